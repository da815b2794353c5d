"""What the kinds of estimators differ in."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator
from torch import optim

from fluxutils_py.data import SampleWeight
from fluxutils_py.data.segments import Segments
from fluxutils_py.estimator.building import resolve_params
from fluxutils_py.estimator.html_repr import HtmlReprMixin
from fluxutils_py.estimator.inputs import Inputs
from fluxutils_py.estimator.predicting import Transform
from fluxutils_py.estimator.targets import Targets, read_targets
from fluxutils_py.nn.losses import SeqLoss, as_loss


class EstimatorBase(HtmlReprMixin, BaseEstimator):
    """What fits and predictions ask of an estimator, as :class:`Estimator` answers; other kinds answer differently."""

    def _resolved_params(self) -> Any:
        """The constructor's arguments by name, with defaults that learn something where they are left to us."""
        return resolve_params(self.get_params(deep=False))

    def _uses_holdout(self) -> bool:
        """Whether to hold out a part of the data for validation, where no validation data are given."""
        return False

    def _read_targets(
        self,
        y: Any,
        inputs: Inputs,
        classes: np.ndarray | None,
        unknown: int | None = None,
        name: str = "y",
        per_series: bool | None = None,
    ) -> Targets:
        loss = as_loss(self._resolved_params().loss)
        kind = "integers" if isinstance(loss, SeqLoss) and loss.classes else "numbers"
        return read_targets(y, inputs, self, kind=kind, name=name, per_series=per_series)

    def _collect_classes(self, y: Any, inputs: Inputs, weight: SampleWeight | None, resume: bool) -> np.ndarray | None:
        """The labels that there are, of classifiers."""
        return None

    def _apply_class_weight(
        self, weight: SampleWeight | None, targets: Targets, classes: np.ndarray | None, rows: Segments
    ) -> SampleWeight | None:
        """The weights of the steps, with those of their classes."""
        return weight

    def _decode_outputs(self, outputs: np.ndarray) -> np.ndarray:
        """What ``predict`` makes of the model's outputs (S, B, G)."""
        return outputs

    def _output_transforms(self) -> dict[str, Transform]:
        """What the methods that give something for each step make of the model's outputs (S, B, G)."""
        return {"predict": self._decode_outputs}

    @classmethod
    @cache
    def _get_param_names(cls) -> list[str]:  # at each call of predict: 50 us where the signature is read again
        names: list[str] = super()._get_param_names()
        return names

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.target_tags.required = True
        tags.target_tags.multi_output = True
        return tags

    def __sklearn_clone__(self) -> Self:
        made = super().__sklearn_clone__()
        if isinstance(getattr(self, "opt", None), optim.Optimizer):  # one copy: it stays bound to the model
            made.model, made.opt = copy.deepcopy((self.model, self.opt))
        return made
