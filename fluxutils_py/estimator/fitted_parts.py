"""What a fit leaves in an estimator, and what functions of this package need of an estimator."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from torch import Tensor, nn
from torch.optim import Optimizer

from fluxutils_py.estimator.spec import Settings
from fluxutils_py.estimator.streams.conformal import Calibration
from fluxutils_py.inputs.inputs import InputLayout, Schema
from fluxutils_py.inputs.target_codec import TargetCodec
from fluxutils_py.nn import Recur
from fluxutils_py.nn.ready_made import WithIntervals


@dataclass(frozen=True)
class FitChoice:
    """What "auto" stands for in a fit. A file of an estimator holds it.

    Attributes
    ----------
    cell : str
        "kernels", "linear", "lstm", or "linear+lstm".
    n_kernels : int
        Features of the kernels.
    n_lags : int
    has_statistics : bool
        Whether a linear model may use statistics of several spans.
    has_means : bool
        Whether a network sees exponential means.
    class_weight : str or None
    scale_input : bool
        Whether a network standardises its inputs; False in some files of 0.2.0 alone.
    needs_trial : bool
        Whether a fit on four fifths of the data is to find the gain first.
    gain : float
        Factor of what the network adds to the linear model.
    n_symbols : int
        Of integers that are symbols, of which a network without a linear model learns vectors; 0 if
        inputs are numbers.
    has_gaps : bool
        Whether inputs lack single values, which are filled with the last one and marked.
    tried : tuple of tuples of float
        What trials showed: a gain, and its error in each block of data that were held out, relative
        to that of the linear model.
    hidden_size, lr, dropout, input_noise, max_updates, batchsize, seqsize
        See :class:`fluxutils_py.SequenceRegressor`.
    """

    cell: str
    n_kernels: int = 10_000
    n_lags: int = 24
    has_statistics: bool = True
    has_means: bool = True
    hidden_size: int = 48
    lr: float = 5e-3
    dropout: float = 0.3
    input_noise: float = 0.1
    max_updates: int = 600
    batchsize: int = 16
    seqsize: int | None = 64
    class_weight: str | None = None
    scale_input: bool = True
    needs_trial: bool = False
    gain: float = 1.0
    n_symbols: int = 0
    has_gaps: bool = False
    tried: tuple[tuple[float, ...], ...] = ()

    def describe(self, n_updates: int) -> str:
        """Return what is fitted, and what trials showed."""
        how = f"up to {n_updates} updates"
        if self.cell in ("kernels", "linear"):
            how = "fitted in closed form"
        return "\n".join([f"{self._named()}, {how}", *self._table()])

    def __str__(self) -> str:
        return "\n".join([self._named(), *self._table()])

    def _named(self) -> str:
        gain = f", gain={self.gain:g}" if 0 < self.gain < 1 else ""
        gaps = ", gaps filled with the last value and marked" if self.has_gaps else ""
        return f"cell={self.cell!r}{gain}{gaps}"

    def _table(self) -> list[str]:
        """Return lines with the errors of the gains that were tried."""
        if not self.tried:
            return []
        lines = ["gain | errors of held-out blocks, relative to those of the linear model"]
        for gain, *errors in self.tried:
            lines.append(f"{gain:4.1f} | {' '.join(f'{e:.3f}' for e in errors)}")
        return lines


@dataclass(frozen=True, eq=False)
class FittedParts:
    """What a fit leaves for later calls, besides the public attributes of an estimator.

    It is frozen, and replaced whole after each epoch: an estimator whose fit fails gets back the
    parts that it had.

    Attributes
    ----------
    layout : InputLayout
        Layout of the inputs of the first fit.
    codec : TargetCodec
    rng : numpy.random.Generator
    scheduler : learning-rate scheduler of torch, or None
    n_steps : int
        Number of training steps so far.
    choice : FitChoice or None
        What "auto" stood for, in a ready-made estimator.
    data : dict of str to str
        Shapes, types and digests of the arrays of the last fit, for its model card.
    calibration : Calibration or None
        Errors on data that were held out, where ``level`` asked for them.
    intervals : WithIntervals or None
        Around the model of the fit, where widths of intervals follow the inputs.
    longest : int
        Steps of the longest series of the first fit; 1 in files that do not have it.
    """

    layout: InputLayout
    codec: TargetCodec
    rng: np.random.Generator
    scheduler: Any
    n_steps: int
    choice: FitChoice | None = None
    data: dict[str, str] = field(default_factory=dict)
    calibration: Calibration | None = None
    longest: int = 1
    intervals: WithIntervals | None = None

    @property
    def interval_parameters(self) -> dict[str, Tensor] | None:
        """What a file holds of the network of intervals."""
        return None if self.intervals is None else self.intervals.own_parameters()


class BaseSeriesEstimator(BaseEstimator):
    """What the functions behind an estimator's methods need of it: settings, and what fit sets."""

    # declared for type checkers, so that ``hasattr`` tells whether there was a fit
    model_: nn.Module
    optimizer_: Optimizer
    fitted_parts_: FittedParts
    loss_: float
    grad_: Tensor
    loss_curve_: list[float]
    validation_loss_curve_: list[float]
    history_: list[dict[str, Any]]
    n_iter_: int
    n_features_in_: int | tuple[int, ...]
    n_outputs_: Any  # int, or tuple of int for several outputs
    feature_names_in_: np.ndarray
    classes_: np.ndarray

    def resolved_params(self) -> Settings:
        """Return the constructor's arguments, with defaults in place of None."""
        raise NotImplementedError


def estimator_of_intervals(est: Any) -> Any:
    """Return a copy of an estimator whose outputs are its own, then the lower and the upper ends of
    its intervals, level by level; None if their widths do not follow the inputs.
    """
    parts: FittedParts = est.fitted_parts_
    model = parts.intervals
    if model is None:
        return None
    twin = copy.copy(est)
    twin.model_ = model
    n_copies = 1 + 2 * len(model.levels)
    twin.n_outputs_ = n_copies * model.n_out
    scale: Any = parts.codec.scale
    of_all = {name: np.tile(getattr(scale, name), n_copies) for name in ("mean", "scale")}
    codec = replace(parts.codec, scale=replace(scale, **of_all))
    twin.fitted_parts_ = replace(parts, codec=codec, calibration=None, intervals=None)
    return twin


def input_schema(est: BaseSeriesEstimator, settings: Settings, parts: FittedParts | None) -> Schema:
    """Return the requirements on inputs; ``parts`` are those of the fit that they follow."""
    name = type(est).__name__
    if parts is None:
        return Schema(name, settings.n_timesteps)
    # layers that may look at earlier steps
    modules = est.model_.modules()
    uses_past = any(isinstance(m, Recur) or hasattr(m, "takes_windows") for m in modules)
    longest = parts.longest if uses_past else 1
    return Schema(name, settings.n_timesteps, fitted=parts.layout, longest=longest)
