"""The estimator: fit and predict on (F, N, T) arrays."""

from __future__ import annotations

import copy
from typing import Any

from sklearn.base import BaseEstimator, clone
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, optim

from fluxutils_py.data import Rows, SampleWeight, SequenceWindows, Series, as_series, require_aligned
from fluxutils_py.errors import ShapeError
from fluxutils_py.estimator.fitting import Fit, check_features, read_lengths
from fluxutils_py.estimator.output import Output
from fluxutils_py.estimator.persistence import load_estimator, save_estimator
from fluxutils_py.estimator.scoring import pooled_accuracy, pooled_r2
from fluxutils_py.estimator.spec import read_spec
from fluxutils_py.nn import SeqLoss, as_loss
from fluxutils_py.training import Predictor, StreamState


class Estimator(BaseEstimator):
    """A stateful sequence model with a scikit-learn face, trained by truncated backpropagation through time.

    Parameters
    ----------
    model : nn.Module, class, callable, or None
        Called with windows ``(S, B, F)`` if it takes them, else with single steps ``(B, F)``; several inputs come as
        several arguments. Its state lives in the :class:`fluxutils_py.nn.Recur` layers in it; bare torch recurrent
        layers in a ``Sequential`` are wrapped. An instance is copied, never changed. Arguments ``n_in`` and ``n_out``
        of a class or callable are filled in from the data. None: one LSTM of 32 units and a linear head.
    loss : callable or None
        ``loss(model, xs, ys)`` or ``loss(model, xs, ys, ws)`` over a window, returning a scalar; or a torch criterion,
        which goes through :func:`fluxutils_py.seqloss`. None: mean squared error.
    opt : optimizer class, functools.partial, callable of the parameters, optimizer of ``model``'s parameters, or None
        None: ``torch.optim.AdamW``, fused where torch offers it.
    spec : Spec, dict, namedtuple, dataclass, object, or None
        ``epochs``, ``batchsize``, ``seqsize`` and what :class:`fluxutils_py.Spec` lists. None: its defaults.
    comm : "auto" or None
        Kept for training over several ranks; this version trains in one process.
    n_jobs : None or 1
        Kept for training in several threads.
    device : str, torch.device or None
        Where to train. None: where the model is.
    callbacks : callable, object, or list of such
        A function is called with the :class:`fluxutils_py.training.Loop` after every step; an object may have
        ``on_start``, ``on_step``, ``on_epoch``, ``on_end``, ``on_close``. Raise
        :class:`fluxutils_py.training.StopTraining`, or call ``loop.stop()``, to end training.
    warm_start : bool
        Whether ``fit`` goes on from the last fit.
    random_state : int, numpy.random.Generator, numpy.random.RandomState, or None
        Source of all randomness: dropout, shuffling, and the initial weights of a model that is given as a class or
        function (those of an instance were drawn when it was built). The global generators of torch and NumPy are
        left as they were. None: different each time.
    verbose : "auto" or bool
        Whether to show a progress bar; "auto": on a terminal or in a notebook.

    Attributes
    ----------
    model_ : nn.Module
        The fitted model, in evaluation mode, its state forgotten.
    optimizer_ : torch.optim.Optimizer
    loss_ : float
        Mean over the windows of the last epoch.
    grad_ : Tensor of shape (P,)
        Mean gradient of the last epoch before clipping, in the order of :func:`fluxutils_py.net2vec`.
    loss_curve_, validation_loss_curve_ : list of float
        Per epoch, windows weighted by their live steps.
    n_iter_ : int
        Epochs so far.
    history_ : list of dict
        Per epoch: ``epoch, loss, window_loss, seconds`` and what hooks added (``validation_loss``, ``lr``).
    n_features_in_, n_outputs_ : int, or tuple of int for several inputs or outputs

    Notes
    -----
    Source: ``Estimator``, ``fit!`` and ``predict!`` of FluxUtils.jl.

    Examples
    --------
    >>> import numpy as np
    >>> from torch import nn
    >>> from fluxutils_py.nn import LSTM
    >>> x = np.random.default_rng(0).normal(size=(3, 20, 50)).astype("float32")  # (F, N, T)
    >>> y = x.mean(0, keepdims=True)
    >>> est = Estimator(nn.Sequential(LSTM(3, 8), nn.Linear(8, 1)), spec={"epochs": 2, "batchsize": 10, "seqsize": 25})
    >>> est.fit(x, y).predict(x).shape
    (1, 20, 50)
    """

    def __init__(
        self,
        model: Any = None,
        loss: Any = None,
        opt: Any = None,
        spec: Any = None,
        *,
        comm: Any = "auto",
        n_jobs: int | None = None,
        device: Any = None,
        callbacks: Any = None,
        warm_start: bool = False,
        random_state: Any = None,
        verbose: Any = "auto",
    ) -> None:
        self.model = model
        self.loss = loss
        self.opt = opt
        self.spec = spec
        self.comm = comm
        self.n_jobs = n_jobs
        self.device = device
        self.callbacks = callbacks
        self.warm_start = warm_start
        self.random_state = random_state
        self.verbose = verbose

    def fit(
        self,
        x: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        validation_data: Any = None,
        epochs: int | None = None,
        lengths: Any = None,
    ) -> Estimator:
        """Train on series.

        Parameters
        ----------
        x : array of shape (F, N, T), or a tuple of such
            Inputs: features, series, time steps. NumPy arrays or memory maps in any memory order, h5py datasets, or
            anything with ``shape`` that takes three slices; only the window at hand is read. Fastest in time-major
            memory, ``(T, N, F)`` in C order, transposed. float64 gives float64 parameters, integers stay integers.
        y : array of shape (G, N, T), or a tuple of such
            Targets. A step with a NaN target carries no loss; its inputs still move the state (if they are NaN, the
            step counts as zeros).
        sample_weight : array of shape (N,), (N, T) or (1, N, T), optional
            Weights of series or steps, scaled to mean 1 over the steps that count. Steps of weight 0 do not count.
        validation_data : (x, y) or (x, y, sample_weight), optional
            Series for the validation loss after each epoch, which never disturbs training.
        epochs : int, optional
            In place of the spec's, for this call.
        lengths : array of int, shape (N,), optional
            How many steps of each series there are, from its start; what follows is padding.

        Returns
        -------
        Estimator
            Itself.

        Raises
        ------
        ValueError, TypeError
            On arguments that do not fit, before any training, with nothing changed.
        FloatingPointError
            When a loss or gradient is NaN or infinite; parameters and optimizer are as before that window.
        KeyboardInterrupt
            Passed on; what was learnt until then stays, and the estimator can be used.
        """
        Fit(self, x, y, sample_weight, validation_data, lengths, epochs, resume=self.warm_start).run()
        return self

    def partial_fit(self, x: Any, y: Any, sample_weight: Any = None, *, lengths: Any = None) -> Estimator:
        """Train for one more epoch, on these series, from where the last ``fit`` or ``partial_fit`` ended.

        Model, optimizer, learning-rate schedule, random generator and history go on; the state starts from zero. The
        first call builds them. Parameters as in :meth:`fit`.
        """
        Fit(self, x, y, sample_weight, None, lengths, epochs=1, resume=True).run()
        return self

    def predict(
        self,
        x: Any,
        out: Any = None,
        *,
        state: list[Tensor] | None = None,
        return_state: bool = False,
        lengths: Any = None,
    ) -> Any:
        """The model's outputs for series.

        Each series is walked through from its start with a state of its own. The result does not depend on how many
        series or steps are computed together. Training state is not touched.

        Parameters
        ----------
        x : array of shape (F, N, T), or a tuple of such
            As in :meth:`fit`; any N and T. A step without any input (all features NaN) moves the state as zeros do,
            and its prediction is NaN.
        out : array of shape (G, N, T), or a tuple of such, optional
            Where to write: a NumPy array, a memory map, an h5py dataset, or anything that takes slices.
        state : StreamState or list of Tensor, optional
            Where to go on: what an earlier call with ``return_state=True`` returned, for the same series in the same
            order. None: from zero.
        return_state : bool
            Whether to return the state at the end as well. Chunks of time, each given the last one's state, give what
            one call gives, to the last bit.
        lengths : array of int, shape (N,), optional
            Lengths of the series; predictions past them are NaN.

        Returns
        -------
        ndarray of shape (G, N, T) in time-major memory, or ``out``; a tuple for several outputs
            With ``return_state``, a pair of that and the state.

        Raises
        ------
        sklearn.exceptions.NotFittedError
            Before ``fit``.
        ValueError
            If ``x``, ``out`` or ``state`` do not fit the model, or ``x`` holds single NaNs or infinities.
        """
        predictor, _ = self._predictor(x, state, lengths)
        output = Output(out, predictor.n_series, predictor.n_steps)
        for prediction in predictor:
            output.write(prediction)
        return (output.result(), predictor.state()) if return_state else output.result()

    def score(self, x: Any, y: Any, sample_weight: Any = None, *, lengths: Any = None) -> float:
        """How good predictions are, pooled over all live steps of all series; higher is better.

        The coefficient of determination R2 (1 is perfect, 0 as good as each feature's mean); with a cross-entropy loss
        and integer targets, the share of steps whose label is right. Steps without a target do not count. Parameters
        as in :meth:`fit`.
        """
        predictor, x_series = self._predictor(x, None, lengths)
        targets = as_series(y, "y")
        require_aligned(x_series, targets[0])
        rows = Rows.whole(x_series.N, x_series.T, read_lengths(lengths, x_series))
        weight = None
        if sample_weight is not None:
            weight = SampleWeight(sample_weight, x_series.N, x_series.T)
            weight.normalise(rows, targets)
        loss = as_loss(self.loss)
        if isinstance(loss, SeqLoss) and loss.classes and targets[0].kind == "int":
            return pooled_accuracy(predictor, targets, rows, weight, loss.ignore_index)
        return pooled_r2(predictor, targets, rows, weight)

    def save(self, path: Any) -> None:
        """Write the fitted estimator to one file, aside and then moved into place; see :meth:`load`.

        The file holds parameters, optimizer and history, the settings, and the structure of models that are made of
        modules of torch and of this package. Code is not stored: a model or loss of your own is named only.

        Raises
        ------
        sklearn.exceptions.NotFittedError
            Before ``fit``.
        """
        check_is_fitted(self, "model_")
        save_estimator(self, path)

    @classmethod
    def load(cls, path: Any, **arguments: Any) -> Estimator:
        """Read an estimator that :meth:`save` wrote. No code from the file is run: it is safe with files of strangers.

        Parameters
        ----------
        path : str or path-like
        **arguments
            Constructor arguments in place of those in the file: ``device`` to load it elsewhere, ``model`` and
            ``loss`` where these are code of your own (an unfitted instance, a class or a function, as for the
            constructor).

        Raises
        ------
        LoadError
            If the file is no estimator, or its parameters do not fit the model; each mismatch is named.
        """
        return load_estimator(cls, path, arguments)

    # -- inside ----------------------------------------------------------------------------------------

    def _predictor(self, x: Any, state: Any, lengths: Any) -> tuple[Predictor, Series]:
        check_is_fitted(self, "model_")
        series = as_series(x, "x")
        check_features(self, series)
        if state is not None and not isinstance(state, StreamState | list | tuple):
            raise ShapeError(f"state must be what predict(..., return_state=True) returned, got {type(state).__name__}")
        spec = read_spec(self.spec)
        rows = Rows.whole(series[0].N, series[0].T, read_lengths(lengths, series[0]))
        windows = SequenceWindows(
            series, batchsize=int(spec.batchsize), seqsize=int(spec.seqsize or series[0].T), rows=rows
        )
        windows.check()
        return Predictor(self.model_, windows, state), series[0]

    def __sklearn_clone__(self) -> Estimator:
        arguments = {name: getattr(self, name) for name in self._get_param_names()}
        if isinstance(self.opt, optim.Optimizer):  # one copy, so that the optimizer stays bound to the model
            arguments |= copy.deepcopy({"model": self.model, "opt": self.opt})
            kept = {"model", "opt"}
        else:
            kept = set()
        arguments = {k: v if k in kept else clone(v, safe=False) for k, v in arguments.items()}
        return type(self)(**arguments)
