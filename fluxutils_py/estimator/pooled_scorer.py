"""scikit-learn's metrics, pooled over series, time and features."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fluxutils_py.data import SampleWeight, SeriesArray, TimestepsView
from fluxutils_py.data.arrays import is_list_of_series
from fluxutils_py.data.ragged import as_ragged
from fluxutils_py.data.segments import Segments
from fluxutils_py.data.views import SequenceView
from fluxutils_py.errors import ShapeError, SpecError
from fluxutils_py.estimator.scoring import pooled_r2, warn_of_unpredicted
from fluxutils_py.inputs.inputs import Inputs, read_weight
from fluxutils_py.inputs.labels import is_label
from fluxutils_py.sklearn_private import Scorer
from fluxutils_py.training.predictor import Prediction

# What to do where predictions do not match the targets.
SCORES_REMEDY = (
    "scikit-learn passes on one column of the probabilities of two classes: use a metric of "
    "predict or decision_function, or labels per series"
)
VALUES_REMEDY = (
    "give y in the form of x: both as samples(...), as timesteps(...), as (F, N, T) arrays, or as "
    "rows"
)


# What to do where outputs are not labels.
OUTPUTS_REMEDY = (
    "give a function that makes labels of the outputs, such as "
    "pooled_scorer(lambda y, z: f1_score(y, z > 0)) for log-odds"
)


def pooled_scorer(
    metric: str | Callable[..., float],
    /,
    **kwargs: Any,
) -> Callable[..., float]:
    """Make a scorer for ``scoring=`` that pools over series, time steps and features.

    Metrics of scikit-learn average over the columns of a matrix. A column of ``timesteps(y)`` is
    one series, a column of ``samples(y)`` one step: in a short fold each has only a few values, and
    the average of their R2 means nothing. This scorer takes all values together.

    Parameters
    ----------
    metric : str or callable
        A name as in scikit-learn: ``"r2"``, ``"neg_mean_squared_error"``,
        ``"neg_root_mean_squared_error"``, ``"neg_mean_absolute_error"``, ``"accuracy"``,
        ``"roc_auc"``, ... (``sklearn.metrics.get_scorer_names()``). Or a function of your own,
        ``metric(y_true, y_pred, **kwargs)`` of two vectors (n,), of targets and of what ``predict``
        returns for them; higher is better, so negate errors.
    **kwargs
        Arguments of the metric, such as ``average="macro"`` for ``"f1"``. ``"r2"`` takes none.

    Returns
    -------
    scorer
        ``scorer(estimator, x, y, sample_weight=None)``; higher is better. It can be pickled, and
        takes part in metadata routing. ``y`` has the form of ``x``: a view, an array (G, N, T), a
        list of series (G, T_i), or a vector or matrix with one row per series, whose columns are
        features; labels for metrics of labels. It is read as a whole, since test folds are small.
        Targets that are missing (NaN) or have no prediction do not count; if none counts, the score
        is NaN. Weights are of rows or of steps, as in ``fit``.

    Raises
    ------
    SpecError
        If there is no such metric; when called, if it needs labels, and ``predict`` returns none.
    TypeError
        If the metric does not take one of ``kwargs``.

    Notes
    -----
    ``"r2"`` uses one mean per feature, as ``score`` of the estimators does; for views and arrays
    (G, N, T) the two agree. All other metrics get the values of all features in one vector.
    Metrics that need probabilities, such as ``"neg_log_loss"`` and ``"neg_brier_score"``, cannot be
    scored for two classes per step, of which scikit-learn takes one column, nor
    for lists of series with labels per step. Metrics of labels or ``decision_function`` can:
    ``"f1"``, ``"recall"``, ``"roc_auc"``, ``"average_precision"``. Labels per series have no such
    limit.

    An :class:`Estimator` for several labels returns their log-odds, or their probabilities if its
    model ends in a sigmoid. ``"roc_auc"`` and ``"average_precision"`` take both, since only the
    order counts. For metrics of labels or probabilities, give a function.

    Examples
    --------
    >>> from sklearn.model_selection import TimeSeriesSplit, cross_validate
    >>> from fluxutils_py import SequenceRegressor, timesteps
    >>> x = np.random.default_rng(0).normal(size=(3, 5, 40))  # (F, N, T)
    >>> scoring = {name: pooled_scorer(name) for name in ("r2", "neg_mean_absolute_error")}
    >>> x, y = timesteps(x), timesteps(x[:1])
    >>> found = cross_validate(
    ...     SequenceRegressor(epochs=2), x, y, cv=TimeSeriesSplit(3), scoring=scoring
    ... )
    >>> sorted(found)
    ['fit_time', 'score_time', 'test_neg_mean_absolute_error', 'test_r2']

    Labels with log-odds above 0 are more likely than not:

    >>> from sklearn.metrics import f1_score
    >>> scoring = pooled_scorer(lambda y, log_odds: f1_score(y, log_odds > 0))
    """
    # deferred: importing it takes 30 ms
    from sklearn.metrics import get_scorer, make_scorer

    if callable(metric):
        name = getattr(metric, "__name__", type(metric).__name__)
        scorer = Scorer(metric, True, "predict", {})
    else:
        name = metric
        scorer = Scorer.of(get_scorer(name))
    methods = scorer.response_method
    of_scores = methods != "predict"
    function = _pooled_r2 if metric == "r2" else scorer.score_func
    pooled = _PooledMetric(name, function, of_scores)
    # of several methods, any will do: the outputs of an Estimator for several labels too
    if not isinstance(methods, str):
        methods = (*methods, "predict")
    return make_scorer(
        pooled,
        greater_is_better=scorer.greater_is_better,
        response_method=methods,
        **{**scorer.kwargs, **kwargs},
    )


def flatten_steps(
    y_true: Any,
    *y_pred: Any,
) -> tuple[np.ndarray, ...]:
    """Flatten targets and predictions of every step to vectors, for metrics and displays of
    scikit-learn.

    Parameters
    ----------
    y_true : view, array (G, N, T), or vector or matrix of one row per series
        Numbers or labels; missing ones (NaN, None) are left out.
    *y_pred : view, array, vector or matrix
        Results of ``predict``, ``predict_proba`` or ``decision_function`` for inputs in the form of
        ``y_true``.

    Returns
    -------
    tuple of ndarray
        The ``n`` targets (n,) that are known and have all predictions, then each prediction for
        them, (n,), or (n, K) for K numbers per target, such as probabilities. With several
        outputs, the steps of the first come first.

    Raises
    ------
    ShapeError
        If a prediction does not match the steps of ``y_true``.

    Examples
    --------
    >>> from sklearn.metrics import classification_report, confusion_matrix
    >>> from fluxutils_py import SequenceClassifier, samples
    >>> x = np.random.default_rng(0).normal(size=(2, 9, 20))  # (F, N, T)
    >>> y = np.where(x[:1] > 0, "up", "down")
    >>> est = SequenceClassifier(epochs=2, random_state=0).fit(samples(x), samples(y))
    >>> labels, found, proba = flatten_steps(y, est.predict(x), est.predict_proba(x))
    >>> labels.shape, found.shape, proba.shape, confusion_matrix(labels, found).sum()
    ((180,), (180,), (180, 2), np.int64(180))
    """
    if not isinstance(y_true, SequenceView) and np.ndim(y_true) < 3:
        y_true = np.reshape(y_true, (1, len(y_true), -1))  # (1, rows, columns)
        y_pred = tuple(_reshape_predictions(p, y_true.shape) for p in y_pred)
    pairs = [_align_predictions(y_true, p, of_scores=True)[:2] for p in y_pred]
    true = pairs[0][0] if pairs else _align_predictions(y_true, y_true, of_scores=False)[0]
    live = _live_mask(true, *(pred for _, pred in pairs))
    return true[live], *(_live_values(pred, live) for _, pred in pairs)


class _PooledMetric:
    """A metric of targets and predictions of any form.

    Parameters
    ----------
    name : str
    function : callable
        ``function(y_true, y_pred)`` of vectors, or with the scores (n, K) of K classes.
    of_scores : bool
        Whether predictions are scores of classes or probabilities.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., float],
        of_scores: bool,
    ) -> None:
        self.__name__ = f"pooled_{name}"
        # scikit-learn looks for sample_weight and pos_label in it
        self.__signature__ = inspect.signature(function)
        self.function = function
        self.of_scores = of_scores

    def __call__(
        self,
        y_true: Any,
        y_pred: object,
        sample_weight: object = None,
        **kwargs: Any,
    ) -> float:
        if is_list_of_series(y_true) and isinstance(y_pred, list):
            y_true, y_pred, sample_weight = _joined(y_true, y_pred, sample_weight)
        true, pred, form = _align_predictions(y_true, y_pred, self.of_scores)
        _, n_series, n_steps = true.shape
        live = _live_mask(true, pred)
        rows = Segments.from_lengths(n_series, n_steps)
        # weights are scaled to mean 1 over the steps that count
        steps = SeriesArray(np.where(live.any(0), 0, np.nan)[None], "y")
        weight = read_weight(sample_weight, Inputs((steps,), form, 1))
        if weight is not None:
            weight = weight.normalized(rows, (steps,))
        # with one mean per feature, it cannot take one vector of all
        if self.function is _pooled_r2:
            return _pooled_r2(true, pred, weight)
        has_target = is_label(true)
        lacks_prediction = (has_target & ~live).any(0)
        warn_of_unpredicted(int(lacks_prediction.sum()), int(has_target.any(0).sum()))
        if not live.any():
            return math.nan
        if weight is not None:
            w = weight.block(slice(0, n_series), slice(0, n_steps))  # as they were given
            kwargs["sample_weight"] = np.broadcast_to(w, true.shape)[live]
        values = _live_values(pred, live)
        try:
            return self.function(true[live], values, **kwargs)
        except ValueError as error:
            if not self.of_scores and _are_continuous(values) and not _are_continuous(true[live]):
                raise SpecError(f"{self.__name__}: {error}; {OUTPUTS_REMEDY}") from error
            raise


