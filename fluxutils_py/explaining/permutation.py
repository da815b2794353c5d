"""How much worse predictions become if inputs of other series stand in for some of the past."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from fluxutils_py.data import SeriesArray, samples
from fluxutils_py.data.arrays import read_whole
from fluxutils_py.data.ragged import RaggedArray, as_ragged, require_list_of_series
from fluxutils_py.data.views import SamplesView
from fluxutils_py.errors import DataError, ShapeError, SpecError
from fluxutils_py.inputs.inputs import Inputs, as_series, check_aligned, restrict_steps
from fluxutils_py.nn.precision import undisturbed
from fluxutils_py.validation import check_integer

STEP_LAGS = (0, 1, 2, 4, 8, 16)
N_PARTS = 8  # of the past of one target per series

Loss = Callable[[np.ndarray, np.ndarray], np.ndarray]
Range = tuple[int, int]


class Importance(NamedTuple):
    """Increase of the loss if a feature is permuted: mean and standard deviation of repeats."""

    name: Any
    mean: float
    std: float


@dataclass(frozen=True, eq=False)
class PermutationImportance:
    """How much the loss grows if a feature is permuted, at all steps, or at some lags.

    Attributes
    ----------
    feature_names : list of str
        F names, of all inputs.
    lags : list of (first, last)
        L ranges of steps back from the predicted one; (0, 0) is the step itself.
    features : ndarray of shape (F, R)
        Increase of the loss if all steps of a feature are permuted, for R repeats.
    at_lags : ndarray of shape (F, L, R)
        The same if only these lags are.
    loss : float
        Without permutation.
    """

    feature_names: list[str]
    lags: list[Range]
    features: np.ndarray
    at_lags: np.ndarray
    loss: float

    def by_feature(self) -> list[Importance]:
        """Rank the features, the most important first."""
        return _ranked(self.feature_names, self.features)

    def by_lag(self) -> list[Importance]:
        """Rank the pairs (feature, (first, last)) of a feature and a range of lags."""
        names = [(name, lag) for name in self.feature_names for lag in self.lags]
        return _ranked(names, self.at_lags.reshape(len(names), -1))


@undisturbed()
def permutation_importance(
    est: Any,
    x: Any,
    y: Any,
    *,
    lags: Sequence[int | Range] | None = None,
    n_repeats: int = 3,
    n_steps: int = 8,
    loss: Loss | None = None,
    random_state: int | None = None,
    lengths: object = None,
    starts: object = None,
) -> PermutationImportance:
    """Tell which features of the past, and which lags, predictions depend on, for any model.

    Only ``est.predict`` is called: models need no gradient, and may be of any package.

    Parameters
    ----------
    est : fitted estimator
        With ``predict`` for inputs in the form of ``x``.
    x : array of shape (F, N, T), list of arrays (F, T_i), tuple of these, or ``samples(x)``
        In memory, better data that the estimator was not fitted on. Names of features are those of
        the fit, or of ``samples(x, feature_names=...)``, as with ``names`` of what
        :func:`fluxutils_py.from_frame` returns.
    y : array of shape (G, N, T), list of arrays (G, T_i), or N targets, one per series
        Numbers, or labels. NaN targets do not count.
    lags : sequence of int, or of pairs (first, last), optional
        Steps back from the predicted one, or ranges of them. None: 0, 1, 2, 4, 8 and 16; for one
        target per series, eight parts of the whole past.
    n_repeats : int
    n_steps : int
        How many steps of the series are permuted, one after the other, to measure lags; each takes
        a prediction per feature, lag and repeat. Of one target per series, it is the last step
        from which lags count.
    loss : callable, optional
        ``loss(y, predicted)`` for arrays of one shape, elementwise. None: the squared error; for
        labels, whether they differ.
    random_state : int, optional
    lengths, starts : array of int, shape (N,), optional
        As for ``est.predict``, which then gets a list of series.

    Returns
    -------
    PermutationImportance
        ``by_feature()`` and ``by_lag()`` rank.

    Notes
    -----
    Whole features are permuted over series; of a single series, rolled in time by a random number
    of steps. At lags, values come from other series of the same step; of fewer than eight series,
    from any series and step. In a list, a series that stands in for a longer one is repeated, from
    its end with one target per series; lags count the series that have all of their steps.
    Correlated features share their importance: each can stand in for the other. Source: Breiman
    (2001), Random Forests, Machine Learning 45; over lags of recurrent models, a step is permuted
    and all later predictions are compared.

    Examples
    --------
    >>> from fluxutils_py import SequenceClassifier
    >>> x = np.random.default_rng(0).normal(size=(3, 60, 30)).astype("float32")  # (F, N, T)
    >>> y = (x[2, :, 20:].mean(axis=1) > 0).astype(int)
    >>> est = SequenceClassifier(cell="kernels").fit(x, y)
    >>> permutation_importance(est, x, y, random_state=0).by_feature()[0].name
    'feature 2'
    """
    check_integer("n_repeats", n_repeats, 1, error=SpecError)
    check_integer("n_steps", n_steps, 1, error=SpecError)
    if lengths is not None or starts is not None:
        x, y = _as_lists(x, y, lengths, starts)
    data = _Data.read(est, x, y, loss)
    ranges = _read_lags(lags, data)
    rng = np.random.default_rng(random_state)
    whole = data.losses(data.arrays)
    base = _mean(whole)
    features = np.empty((data.n_features, n_repeats))
    at_lags = np.empty((data.n_features, len(ranges), n_repeats))
    for f in range(data.n_features):
        for r in range(n_repeats):
            features[f, r] = _mean(data.losses(data.permuted(f, rng))) - base
            at_lags[f, :, r] = _at_lags(data, f, ranges, whole, n_steps, rng)
    return PermutationImportance(data.names, ranges, features, at_lags, base)


def _as_lists(x: Any, y: Any, lengths: object, starts: object) -> tuple[Any, Any]:
    """Return inputs, and targets of every step, as lists of series of these lengths."""
    given = as_series(as_ragged(x.native if isinstance(x, SamplesView) else x, "x"), "x")
    rows = restrict_steps(Inputs(given, "native", None), starts, lengths).whole()
    steps = [slice(t, t + k) for t, k in zip(rows.start, rows.length, strict=True)]
    inputs = tuple([s.array[:, n, t] for n, t in enumerate(steps)] for s in given)
    targets = y.native if isinstance(y, SamplesView) else y
    if np.ndim(targets) == 3:
        check_aligned(given[0], SeriesArray(targets, "y"))
        targets = [targets[:, n, t] for n, t in enumerate(steps)]
    return (inputs if isinstance(x, tuple) else inputs[0]), targets


@dataclass(frozen=True)
class _Data:
    """Inputs and targets, and how well an estimator predicts them.

    Series of a list are padded: with one target per series in front, so that their last steps stand
    side by side, else behind.
    """

    est: Any
    arrays: tuple[np.ndarray, ...]
    y: np.ndarray  # (G, N, T), or (G, N, 1) of one target per series
    exists: np.ndarray  # (N, T): which steps are not padding
    per_series: bool
    as_rows: bool
    is_list: bool
    names: list[str]
    loss: Loss

    @classmethod
    def read(cls, est: Any, x: Any, y: Any, loss: Loss | None) -> _Data:
        as_rows = isinstance(x, SamplesView)
        require_list_of_series(x, "x")
        given = as_ragged(x.native if as_rows else x, "x")
        y = as_ragged(y.native if isinstance(y, SamplesView) else y, "y")
        lengths = _lengths_of_lists(given, y)
        arrays = _three_axes(given if isinstance(given, tuple) else (given,))
        targets = read_whole(y)
        per_series = targets.ndim < 3
        targets = _aligned(targets, arrays[0].shape)
        _, n_series, n_steps = arrays[0].shape
        exists = np.ones((n_series, n_steps), bool)
        if lengths is not None:
            exists = np.arange(n_steps) < lengths[:, None]
            if per_series:
                for a in arrays:
                    a[:, exists[:, ::-1]] = a[:, exists]
                exists = exists[:, ::-1]
        is_label = hasattr(est, "classes_") or targets.dtype.kind not in "fiu"
        if loss is None:
            loss = _differ if is_label else _squared
        names = _names(est, x, arrays)
        is_list = lengths is not None
        return cls(est, arrays, targets, exists, per_series, as_rows, is_list, names, loss)

    @property
    def n_features(self) -> int:
        return len(self.names)

    @property
    def n_series(self) -> int:
        return self.arrays[0].shape[1]

    @property
    def n_steps(self) -> int:
        return self.arrays[0].shape[2]

    def losses(self, arrays: tuple[np.ndarray, ...]) -> np.ndarray:
        """Return the loss of each target, (G, N, T) or (G, N, 1), NaN where there is no target."""
        predicted = self._predict(arrays)
        if predicted.size != self.y.size:
            raise ShapeError(
                f"predictions have shape {predicted.shape}, and y {self.y.shape}; they must be of "
                "the same targets"
            )
        if self.per_series:
            predicted = predicted.reshape(self.n_series, -1).T[:, :, None]
        elif self.as_rows:
            predicted = SamplesView.from_rows(predicted, len(self.y))
        losses = np.asarray(self.loss(self.y, predicted.reshape(self.y.shape)), dtype=np.float64)
        if self.y.dtype.kind == "f":
            losses = np.where(np.isnan(self.y), np.nan, losses)
        return losses if self.per_series else np.where(self.exists, losses, np.nan)

    def _predict(self, arrays: tuple[np.ndarray, ...]) -> np.ndarray:
        """Return the predictions for changed inputs; of every step of a list, padded."""
        each: tuple[Any, ...] = arrays
        if self.is_list:
            each = tuple([a[:, n, steps] for n, steps in enumerate(self.exists)] for a in arrays)
        x = each if len(each) > 1 else each[0]
        predicted = self.est.predict(samples(x) if self.as_rows else x)
        return np.asarray(as_ragged(predicted, "the predictions"))

    def locate(self, feature: int) -> tuple[int, int]:
        """Return the input of a feature, and its place there."""
        for i, a in enumerate(self.arrays):
            if feature < len(a):
                return i, feature
            feature -= len(a)
        raise IndexError(feature)

    def permuted(self, feature: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        """Return the inputs with a feature of all steps permuted over series."""
        i, f = self.locate(feature)
        values = self.arrays[i][f]
        if self.n_series > 1:
            # no series keeps its own values
            shift = 1 + int(rng.integers(self.n_series - 1))
            order = rng.permutation(self.n_series)
            taken = np.empty_like(values)
            taken[order] = [self._repeated(values, n) for n in np.roll(order, shift)]
        else:
            shift = 1 + int(rng.integers(max(1, self.n_steps - 1)))
            taken = np.roll(values, shift, axis=1)
        return self._with(i, f, slice(None), taken)

    def _repeated(self, values: np.ndarray, n: int) -> np.ndarray:
        """Return the values of a series, again and again if it is shorter than others, (T,)."""
        own = values[n, self.exists[n]]
        if self.per_series:  # its last step stays the last
            return np.resize(own[::-1], self.n_steps)[::-1]
        return np.resize(own, self.n_steps)

    def having(self, steps: slice) -> np.ndarray:
        """Return which series have all of these steps, (N,)."""
        return np.asarray(self.exists[:, steps].all(1))

    def permuted_steps(
        self, feature: int, steps: slice, rng: np.random.Generator
    ) -> tuple[np.ndarray, ...]:
        """Return the inputs with a feature of some steps permuted, in series that have them all."""
        i, f = self.locate(feature)
        values = self.arrays[i][f]
        taken = values[:, steps].copy()
        whole = self.having(steps)
        if whole.sum() >= 8:
            taken[whole] = rng.permutation(taken[whole], axis=0)
        else:
            taken[whole] = rng.choice(values[self.exists], size=taken[whole].shape)
        return self._with(i, f, steps, taken)

    def _with(self, i: int, f: int, steps: slice, values: np.ndarray) -> tuple[np.ndarray, ...]:
        changed = self.arrays[i].copy()
        changed[f, :, steps] = values
        return (*self.arrays[:i], changed, *self.arrays[i + 1 :])


def _lengths_of_lists(x: Any, y: Any) -> np.ndarray | None:
    """Return the lengths of series in lists, after a check of the targets; None of arrays."""
    if not any(isinstance(a, RaggedArray) for a in (x if isinstance(x, tuple) else (x,))):
        return None
    series = as_series(x, "x")
    if np.ndim(y) == 3:
        if not isinstance(y, RaggedArray):
            raise ShapeError("x is a list of series and y an array; give y as a list of (G, T_i)")
        check_aligned(series[0], SeriesArray(y, "y"))
    return np.asarray(series[0].array.lengths)


def _three_axes(given: tuple[Any, ...]) -> tuple[np.ndarray, ...]:
    arrays = tuple(map(read_whole, given))
    if any(a.ndim != 3 for a in arrays):
        raise ShapeError(
            "permutation_importance takes an array (F, N, T), a list of series (F, T_i), a tuple "
            f"of these, or samples(x); got shapes {[a.shape for a in arrays]}"
        )
    return arrays


def _aligned(y: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return targets (G, N, T), or (G, N, 1) of one per series, for inputs of this shape."""
    _, n_series, n_steps = shape
    targets = y
    if y.ndim == 2 and n_steps > 1 and y.shape[1] % n_steps == 0:
        raise ShapeError(
            f"y has shape {y.shape}: targets of all {n_steps} steps, or of one per series? Give "
            "the former as (G, N, T) or samples(y)"
        )
    if y.ndim < 3:
        targets = y.reshape(len(y), -1).T[:, :, None]
        n_steps = 1
    if targets.shape[1:] != (n_series, n_steps):
        raise ShapeError(
            f"y has shape {y.shape}; expected (G, {n_series}, {shape[2]}), or {n_series} targets, "
            "one per series"
        )
    return targets


