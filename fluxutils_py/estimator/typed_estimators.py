"""Estimators that are regressors or classifiers of scikit-learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch.nn.functional as F
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.metadata_routing import UNUSED
from torch import Tensor

from fluxutils_py.estimator.estimator import Estimator
from fluxutils_py.estimator.predicting import run_predict
from fluxutils_py.estimator.spec import Settings


def _output_method(name: str, doc: str) -> Callable[..., Any]:
    """Make a method like ``Estimator.predict`` that returns another output for each step."""

    def method(
        self: EstimatorClassifier,
        x: object,
        out: object = None,
        *,
        state: list[Tensor] | None = None,
        return_state: bool = False,
        lengths: object = None,
        starts: object = None,
        sharded: bool = False,
    ) -> Any:
        return run_predict(self, name, x, out, state, return_state, lengths, starts, sharded)

    # for help(), and for pickle, which looks functions up by these names
    method.__name__ = name
    method.__qualname__ = f"EstimatorClassifier.{name}"
    method.__doc__ = doc
    return method


class EstimatorRegressor(RegressorMixin, Estimator):
    """An :class:`Estimator` that is a regressor of scikit-learn, for numbers per step or per
    series.

    Parameters, attributes and methods are those of :class:`Estimator`. ``score`` is R2 pooled over
    series and time, or minus the loss, where the outputs are in another unit than the targets.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.model_selection import cross_val_score
    >>> from fluxutils_py import samples
    >>> x = np.random.default_rng(0).normal(size=(3, 40, 20)).astype("float32")  # (F, N, T)
    >>> est = EstimatorRegressor(spec={"epochs": 2, "batchsize": 10, "seqsize": 10})
    >>> len(cross_val_score(est, samples(x), samples(x[:1]), cv=4))
    4
    """

    score = Estimator.score  # the mixin's would average over columns


class EstimatorClassifier(ClassifierMixin, Estimator):
    """An :class:`Estimator` that is a classifier of scikit-learn, for labels of any type, per step
    or per series.

    Parameters, attributes and methods are those of :class:`EstimatorRegressor`, and:

    - The model returns one score (logit) per class; ``n_out`` is the number of classes.
      ``loss=None`` is cross-entropy; your own loss gets the indices of the labels in ``classes_``.
    - ``y`` holds labels: one per step, as (1, N, T), ``samples(y)``, ``timesteps(y)`` or a matrix
      (N, T) (for ``timesteps``, (T, N)), or one per series, as (N,). NaN, and None among strings,
      marks a step without a label; in a vector it is an error.
    - ``predict`` returns labels in the same form. ``predict_proba`` returns probabilities:
      (K, N, T) for ``(F, N, T)``; one row of K columns per series or sample; rows of K * T or
      K * N columns for views with a label per step.
    - ``score`` is the accuracy, pooled over series and time. For metrics and displays of
      scikit-learn, :func:`fluxutils_py.estimator.flatten_steps` makes vectors of labels per step.

    With labels at each step, and in streams, steps without any input, or outside a series, have NaN
    as probabilities; their labels mean nothing. With one label per series, ``predict`` and
    ``score`` raise an error if a series has no input at its last step.

    Attributes
    ----------
    classes_ : ndarray of shape (K,)
    """

    __metadata_request__predict_proba = {"x": UNUSED}  # noqa: RUF012  the protocol wants a dict
    __metadata_request__predict_log_proba = {"x": UNUSED}  # noqa: RUF012
    __metadata_request__decision_function = {"x": UNUSED}  # noqa: RUF012
    score = Estimator.score  # streams

    def partial_fit(
        self,
        x: object,
        y: object,
        sample_weight: object = None,
        *,
        classes: object = None,
        lengths: object = None,
        starts: object = None,
        sharded: bool = False,
    ) -> Self:
        """Train for one more epoch; see :meth:`Estimator.partial_fit`.

        ``classes`` are all labels that may ever occur; the first call needs them if ``y`` does not
        hold all of them.
        """
        series = (x, y, sample_weight, lengths, starts, sharded)
        self._fitting()(*series, epochs=1, classes=classes, resume=True)
        return self

    predict_proba = _output_method(
        "predict_proba",
        """Probabilities of the classes, in the order of ``classes_``.

        See :class:`EstimatorClassifier` for shapes, and :meth:`Estimator.predict` for parameters.
        """,
    )
    predict_log_proba = _output_method(
        "predict_log_proba", """Logarithms of :meth:`predict_proba`."""
    )
    decision_function = _output_method(
        "decision_function",
        """Scores of the classes before the softmax.

        For two classes, the second's score minus the first's.
        """,
    )

    # -- inside ----------------------------------------------------------------------------------

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = False
        return tags

    def resolved_params(self) -> Settings:
        loss = F.cross_entropy if self.loss is None else self.loss
        return Settings.from_estimator(self, loss=loss, is_classifier=True)
