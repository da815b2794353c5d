"""Ready-made estimators: models chosen from the data, with flat hyper-parameters."""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch.nn.functional as F
from sklearn.utils.validation import check_is_fitted
from torch import nn

from fluxutils_py.auto.choice_of_model import BESIDE_LINEAR, DataSize, choose_model
from fluxutils_py.auto.intervals import loss_of_levels
from fluxutils_py.auto.trial_fits import run_auto_fit
from fluxutils_py.errors import SpecError
from fluxutils_py.estimator.building import require_single_input_and_output
from fluxutils_py.estimator.estimator import Estimator
from fluxutils_py.estimator.fitted_parts import (
    FitChoice,
    FittedParts,
    estimator_of_intervals,
)
from fluxutils_py.estimator.nested_parameters import View, view
from fluxutils_py.estimator.spec import NAMES, Settings, Spec, explains_arguments, read_spec
from fluxutils_py.estimator.streams.conformal import read_levels
from fluxutils_py.estimator.typed_estimators import EstimatorClassifier, EstimatorRegressor
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
from fluxutils_py.nn.ready_made import (
    MEANS,
    WithIntervals,
    linear_plus_network,
    mean_model,
    plain_network,
)
from fluxutils_py.training.make_optimizer import adamw
from fluxutils_py.validation import check_integer, check_positive


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
FIXED = ("kernels", "linear")  # models of fixed features, fitted in closed form
FIXED_SEQSIZE = 256  # steps to read at once, which changes nothing
SUM = "linear+"  # before the name of a cell: a linear model, and a network that adds to it
# Arguments, with their defaults, that only networks have: to set one asks for a network.
OF_NETWORKS = {
    **dict.fromkeys(("hidden_size", "dropout", "lr", "max_updates"), "auto"),
    **{"num_layers": 1, "epochs": None, "early_stopping": False},
}
# What "auto" stands for then, where it would be a closed form.
NETWORK_FOR = {"kernels": "lstm", "linear": "linear+lstm"}
# Fields of a spec that are arguments, and what the others are unless ``spec`` has them.
FLAT = ("epochs", "max_updates", "batchsize", "seqsize")
IN_SPEC = {"lr_schedule": "onecycle", "shuffle": True, "clip": 1.0}
PATIENCE = 10  # epochs, with early_stopping
WEIGHT_DECAY = 0.01
INTERVAL_UPDATES = 300  # of the network of intervals
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
    cells = ", ".join(f'"{name}"' for name in ("auto", *FIXED, *CELLS))
    cls.__doc__ = str(cls.__doc__).replace("{parameters}", shared).replace("{cells}", cells)
    return cls


def ready_made(
    n_in: int, n_out: int, *, make: Callable[..., nn.Module], n_models: int
) -> nn.Module:
    """Build a model, or the mean of several."""
    require_single_input_and_output("a ready-made network", n_in, n_out)
    if n_models == 1:
        return make(n_in, n_out)
    return mean_model(n_in, n_out, make=make, n_models=n_models)