def _names(est: object, x: object, arrays: tuple[np.ndarray, ...]) -> list[str]:
    prefix = ["" if len(arrays) == 1 else f"x[{i}] " for i in range(len(arrays))]
    names = [f"{p}feature {f}" for p, a in zip(prefix, arrays, strict=True) for f in range(len(a))]
    for own in (getattr(x, "feature_names", None), getattr(est, "feature_names_in_", None)):
        if own is not None and len(own) == len(names):
            return [str(name) for name in own]
    return names


def _at_lags(
    data: _Data,
    feature: int,
    lags: list[Range],
    whole: np.ndarray,
    n_steps: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return the increase of the loss for each range of lags, (L,)."""
    increases: list[list[float]] = [[] for _ in lags]
    for ranges, steps, target in _runs(data, lags, n_steps):
        losses = data.losses(data.permuted_steps(feature, steps, rng)) - whole
        losses = losses[:, data.having(steps)]
        for k in ranges:
            at = target(lags[k])
            increases[k].append(_mean(losses[:, :, at : at + 1]))
    return np.array([np.nanmean(i) if i else np.nan for i in increases])


def _runs(
    data: _Data, lags: list[Range], n_steps: int
) -> Iterator[tuple[list[int], slice, Callable[[Range], int]]]:
    """Yield what to predict: which of the lags it measures, the steps to permute, and the place of
    the target for each lag.
    """
    last = data.n_steps - 1
    if data.per_series:
        for k, (first, end) in enumerate(lags):
            yield [k], slice(last - end, last - first + 1), lambda lag: 0
        return
    common = int(np.median(data.exists.sum(1))) - 1  # a step that half of the series have
    widths = sorted({end - first for first, end in lags})
    for width in widths:
        ranges = [k for k, (first, end) in enumerate(lags) if end - first == width]
        furthest = max(lags[k][1] for k in ranges)
        # one changed run of steps tells all lags of its width, by the targets after it
        starts = np.unique(np.linspace(0, max(common - furthest, 0), n_steps).astype(int))
        for start in starts.tolist():
            stop = start + width + 1

            def target(lag: Range, end: int = stop - 1) -> int:
                return end + lag[0]

            yield ranges, slice(start, stop), target


def _read_lags(lags: Sequence[int | Range] | None, data: _Data) -> list[Range]:
    if lags is None:
        if data.per_series:
            edges = np.unique(np.linspace(0, data.n_steps, N_PARTS + 1).astype(int)).tolist()
            return [(a, b - 1) for a, b in pairwise(edges)]
        return [(lag, lag) for lag in STEP_LAGS if lag < data.n_steps]
    ranges = []
    for lag in lags:
        pair = lag if isinstance(lag, tuple) else (lag, lag)
        first, last = (check_integer("lags", k, 0, error=SpecError) for k in pair)
        if not first <= last < data.n_steps:
            raise SpecError(f"lags has {lag!r}; expected numbers from 0 to {data.n_steps - 1}")
        ranges.append((first, last))
    return ranges


def _mean(losses: np.ndarray) -> float:
    live = losses[~np.isnan(losses)]
    if not len(live):
        raise DataError("y has no target, only NaN, at the steps that are compared")
    return float(live.mean())


def _squared(y: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    return np.square(y - predicted)


def _differ(y: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    return (y != predicted).astype(np.float64)


def _ranked(names: Sequence[Any], values: np.ndarray) -> list[Importance]:
    ranks = [
        Importance(name, float(v.mean()), float(v.std()))
        for name, v in zip(names, values, strict=True)
    ]
    return sorted(ranks, key=lambda i: -i.mean)
