"""Model, optimizer and step count of a training task."""

from __future__ import annotations

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
    """A model, its optimizer, and the number of steps that they have made.

    Parameters are torch's, changed in place: a state that a training step returns is the one that it was given.

    Attributes
    ----------
    step : int
        Steps made.
    model : nn.Module
    opt : torch.optim.Optimizer

    Notes
    -----
    Source: ``TrainState`` of bobbin, where parameters and the state of the optimizer are fields; here they are views.

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
        """The parameters by name, themselves; one that is shared has one name."""
        return dict(self.model.named_parameters())

    @property
    def extra_vars(self) -> dict[str, Tensor]:
        """The buffers by name, themselves: what a model keeps that is not learnt, such as a running mean."""
        return dict(self.model.named_buffers())

    @property
    def model_vars(self) -> dict[str, Tensor]:
        """Parameters and buffers."""
        return {**self.params, **self.extra_vars}

    @property
    def opt_state(self) -> dict[str, Any]:
        """The optimizer's ``state_dict``."""
        return self.opt.state_dict()

    def apply_fn(self, model_vars: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """Call the model with other parameters and buffers, such as ``{**state.model_vars, "weight": w}``.

        Its own are as before, and so is the state of its recurrent layers. Gradients flow to those given.
        """
        kept = snapshot(self.model)
        try:
            return functional_call(self.model, dict(model_vars), args, kwargs)
        finally:
            restore(self.model, kept)

    def parts(self) -> dict[str, Any]:
        """What a :class:`Checkpointer` is to track: ``Checkpointer(dir).track(**state.parts())``."""
        return {"model": self.model, "optimizer": self.opt}

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain data and tensors: those of the model and the optimizer themselves, not copies."""
        return {"step": self.step, "model": self.model.state_dict(), "opt": self.opt.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.model.load_state_dict(state["model"])
        load_optimizer_state(self.opt, state["opt"])
        self.step = state["step"]
