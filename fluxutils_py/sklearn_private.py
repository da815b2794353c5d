"""The private parts of scikit-learn that this package uses, all in one place.

The test of this file names the versions of scikit-learn for which they are known to work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sklearn.utils._set_output import _wrap_data_with_container


def as_configured(transformed: object, x: object, transformer: object) -> Any:
    """Return the output of ``transform(x)`` in the container that ``set_output`` chose."""
    return _wrap_data_with_container("transform", transformed, x, transformer)


class Scorer(NamedTuple):
    """Parts of one of scikit-learn's scorers, as arguments of ``make_scorer``."""

    score_func: Callable[..., float]
    greater_is_better: bool
    response_method: Any
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, scorer: Any) -> Scorer:
        # make_scorer keeps its arguments in private attributes only
        return cls(
            score_func=scorer._score_func,
            greater_is_better=scorer._sign > 0,
            response_method=scorer._response_method,
            kwargs=scorer._kwargs,
        )


class HtmlTables:
    """Pass scikit-learn's HTML tables to ``_edit_params_table`` and ``_edit_fitted_table`` before
    they are shown.

    A table is a mapping of names to values, or to dicts with the ``"value"`` of an attribute, with
    its content in ``data``; ``non_default`` holds the names of the parameters that the user has
    set.
    """

    def _get_params_html(self, *args: Any, **kwargs: Any) -> Any:  # since 1.7
        table = super()._get_params_html(*args, **kwargs)  # type: ignore[misc]  # BaseEstimator's
        return self._edit_params_table(table)  # type: ignore[attr-defined]  # a subclass has it

    def _get_fitted_attr_html(self, *args: Any, **kwargs: Any) -> Any:  # since 1.8
        table = super()._get_fitted_attr_html(*args, **kwargs)  # type: ignore[misc]  # as above
        return self._edit_fitted_table(table)  # type: ignore[attr-defined]  # a subclass has it
