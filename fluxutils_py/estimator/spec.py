"""The settings of training, and all arguments of an estimator with defaults in place of None."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, TypeVar

import numpy as np

from fluxutils_py.errors import SpecError
from fluxutils_py.estimator.building import default_model
from fluxutils_py.lr_schedules import cosine
from fluxutils_py.nn.precision import check_precision
from fluxutils_py.training.make_optimizer import adamw
from fluxutils_py.tree import children, is_sequence
from fluxutils_py.validation import check_integer, check_positive


def closest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return which of the names is most like another, None if none is."""
    return next(iter(get_close_matches(name, names, 1, cutoff)), None)


def names_what_was_meant(cls: type[Any]) -> type[Any]:
    """Let a dataclass refuse unknown arguments with the name that was probably meant."""
    plain = cls.__init__  # bound now: cls.__init__ will be the function below

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **arguments: Any) -> None:
        names = [f.name for f in fields(self)]
        # the error of a dataclass names no field that may have been meant
        for field in arguments:
            if field not in names:
                near = closest(field, names)
                meant = f"; did you mean {near!r}?" if near else f"; it has {', '.join(names)}"
                raise SpecError(f"{cls.__name__} has no field {field!r}{_place(field) or meant}")
        plain(self, *args, **arguments)

    cls.__init__ = init
    return cls


Class = TypeVar("Class")


def explains_arguments(cls: type[Class]) -> type[Class]:
    """Let an estimator refuse unknown arguments with what was probably meant.

    That is a field of its spec, or another name; ``INSTEAD`` of the class says what replaces
    arguments that it had once. The signature stays that of the class, for scikit-learn and for
    users.
    """
    plain: Callable[..., None] = cls.__init__
    names = list(inspect.signature(plain).parameters)[1:]  # without self
    replaced: dict[str, str] = getattr(cls, "INSTEAD", {})

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **arguments: Any) -> None:
        for name in arguments:
            if name not in names:
                way = replaced.get(name) or _way_to_set(name, names)
                raise TypeError(f"{type(self).__name__} has no parameter {name!r}; {way}")
        plain(self, *args, **arguments)

    cls.__init__ = init  # type: ignore[method-assign]
    return cls


def _way_to_set(name: str, names: list[str]) -> str:
    """Say how to set what may be meant by a name that is no argument of an estimator.

    ``names`` are those of its arguments.
    """
    has_spec = "spec" in names
    if name in NAMES and has_spec:
        return f"it is a field of the spec: spec={{{name!r}: ...}}"
    near = closest(name, [*names, *NAMES] if has_spec else names)
    if near and near not in names:
        return f"did you mean {near!r}, a field of the spec: spec={{{near!r}: ...}}?"
    if near:
        return f"did you mean {near!r}?"
    if name in NAMES:
        return (
            "it is a field of the spec that an Estimator takes: "
            f"Estimator(model, spec={{{name!r}: ...}})"
        )
    return f"it has {', '.join(names)}"


EPOCHS = 100  # of a fit whose spec says nothing about its length