@dataclass(eq=False, repr=False)  # scikit-learn needs a constructor with an explicit signature
class _SequenceEstimator(Estimator):
    """Parameters and methods shared by both ready-made estimators.

    Parameters
    ----------
    hidden_size : int or "auto"
        Number of units in each recurrent layer. "auto": 48; 128 for labels of symbols,
        and for more than 614,400 steps.
    num_layers : int
        Number of recurrent layers.
    cell : {cells}, "linear+" and the name of a recurrent layer, or a class
        The model. "kernels" (for one target per series: :class:`fluxutils_py.nn.CausalKernels`) and
        "linear" (the last steps, and statistics of several spans where they help) are fixed
        features with a linear head, fitted in closed form in one pass; of the other parameters,
        only those of the data apply. "linear+lstm" and the like add a network to the linear model,
        which is fitted first and then held still. A single name is a recurrent layer with a linear
        head: "mingru", "minlstm", "lru" and "attention" are blocks of a
        :class:`fluxutils_py.nn.SequenceStack`; a "tcn" has ``num_layers + 5`` levels. A class is
        called as ``cell(n_in, n_out, num_layers, dropout)``. "auto": "kernels" for one target per
        series; "lstm" for labels of symbols, which are integers (1, N, T) up to 999, or steps of
        which one feature is 1 and the others are 0;
        else "linear+lstm", or "linear" where the network adds nothing in trials on data that are
        held out: see ``choice_``. Setting one of ``hidden_size``, ``num_layers``,
        ``dropout``, ``lr``, ``epochs``, ``max_updates`` or ``early_stopping`` asks for a network
        without a trial: "lstm" for one target per series and for labels of symbols, else
        "linear+lstm". A first ``partial_fit`` takes "lstm".
    dropout : float or "auto"
        Probability of dropping an output in training: between two layers, and, in a network that
        adds to a linear model, after the last. "auto": 0.3 in such a network, unless it has 128
        units, else 0.
    lr : float or "auto"
        Highest learning rate of AdamW. "auto": 0.005 in a network that adds to a linear model,
        unless it has 128 units, else 0.01.
    epochs : int or None
        Passes over the data. None: as many as ``max_updates`` takes.
    max_updates : int, "auto" or None
        Steps of the optimizer. "auto": None if ``epochs`` is given; else 20 passes, but at least
        200 and at most 600 steps, or 1000 for labels of symbols; 1000 for more than 614,400 steps
        of data. Trials, and the fit that continues them, share these updates.
    batchsize : int or "auto"
        See :class:`Spec`; it counts all ranks together. "auto": 16, but 32, 64 or 128 where updates
        would make fewer than eight passes; 32 for more than 614,400 steps; 128 for single steps.
    seqsize : int, None or "auto"
        Steps of a window; None trains on whole series. "auto": 64 for targets at each step; for one
        target per series, whole series of up to 500 steps, else 128.
    spec : dict or None
        Further fields of :class:`Spec`, such as ``{"clip": 0.5, "overlap": 20}``. The defaults here
        are ``lr_schedule="onecycle"``, ``shuffle=True``, ``clip=1.0`` and, with
        ``early_stopping``, ``patience=10``. ``spec__clip`` sets one of them in ``set_params`` and
        grids.
    n_models : int
        Number of models with different initial weights or kernels; predictions are their mean.
    early_stopping : bool
        Hold out a tenth of the data, stop when the loss on them has not fallen for
        ``spec["patience"]`` epochs, and keep the best weights. Series are held out, stratified by
        label in classification; a single series and ``timesteps`` lose their last steps. Uses
        ``validation_data`` instead, if given.
    level : float, list of float, or None
        Share of targets, in per cent such as 80 or [80, 95], that intervals, or sets of classes,
        are to hold. For numbers at each step with ``scale_target``, a network learns both ends from
        the inputs (pinball loss); else all intervals are equally wide. A second model, fitted
        without the last fifth of up to nine series, else without a fifth of the series, calibrates
        them by its errors there; with ``validation_data`` or ``early_stopping``, the model itself
        does, on the data held out. Predictions do not change.
    target : "auto", "step" or "series"
        See :class:`Estimator`.
    n_timesteps : int or None
        For matrices: number of steps in each row, whose column ``f * n_timesteps + t`` is feature
        ``f`` at step ``t``. None: one step.
    comm, device, callbacks, warm_start, random_state, verbose
        See :class:`Estimator`. Several ranks share the work of one.
    """

    hidden_size: int | str = "auto"
    num_layers: int = 1
    cell: Any = "auto"
    _: KW_ONLY
    dropout: float | str = "auto"
    lr: float | str = "auto"
    epochs: int | None = None
    max_updates: int | str | None = "auto"
    batchsize: int | str = "auto"
    seqsize: int | str | None = "auto"
    spec: Mapping[str, Any] | None = None
    n_models: int = 1
    early_stopping: bool = False
    level: Any = None
    target: str = "auto"
    n_timesteps: int | None = None
    comm: Any = "auto"
    device: Any = None
    callbacks: Any = None
    warm_start: bool = False
    random_state: Any = None
    verbose: Any = "auto"

    _fit = run_auto_fit
    INSTEAD: ClassVar[dict[str, str]] = {  # what replaces arguments of 0.2.0
        "interval": "give level, in per cent: level=90 for interval=0.9",
        "n_iter_no_change": "give spec={'patience': n}, with early_stopping=True",
        "validation_fraction": "a tenth is held out; give another part to fit as validation_data",
        "scaling": "all ranks share each minibatch: batchsize counts the series of all ranks",
        "compile": "compile a model of your own: EstimatorRegressor(model, compile=True)",
        **dict.fromkeys(
            ("weight_decay", "input_noise", "scale_input", "n_lags"),
            "its former default always holds; for another value, give a model to "
            "EstimatorRegressor or EstimatorClassifier",
        ),
    }

    @property
    def cell_(self) -> Any:
        """The model of the fit: what ``cell`` is, or what "auto" has chosen."""
        chosen = self.choice_.cell
        return chosen if _is_auto(self.cell) else self.cell

    @property
    def choice_(self) -> FitChoice:
        """What "auto" stood for in the fit, and what trials showed; ``print`` makes a table."""
        parts: FittedParts | None = getattr(self, "fitted_parts_", None)
        if parts is None or parts.choice is None:
            raise AttributeError("choice_ is what a fit has chosen; nothing was chosen")
        return parts.choice

    def resolved_params(self) -> Settings:
        parts: FittedParts | None = getattr(self, "fitted_parts_", None)
        fitted = None if parts is None else parts.choice
        # before a fit, for checks alone
        return self.settings_of(fitted or FitChoice("linear+lstm"))

    def choose(self, size: DataSize, is_fit: bool) -> FitChoice:
        """Return what "auto" stands for with data of this size; internal."""
        choice = choose_model(self.cell, size, is_fit=is_fit)
        set_by_user = [name for name, value in OF_NETWORKS.items() if getattr(self, name) != value]
        if not (_is_auto(self.cell) and set_by_user):
            return choice
        cell = NETWORK_FOR.get(choice.cell, choice.cell)
        return dataclasses.replace(choose_model(cell, size), needs_trial=False)

    def settings_of(self, choice: FitChoice) -> Settings:
        """Return the settings for a choice of what is "auto"; internal."""
        cell = choice.cell if _is_auto(self.cell) else self.cell
        make = self._maker(cell, choice)
        self._check_arguments()
        is_classifier = isinstance(self, EstimatorClassifier)
        spec = self._spec(choice)
        if cell in FIXED:
            given_size = FIXED_SEQSIZE if _is_auto(self.seqsize) else spec.seqsize
            n_steps = min(given_size or FIXED_SEQSIZE, FIXED_SEQSIZE)
            spec = Spec(
                epochs=1,
                batchsize=spec.batchsize,
                seqsize=n_steps,
                burn_in=spec.burn_in,
                rebatch=False,
            )
        given = {}
        if is_classifier and _is_auto(getattr(self, "class_weight", None)):
            given["class_weight"] = choice.class_weight
        lr: Any = choice.lr if _is_auto(self.lr) else self.lr
        return Settings.from_estimator(
            self,
            spec=spec,
            model=partial(ready_made, make=make, n_models=self.n_models),
            loss=F.cross_entropy if is_classifier else None,
            opt=partial(adamw, lr=lr, weight_decay=WEIGHT_DECAY),
            scaling="strong",
            is_classifier=is_classifier,
            choice=choice,
            **given,
        )

    def interval_settings(
        self, choice: FitChoice, center: nn.Module, levels: Sequence[float]
    ) -> Settings:
        """Return the settings of the network of intervals around a model; internal."""
        return Settings.from_estimator(
            self,
            spec=self._spec(dataclasses.replace(choice, max_updates=INTERVAL_UPDATES)),
            model=partial(WithIntervals, center=center, levels=levels),
            loss=loss_of_levels(levels),
            opt=partial(adamw, lr=BESIDE_LINEAR["lr"], weight_decay=WEIGHT_DECAY),
            scaling="strong",
            choice=choice,
        )

    def _level(self, level: float | None) -> float:
        """Return the level of intervals in per cent: the one given, or that of the fit."""
        check_is_fitted(self, "model_")
        if self.level is None or self.fitted_parts_.calibration is None:
            raise SpecError(
                f"{type(self).__name__} has no interval: set level=90, or another share, and fit"
            )
        levels = read_levels(self.level if level is None else level)
        if len(levels) > 1:
            given = self.level if level is None else level
            raise SpecError(f"level must be one of {given!r}: give one")
        return levels[0]

    def _maker(self, cell: Any, choice: FitChoice) -> Callable[..., nn.Module]:
        """Return the function that makes a model with ``cell``."""
        if isinstance(cell, str) and cell == "kernels":
            return partial(kernel_model, size=choice.n_kernels)
        gaps: dict[str, Any] = {"fills_gaps": choice.has_gaps}
        linear: dict[str, Any] = {
            "n_lags": choice.n_lags,
            "has_statistics": choice.has_statistics,
            **gaps,
        }
        if isinstance(cell, str) and cell == "linear":
            return partial(lag_model, **linear)
        is_sum = isinstance(cell, str) and cell.startswith(SUM)
        layer = self._layer(cell.removeprefix(SUM) if is_sum else cell)
        arguments: dict[str, Any] = {
            "cell": layer,
            "hidden_size": choice.hidden_size if _is_auto(self.hidden_size) else self.hidden_size,
            "num_layers": self.num_layers,
            "dropout": choice.dropout if _is_auto(self.dropout) else self.dropout,
            "input_noise": choice.input_noise,
        }
        if not is_sum:
            arguments["n_symbols"] = choice.n_symbols
            return partial(plain_network, scale_input=choice.scale_input, **gaps, **arguments)
        means = MEANS if choice.has_means else ()
        return partial(linear_plus_network, means=means, gain=choice.gain, **linear, **arguments)

    def _layer(self, given: Any) -> Callable[..., nn.Module]:
        """Return the function or class that ``cell`` names."""
        # only classes are looked up: another object may have no hash
        name = CLASSES.get(given, given) if isinstance(given, type) else given
        cell = CELLS.get(name) if isinstance(name, str) else name
        if not callable(cell):
            names = ", ".join(map(repr, ("auto", *FIXED, f"{SUM}lstm", *CELLS)))
            raise ValueError(f"cell must be one of {names}, or a class, got {self.cell!r}")
        return cell

    def _check_arguments(self) -> None:
        """Raise SpecError unless all arguments that are no fields of a spec can be."""
        for name in ("hidden_size", "num_layers", "n_models"):
            if not self._may_be_auto(name):
                check_integer(name, getattr(self, name), 1, error=SpecError)
        check_integer("n_timesteps", self.n_timesteps, 1, optional=True, error=SpecError)
        if self.level is not None:
            read_levels(self.level)
        if not self._may_be_auto("lr"):
            check_positive("lr", self.lr, error=SpecError)
        if not self._may_be_auto("dropout"):
            _check_dropout(self.dropout)
        for name in ("early_stopping", "scale_target"):
            value = getattr(self, name, False)  # only the regressor has scale_target
            if not isinstance(value, bool | np.bool_):
                raise SpecError(f"{name} must be True or False, got {value!r}")

    def _may_be_auto(self, name: str) -> bool:
        """Return whether an argument is "auto", and may be."""
        return name in ("hidden_size", "lr", "dropout") and _is_auto(getattr(self, name))

    def _spec(self, choice: FitChoice) -> Spec:
        given = self._fields_given()
        settings = {name: getattr(self, name) for name in FLAT}
        for name in ("max_updates", "batchsize", "seqsize"):
            if _is_auto(settings[name]):
                settings[name] = getattr(choice, name)
        if _is_auto(self.max_updates) and self.epochs is not None:
            settings["max_updates"] = None
        # without early stopping, validation data only give a loss to watch
        patience = PATIENCE if self.early_stopping else None
        try:
            return read_spec(Spec(**{**IN_SPEC, "patience": patience, **given, **settings}))
        except SpecError as error:  # some fields are arguments of the estimator
            names = "|".join(FLAT)
            raise SpecError(re.sub(rf"^spec\.({names}) ", r"\1 ", str(error))) from None

    def _fields_given(self) -> dict[str, Any]:
        """Return the fields of ``spec``; raise SpecError if they are not those that it may have."""
        if self.spec is not None and not isinstance(self.spec, Mapping):
            raise SpecError(
                f"spec must be a dict with further fields of Spec, such as {{'clip': 0.5}}, or "
                f"None, got {self.spec!r}; {', '.join(FLAT)} are arguments of their own"
            )
        given = {str(name): value for name, value in (self.spec or {}).items()}
        for name in given:
            if name in {f.name for f in fields(self)}:
                raise SpecError(
                    f"spec has the field {name!r}, which is an argument of its own: "
                    f"{type(self).__name__}({name}={given[name]!r})"
                )
        return given

    def _view_argument(self, argument: str) -> View:
        # spec is the only argument with parameters inside
        further = [name for name in NAMES if name not in FLAT]
        return view(IN_SPEC if self.spec is None else self.spec, optional=further)

    def _default_values(self, argument: str) -> dict[str, Any]:
        return {**vars(Spec()), **IN_SPEC}


