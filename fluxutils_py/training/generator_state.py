"""Save and restore random generators as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fluxutils_py.errors import LoadError

__all__ = ["RandomGenerators"]

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
    return {"kind": "numpy", "state": _numbers(generator.bit_generator.state)}


def set_generator_state(generator: Generator, state: Mapping[str, Any]) -> None:
    """Set a generator to a state from :func:`get_generator_state`.

    Raises
    ------
    LoadError
        If the state belongs to another kind of generator. The generator does not change.
    """
    kind = "torch" if isinstance(generator, torch.Generator) else "numpy"
    if state["kind"] != kind:
        raise LoadError(f"the state is of a generator of {state['kind']}, this one is of {kind}")
    if isinstance(generator, torch.Generator):
        generator.set_state(state["state"].cpu())
        return
    stored, own = state["state"]["bit_generator"], generator.bit_generator.state["bit_generator"]
    if stored != own:
        raise LoadError(f"the state is of a NumPy generator {stored}, this one is {own}")
    generator.bit_generator.state = state["state"]


def start_epoch_order(
    generator: Generator, began: Mapping[str, Any] | None, skipped: int
) -> dict[str, Any]:
    """Return the state of the generator that draws the order of a pass over data, at the start of
    the pass.

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

    def __init__(self, device: torch.device | None = None, **generators: Generator) -> None:
        self.device, self.generators = device, generators

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"torch": torch.get_rng_state()}
        if self.device is not None and self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        state["named"] = {name: get_generator_state(g) for name, g in self.generators.items()}
        return state

    def reshard_state_dict(
        self, states: Sequence[Mapping[str, Any]], rank: int, size: int
    ) -> Mapping[str, Any]:
        """Return the state of this rank among those that ranks saved.

        A rank that is new keeps torch's generators as they are, and takes the other generators of
        rank 0.
        """
        return (
            states[rank]
            if rank < len(states)
            else {**self.state_dict(), "named": states[0]["named"]}
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state["named"]) != set(self.generators):
            raise LoadError(
                f"the state is of generators {sorted(state['named'])}, these are "
                f"{sorted(self.generators)}"
            )
        for name, g in self.generators.items():
            set_generator_state(g, state["named"][name])
        torch.set_rng_state(state["torch"].cpu())
        if "cuda" in state and self.device is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"].cpu(), self.device)


def _numbers(value: Any) -> Any:
    """Convert NumPy arrays in nested dicts to lists, for files of plain data."""
    if isinstance(value, dict):
        return {k: _numbers(v) for k, v in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value
