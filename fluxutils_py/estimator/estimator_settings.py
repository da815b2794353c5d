"""Resolve the constructor's arguments of an estimator into frozen settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from fluxutils_py.estimator.building import default_model
from fluxutils_py.estimator.fit_choice import DataSize, FitChoice
from fluxutils_py.estimator.spec import Spec
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
    choose : callable or None
        ``choose(size, is_fit)`` chooses for data; None where the choice is made.
    with_choice : callable or None
        Makes the settings for a choice.
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
    choose: Callable[[DataSize, bool], FitChoice] | None = None
    with_choice: Callable[[FitChoice], Settings] | None = None

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
