"""Estimators that scikit-learn knows as regressors and as classifiers."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.metadata_routing import UNUSED
from torch import Tensor

from fluxutils_py.data import SampleWeight
from fluxutils_py.errors import DataError
from fluxutils_py.estimator.estimator import Estimator
from fluxutils_py.estimator.fitting import run_fit
from fluxutils_py.estimator.inputs import Inputs
from fluxutils_py.estimator.labels import LabelEncoder, find_classes
from fluxutils_py.estimator.predicting import Transform, run_predict
from fluxutils_py.estimator.targets import Targets, read_labels, read_targets


class EstimatorRegressor(RegressorMixin, Estimator):
    """An :class:`Estimator` that scikit-learn knows as a regressor: of numbers, per step or per series.

    Parameters, attributes and methods are those of :class:`Estimator`. ``score`` is R2 pooled over series and time.

    Examples
    --------
    >>> from sklearn.model_selection import cross_val_score
    >>> from fluxutils_py import samples
    >>> x = np.random.default_rng(0).normal(size=(3, 40, 20)).astype("float32")  # (F, N, T)
    >>> est = EstimatorRegressor(spec={"epochs": 2, "batchsize": 10, "seqsize": 10})
    >>> len(cross_val_score(est, samples(x), samples(x[:1]), cv=4))
    4
    """

    score = Estimator.score  # the mixin's would average over columns


class EstimatorClassifier(ClassifierMixin, Estimator):
    """An :class:`Estimator` that scikit-learn knows as a classifier: of labels of any type, per step or per series.

    Parameters, attributes and methods are those of :class:`EstimatorRegressor`, and:

    - the model gives one score (logit) per class, and ``n_out`` is the number of classes; ``loss=None`` is
      cross-entropy; a loss of your own is given the places of the labels among ``classes_``;
    - ``y`` holds labels: one per step, (1, N, T), ``samples(y)`` or ``timesteps(y)``, or a matrix (N, T) (for
      ``timesteps``, (T, N)); or one per series, (N,). NaN, and None among strings, is a step without a label;
    - ``predict`` gives labels in the same form, ``predict_proba`` probabilities: (K, N, T) for ``(F, N, T)``; one row
      of K columns per series or sample; of views with a label per step, rows of K * T or K * N columns;
    - ``score`` is the share of labels that are right, pooled over series and time; for metrics and displays of
      scikit-learn, :func:`fluxutils_py.flatten_steps` makes vectors of labels per step.

    A step without any input, or outside a series, has NaN for probabilities; its label means nothing.

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
        x: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        classes: Any = None,
        lengths: Any = None,
        starts: Any = None,
    ) -> Self:
        """Train for one more epoch; see :meth:`Estimator.partial_fit`.

        ``classes`` are all labels that there will ever be; to be given at the first call if ``y`` does not hold them.
        """
        self._declared_classes = None if classes is None else np.unique(classes)
        try:
            run_fit(self, x, y, sample_weight, lengths=lengths, starts=starts, epochs=1, resume=True)
        finally:
            del self._declared_classes
        return self

    def predict_proba(
        self,
        x: Any,
        out: Any = None,
        *,
        state: list[Tensor] | None = None,
        return_state: bool = False,
        lengths: Any = None,
        starts: Any = None,
    ) -> Any:
        """Probabilities of the classes, in the order of ``classes_``.

        See :class:`EstimatorClassifier` for shapes, and :meth:`Estimator.predict` for parameters.
        """
        how = {"state": state, "return_state": return_state, "lengths": lengths, "starts": starts}
        found, end = run_predict(self, x, out, "predict_proba", **how)
        return (found, end) if return_state else found

    def predict_log_proba(
        self,
        x: Any,
        out: Any = None,
        *,
        state: list[Tensor] | None = None,
        return_state: bool = False,
        lengths: Any = None,
        starts: Any = None,
    ) -> Any:
        """Logarithms of :meth:`predict_proba`."""
        how = {"state": state, "return_state": return_state, "lengths": lengths, "starts": starts}
        found, end = run_predict(self, x, out, "predict_log_proba", **how)
        return (found, end) if return_state else found

    def decision_function(
        self,
        x: Any,
        out: Any = None,
        *,
        state: list[Tensor] | None = None,
        return_state: bool = False,
        lengths: Any = None,
        starts: Any = None,
    ) -> Any:
        """Scores of the classes before the softmax; of two classes, how far the second's is above the first's."""
        how = {"state": state, "return_state": return_state, "lengths": lengths, "starts": starts}
        found, end = run_predict(self, x, out, "decision_function", **how)
        if out is None and len(self.classes_) == 2 and isinstance(found, np.ndarray) and found.ndim == 2:
            found = found[:, 0] if found.shape[1] == 1 else found
        return (found, end) if return_state else found

    # -- inside ----------------------------------------------------------------------------------------

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = False
        return tags

    def _resolved_params(self) -> Any:
        settings = super()._resolved_params()
        if settings.loss is None:
            settings.loss = F.cross_entropy
        return settings

    def _read_targets(
        self,
        y: Any,
        inputs: Inputs,
        classes: np.ndarray | None,
        unknown: int | None = None,
        name: str = "y",
        per_series: bool | None = None,
    ) -> Targets:
        encode = None if classes is None else LabelEncoder(classes, unknown, name)
        return read_targets(y, inputs, self, kind="labels", encode=encode, name=name, per_series=per_series)

    def _collect_classes(self, y: Any, inputs: Inputs, weight: SampleWeight | None, resume: bool) -> np.ndarray | None:
        announced = getattr(self, "_declared_classes", None)
        if resume:
            if announced is not None and not np.array_equal(announced, self.classes_):
                raise ValueError(
                    f"classes={announced.tolist()}, but the first call had {self.classes_.tolist()}; they cannot change"
                )
            return self.classes_
        if announced is not None:
            return announced
        labels, weight = read_labels(y, inputs, weight)
        return find_classes(labels, weight, inputs.whole() if labels.shape[1:] == (inputs.N, inputs.T) else None)

    def _decode_outputs(self, outputs: np.ndarray) -> np.ndarray:
        self._require_scores(outputs)
        return self.classes_[outputs.argmax(-1)][:, :, None]

    def _output_transforms(self) -> dict[str, Transform]:
        return {
            "predict": self._decode_outputs,
            "predict_proba": self._probabilities,
            "predict_log_proba": self._log_probabilities,
            "decision_function": self._margins,
        }

    def _probabilities(self, outputs: np.ndarray) -> np.ndarray:
        return np.exp(self._log_probabilities(outputs))

    def _log_probabilities(self, outputs: np.ndarray) -> np.ndarray:
        self._require_scores(outputs)
        return torch.log_softmax(torch.from_numpy(np.ascontiguousarray(outputs)), -1).numpy()

    def _margins(self, outputs: np.ndarray) -> np.ndarray:
        self._require_scores(outputs)
        return outputs[:, :, 1:] - outputs[:, :, :1] if len(self.classes_) == 2 else outputs

    def _require_scores(self, outputs: np.ndarray) -> None:
        if outputs.shape[-1] != len(self.classes_):
            raise DataError(
                f"the model gives {outputs.shape[-1]} scores for {len(self.classes_)} classes; a class or function as "
                "model is told their number as n_out"
            )
