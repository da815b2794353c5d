"""Ready-made estimators: recurrent networks with flat hyper-parameters."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np
import torch.nn.functional as F
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.metadata_routing import UNUSED
from torch import Tensor, nn

from fluxutils_py.errors import SpecError
from fluxutils_py.estimator.building import require_single_input_and_output
from fluxutils_py.estimator.estimator import Estimator
from fluxutils_py.estimator.estimator_settings import Settings
from fluxutils_py.estimator.fit_data import FitRequest
from fluxutils_py.estimator.fitted_parts import FittedParts
from fluxutils_py.estimator.fitting import run_fit
from fluxutils_py.estimator.predicting import run_predict
from fluxutils_py.estimator.spec import Spec, explains_arguments, read_spec
from fluxutils_py.inputs.target_codec import TargetScale
from fluxutils_py.nn import (
    FLSTM,
    GRU,
    HFGRU,
    LRU,
    LSTM,
    MGU,
    RNN,
    SGRU,
    SMGU,
    TCN,
    MinGRU,
    MinLSTM,
    SequenceStack,
    SlidingWindowAttention,
)
from fluxutils_py.nn.closed_form_model import kernel_model, lag_model
from fluxutils_py.training.make_optimizer import adamw
from fluxutils_py.validation import check_integer, check_positive


def _output_method(name: str, doc: str) -> Callable[..., Any]:
    """Make a method like ``Estimator.predict`` that returns another output for each step."""

    def method(
        self: EstimatorClassifier,
        x: object,
        out: object = None,
        *,
        state: list[Tensor] | None = None,
        return_state: bool = False,
        lengths: object = None,
        starts: object = None,
        sharded: bool = False,
    ) -> Any:
        return run_predict(self, name, x, out, state, return_state, lengths, starts, sharded)

    # for help(), and for pickle, which looks functions up by these names
    method.__name__ = name
    method.__qualname__ = f"EstimatorClassifier.{name}"
    method.__doc__ = doc
    return method


class EstimatorRegressor(RegressorMixin, Estimator):
    """An :class:`Estimator` that is a regressor of scikit-learn, for numbers per step or per
    series.

    Parameters, attributes and methods are those of :class:`Estimator`. ``score`` is R2 pooled over
    series and time.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.model_selection import cross_val_score
    >>> from fluxutils_py import samples
    >>> x = np.random.default_rng(0).normal(size=(3, 40, 20)).astype("float32")  # (F, N, T)
    >>> est = EstimatorRegressor(spec={"epochs": 2, "batchsize": 10, "seqsize": 10})
    >>> len(cross_val_score(est, samples(x), samples(x[:1]), cv=4))
    4
    """

    score = Estimator.score  # the mixin's would average over columns


class EstimatorClassifier(ClassifierMixin, Estimator):
    """An :class:`Estimator` that is a classifier of scikit-learn, for labels of any type, per step
    or per series.

    Parameters, attributes and methods are those of :class:`EstimatorRegressor`, and:

    - The model returns one score (logit) per class; ``n_out`` is the number of classes.
      ``loss=None`` is cross-entropy; your own loss gets the indices of the labels in ``classes_``.
    - ``y`` holds labels: one per step, as (1, N, T), ``samples(y)``, ``timesteps(y)`` or a matrix
      (N, T) (for ``timesteps``, (T, N)), or one per series, as (N,). NaN, and None among strings,
      marks a step without a label; in a vector it is an error.
    - ``predict`` returns labels in the same form. ``predict_proba`` returns probabilities:
      (K, N, T) for ``(F, N, T)``; one row of K columns per series or sample; rows of K * T or
      K * N columns for views with a label per step.
    - ``score`` is the accuracy, pooled over series and time. For metrics and displays of
      scikit-learn, :func:`fluxutils_py.flatten_steps` makes vectors of labels per step.

    Steps without any input, or outside a series, have NaN as probabilities; their labels mean
    nothing.

    Attributes
    ----------
    classes_ : ndarray of shape (K,)
    """

    __metadata_request__predict_proba = {"x": UNUSED}  # noqa: RUF012  the protocol wants a dict
    __metadata_request__predict_log_proba = {"x": UNUSED}  # noqa: RUF012
    __metadata_request__decision_function = {"x": UNUSED}  # noqa: RUF012
    score = Estimator.score  # streams

    def partial_fit(
        self,
        x: object,
        y: object,
        sample_weight: object = None,
        *,
        classes: object = None,
        lengths: object = None,
        starts: object = None,
        sharded: bool = False,
    ) -> Self:
        """Train for one more epoch; see :meth:`Estimator.partial_fit`.

        ``classes`` are all labels that may ever occur; the first call needs them if ``y`` does not
        hold all of them.
        """
        series = (x, y, sample_weight, lengths, starts, sharded)
        request = FitRequest(*series, epochs=1, classes=classes, resume=True)
        run_fit(self, request)
        return self

    predict_proba = _output_method(
        "predict_proba",
        """Probabilities of the classes, in the order of ``classes_``.

        See :class:`EstimatorClassifier` for shapes, and :meth:`Estimator.predict` for parameters.
        """,
    )
    predict_log_proba = _output_method(
        "predict_log_proba", """Logarithms of :meth:`predict_proba`."""
    )
    decision_function = _output_method(
        "decision_function",
        """Scores of the classes before the softmax.

        Of two classes, the second's score minus the first's.
        """,
    )

    # -- inside ----------------------------------------------------------------------------------

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = False
        return tags

    def resolved_params(self) -> Settings:
        loss = F.cross_entropy if self.loss is None else self.loss
        return Settings.from_estimator(self, loss=loss, is_classifier=True)


def attention(n_in: int, n_out: int) -> SlidingWindowAttention:
    """Make attention with four heads, or fewer where four do not divide ``n_out``."""
    return SlidingWindowAttention(n_in, n_out, math.gcd(n_out, 4))


def tcn(n_in: int, n_out: int, num_layers: int, dropout: float) -> TCN:
    """Make a TCN with ``num_layers + 5`` levels; with six, an output sees 253 steps."""
    return TCN(n_in, n_out, num_layers + 5, dropout=dropout)


Class = TypeVar("Class")

CELLS: dict[str, Callable[..., nn.Module]] = {
    **{layer.__name__.lower(): layer for layer in (LSTM, GRU, RNN, FLSTM, SGRU, MGU, SMGU, HFGRU)},
    **{layer.__name__.lower(): partial(SequenceStack, layer) for layer in (MinGRU, MinLSTM, LRU)},
    "tcn": tcn,
    "attention": partial(SequenceStack, attention),
}
# Models of fixed features, fitted in closed form.
FIXED: dict[str, Callable[..., nn.Module]] = {"kernels": kernel_model, "linear": lag_model}
FIXED_SEQSIZE = 256  # steps to read at once, which changes nothing
# Classes with a signature other than cell(n_in, n_out, num_layers, dropout).
CLASSES = {
    MinGRU: "mingru",
    MinLSTM: "minlstm",
    LRU: "lru",
    TCN: "tcn",
    SlidingWindowAttention: "attention",
}


def documented(cls: type[Class]) -> type[Class]:
    """Insert the shared parameters and the names of the cells into the docstring of a class."""
    shared = str(_SequenceEstimator.__doc__).partition("----------\n")[2].strip()
    cells = ", ".join(f'"{name}"' for name in (*CELLS, *FIXED))
    cls.__doc__ = str(cls.__doc__).replace("{parameters}", shared).replace("{cells}", cells)
    return cls


def network(
    n_in: int,
    n_out: int,
    *,
    cell: Callable[..., nn.Module],
    hidden_size: int,
    num_layers: int,
    dropout: float,
) -> nn.Module:
    """Build recurrent layers and a linear head."""
    require_single_input_and_output("a ready-made network", n_in, n_out)
    return nn.Sequential(
        cell(n_in, hidden_size, num_layers, dropout), nn.Linear(hidden_size, n_out)
    )


@dataclass(eq=False, repr=False)  # scikit-learn needs a constructor with an explicit signature
class _SequenceEstimator(Estimator):
    """Parameters and methods shared by both ready-made estimators.

    Parameters
    ----------
    hidden_size : int
        Number of units in each recurrent layer.
    num_layers : int
        Number of recurrent layers.
    cell : {cells}, or a class
        The recurrent layer. "kernels" (for one target per series: :class:`CausalKernels`) and
        "linear" (the last 24 steps) are fixed features of standardised inputs with a linear head,
        fitted in closed form in one pass: of the other parameters, only those of the data apply.
        "mingru", "minlstm", "lru" and "attention" are blocks of a
        :class:`SequenceStack`; a "tcn" has ``num_layers + 5`` levels. A class is called as
        ``cell(n_in, n_out, num_layers, dropout)``.
    dropout : float
        Probability of dropping an output between two layers in training.
    lr, weight_decay : float
        Learning rate and weight decay of AdamW.
    epochs, batchsize, seqsize, shuffle, overlap, burn_in, clip, rebatch, precision
        See :class:`Spec`. ``seqsize=None`` trains on whole series.
    n_timesteps : int or None
        For matrices: number of steps in each row, whose column ``f * n_timesteps + t`` is feature
        ``f`` at step ``t``. None: one step.
    target : "auto", "step" or "series"
        See :class:`Estimator`.
    early_stopping : bool
        Hold out validation data, stop when their loss has not fallen for ``n_iter_no_change``
        epochs, and keep the best weights. Series are held out, stratified by label in
        classification; a single series and ``timesteps`` lose their last steps. Uses
        ``validation_data`` instead, if given.
    validation_fraction : float
        Fraction of the data to hold out.
    n_iter_no_change : int
        Number of epochs to wait for a lower validation loss.
    comm, scaling, n_jobs, device, compile, callbacks, warm_start, random_state, verbose
        See :class:`Estimator`.
    """

    hidden_size: int = 32
    num_layers: int = 1
    cell: Any = "lstm"
    _: KW_ONLY
    dropout: float = 0.0
    lr: float = 1e-2
    weight_decay: float = 0.01
    epochs: int = 100
    batchsize: int = 256
    seqsize: int | None = None
    shuffle: bool = False
    overlap: int = 0
    burn_in: int = 0
    clip: float | None = None
    rebatch: bool | str = "auto"
    precision: str = "float32"
    n_timesteps: int | None = None
    target: str = "auto"
    early_stopping: bool = False
    validation_fraction: float = 0.1
    n_iter_no_change: int = 10
    comm: Any = "auto"
    scaling: str = "weak"
    n_jobs: int | None = None
    device: Any = None
    compile: Any = False
    callbacks: Any = None
    warm_start: bool = False
    random_state: Any = None
    verbose: Any = "auto"

    def resolved_params(self) -> Settings:
        if isinstance(self.cell, str) and self.cell in FIXED:
            return self._fixed_params(FIXED[self.cell])
        cell = self._layer()
        self._check_network()
        is_classifier = isinstance(self, EstimatorClassifier)
        model = partial(
            network,
            cell=cell,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            dropout=self.dropout,
        )
        return Settings.from_estimator(
            self,
            spec=self._spec(),
            model=model,
            loss=F.cross_entropy if is_classifier else None,
            opt=partial(adamw, lr=self.lr, weight_decay=self.weight_decay),
            is_classifier=is_classifier,
        )

    def _fixed_params(self, model: Callable[..., nn.Module]) -> Settings:
        """Return the settings of a model that is fitted in closed form."""
        self._check_network()
        is_classifier = isinstance(self, EstimatorClassifier)
        spec = dataclasses.replace(
            self._spec(),
            seqsize=min(self.seqsize or FIXED_SEQSIZE, FIXED_SEQSIZE),
            overlap=0,
            rebatch=False,
            shuffle=False,
        )
        return Settings.from_estimator(
            self,
            spec=spec,
            model=model,
            loss=F.cross_entropy if is_classifier else None,
            opt=partial(adamw, lr=self.lr, weight_decay=self.weight_decay),
            is_classifier=is_classifier,
        )

    def _layer(self) -> Callable[..., nn.Module]:
        """Return the function or class that ``cell`` names."""
        # only classes are looked up: another object may have no hash
        name = CLASSES.get(self.cell, self.cell) if isinstance(self.cell, type) else self.cell
        cell = CELLS.get(name) if isinstance(name, str) else name
        if not callable(cell):
            names = ", ".join(map(repr, (*CELLS, *FIXED)))
            raise ValueError(f"cell must be one of {names}, or a class, got {self.cell!r}")
        return cell

    def _check_network(self) -> None:
        """Raise SpecError unless all arguments that are no fields of a spec can be."""
        for name in ("hidden_size", "num_layers", "n_iter_no_change"):
            check_integer(name, getattr(self, name), 1, error=SpecError)
        check_integer("n_timesteps", self.n_timesteps, 1, optional=True, error=SpecError)
        check_positive("lr", self.lr, error=SpecError)
        for name, most in (("dropout", 1), ("weight_decay", math.inf)):
            value = getattr(self, name)
            # bool is a number for Python, and NaN is in no range
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not is_number or not 0 <= float(value) <= most:
                raise SpecError(f"{name} must be a number from 0 to {most}, got {value!r}")
        for name in ("early_stopping", "scale_target"):
            value = getattr(self, name, False)  # only the regressor has scale_target
            if not isinstance(value, bool | np.bool_):
                raise SpecError(f"{name} must be True or False, got {value!r}")

    def _spec(self) -> Spec:
        # without early stopping, validation data only give a loss to watch
        patience = self.n_iter_no_change if self.early_stopping else None
        in_spec = {f.name: getattr(self, f.name) for f in fields(Spec) if hasattr(self, f.name)}
        try:
            return read_spec(Spec(**in_spec, patience=patience))
        except SpecError as error:  # the fields are arguments of the estimator
            raise SpecError(str(error).removeprefix("spec.")) from None


@explains_arguments
@documented
@dataclass(eq=False, repr=False, kw_only=True)
class SequenceRegressor(_SequenceEstimator, EstimatorRegressor):
    """Recurrent network for regression, built from its hyper-parameters.

    Parameters
    ----------
    {parameters}
    scale_target : bool
        Whether to standardise targets to mean 0 and variance 1, per output, over the weighted live
        steps. Predictions and scores are in the units of the targets. A fit that continues
        (``partial_fit``, ``warm_start``) keeps the mean and scale of the first fit.

    Attributes
    ----------
    target_mean_, target_scale_ : ndarray of shape (G,), float64
        Only with ``scale_target``. The scale of a constant output is 1.
    loss_curve_, validation_loss_curve_, loss_, grad_
        Values for the standardised targets: with ``scale_target``, predicting the mean has a loss
        of 1.

    Notes
    -----
    The loss is the squared error. See :class:`EstimatorRegressor` for inputs, targets, other
    attributes and methods. Predictions have the type of the model or of the targets, whichever is
    longer, so that a large mean costs no digits.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.random.default_rng(0).normal(size=(3, 40, 20))  # (F, N, T)
    >>> y = x.cumsum(2).mean(0, keepdims=True)  # (1, N, T)
    >>> SequenceRegressor(8, epochs=3, seqsize=10).fit(x, y).predict(x).shape
    (1, 40, 20)
    >>> SequenceRegressor(8, epochs=3).fit(x, y[0, :, -1]).predict(x).shape  # one target per series
    (40,)
    """

    scale_target: bool = True

    @property
    def target_mean_(self) -> np.ndarray:
        """Mean of each output over the training targets, (G,)."""
        return self._fitted_scale().mean

    @property
    def target_scale_(self) -> np.ndarray:
        """Standard deviation of each output over the training targets, (G,); 1 for a constant
        output.
        """
        return self._fitted_scale().scale

    def _fitted_scale(self) -> TargetScale:
        parts: FittedParts | None = getattr(self, "fitted_parts_", None)
        if parts is None or parts.codec.scale is None:
            # so that hasattr tells whether there is a scale
            raise AttributeError(
                "there is no mean and scale of targets before fit, and with scale_target=False"
            )
        return parts.codec.scale


@explains_arguments
@documented
@dataclass(eq=False, repr=False, kw_only=True)
class SequenceClassifier(_SequenceEstimator, EstimatorClassifier):
    """Recurrent network for classification, built from its hyper-parameters.

    Parameters
    ----------
    {parameters}
    class_weight : "balanced", dict of label to weight, or None
        Weight of each class, which multiplies the ``sample_weight`` of its steps. "balanced":
        inversely proportional to the frequency of the class.

    Notes
    -----
    The loss is the cross-entropy. See :class:`EstimatorClassifier` for inputs, targets, attributes
    and methods.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.random.default_rng(0).normal(size=(1, 60, 20))  # (F, N, T)
    >>> y = np.where(x[0].mean(1) > 0, "up", "down")  # one label per series
    >>> est = SequenceClassifier(8, epochs=3, random_state=0).fit(x, y)
    >>> est.predict_proba(x).shape, est.classes_
    ((60, 2), array(['down', 'up'], dtype='<U4'))
    """

    class_weight: Any = None
