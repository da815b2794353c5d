"""Resolve the constructor's arguments of an estimator into frozen settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from fluxutils_py.data import SequenceWindows
from fluxutils_py.errors import SpecError
from fluxutils_py.estimator.building import default_model
from fluxutils_py.estimator.fit_choice import FitChoice
from fluxutils_py.estimator.spec import Spec, read_spec
from fluxutils_py.parallel.launcher import in_shared_search
from fluxutils_py.training.hooks import Hooks
from fluxutils_py.training.make_optimizer import adamw


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
        Whether to hold out ``validation_fraction`` of the training data if no validation data are
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
    validation_fraction: Any = None
    interval: float | None = None
    choice: FitChoice | None = None

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
            arguments["opt"] = partial(adamw, lr=0.01)
        if in_shared_search():
            # The candidates of a search were each fitted by one process, and its refit trains them
            # together: minibatches of the same size give the model that was chosen.
            arguments["scaling"] = "strong"
        return cls(**arguments)


def as_callbacks(callbacks: object) -> list[Any]:
    """Return the ``callbacks`` argument of an estimator as a list, after checking each callback."""
    if callbacks is None:
        return []
    as_list = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    for callback in as_list:
        Hooks().attach(callback)  # raises the errors of what cannot be a hook
    return as_list


# -- how many series a minibatch has ---------------------------------------------------------------

SCALINGS = ("weak", "strong")


def whole_batchsize(
    settings: Settings, n_ranks: int, saved: Mapping[str, Any] | None = None
) -> int:
    """Return the number of series in a minibatch over all ranks.

    ``saved`` is :func:`minibatch_size` in the checkpoint that the fit continues from. With weak
    scaling and the same ``batchsize`` as then, the whole minibatch stays as it was, whatever the
    number of ranks.

    Raises
    ------
    SpecError
        If ``scaling`` is neither ``"weak"`` nor ``"strong"``.
    """
    scaling = settings.scaling
    if scaling not in SCALINGS:
        raise SpecError(
            "scaling must be 'weak' (batchsize counts the series on each rank) or 'strong' (in "
            f"the whole minibatch), got {scaling!r}"
        )
    batchsize = read_spec(settings.spec).batchsize
    # with strong scaling, a minibatch has the same size on any number of ranks
    if scaling == "strong":
        return batchsize
    # restoring the checkpoint of a different fit raises the error
    if saved is not None and (saved["scaling"], saved["batchsize"]) == (scaling, batchsize):
        return int(saved["whole"])
    return batchsize * n_ranks


def minibatch_size(settings: Settings, windows: SequenceWindows) -> dict[str, Any]:
    """Return the size of minibatches, as a checkpoint holds it."""
    return {
        "scaling": settings.scaling,
        "batchsize": read_spec(settings.spec).batchsize,
        "whole": windows.batchsize,
    }


def describe_minibatches(settings: Settings, windows: SequenceWindows, n_ranks: int) -> str | None:
    """Return a line such as ``4 ranks train on minibatches of 32 series, 8 on each rank``; None
    where it goes without saying.
    """
    resumed = windows.batchsize != whole_batchsize(settings, n_ranks)
    if n_ranks == 1 and not resumed:
        return None
    rows = windows.segments
    whole = min(windows.batchsize, len(rows))  # a small data set makes one minibatch
    least, remainder = divmod(whole, n_ranks)
    each = f"{least} on each rank"
    if windows.shards is not None:
        each = "each rank on its own"
    elif remainder:
        each = f"{least} or {least + 1} on each rank"
    quantity = f"all {whole}" if whole == len(rows) else str(whole)
    minibatches = f"{quantity} {'pieces of series' if rows.folds > 1 else 'series'}"
    batchsize = read_spec(settings.spec).batchsize
    why = f"batchsize={batchsize}, scaling={settings.scaling!r}"
    if resumed:
        why += f", which continues with the {windows.batchsize} of its checkpoint"
    if n_ranks == 1:
        return f"this process trains on minibatches of {minibatches} ({why})"
    return f"{n_ranks} ranks train on minibatches of {minibatches}, {each} ({why})"
