"""Targets and predictions of some series, whatever the form of the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fluxutils_py.data.arrays import plain_block, to_numpy
from fluxutils_py.data.ragged import is_list_of_series
from fluxutils_py.data.views import SequenceView
from fluxutils_py.errors import ShapeError
from fluxutils_py.validation import check_integer


class PredictedSeries(NamedTuple):
    """One series: targets (G, T), NaN where there are none, and the model's outputs (H, T)."""

    series: int
    truth: np.ndarray
    predicted: np.ndarray


def predict_series(est: Any, x: Any, y: Any, series: Sequence[int]) -> list[PredictedSeries]:
    """Predict some series, and only these where ``x`` is an array.

    Raises
    ------
    ShapeError
        If ``y`` is not of every step, or does not fit ``x``, or there is no such series.
    """
    if isinstance(x, SequenceView):
        return _of_view(est, x, y, series)
    if is_list_of_series(x[0] if isinstance(x, tuple) else x):
        return _of_lists(est, x, y, series)
    arrays = x if isinstance(x, tuple) else (x,)
    chosen = check_series(series, arrays[0].shape[1])
    shape = getattr(y, "shape", ())
    if len(shape) != 3:
        raise ShapeError(
            f"this picture is of targets of every step, (G, N, T); y has shape {shape}"
        )
    parts = tuple(_of_series(a, chosen) for a in arrays)
    predicted = est.predict(parts if isinstance(x, tuple) else parts[0])
    truths = _of_series(y, chosen).transpose(1, 0, 2)
    outputs = np.asarray(predicted).transpose(1, 0, 2)
    return _checked(chosen, list(truths), list(outputs))


def check_series(series: Sequence[int], n_series: int) -> list[int]:
    """Return the numbers of series, counted from 0; raise ShapeError if there is no such one."""
    chosen = []
    for i in series:
        check_integer("series", i)
        if not -n_series <= i < n_series:
            raise ShapeError(f"series is {i}, but x has {n_series} series")
        chosen.append(int(i) % n_series)
    return chosen


def _of_lists(est: Any, x: Any, y: Any, series: Sequence[int]) -> list[PredictedSeries]:
    lists = x if isinstance(x, tuple) else (x,)
    chosen = check_series(series, len(lists[0]))
    parts = tuple([a[i] for i in chosen] for a in lists)
    predicted = est.predict(parts if isinstance(x, tuple) else parts[0])
    truths = [to_numpy(y[i]) for i in chosen]
    return _checked(chosen, truths, [np.asarray(p) for p in predicted])


def _of_view(est: Any, x: SequenceView, y: Any, series: Sequence[int]) -> list[PredictedSeries]:
    if not isinstance(y, SequenceView):
        raise ShapeError(
            f"x is a view of every step, so y must be one too, as samples(y); got "
            f"{type(y).__name__}"
        )
    chosen = check_series(series, x.native.shape[1])
    truth = np.asarray(y.native)
    predicted = np.asarray(est.predict(x))
    n_outputs = max(1, predicted.size // (truth.shape[1] * truth.shape[2]))
    outputs = np.asarray(type(x).from_rows(predicted.reshape(len(x), -1), n_outputs))
    return _checked(
        chosen,
        list(truth[:, chosen].transpose(1, 0, 2)),
        list(outputs[:, chosen].transpose(1, 0, 2)),
    )


def _of_series(array: Any, chosen: list[int]) -> np.ndarray:
    # one after the other: files are not indexed by lists
    blocks = [plain_block(to_numpy(array[:, i : i + 1, :])) for i in chosen]
    return np.concatenate(blocks, axis=1)


def _checked(
    chosen: list[int], truths: list[np.ndarray], outputs: list[np.ndarray]
) -> list[PredictedSeries]:
    rows = []
    for i, truth, predicted in zip(chosen, truths, outputs, strict=True):
        if truth.ndim != 2 or truth.shape[1:] != predicted.shape[1:]:
            raise ShapeError(
                f"series {i} has targets of shape {truth.shape} and predictions of shape "
                f"{predicted.shape}; expected (G, T) of equal T"
            )
        rows.append(PredictedSeries(i, truth, predicted))
    return rows