def _check_dropout(value: object) -> None:
    # bool is a number for Python, and NaN is in no range
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= float(value) <= 1:  # type: ignore[arg-type]
        raise SpecError(f"dropout must be a number from 0 to 1, got {value!r}")


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"


@explains_arguments
@documented
@dataclass(eq=False, repr=False, kw_only=True)
class SequenceRegressor(_SequenceEstimator, EstimatorRegressor):
    """Regression of numbers per step or per series, by a model that is chosen from the data.

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
    wider, so that a large mean costs no digits.

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

    def predict_interval(
        self,
        x: object,
        *,
        level: float | None = None,
        lengths: object = None,
        starts: object = None,
    ) -> tuple[Any, Any, Any]:
        """Return predictions and the ends of their intervals: ``prediction, low, high``.

        If further steps are like those that were held out from the fit, about ``level`` per cent of
        the targets lie between the ends. Where series drift, use :meth:`Estimator.stream` with
        ``interval``, which follows them. In a pipeline, transform first:
        ``pipe[-1].predict_interval(pipe[:-1].transform(x))``.

        Parameters
        ----------
        x, lengths, starts
            As for :meth:`Estimator.predict`; each result has its form.
        level : float, optional
            A level of the fit, in per cent; may be None if there is only one. Where all
            intervals are equally wide, any level.

        Raises
        ------
        SpecError
            If the fit was without ``level``, or has no network for this level.

        Notes
        -----
        Sources: Romano, Patterson & Candes (2019), Conformalized quantile regression, NeurIPS; for
        one target per series, Lei et al. (2018), Distribution-free predictive inference for
        regression, JASA.
        """
        level = self._level(level)
        ends = self.interval_estimator_
        if ends is None:
            width = _calibration_of(self, level)
            predicted = self.predict(x, lengths=lengths, starts=starts)
            return predicted, _moved(predicted, -width), _moved(predicted, width)
        levels = ends.model_.levels
        if level not in levels:
            raise SpecError(f"level={level:g}: this fit has intervals of {levels} per cent")
        first = 1 + 2 * levels.index(level)
        outputs = ends.predict(x, lengths=lengths, starts=starts)
        form = (1 + 2 * len(levels), self.fitted_parts_.codec.ndim == 1)
        return tuple(_group(outputs, k, *form) for k in (0, first, first + 1))

    @property
    def interval_estimator_(self) -> Any:
        """An estimator to stream and to export, with more outputs: first the predictions, then the
        lower and the upper ends of the intervals, level by level. None where all intervals are
        equally wide.
        """
        return estimator_of_intervals(self)

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
                "targets have no mean and scale before fit, or with scale_target=False"
            )
        return parts.codec.scale


@explains_arguments
@documented
@dataclass(eq=False, repr=False, kw_only=True)
class SequenceClassifier(_SequenceEstimator, EstimatorClassifier):
    """Classification per step or per series, by a model that is chosen from the data.

    Parameters
    ----------
    {parameters}
    class_weight : "auto", "balanced", "sqrt_balanced", dict of label to weight, or None
        Weight of each class, which multiplies the ``sample_weight`` of its steps. "balanced":
        inversely proportional to the frequency of the class at steps that carry loss;
        "sqrt_balanced": to its square root. "auto": "sqrt_balanced" for up to ten classes of labels
        at each step, else None. A class of weight 0 in a dict is left out: its steps carry no loss.

    Notes
    -----
    The loss is the cross-entropy. See :class:`EstimatorClassifier` for inputs, targets, attributes
    and methods.

    ``predict`` and ``decision_function`` follow ``class_weight``; ``predict_proba`` gives the
    probabilities of the data, as if all classes had the weight 1. ``predict`` is therefore the
    class of the largest product of probability and weight, which need not be the most probable one.
    scikit-learn's classifiers leave the weights in their probabilities. :meth:`partial_fit` keeps
    the frequencies of the first call.

    With one label per series, probabilities hold for series as long as those of training. After the
    first steps of a series, in a stream or of a prefix, "kernels" are often nearly certain and
    wrong. To decide early, fit on prefixes of the lengths at which you decide, with ``groups`` that
    keep the prefixes of a series together, and choose a threshold on held-out series.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.random.default_rng(0).normal(size=(1, 60, 20))  # (F, N, T)
    >>> y = np.where(x[0].mean(1) > 0, "up", "down")  # one label per series
    >>> est = SequenceClassifier(8, epochs=3, random_state=0).fit(x, y)
    >>> est.predict_proba(x).shape, est.classes_
    ((60, 2), array(['down', 'up'], dtype='<U4'))
    """

    class_weight: Any = "auto"

    def predict_set(
        self,
        x: object,
        *,
        level: float | None = None,
        lengths: object = None,
        starts: object = None,
    ) -> Any:
        """Return which classes are in the prediction set: bool, in the form of ``predict_proba``.

        A set holds the likeliest class, and every class whose probability reaches what the label
        had at ``level`` per cent of the held-out steps. If further steps are like these, at least
        ``level`` per cent of the sets hold the label. ``level`` defaults to the level of the fit;
        for other parameters see :meth:`Estimator.predict`. A step without input has an empty set.

        Raises
        ------
        SpecError
            If the fit was without ``level``.

        Notes
        -----
        Source: Sadinle, Lei & Wasserman (2019), Least ambiguous set-valued classifiers with bounded
        error levels, JASA.
        """
        (error,) = _calibration_of(self, self._level(level))
        likely = self.predict_proba(x, lengths=lengths, starts=starts)
        return _sets(likely, float(error), len(self.classes_))


def _calibration_of(est: _SequenceEstimator, level: float) -> np.ndarray:
    calibration = est.fitted_parts_.calibration
    assert calibration is not None
    return calibration.quantile(level / 100)


def _group(outputs: Any, k: int, n_groups: int, is_vector: bool) -> Any:
    """Return the outputs of one of several groups, from predictions of any form."""
    if isinstance(outputs, list):
        return [np.split(of_series, n_groups)[k] for of_series in outputs]
    if outputs.ndim == 3:
        return np.split(outputs, n_groups)[k]
    # columns of a matrix are outputs, each for one or more steps
    columns = np.split(outputs, n_groups, 1)[k]
    return columns[:, 0] if is_vector and columns.shape[1] == 1 else columns


def _moved(predicted: Any, distance: np.ndarray) -> Any:
    """Return predictions of any form with a number per output added, in their type."""
    if isinstance(predicted, list):  # of series (G, T_i)
        return [_moved(p[:, None], distance)[:, 0] for p in predicted]
    if predicted.ndim == 3:
        moved = predicted + distance[:, None, None]
    else:  # columns of a matrix are outputs, each for one or more steps or series
        n_columns = predicted.shape[1] if predicted.ndim == 2 else 1
        moved = predicted + np.repeat(distance, n_columns // len(distance))
    return moved.astype(predicted.dtype)


def _sets(likely: Any, error: float, n_classes: int) -> Any:
    """Return which probabilities, of any form, belong into sets."""
    if isinstance(likely, list):
        return [_sets(p[:, None], error, n_classes)[:, 0] for p in likely]
    axis = 0 if likely.ndim == 3 else 1
    by_class = likely
    if axis == 1:  # columns are classes, each for one or more steps or series
        by_class = likely.reshape(len(likely), n_classes, -1)
    # probabilities are rounded: the one at the threshold itself belongs to the set
    inside = 1 - by_class <= error + 1e-7
    inside |= by_class == by_class.max(axis, keepdims=True)
    return inside.reshape(likely.shape)