@names_what_was_meant
@dataclass(frozen=True)
class Spec:
    """The settings with which an estimator trains.

    An estimator takes a ``Spec``, or any dict, namedtuple, dataclass or object with at least one of
    these fields; the others have the defaults given here. Unknown fields are ignored, unless they
    look like misspelt ones: that is an error for ``epochs``, ``batchsize`` and ``seqsize``, and a
    warning for the rest. Arguments of the estimator or of the optimizer (``device``,
    ``random_state``, ``lr``) are an error, unless they are None.

    Parameters
    ----------
    epochs : int or None
        Passes over the data. None: as many as ``max_updates`` takes, or 100 if that is None too.
    batchsize : int
        Series per minibatch.
    seqsize : int or None
        Time steps per window; gradients stop at its left edge. None: the whole series.
    shuffle : bool
        Take the series in a new order each epoch. Time always runs forward.
    overlap : int
        Earlier steps to compute again with each window, so that gradients reach ``overlap`` to
        ``seqsize + overlap`` steps back. The loss covers the last ``seqsize`` steps. A model
        without recurrent state that takes windows (``takes_windows = True``: a causal convolution,
        attention over the window) sees these steps in the same call, also in prediction and
        validation. If ``overlap`` is its receptive field less one, nothing depends on
        ``seqsize``.
    burn_in : int
        Steps at the start of each series that move the state, but carry no loss and no gradient.
    clip : float or None
        Largest global norm of the gradient.
    accumulate : int
        Windows per step of the optimizer; windows without a live step do not count.
    patience : int or None
        Stop after this many epochs without a better validation loss (or training loss, without
        validation data), and restore the best weights. None: never stop early, and keep the last
        weights.
    rebatch : "auto" or bool
        Whether ``fit`` cuts the time of few long series (at most half of ``batchsize``) into folds,
        each a row of the minibatch that starts from the zero state. "auto": into as many folds as
        possible, at most ``batchsize`` over the number of series, of at least ``8 * seqsize`` steps
        each; never with ``seqsize=None``. A series too short for two such folds stays whole. True:
        into as many as fill the minibatch, however short, as :func:`fluxutils_py.data.rebatch`
        does; the model then learns nothing that reaches beyond a fold. False: never. On several
        ranks, the ``batchsize`` of all together counts. ``folds`` in ``history_`` is the largest
        number of folds of a series.
    precision : "float32" or "bfloat16"
        Type in which torch's autocast computes matrix products, recurrences and the like, in
        training, validation and prediction. "float32": the type of the data (float64 for float64).
        "bfloat16": parameters, optimizer, losses and results are float32 whatever the data. Worth
        it where layers are large; see the guide.
    max_updates : int or None
        Stop after this many steps of the optimizer, also within an epoch. With ``epochs`` too,
        whichever comes first ends a fit.
    lr_schedule : "onecycle", "cosine", callable, ("step", callable) or None
        How learning rates change. "cosine": from their values to 0 at the end of the fit, along a
        cosine, after each step of the optimizer. "onecycle": the same, after a linear rise over the
        first fifth. In ``partial_fit``, whose length is unknown, these two keep the rates. A
        callable ``f(optimizer)`` returns a torch learning-rate scheduler, which steps after each
        epoch: ``partial(torch.optim.lr_scheduler.StepLR, step_size=5)``. ("step", f): after each
        step of the optimizer.
    gradient : "truncated" or "exact"
        What a window learns from steps before it. "truncated": nothing. "exact": layers with a
        diagonal recurrence (:class:`LRU`, :class:`MinGRU`, :class:`MinLSTM`) carry along how their
        state depends on their parameters, and learn from all of the past, whatever ``seqsize`` is.
        The gradient of a model with one such layer is that of backpropagation through the whole
        series, if parameters held still; in stacks it is exact within each layer and truncated
        between them. Other recurrent layers stay truncated, with a warning. Needs ``overlap=0``;
        steps of the ``burn_in`` are not learnt from, and ``rebatch="auto"`` never cuts series.
        Source: Zucchet et al. (2023), Online learning of long-range dependencies.

    Notes
    -----
    Source: FluxUtils.jl for the first three. For ``overlap``, see Williams & Peng (1990), Neural
    Computation 2(4), 490-501: their k1 is ``seqsize``, their k2 ``seqsize + overlap``.
    """

    epochs: int | None = None
    batchsize: int = 256
    seqsize: int | None = None
    shuffle: bool = False
    overlap: int = 0
    burn_in: int = 0
    clip: float | None = None
    accumulate: int = 1
    patience: int | None = None
    rebatch: bool | str = "auto"
    precision: str = "float32"
    max_updates: int | None = None
    lr_schedule: Any = None
    gradient: str = "truncated"

    @property
    def schedule(self) -> tuple[str, Any] | None:
        """When the learning-rate scheduler steps, "epoch" or "step", and what makes it."""
        if self.lr_schedule is None or isinstance(self.lr_schedule, tuple):
            return self.lr_schedule
        if isinstance(self.lr_schedule, str):
            return "step", cosine(cycles=1, warm_up=LR_SCHEDULES[self.lr_schedule])
        return "epoch", self.lr_schedule

    @property
    def schedule_follows_length(self) -> bool:
        """Whether learning rates follow the length of a fit, and end with it."""
        return isinstance(self.lr_schedule, str)

    def planned_epochs(self, updates_per_epoch: int) -> int:
        """Return the number of passes of a fit, of which each makes so many updates."""
        if self.max_updates is None or not updates_per_epoch:
            return self.epochs or EPOCHS
        enough = -(-self.max_updates // updates_per_epoch)
        return enough if self.epochs is None else min(self.epochs, enough)


# share of the fit in which rates rise
LR_SCHEDULES = {"onecycle": 0.2, "cosine": 0}
GRADIENTS = ("truncated", "exact")
NAMES = [f.name for f in fields(Spec)]
# Arguments of estimators: a spec that has them would be accepted, and they would do nothing.
ARGUMENTS = (
    *("model", "loss", "opt", "comm", "scaling", "device", "compile", "callbacks"),
    *("warm_start", "random_state", "verbose", "target", "n_timesteps"),
    *("scale_target", "class_weight"),
)
# What an Estimator has in place of the argument of ready-made estimators.
STOP_EARLY = "set patience=n in the spec, and give fit(..., validation_data=(x, y))"


def _place(field: str) -> str | None:
    """Return where an unknown field of a spec belongs; None if this package has no such name."""
    if field in ARGUMENTS:
        return f"; {field} is an argument of the estimator: Estimator(..., {field}=..., spec=...)"
    if field == "early_stopping":
        return f"; {STOP_EARLY}. SequenceRegressor and SequenceClassifier have it as an argument"
    if field in ("scheduler", "schedule_every"):
        return "; a scheduler is given as lr_schedule=f, or ('step', f) to step with the optimizer"
    if field in ("lr", "learning_rate"):
        return (
            f"; {field} belongs to the optimizer: "
            "Estimator(..., opt=functools.partial(torch.optim.AdamW, lr=...))"
        )
    return None


def read_spec(spec: Any) -> Spec:
    """Return a checked :class:`Spec` from any form, with numbers of Python.

    None and missing fields mean the defaults.

    Raises
    ------
    SpecError
        If it has none of the known fields, a name looks like a misspelt ``epochs``, ``batchsize``
        or ``seqsize``, or a value cannot be.
    """
    if spec is None:
        return Spec()
    # a subclass may have fields of the user, which are looked at like those of other forms
    known = spec if type(spec) is Spec else _from_fields(spec_fields(spec))
    integers = _check_integers(known)
    _check_others(known)
    numpys = {k: v.item() for k, v in vars(known).items() if isinstance(v, np.generic)}
    return replace(known, **{**numpys, **integers})


def _from_fields(fields: dict[str, Any]) -> Spec:
    """Make a spec of fields by name; fields may be missing or unknown, but not misspelt."""
    known = {name: fields[name] for name in NAMES if name in fields}
    missing = sorted(set(NAMES) - known.keys())
    for field in (name for name in fields if name not in known):
        # an object may hold all settings of a program, None where they do not apply
        place = _place(field)
        if place is not None and fields[field] is not None:
            raise SpecError(f"spec has the field {field!r}, which would not be used{place}")
        near = closest(field, missing, 0.7)
        if near:
            raise SpecError(f"spec field {field!r} is not used; did you mean {near!r}?")
    if not known:
        raise SpecError(
            f"spec has none of the fields {', '.join(NAMES)} (found: "
            f"{', '.join(fields) or 'none'}); None means the defaults"
        )
    return Spec(**known)


def spec_fields(spec: Any) -> dict[str, Any]:
    """Return the fields of a spec of any form."""
    if isinstance(spec, Mapping):
        return dict(spec)
    fields = None if is_sequence(spec) else children(spec)  # a namedtuple or dataclass
    if fields is not None:
        return fields
    if isinstance(spec, type | str | bytes | numbers.Number | list | tuple | set):
        raise SpecError(
            "spec must be a Spec, dict, namedtuple, dataclass or object with epochs, batchsize "
            f"and seqsize, got {spec!r}"
        )
    # properties and slots are not in the __dict__
    named = [name for name in NAMES if hasattr(spec, name)]
    names = dict.fromkeys([*getattr(spec, "__dict__", {}), *named])
    return {name: getattr(spec, name) for name in names if not name.startswith("_")}


# The smallest value of each field that is an integer; those whose default is None are optional.
LEAST = {
    **dict.fromkeys(("epochs", "batchsize", "seqsize", "accumulate", "patience"), 1),
    "max_updates": 1,
    **dict.fromkeys(("overlap", "burn_in"), 0),
}


def _check_integers(spec: Spec) -> dict[str, int | None]:
    """Return the fields that are integers, as integers of Python."""
    integers = {}
    for name in NAMES:
        if name in LEAST:
            value = getattr(spec, name)
            optional = getattr(Spec, name) is None
            integers[name] = check_integer(
                f"spec.{name}", value, LEAST[name], optional=optional, error=SpecError
            )
    return integers


def _check_others(spec: Spec) -> None:
    if not isinstance(spec.shuffle, bool | np.bool_):
        raise SpecError(f"spec.shuffle must be True or False, got {spec.shuffle!r}")
    # isinstance first: an array compared with "auto" has no truth value
    is_auto = isinstance(spec.rebatch, str) and spec.rebatch == "auto"
    if not is_auto and not isinstance(spec.rebatch, bool | np.bool_):
        raise SpecError(f"spec.rebatch must be 'auto', True or False, got {spec.rebatch!r}")
    check_positive("spec.clip", spec.clip, optional=True, error=SpecError)
    check_precision(spec.precision, "spec.precision", SpecError)
    _check_gradient(spec)
    if spec.lr_schedule is not None and not _is_schedule(spec.lr_schedule):
        names = ", ".join(map(repr, LR_SCHEDULES))
        raise SpecError(
            f"spec.lr_schedule must be {names}, None, a function of the optimizer that returns a "
            "torch scheduler, which steps each epoch, or ('step', function), for one that steps "
            f"with the optimizer, got {spec.lr_schedule!r}; for example "
            "functools.partial(torch.optim.lr_scheduler.StepLR, step_size=5)"
        )


def _is_schedule(schedule: object) -> bool:
    if isinstance(schedule, str):
        return schedule in LR_SCHEDULES
    if isinstance(schedule, tuple):
        return len(schedule) == 2 and schedule[0] == "step" and callable(schedule[1])
    return callable(schedule)


def _check_gradient(spec: Spec) -> None:
    if not isinstance(spec.gradient, str) or spec.gradient not in GRADIENTS:
        names = " or ".join(map(repr, GRADIENTS))
        raise SpecError(f"spec.gradient must be {names}, got {spec.gradient!r}")
    if spec.gradient == "exact" and spec.overlap:
        raise SpecError(
            f"spec.gradient='exact' needs overlap=0, got overlap={spec.overlap}: gradients already "
            "reach all steps before a window; leave overlap out, or set gradient='truncated'"
        )


# -- all arguments of an estimator -----------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """Constructor arguments of an estimator, with defaults in place of None.

    These attributes are not arguments of every estimator:

    Attributes
    ----------
    n_timesteps : int or None
        Steps in each row of a matrix.
    is_classifier : bool
        Whether targets are labels of any type.
    class_weight : "balanced", "sqrt_balanced", dict or None
    scale_target : bool
        Whether to train on targets of mean 0 and variance 1.
    early_stopping : bool
        Whether to hold out a tenth of the training data if no validation data are
        given.
    choice : FitChoice or None
        What "auto" stands for; None where nothing is chosen, or nothing yet.
    """

    model: Any = None
    loss: Any = None
    opt: Any = None
    spec: Any = None
    comm: Any = "auto"
    scaling: Any = "weak"
    device: Any = None
    compile: Any = False
    callbacks: Any = None
    random_state: Any = None
    verbose: Any = "auto"
    target: str = "auto"
    n_timesteps: int | None = None
    is_classifier: bool = False
    class_weight: Any = None
    scale_target: bool = False
    early_stopping: bool = False
    level: Any = None
    choice: Any = None

    @classmethod
    def from_estimator(cls, est: object, **replacements: Any) -> Settings:
        """Return the settings of an estimator, with some of its arguments replaced."""
        names = [f.name for f in fields(cls)]
        arguments = {name: getattr(est, name) for name in names if hasattr(est, name)}
        arguments |= replacements
        if arguments.get("spec") is None:
            arguments["spec"] = Spec()
        model = arguments.get("model")
        is_default = model is None or getattr(model, "func", None) is default_model
        if is_default and arguments.get("opt") is None:
            arguments["opt"] = functools.partial(adamw, lr=0.01)
        return cls(**arguments)
