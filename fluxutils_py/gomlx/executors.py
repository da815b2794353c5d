"""The function that calls a model for each kind of batch, compiled if wanted."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import nn

from fluxutils_py.training.minibatch import Minibatch
from fluxutils_py.validation import check_integer

Executor = Callable[[tuple[Any, ...]], Any]


class Mode(Enum):
    """Purpose of a step."""

    TRAIN = "train"
    EVAL = "eval"


class Executors:
    """Functions with which a :class:`Trainer` calls its model, one per kind of batch and mode,
    optionally compiled.

    Parameters
    ----------
    model : nn.Module
    max_kinds : int
        Largest number of executors.
    takes_kind : bool
        Whether to call ``model(kind, *inputs)``.
    compile : bool or callable
        True compiles with ``torch.compile``, a callable with ``compile(fn)``.

    Attributes
    ----------
    handlers : list of callable
        ``handler(executor, mode)`` is called for each new executor.
    """

    def __init__(
        self,
        model: nn.Module,
        max_kinds: int,
        takes_kind: bool,
        compile: bool | Callable[[Any], Any],
    ) -> None:
        self.model, self.takes_kind = model, takes_kind
        self.max_kinds = check_integer("max_kinds", max_kinds, 1)
        self.handlers: list[Callable[[Executor, Mode], Any]] = []
        self._compile = torch.compile if compile is True else compile or None
        self._executors: dict[tuple[Any, Mode], Executor] = {}

    def __call__(self, kind: Any, mode: Mode) -> Executor:
        """Return the executor for a kind of batch; raise RuntimeError if there are more than
        ``max_kinds``.
        """
        key = kind_key(kind), mode
        if key not in self._executors:
            if len(self._executors) >= self.max_kinds:
                raise RuntimeError(
                    f"kind {kind!r} in mode {mode.value!r} is one more than "
                    f"max_kinds={self.max_kinds}: a kind stands for many batches, not for one; use "
                    "fewer, or raise max_kinds"
                )
            executor = self._executors[key] = self._make_executor(kind)
            for handler in self.handlers:
                handler(executor, mode)
        return self._executors[key]

    def _make_executor(self, kind: Any) -> Executor:
        def run(inputs: tuple[Any, ...]) -> Any:
            return self.model(kind, *inputs) if self.takes_kind else self.model(*inputs)

        return run if self._compile is None else self._compile(run)


def kind_key(kind: Any) -> Any:
    """Return a hashable key for a kind of batch."""
    try:
        hash(kind)
    except TypeError:
        return repr(kind)
    return kind


def run_uncompiled(model: nn.Module, batch: Minibatch, takes_kind: bool) -> Any:
    """Call a model with a batch as a training step of a :class:`Trainer` does."""
    first = next(model.parameters(), None)
    moved = batch if first is None else batch.to(first.device)
    return Executors(model, 1, takes_kind, False)(moved.kind, Mode.TRAIN)(moved.inputs)
