"""Get and set parameters inside arguments: ``model__hidden``, ``opt__lr``, ``spec__epochs``."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, Self

from torch import nn, optim
from torch.optim import Optimizer

from fluxutils_py.errors import SpecError
from fluxutils_py.estimator.building import (
    SIZES,
    default_model,
    parameters_of,
)
from fluxutils_py.estimator.spec import NAMES, Spec, spec_fields
from fluxutils_py.training.make_optimizer import adamw

# arguments of user code that fit fills in
FILLED = {"params", "optimizer", *SIZES}


def parameter_names(cls: type) -> list[str]:
    """Return the names of the constructor's arguments, sorted as in scikit-learn."""
    return sorted(inspect.signature(cls).parameters)


class NestedParamsMixin:
    """Lets ``get_params`` and ``set_params`` reach into arguments; put it before ``BaseEstimator``.

    ``model__hidden`` is the argument ``hidden`` of the class or function given as ``model``,
    ``opt__lr`` an argument of the optimizer, ``spec__epochs`` a field of the spec. Setting a
    parameter replaces the argument and never changes it in place, because other estimators may
    share it.

    =====================  ================================  ====================================
    argument               its parameters                    becomes
    =====================  ================================  ====================================
    class, function        its arguments                     a ``functools.partial`` of it
    ``functools.partial``  the function's arguments          a partial with more keywords
    ``Spec``, dataclass    its fields                        a new one
    mapping                its keys                          a dict
    spec of another form   its fields                        a dict
    model or optimizer     none: it cannot be built again
    None                   parameters of the default         a partial, a ``Spec``
    =====================  ================================  ====================================

    ``None`` stands for the default network (``model__n_hidden``), ``AdamW`` and ``Spec()``, with
    the defaults of the estimator. To a spec that is no dataclass, the other fields of
    :class:`fluxutils_py.Spec` can be added. Another ``__`` reaches one level deeper:
    ``spec__lr_schedule__step_size``. Arguments that ``fit`` fills in (``params``, ``n_in``,
    ``n_out``, ``n_features``, ``n_outputs``) are not parameters.

    Examples
    --------
    >>> from fluxutils_py import Estimator
    >>> spec = {"epochs": 2, "batchsize": 10, "seqsize": 25}
    >>> est = Estimator(spec=spec).set_params(spec__epochs=5, opt__lr=0.01, model__n_hidden=8)
    >>> est.spec, spec["epochs"]
    ({'epochs': 5, 'batchsize': 10, 'seqsize': 25}, 2)
    >>> est.get_params()["opt__lr"]
    0.01
    """

    @classmethod
    def _nested_arguments(cls) -> list[str]:
        """Return the names of the nested arguments, which a subclass may lack."""
        names = parameter_names(cls)
        return [name for name in ("model", "opt", "spec") if name in names]

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return all parameters by name.

        With ``deep``, also those inside ``model``, ``opt`` and ``spec``.
        """
        params: dict[str, Any] = super().get_params(deep)  # type: ignore[misc]  # BaseEstimator's
        if deep:
            for argument in self._nested_arguments():
                params |= _flatten_values(argument, self._view_argument(argument).values)
        return params

    def set_params(self, **params: Any) -> Self:
        """Set parameters by name, also inside arguments, as in ``spec__epochs``.

        Whole arguments are set first: ``set_params(spec__epochs=3, spec=other)`` gives ``other``
        with 3 epochs.

        Raises
        ------
        SpecError
            A ``ValueError``, if there is no such parameter. Nothing changes then.
        """
        inside = self._nested_arguments()
        plain: dict[str, Any] = {}
        nested: dict[str, dict[str, Any]] = defaultdict(dict)
        for key, value in params.items():
            argument, _, name = key.partition("__")
            if name and argument in inside:
                nested[argument][name] = value
            else:
                plain[key] = value
        names = parameter_names(type(self))
        for key in plain:
            self._check_name(key, params, names)
        before = dict(vars(self))
        try:
            # whole arguments first: what is set inside them is set in the new ones
            super().set_params(**plain)  # type: ignore[misc]  # BaseEstimator's
            made = {
                name: _replace_values(self._view_argument(name), changes, name)
                for name, changes in nested.items()
            }
        except Exception:  # whatever a value of the user raises, nothing has changed
            vars(self).clear()
            vars(self).update(before)
            raise
        for argument, value in made.items():
            setattr(self, argument, value)
        return self

    def _view_argument(self, argument: str) -> View:
        """Return the settings of ``model``, ``opt`` or ``spec``.

        None stands for the default that fit uses.
        """
        value = getattr(self, argument)
        if value is None:
            settings = self.resolved_params()  # type: ignore[attr-defined]  # Estimator's
            value = getattr(settings, argument)
        if argument == "opt":
            if value is None or getattr(value, "func", None) is adamw:
                # the class in its place: its arguments can be listed, and a file can store it
                value = partial(optim.AdamW, **getattr(value, "keywords", {}))
            return view(value, n_filled=1)  # the first argument is the parameters, under any name
        if argument == "spec":
            return view(Spec() if value is None else value, optional=NAMES)
        return view(default_model if value is None else value)

    def _check_name(self, key: str, params: dict[str, Any], names: list[str]) -> None:
        """Raise unless scikit-learn can set the parameter."""
        argument, inside, _ = key.partition("__")
        fault = f"Invalid parameter {key!r} for estimator {type(self).__name__}"
        if argument not in names:
            field = f" It is a field of the spec: spec__{key}." if key in NAMES else ""
            raise SpecError(f"{fault}. Valid parameters are: {names!r}.{field}")
        if inside and not hasattr(params.get(argument, getattr(self, argument)), "set_params"):
            raise SpecError(
                f"{fault}: what is inside {argument} cannot be set; give {argument} as a whole."
            )


@dataclasses.dataclass(frozen=True)
class View:
    """Settings of a value.

    Parameters
    ----------
    value : object
    values : dict
        Current settings.
    replace : callable
        Makes a new value from a dict of changed settings.
    names : iterable of str or None
        Names that can be set; None: any.
    """

    value: Any
    values: dict[str, Any]
    replace: Callable[[dict[str, Any]], Any]
    names: Collection[str] | None

    @property
    def name(self) -> str:
        """Short name of the value for messages."""
        core = self.value.func if isinstance(self.value, partial) else self.value
        return str(getattr(core, "__name__", type(core).__name__))


def view(
    value: Any,
    n_filled: int = 0,
    optional: Iterable[str] = (),
) -> View:
    """Return the settings of a value.

    ``n_filled`` is the number of leading arguments of a function that the user cannot set;
    ``optional`` are fields that can be added to a spec that is no dataclass.
    """
    if isinstance(value, nn.Module | Optimizer):
        return View(value, {}, lambda new: value, ())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return View(value, values, lambda new: dataclasses.replace(value, **new), values)
    if callable(value):  # after dataclasses, which may be callable too
        return _view_arguments(value, n_filled)
    values = {}
    if optional or isinstance(value, Mapping):
        with contextlib.suppress(SpecError):  # of a number, text or list
            values = spec_fields(value)
    names = {*values, *optional} if values else ()
    return View(value, values, lambda new: {**values, **new}, names)


def _view_arguments(
    f: Callable[..., Any],
    n_filled: int,
) -> View:
    """Return the arguments of a class, function or partial as settings.

    Changing them gives a partial.
    """
    parameters = parameters_of(f)
    is_open = parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters[n_filled:])
    arguments = {
        p.name: p.default
        for p in (parameters or [])[n_filled:]
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    if isinstance(f, partial):
        arguments |= f.keywords  # also those that a signature with **kwargs does not list
    arguments = {k: v for k, v in arguments.items() if k not in FILLED}
    return View(
        f,
        {k: v for k, v in arguments.items() if v is not inspect.Parameter.empty},
        lambda new: partial(f, **new),
        None if is_open else arguments,
    )


def _flatten_values(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return values by full name, including the parameters nested inside them."""
    flat = {}
    for name, value in values.items():
        flat[f"{prefix}__{name}"] = value
        is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
        # the settings of functions are not shown
        if is_record or isinstance(value, partial | Mapping):
            flat |= _flatten_values(f"{prefix}__{name}", view(value).values)
    return flat


def _replace_values(
    seen: View,
    changes: dict[str, Any],
    where: str,
) -> Any:
    """Return a new value with the changes, whose names may be nested.

    ``where`` is the full name of the value.
    """
    new: dict[str, Any] = {}
    deeper: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in changes.items():
        name, inside, rest = key.partition("__")
        if inside:
            deeper[name][rest] = value
        else:
            new[name] = value
    for name in (*new, *deeper):
        is_known = seen.names is None or name in seen.names
        if name in FILLED or not is_known:
            raise SpecError(_invalid_parameter(seen, name, where))
    for name, inner in deeper.items():
        value = new[name] if name in new else seen.values.get(name)
        new[name] = _replace_values(view(value), inner, f"{where}__{name}")
    return seen.replace(new)


def _invalid_parameter(seen: View, name: str, where: str) -> str:
    text = f"Invalid parameter {name!r} for {where} ({seen.name})"
    if name in FILLED:
        return f"{text}: fit fills it in."
    if isinstance(seen.value, nn.Module | Optimizer):
        return (
            f"{text}: an instance cannot be built again; give its class, a function that makes "
            "one, or a functools.partial of either."
        )
    return f"{text}. Valid parameters are: {sorted(seen.names or ())!r}."
