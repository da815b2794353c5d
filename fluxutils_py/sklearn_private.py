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