def _joined(
    y_true: list[Any],
    y_pred: list[Any],
    sample_weight: Any,
) -> tuple[np.ndarray, np.ndarray, Any]:
    """Return the targets (G, 1, n) and predictions (K, 1, n) of a list of series, one series after
    the other, and the weights of their steps, (1, n).
    """
    true = as_ragged(y_true, "y")
    pred = as_ragged(y_pred, "the predictions")
    if not np.array_equal(true.lengths, pred.lengths):
        raise ShapeError(
            f"y has {len(y_true)} series of {true.lengths.sum()} steps in all, and the predictions "
            f"{len(y_pred)} of {pred.lengths.sum()}; {VALUES_REMEDY}"
        )
    weight = None
    if sample_weight is not None:
        given = zip(sample_weight, true.lengths, strict=True)
        steps = [np.broadcast_to(np.asarray(w).ravel(), (t,)) for w, t in given]
        weight = np.concatenate(steps)[None]
    arrays = [np.concatenate([np.asarray(a) for a in r.arrays], 1)[:, None] for r in (true, pred)]
    return arrays[0], arrays[1], weight


def _reshape_predictions(
    y_pred: object,
    shape: tuple[int, ...],
) -> np.ndarray:
    """Reshape rows of predictions, with K numbers for each column of the targets, to (K, rows,
    columns).
    """
    pred = np.asarray(y_pred)
    _, n_rows, n_columns = shape
    if pred.ndim < 3 and len(pred) == n_rows and pred.size % (n_rows * n_columns) == 0:
        return pred.reshape(n_rows, -1, n_columns).transpose(1, 0, 2)
    return pred


