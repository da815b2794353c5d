"""Model, optimizer and step count of a training task."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fluxutils_py.nn.states import restore, snapshot
from fluxutils_py.optim import load_optimizer_state


@dataclass
class TrainState:
    """A model, its optimizer, and the number of training steps so far.

    Training steps change the parameters in place and return the same state object that they got.

    Attributes
    ----------
    step : int
        Number of training steps so far.
    model : nn.Module
    opt : torch.optim.Optimizer

    Notes
    -----
    Source: ``TrainState`` of bobbin, which stores parameters and optimizer state as fields; here
    they are views.

    Examples
    --------
    >>> model = nn.Linear(2, 1)
    >>> state = TrainState(0, model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> list(state.params), list(state.extra_vars)
    (['weight', 'bias'], [])
    """

    step: int
    model: nn.Module
    opt: torch.optim.Optimizer

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """Parameters by name, not copied; a shared parameter has one name."""
        return dict(self.model.named_parameters())

    @property
    def extra_vars(self) -> dict[str, Tensor]:
        """Buffers by name, not copied: tensors of the model that are not trained, such as a running
        mean.
        """
        return dict(self.model.named_buffers())

    @property
    def model_vars(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, not copied."""
        return {**self.params, **self.extra_vars}

    @property
    def opt_state(self) -> dict[str, Any]:
        """The optimizer's ``state_dict``."""
        return self.opt.state_dict()

    def apply_fn(self, model_vars: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """Call the model with other parameters and buffers, such as ``{**state.model_vars,
        "weight": w}``.

        The model's parameters, buffers and recurrent state stay unchanged. Gradients flow to
        ``model_vars``.
        """
        kept = snapshot(self.model)  # functional_call replaces tensors, but not recurrent states
        try:
            return functional_call(self.model, dict(model_vars), args, kwargs)
        finally:
            restore(self.model, kept)

    def replace(
        self,
        *,
        step: int | None = None,
        params: Mapping[str, Any] | None = None,
        extra_vars: Mapping[str, Any] | None = None,
        opt_state: dict[str, Any] | None = None,
    ) -> TrainState:
        """Return a copy with other values, as flax does; this state and its model do not change.

        Parameters
        ----------
        step : int, optional
        params, extra_vars : mapping, optional
            Tensors by name; those left out keep their values.
        opt_state : mapping, optional
            The :attr:`opt_state` of such an optimizer.

        Raises
        ------
        ValueError
            If the model has no such tensor, or one of another shape.
        """
        new = copy.deepcopy(self)  # model and optimizer at once, so that they stay connected
        new.step = self.step if step is None else step
        set_vars(new.model, {**(params or {}), **(extra_vars or {})})
        if opt_state is not None:
            # copied: torch would change the moments that were given
            load_optimizer_state(new.opt, copy.deepcopy(opt_state))
        return new

    def parts(self) -> dict[str, Any]:
        """Return the parts that a :class:`Checkpointer` tracks:
        ``Checkpointer(dir).track(**state.parts())``.
        """
        return {"model": self.model, "optimizer": self.opt}

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain data and tensors; tensors of model and optimizer are not
        copied.
        """
        return {"step": self.step, "model": self.model.state_dict(), "opt": self.opt.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        self.model.load_state_dict(state["model"])
        # After the model: the optimizer's state goes to the devices of the parameters.
        load_optimizer_state(self.opt, state["opt"])
        self.step = state["step"]


def set_vars(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Copy values into the parameters and buffers of a model that have these names."""
    own: dict[str, Tensor] = {}
    own |= dict(model.named_parameters(remove_duplicate=False))
    own |= dict(model.named_buffers(remove_duplicate=False))
    tensors = {name: torch.as_tensor(value) for name, value in values.items()}
    for name, tensor in tensors.items():
        if name not in own or own[name].shape != tensor.shape:
            has = f"of shape {tuple(own[name].shape)}" if name in own else f"only {', '.join(own)}"
            raise ValueError(f"{name!r} is of shape {tuple(tensor.shape)}, the model has {has}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
