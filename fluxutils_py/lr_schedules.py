"""Schedules of the learning rate: a cosine, which may span the run, and the inverse square root."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.optim import Optimizer

from fluxutils_py.validation import check_integer


def cosine(
    period: int | None = None,
    min_lr: float = 0.0,
    factor: int = 1,
    *,
    cycles: int | None = None,
    warm_up: float = 0,
) -> functools.partial[Any]:
    """Let learning rates fall along a cosine to ``min_lr``, then restart.

    Pass it as ``lr_schedule`` of a spec, as in ``("step", cosine(100))``, or as ``scheduler`` of a
    trainer, or call it with an optimizer: ``cosine(100)(optimizer)``.

    Parameters
    ----------
    period : int, optional
        Steps from one restart to the next; each period is ``factor`` times as long as the one
        before.
    min_lr : float
    factor : int
    cycles : int, optional
        In place of ``period``: number of periods in the run, whose length the trainer or estimator
        tells the schedule.
    warm_up : int, or float below 1
        Steps before the first period, in which rates rise linearly from ``min_lr``; or, with
        ``cycles``, their share of the run.

    Raises
    ------
    TypeError, ValueError
        If not exactly one of ``period`` and ``cycles`` is given, or one is no positive integer.
        When a run begins, if there are ``cycles`` and the length of the run is unknown.

    Notes
    -----
    Source: ``CosineSchedule`` of gomlx.

    Examples
    --------
    >>> optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=1.0)
    >>> cosine(10)(optimizer).get_last_lr()
    [1.0]
    """
    if isinstance(period, Optimizer):
        raise TypeError(
            "cosine takes numbers and returns a function of the optimizer: cosine(100)(optimizer)"
        )
    if (period is None) == (cycles is None):
        raise ValueError(
            f"give either period, in steps, or cycles of the run; got period={period}, "
            f"cycles={cycles}"
        )
    is_share = isinstance(warm_up, float) and 0 < warm_up < 1 and cycles is not None
    if not is_share:
        check_integer("warm_up", warm_up, 0)
    if cycles is None:
        period = check_integer("period", period, 1)
        if not warm_up:
            # torch's own class does the same, and the file of an estimator can name it
            return functools.partial(
                torch.optim.lr_scheduler.CosineAnnealingWarmRestarts,
                T_0=period,
                T_mult=factor,
                eta_min=min_lr,
            )
    else:
        check_integer("cycles", cycles, 1)
    # CosineSchedule has periods of one length
    if factor != 1:
        raise ValueError(
            f"periods of different lengths (factor={factor}) go with neither cycles nor warm_up"
        )
    return functools.partial(
        CosineSchedule, period=period, cycles=cycles, min_lr=min_lr, warm_up=warm_up
    )


class CosineSchedule(torch.optim.lr_scheduler.LRScheduler):
    """The schedule that :func:`cosine` makes for ``cycles`` or ``warm_up``."""

    def __init__(
        self,
        optimizer: Optimizer,
        period: int | None = None,
        cycles: int | None = None,
        min_lr: float = 0.0,
        warm_up: float = 0,
    ) -> None:
        self.period = period
        self.cycles = cycles
        self.min_lr = min_lr
        self.warm_up = warm_up
        self.n_rising = warm_up if isinstance(warm_up, int) else 0
        self.end: int | None = None  # the last step of the run, once begin_run has told it
        super().__init__(optimizer)  # last: it computes the first rates

    def begin_run(self, n_left: int | None) -> None:
        """Set the number of steps left in the run, from which ``cycles`` gives the period."""
        if self.cycles is None:
            return
        if n_left is None:
            raise ValueError(
                f"cosine(cycles={self.cycles}) needs the length of the run, which data without a "
                "length do not tell: give cosine a period, or run a number of steps"
            )
        self.end = self.last_epoch + n_left
        if isinstance(self.warm_up, float):
            self.n_rising = round(self.warm_up * self.end)
        # the rates of the first step were set before the length was known
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = lr
        self._last_lr = self.get_lr()

    def get_lr(self) -> list[Any]:
        """Return the rates for the next step."""
        share = self._share_of_rise()
        return [self.min_lr + share * (lr - self.min_lr) for lr in self.base_lrs]

    def _share_of_rise(self) -> float:
        """Return the next rate as a fraction of the way from ``min_lr`` to the highest one."""
        step = self.last_epoch - self.n_rising
        if step < 0:
            return self.last_epoch / self.n_rising
        period: float | None = self.period
        if self.cycles is not None:
            if self.end is None:  # begin_run comes after the optimizer and its schedule are made
                return 1.0
            if self.last_epoch >= self.end:
                return 0.0
            period = (self.end - self.n_rising) / self.cycles
        assert period is not None
        return (1 + math.cos(math.pi * (step / period % 1))) / 2


def inverse_sqrt(optimizer: Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Divide the learning rate by the square root of the step, counted from 1. Source: SGD of
    gomlx.

    Pass it to a spec as ``lr_schedule=("step", inverse_sqrt)``, or call it with an optimizer.
    """
    return torch.optim.lr_scheduler.LambdaLR(optimizer, _inverse_sqrt)


def _inverse_sqrt(done: int) -> float:
    return (done + 1) ** -0.5