def _pooled_r2(
    y_true: np.ndarray,
    y_pred: np.ndarray,
    sample_weight: SampleWeight | None = None,
) -> float:
    """Return the pooled R2 of arrays (G, N, T)."""
    _, n_series, n_steps = y_true.shape
    outputs = y_pred.transpose(2, 1, 0)  # (S, B, G)
    whole = Prediction((outputs,), slice(0, n_series), slice(0, n_steps))
    rows = Segments.from_lengths(n_series, n_steps)
    return pooled_r2([whole], (SeriesArray(y_true, "y"),), rows, sample_weight)


def _align_predictions(
    y_true: Any,
    y_pred: Any,
    of_scores: bool,
) -> tuple[np.ndarray, np.ndarray, str]:
    """Return targets (G, N, T), predictions (G, N, T) or (K, N, T) for classes, and the form of the
    targets' rows.
    """
    pred = np.asarray(y_pred)
    if isinstance(y_true, SequenceView):
        form = "timesteps" if isinstance(y_true, TimestepsView) else "samples"
        true = np.asarray(y_true.native)
        pred = _predictions_of_view(y_true, pred)
    else:
        true = np.asarray(y_true)
        form = "native" if true.ndim == 3 else "rows"
    if form == "rows":
        true = true.reshape(len(true), -1).T[:, :, None]
        if pred.ndim <= 2:
            pred = pred.reshape(len(pred), -1).T[:, :, None]
    same_steps = pred.ndim == 3 and pred.shape[1:] == true.shape[1:]
    are_scores = of_scores and len(true) == 1
    if not same_steps or (len(pred) != len(true) and not are_scores):
        remedy = SCORES_REMEDY if of_scores else VALUES_REMEDY
        raise ShapeError(
            f"y has shape {np.shape(y_true)} and the predictions {np.shape(y_pred)}, which are not "
            f"of the same steps; {remedy}"
        )
    return true, pred, form


def _predictions_of_view(view: SequenceView, pred: np.ndarray) -> np.ndarray:
    """Return predictions as (K, N, T) if they have one row per row of the view."""
    n_columns = view.shape[1] // view.n_features
    if pred.ndim > 2 or len(pred) != len(view) or pred.size % (len(pred) * n_columns):
        return pred
    rows = pred.reshape(len(pred), -1)
    return view.from_rows(rows, rows.shape[1] // n_columns)


def _are_continuous(values: np.ndarray) -> bool:
    """Whether some values are no labels."""
    return values.dtype.kind == "f" and bool((values != np.round(values)).any())


def _live_values(pred: np.ndarray, live: np.ndarray) -> np.ndarray:
    """Return the predictions of live targets as (n,), or (n, K) for K numbers per target."""
    return pred[:, live[0]].T if len(pred) > len(live) else pred[live]


def _live_mask(true: np.ndarray, *preds: np.ndarray) -> np.ndarray:
    """Return a mask (G, N, T) of targets that have a value and all numbers of all predictions."""
    live = is_label(true)
    for pred in preds:
        live = live & (is_label(pred).all(0) if len(pred) > len(true) else is_label(pred))
    return live
