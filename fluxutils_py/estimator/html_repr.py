"""Show estimators in notebooks."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn, optim

from fluxutils_py.estimator.nested_parameters import NestedParamsMixin, view
from fluxutils_py.estimator.spec import Spec
from fluxutils_py.sklearn_private import HtmlTables


class HtmlReprMixin(NestedParamsMixin, HtmlTables):
    """Mixin that makes scikit-learn's tables of parameters and fitted attributes readable for neural networks.

    A cell holds 30 characters, so it shows modules, optimizers and partials by a short name. A nested parameter comes
    after its argument, and counts as set by the user only if it differs from the default of its class or function;
    scikit-learn would list all of them first, as set.
    """

    def _edit_params_table(self, table: Any) -> Any:
        arguments = list(inspect.signature(type(self).__init__).parameters)
        nested = {name for name in table if "__" in name and name.partition("__")[0] in self._nested_arguments()}
        given = {name for name in table.non_default if name not in nested}
        for argument in self._nested_arguments():
            default = {f"{argument}__{k}": v for k, v in self._default_values(argument).items()}
            mine = {name for name in nested if name.startswith(f"{argument}__")}
            given |= {name for name in mine if name not in default or repr(default[name]) != repr(table[name])}

        def sort_key(name: str) -> tuple[bool, int, bool]:
            return name not in given, arguments.index(name.partition("__")[0]), "__" in name

        table.data = {name: short_repr(table[name]) for name in sorted(table, key=sort_key)}
        table.non_default = tuple(name for name in table if name in given)
        return table

    def _default_values(self, argument: str) -> dict[str, Any]:
        """Return the default values of the parameters inside an argument."""
        value = getattr(self, argument)
        if value is None:
            return self._view_argument(argument).values
        if argument == "spec":
            return view(Spec).values
        origin = value.func if isinstance(value, functools.partial) else value
        return view(origin if callable(origin) else type(origin)).values

    def _edit_fitted_table(self, table: Any) -> Any:
        for cell in table.data.values():
            cell["value"] = short_repr(cell["value"])
        return table


class Unquoted:
    """Text that is shown without quotes."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def short_repr(value: Any) -> Any:
    """Return a value, or a short text for one with a long ``repr``."""
    if isinstance(value, functools.partial):
        settings = [*map(repr, value.args), *(f"{k}={short_repr(v)!r}" for k, v in value.keywords.items())]
        return Unquoted(f"{short_repr(value.func)!r}({', '.join(settings)})")
    if isinstance(value, nn.Module) and list(value.children()):
        sizes = [p.numel() for p in value.parameters() if not nn.parameter.is_lazy(p)]
        return Unquoted(f"{type(value).__name__}, {sum(sizes):,} parameters")
    if isinstance(value, optim.Optimizer):
        return Unquoted(f"{type(value).__name__}(lr={value.param_groups[0].get('lr')})")
    if inspect.isclass(value) or inspect.isfunction(value):
        return Unquoted(value.__name__)
    if isinstance(value, Spec):
        return Unquoted("Spec(...)")  # its fields have rows of their own
    if isinstance(value, list) and any(isinstance(v, dict) for v in value):
        return Unquoted(f"{len(value)} records")
    return value
