"""Save and restore random generators as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fluxutils_py.errors import LoadError
from fluxutils_py.tree import tree_map

Generator = np.random.Generator | torch.Generator


def get_generator_state(generator: Generator) -> dict[str, Any]:
    """Return the state of a generator as plain data and tensors.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> state = get_generator_state(rng)
    >>> first = rng.random()
    >>> set_generator_state(rng, state)
    >>> rng.random() == first
    True
    """
    if isinstance(generator, torch.Generator):
        return {"kind": "torch", "state": generator.get_state().clone()}
    # lists, for files of plain data
    state = tree_map(
        lambda v: v.tolist() if isinstance(v, np.ndarray) else v, generator.bit_generator.state
    )
    return {"kind": "numpy", "state": state}


def set_generator_state(generator: Generator, state: Mapping[str, Any]) -> None:
    """Set a generator to a state from :func:`get_generator_state`.

    Raises
    ------
    ValueError, TypeError, AttributeError
        If the state belongs to another kind of generator. The generator does not change.
    """
    if isinstance(generator, torch.Generator):
        # torch accepts states on the CPU only, and a file may have been loaded to a GPU
        generator.set_state(state["state"].cpu())
    else:
        generator.bit_generator.state = state["state"]


def start_epoch_order(
    generator: Generator, began: Mapping[str, Any] | None, skipped: int
) -> dict[str, Any]:
    """Return the state, at the start of a pass over data, of the generator that draws its order.

    A pass that skips batches repeats the last pass, so the generator is first reset to the state
    ``began``.
    """
    if skipped and began is not None:
        set_generator_state(generator, began)
    return get_generator_state(generator)


class RandomGenerators:
    """The random generators of a run: torch's default generators, and others by name.

    Parameters
    ----------
    device : torch.device, optional
        If it is a GPU, include its default generator.
    **generators
        Further generators, ``numpy.random.Generator`` or ``torch.Generator``.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        **generators: Generator,
    ) -> None:
        self.generators = generators
        self._gpu = device if device is not None and device.type == "cuda" else None

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all generators, copied."""
        state: dict[str, Any] = {"torch": torch.get_rng_state()}
        if self._gpu is not None:
            state["cuda"] = torch.cuda.get_rng_state(self._gpu)
        state["named"] = {name: get_generator_state(g) for name, g in self.generators.items()}
        return state

    def reshard_state_dict(
        self, states: Sequence[Mapping[str, Any]], rank: int, size: int
    ) -> Mapping[str, Any]:
        """Return the state of this rank among those that ranks saved.

        A rank that is new keeps torch's generators as they are, and uses the other generators of
        rank 0.
        """
        if rank < len(states):
            return states[rank]
        # named generators draw what all ranks share, such as the order of the data
        state = self.state_dict()
        state["named"] = states[0]["named"]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all generators to a state; raise LoadError if it has generators of other names."""
        if set(state["named"]) != set(self.generators):
            raise LoadError(
                f"the state is of generators {sorted(state['named'])}, these are "
                f"{sorted(self.generators)}"
            )
        for name, g in self.generators.items():
            set_generator_state(g, state["named"][name])
        # last: the states of the others may be refused
        torch.set_rng_state(state["torch"].cpu())
        # a run that continues on a CPU has no use for the state of a GPU
        if "cuda" in state and self._gpu is not None:
            torch.cuda.set_rng_state(state["cuda"].cpu(), self._gpu)
