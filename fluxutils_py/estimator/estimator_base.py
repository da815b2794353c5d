"""The methods of all estimators after a fit, and the protocols of scikit-learn."""

from __future__ import annotations

import copy
from typing import Any, Self

from sklearn.base import BaseEstimator
from sklearn.utils.metadata_routing import UNUSED
from sklearn.utils.validation import check_is_fitted
from torch import Tensor
from torch.optim import Optimizer

from fluxutils_py.estimator.estimator_settings import Settings
from fluxutils_py.estimator.fitting import run_evaluate
from fluxutils_py.estimator.html_repr import HtmlReprMixin
from fluxutils_py.estimator.model_export import export
from fluxutils_py.estimator.persistence import load_estimator, save_estimator
from fluxutils_py.estimator.scoring import run_score
from fluxutils_py.estimator.streaming import EstimatorStream
from fluxutils_py.inputs.inputs import InputLayout, InputSchema
from fluxutils_py.inputs.target_codec import TargetCodec
from fluxutils_py.parallel import get_communicator


class EstimatorBase(HtmlReprMixin, BaseEstimator):
    """Streams, scores, evaluates, saves and loads fitted estimators; :class:`Estimator` fits and predicts."""

    _layout: InputLayout  # of the inputs of the first fit
    _codec: TargetCodec

    __metadata_request__score = {"x": UNUSED}  # noqa: RUF012  the protocol wants a dict

    def stream(
        self, n_series: int = 1, state: list[Tensor] | None = None, *, method: str = "predict"
    ) -> EstimatorStream:
        """Run step by step, as data arrive.

        Parameters
        ----------
        n_series : int
            N, the number of series at each step.
        state : list of Tensor, optional
            State to continue from: the ``state`` of an earlier stream, also from ``torch.save``, or one that
            :meth:`predict` or :func:`fluxutils_py.states` returned. None: the zero state.
        method : str
            Output of each step: "predict"; for classifiers also "predict_proba", "predict_log_proba" and
            "decision_function".

        Returns
        -------
        EstimatorStream
            ``step(x)`` takes ``(F, N)`` and returns what ``method`` returns for that step of the series, ``(G, N)``. It
            keeps the current model if the estimator is fitted again. For pipelines, see :func:`fluxutils_py.stream`.

        Raises
        ------
        sklearn.exceptions.NotFittedError
            Before ``fit``.
        ValueError
            If ``state`` does not fit, or there is no such method.
        """
        return EstimatorStream(self, n_series, state, method)

    def score(
        self,
        x: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        lengths: Any = None,
        starts: Any = None,
        sharded: bool = False,
    ) -> float:
        """Return a score of the predictions, pooled over all live steps of all series; higher is better.

        The score is the coefficient of determination R2 (1 is perfect, 0 is as good as each feature's mean); for
        classifiers, or with a cross-entropy loss and integer targets, the accuracy. Steps without a target do not
        count. For the parameters see :meth:`fit`.
        """
        return run_score(self, x, y, sample_weight, lengths, starts, sharded)

    def evaluate(
        self,
        x: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        gradient: bool = False,
        lengths: Any = None,
        starts: Any = None,
        sharded: bool = False,
    ) -> Any:
        """Return the loss on data, and optionally its gradient, without training.

        The data are cut into the windows that :meth:`fit` would train on; the state is carried from each to the next.
        The model is in evaluation mode and does not change. Other parameters are those of :meth:`fit`.

        Parameters
        ----------
        gradient : bool
            Whether to return the gradient as well.

        Returns
        -------
        float, or (float, Tensor of shape (P,))
            The mean over live steps, and the mean gradient over windows, in the order of
            :func:`fluxutils_py.net2vec`, as in ``grad_``.

        Notes
        -----
        Source: ``fit!`` of FluxUtils.jl with ``runopt=false``, or, without the gradient, with ``runback=false``.
        """
        how = {"lengths": lengths, "starts": starts, "sharded": sharded}
        return run_evaluate(self, x, y, sample_weight, gradient=gradient, **how)

    def save(self, path: Any) -> None:
        """Write the fitted estimator to one file, which is never half-written; see :meth:`load`.

        The file holds parameters, optimizer, history, settings, and the structure of models built from modules of torch
        and of this package. It does not hold code: your own model or loss is only named. On several ranks, only rank 0
        writes; the others return at once, and call ``get_communicator("auto").barrier()`` with rank 0 before they read
        the file.

        Raises
        ------
        sklearn.exceptions.NotFittedError
            Before ``fit``.
        """
        check_is_fitted(self, "model_")
        if get_communicator(self._resolved_params().comm).rank == 0:
            save_estimator(self, path)

    def export(self, path: Any, format: str = "onnx", *, input_names: Any = None, output_names: Any = None) -> None:
        """Write the fitted estimator to a file that runs without this package; see :func:`fluxutils_py.export`.

        Parameters and errors are those of that function, which takes pipelines too.
        """
        export(self, path, format, input_names=input_names, output_names=output_names)

    @classmethod
    def load(cls, path: Any, **arguments: Any) -> Self:
        """Read an estimator that :meth:`save` wrote. It runs no code from the file, so files from strangers are safe.

        Parameters
        ----------
        path : str or path-like
        **arguments
            Constructor arguments to use instead of those in the file: ``device`` to load it elsewhere; ``model`` and
            ``loss`` if they are your own code (an unfitted instance, a class or a function, as for the constructor).

        Raises
        ------
        LoadError
            If the file holds no estimator, or its parameters do not fit the model; names each mismatch.
        """
        estimator: Self = load_estimator(cls, path, arguments)
        return estimator

    # -- inside ----------------------------------------------------------------------------------------

    def _resolved_params(self) -> Settings:
        """Return the constructor's arguments, with defaults in place of None."""
        return Settings.from_estimator(self)

    def _input_schema(self, fitted: bool = True) -> InputSchema:
        """Return the requirements on inputs; after a fit, also its layout."""
        return InputSchema(
            type(self).__name__, getattr(self, "n_timesteps", None), fitted=self._layout if fitted else None
        )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.target_tags.required = True
        tags.target_tags.multi_output = True
        return tags

    def __sklearn_clone__(self) -> Self:
        made = super().__sklearn_clone__()
        if isinstance(getattr(self, "opt", None), Optimizer):  # one copy: it stays bound to the model
            made.model, made.opt = copy.deepcopy((self.model, self.opt))
        return made
