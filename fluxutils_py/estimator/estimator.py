"""The estimator: fit and predict on (F, N, T) arrays."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.utils.metadata_routing import UNUSED
from sklearn.utils.validation import check_is_fitted
from torch import Tensor
from torch.optim import Optimizer

from fluxutils_py.errors import DataError
from fluxutils_py.estimator.fit_loop import FitLoop
from fluxutils_py.estimator.fitted_parts import BaseSeriesEstimator
from fluxutils_py.estimator.fitting import begun_fit, run_evaluate
from fluxutils_py.estimator.model_export import export
from fluxutils_py.estimator.nested_parameters import NestedParamsMixin
from fluxutils_py.estimator.persistence import load_estimator, save_estimator
from fluxutils_py.estimator.predicting import run_predict
from fluxutils_py.estimator.scoring import run_score
from fluxutils_py.estimator.spec import STOP_EARLY, Settings, explains_arguments
from fluxutils_py.estimator.streams.streaming import EstimatorStream
from fluxutils_py.estimator.streams.watched_stream import StreamOptions, watched_stream
from fluxutils_py.nn.parameters import Freeze
from fluxutils_py.parallel import get_communicator
from fluxutils_py.sklearn_callbacks import ATTRIBUTE, CallbackSupport, within_callbacks


@explains_arguments
class Estimator(CallbackSupport, NestedParamsMixin, BaseSeriesEstimator):
    """A stateful sequence model as a scikit-learn estimator, trained by truncated backpropagation
    through time.

    Parameters
    ----------
    model : nn.Module, class, callable, or None
        Called with windows ``(S, B, F)`` if it takes them, else with single steps ``(B, F)``;
        several inputs are several arguments. Its state lives in its :class:`fluxutils_py.nn.Recur`
        layers; bare torch recurrent layers in a ``Sequential`` are wrapped. An instance is copied,
        never changed. Arguments ``n_in`` and ``n_out`` of a class or callable are filled in from
        the data. None: one LSTM of 32 units and a linear head.
    loss : callable or None
        ``loss(model, xs, ys)`` or ``loss(model, xs, ys, ws)`` over a window, returning a scalar; or
        a torch criterion, which goes through :func:`fluxutils_py.seqloss`. None: mean squared
        error.
    opt : optimizer class, functools.partial, callable, optimizer, or None
        A callable gets the parameters; an optimizer must hold the parameters of ``model``. None:
        ``torch.optim.AdamW``, fused where torch offers it; with ``model=None``, its learning rate
        is 0.01.
    spec : Spec, dict, namedtuple, dataclass, object, or None
        ``epochs``, ``batchsize``, ``seqsize`` and the other fields of :class:`fluxutils_py.Spec`,
        with its defaults for missing ones. None: all defaults, but 100 epochs.
    comm : "auto", "mpi", "torch", None, or a communicator
        The processes that train, predict and score together. All make the same calls with the same
        arguments, and get the same results. "auto": the ranks that ``mpirun``, ``srun`` or
        ``torchrun`` started; without them, and in child processes and threads, this process alone.
        An error on one rank is raised on all. To write your own, see
        :class:`fluxutils_py.parallel.Communicator`.
    scaling : "weak" or "strong"
        What ``batchsize`` counts on several ranks. "weak": the series on each rank, so ``P`` ranks
        train as one with ``P * batchsize``. "strong": the series of the whole minibatch, of which
        each rank takes its share, so any number of ranks trains as one with the same ``batchsize``.
        Dropout and batch normalisation see only the series of their rank. Unless ``verbose`` is
        False, rank 0 says once how large the minibatches are.
    device : str, torch.device or None
        The device to train on. None: the device of the model, which is built on the CPU if it is
        given as a class or function; torch's default device has no effect.
    compile : bool or dict
        Whether to train, and validate, with ``torch.compile``; a dict has arguments for it. For
        models with custom code: it compiles the largest parts without recurrent layers, and your
        modules inside ``Recur``; recurrent layers run as native kernels anyway. It takes seconds to
        minutes before the first update. Results are the same to rounding, but dropout draws other
        numbers. Without a C++ compiler, there is a warning, and training continues uncompiled.
        ``predict`` and ``model_`` are never compiled.
    callbacks : callable, object, or list of such
        A function is called with the :class:`fluxutils_py.training.Loop` after every step; an
        object may have ``on_start``, ``on_step``, ``on_epoch``, ``on_end``, ``on_close``. Raise
        :class:`fluxutils_py.training.StopTraining`, or call ``loop.stop()``, to end training. With
        a :class:`fluxutils_py.training.Checkpointer`, calling ``fit`` again with the same arguments
        and folder, even in another process, continues from the last checkpoint, in the middle of an
        epoch, and ends with the bits of an uninterrupted fit; on another number of ranks, with
        equal values to rounding, and minibatches of the same size. With more ``epochs``, it trains
        for these too. A checkpoint of a different fit raises ``LoadError``, see the notes. With
        ``warm_start`` or ``partial_fit``, a fitted estimator saves checkpoints, but continues from
        itself: give each such call its own folder.
    warm_start : bool
        Whether ``fit`` continues from the last fit.
    random_state : int, numpy.random.Generator, numpy.random.RandomState, or None
        Source of all randomness: dropout, shuffling, and the initial weights of a model given as a
        class or function (those of an instance were drawn when it was built). The global generators
        of torch and NumPy do not change. None: different each time.
    verbose : "auto" or bool
        Whether to report progress: by a bar on a terminal and in a notebook, elsewhere by a line
        per epoch in the log, ``logging.getLogger("fluxutils_py")``, of level INFO, from rank 0.
        With True, the line goes to stderr if logging does not show it. False: no report.
    target : "auto", "step" or "series"
        The meaning of a plain vector or matrix ``y``, if the inputs are series of several steps.
        "series": one row per series, (N,) or (N, G), learnt at its last step. "step": all steps,
        (N, G * T), the form of ``samples(y)`` after another tool, such as
        ``TransformedTargetRegressor``, has made a matrix of it. "auto": all steps if the number of
        columns is a multiple of T, else one row per series. If T is 10 or less, or ``x`` is an
        array, such a matrix is ambiguous, and "auto" raises an error.

    Attributes
    ----------
    model_ : nn.Module
        The fitted model, in evaluation mode, its state forgotten.
    optimizer_ : torch.optim.Optimizer
    loss_ : float
        Mean over the windows of the last epoch.
    grad_ : Tensor of shape (P,)
        Mean gradient of the last epoch before clipping, in the order of
        :func:`fluxutils_py.net2vec`.
    loss_curve_, validation_loss_curve_ : list of float
        Per epoch, windows weighted by their live steps.
    n_iter_ : int
        Epochs so far.
    history_ : list of dict
        Per epoch: ``epoch, loss, mean_batch_loss, seconds``, ``folds`` (largest number of folds of
        a series, see ``rebatch`` of :class:`fluxutils_py.Spec`), and values that hooks add
        (``validation_loss``, ``lr``);
        ``pandas.DataFrame(est.history_)`` makes a table.
    n_features_in_ : int, or tuple of int for several inputs
        Features per step; for a matrix or a view, its columns.
    feature_names_in_ : ndarray of str
        Names of features, for inputs that have them.
    n_outputs_ : int, or tuple of int for several outputs

    Notes
    -----
    The folder of a ``Checkpointer`` belongs to one fit. To tell fits apart, it compares all
    settings that the result depends on: spec, scheduler, loss, modules, optimizer and its groups,
    ``random_state`` (for a generator, its kind), and for your own functions their compiled code,
    defaults and closures (not global variables, nor lists and objects in closures). It compares
    data by digests: of all values if they are in memory or in a file of up to 64 MiB, else of all
    features at 8 steps at 8 evenly spaced places along each of the two axes, series and time.
    Computing them takes 0.5 to 1 s per GB. Epochs, ``device``, ``verbose`` and other
    callbacks may change.

    Source: ``Estimator``, ``fit!`` and ``predict!`` of FluxUtils.jl.

    Examples
    --------
    >>> import numpy as np
    >>> from torch import nn
    >>> from fluxutils_py.nn import LSTM
    >>> x = np.random.default_rng(0).normal(size=(3, 20, 50)).astype("float32")  # (F, N, T)
    >>> y = x.mean(0, keepdims=True)
    >>> est = Estimator(
    ...     nn.Sequential(LSTM(3, 8), nn.Linear(8, 1)),
    ...     spec={"epochs": 2, "batchsize": 10, "seqsize": 25},
    ... )
    >>> est.fit(x, y).predict(x).shape
    (1, 20, 50)

    Killed and run again, this makes the remaining steps, if any:

    >>> import tempfile
    >>> from fluxutils_py.training import Checkpointer
    >>> from fluxutils_py.training import EveryNSteps
    >>> folder = tempfile.TemporaryDirectory()
    >>> saves = Checkpointer(folder.name, keep=2, trigger=EveryNSteps(100))
    >>> est.set_params(callbacks=saves, random_state=0).fit(x, y).n_iter_
    2
    >>> folder.cleanup()
    """

    # scikit-learn's routing of metadata takes any other name than X for metadata
    __metadata_request__fit = {"x": UNUSED}  # noqa: RUF012  the protocol wants a dict
    __metadata_request__partial_fit = {"x": UNUSED}  # noqa: RUF012
    __metadata_request__predict = {"x": UNUSED}  # noqa: RUF012
    __metadata_request__score = {"x": UNUSED}  # noqa: RUF012

    model_: Any  # the user's class of nn.Module, with attributes that only the user knows
    INSTEAD: ClassVar[dict[str, str]] = {"early_stopping": STOP_EARLY}

    def __init__(
        self,
        model: object = None,
        loss: object = None,
        opt: object = None,
        spec: object = None,
        *,
        comm: object = "auto",
        scaling: str = "weak",
        device: object = None,
        compile: object = False,
        callbacks: object = None,
        warm_start: bool = False,
        random_state: object = None,
        verbose: object = "auto",
        target: str = "auto",
    ) -> None:
        self.model = model
        self.loss = loss
        self.opt = opt
        self.spec = spec
        self.comm = comm
        self.scaling = scaling
        self.device = device
        self.compile = compile
        self.callbacks = callbacks
        self.warm_start = warm_start
        self.random_state = random_state
        self.verbose = verbose
        self.target = target

    # scikit-learn's metadata routing reads signatures, so that each method lists its arguments.

    def fit(
        self,
        x: object,
        y: object,
        sample_weight: object = None,
        *,
        validation_data: object = None,
        epochs: int | None = None,
        lengths: object = None,
        starts: object = None,
        sharded: bool = False,
        groups: object = None,
    ) -> Self:
        """Train on series.

        Parameters
        ----------
        x : array of shape (F, N, T), tuple of such, view, or matrix
            Inputs: features, series, time steps. NumPy arrays or memory maps in any memory order,
            h5py datasets, or anything with ``shape`` that takes three slices. ``fit`` reads one
            window at a time, fastest in time-major memory: ``(T, N, F)`` in C order, transposed.
            float64 gives float64 parameters; integers stay integers. For tools that split, use
            :func:`fluxutils_py.samples` or :func:`fluxutils_py.timesteps` of such an array; at gaps
            of ``timesteps`` the state is forgotten. A matrix or data frame has one row per series
            of a single step, and is float64 unless it is float32. Series of different lengths may
            be a list of arrays (F, T_i), which are not copied; ``y`` is then a list of (G, T_i), or
            has one target per series.
        y : array of shape (G, N, T), tuple of such, view, vector or matrix
            Targets. A step with NaN targets carries no loss; its inputs still move the state, as
            zeros if they are NaN. If only some outputs are NaN, the others carry loss. Rows of
            ``samples(y)``, ``timesteps(y)``, or of a plain vector or matrix match the rows of
            ``x``; with ``samples(x)``, a matrix of G * T columns holds all steps. For series of
            several steps, a vector (N,) or matrix (N, G) is one target per series, to be predicted
            at its last step; see ``target``. Inputs of all its steps must then be numbers, or NaN
            in all features.
        sample_weight : array of shape (N,), (N, T) or (1, N, T), optional
            Weights of series or steps, scaled to mean 1 over the steps that count. Steps of weight
            0 do not count. For ``timesteps``, (T,) or (T, N); for a list of series, a list of
            (T_i,).
        validation_data : tuple of 2 to 5 arguments, optional
            ``x, y, sample_weight, lengths, starts``, or the first ones of these: series for the
            validation loss after each epoch, which never disturbs training.
        epochs : int, optional
            Epochs of this call, instead of the spec's ``epochs`` and ``max_updates``.
        groups : array of shape (N,), optional
            For ready-made estimators: series of one group, such as one patient, are held out
            together when a penalty or a model is chosen, intervals are calibrated, or training
            stops early.
        lengths, starts : array of int, shape (N,), optional
            Series ``n`` has the steps ``starts[n]`` (default 0) to ``starts[n] + lengths[n]``
            (default T); the rest is padding. None: from the first to the last step with input, one
            that is not NaN in all features. A series begins there with the zero state, and
            ``burn_in`` counts from there. The series of a minibatch are walked through side by
            side, each from its own start.
        sharded : bool
            On several ranks, whether each rank gets only its own series, in all arguments, as for
            data that no node holds whole. Ranks may have any number of series, of any lengths;
            one without series gives None for ``x`` and ``y``. The ranks train as one process with
            all series, where each rank's are spread evenly over the order, also with ``shuffle``.
            A :class:`~fluxutils_py.training.Checkpointer` continues with the same series on the
            same ranks only.

        Returns
        -------
        Estimator
            Itself.

        Raises
        ------
        ValueError, TypeError
            If arguments do not fit. Raised before any training; nothing is changed.
        FloatingPointError
            If a loss or gradient is NaN or infinite. Parameters and optimizer are as before that
            window.
        KeyboardInterrupt
            Passed on; the estimator keeps what it has learnt, and can be used.
        RemoteError, RankError
            If another rank failed, or was given other arguments; see
            :class:`fluxutils_py.parallel.RankGroup`.

        Notes
        -----
        An error after updates (a NaN in a memory map, an error in a callback) restores an earlier
        fit with all its attributes. Without an earlier fit, or when continuing one (``warm_start``,
        ``partial_fit``), the estimator keeps what it has learnt, as after ``KeyboardInterrupt``. An
        error before the first update changes nothing.
        """
        self._fitting()(
            x,
            y,
            sample_weight,
            lengths,
            starts,
            sharded,
            validation_data=validation_data,
            epochs=epochs,
            groups=groups,
            resume=self.warm_start,
            is_fit=True,
        )
        return self

    def partial_fit(
        self,
        x: object,
        y: object,
        sample_weight: object = None,
        *,
        lengths: object = None,
        starts: object = None,
        sharded: bool = False,
    ) -> Self:
        """Train for one more epoch, on these series, from where the last ``fit`` or ``partial_fit``
        ended.

        Model, optimizer, learning-rate schedule, random generator and history continue; the state
        starts from zero. The first call builds them. Parameters are those of :meth:`fit`.
        """
        series = (x, y, sample_weight, lengths, starts, sharded)
        self._fitting()(*series, epochs=1, resume=True)
        return self

    def predict(
        self,
        x: object,
        out: object = None,
        *,
        state: list[Tensor] | None = None,
        return_state: bool = False,
        lengths: object = None,
        starts: object = None,
        sharded: bool = False,
    ) -> np.ndarray | Any:  # Any: arguments and model decide whether it is one array
        """Return the model's outputs for series.

        Each series is walked through from its start, with a separate state. The result does not
        depend on how many series or steps are computed together. The state of training does not
        change.

        Parameters
        ----------
        x : array of shape (F, N, T), tuple of such, view, or matrix
            As in :meth:`fit`, with any N and T. A step without input (all features NaN) moves the
            state as zeros do, if it is between others, and its prediction is NaN; with one target
            per series, the last step of a series or chunk must have an input. Each run of
            ``timesteps(x, context=k)`` is warmed up on the ``k`` steps before it.
        out : array of shape (G, N, T), a tuple of such, or "xarray", optional
            Array to write to: a NumPy array, a memory map, an h5py dataset, a zarr array, or
            anything that takes slices. "xarray": ``x`` is an ``xarray.DataArray``, and so is the
            result, with the dimensions and coordinates of series and time of ``x``. On several
            ranks, each gets the whole result in its own array; into maps of the same file, each
            writes its own series.
        state : list of Tensor, optional
            The state to continue from: the result of an earlier call with ``return_state=True`` or
            of :func:`fluxutils_py.states`, for the same series in the same order. Copies and NumPy
            arrays work too. None: the zero state.
        return_state : bool
            Whether to return the state too: a plain list of tensors, equal to
            :func:`fluxutils_py.states` of the model after each series' last step. Chunks of time,
            each with the state of the one before, give the result of one call, to rounding. The
            state of a model without recurrent layers that takes windows is its last ``overlap``
            inputs, (k, N, F) of each input.
        lengths, starts : array of int, shape (N,), optional
            As in :meth:`fit`; predictions outside a series are NaN.
        sharded : bool
            Whether each rank gives its own series, as in :meth:`fit`, and gets the result for
            these; None on a rank without series.

        Returns
        -------
        ndarray of shape (G, N, T) in time-major memory, or ``out``; a tuple for several outputs
            For a list of series, a list of (G, T_i). For a view, a matrix with the view's rows: (N,
            G * T) or (T, G * N). For a matrix, or if there is one target per series, (N, G). A
            vector if the targets were one. With ``return_state``, a pair of the outputs and the
            state.

        Raises
        ------
        sklearn.exceptions.NotFittedError
            Before ``fit``.
        ValueError
            If ``x``, ``out`` or ``state`` do not fit the model, or ``x`` has single NaNs or
            infinities, or, with one target per series, no input at the last step of a series.
        """
        return run_predict(self, "predict", x, out, state, return_state, lengths, starts, sharded)

    def stream(
        self,
        n_series: int = 1,
        state: list[Tensor] | None = None,
        *,
        method: str = "predict",
        interval: float | None = None,
        alarm: bool | int | str = False,
        calibration: tuple[Any, Any] | None = None,
        learn: bool | float = False,
        freeze: Freeze = None,
        delay: int | None = None,
    ) -> Any:  # Any: whether a step returns one array depends on the arguments
        """Run step by step, as data arrive.

        Parameters
        ----------
        n_series : int
            N, the number of series at each step.
        state : list of Tensor, optional
            State to continue from: the ``state`` of an earlier stream, also from ``torch.save``, or
            one that :meth:`predict` or :func:`fluxutils_py.states` returned (a network of the ends
            of intervals then sees its first step). None: the zero state.
        method : str
            Output of each step: "predict"; for classifiers also "predict_proba",
            "predict_log_proba" and "decision_function".
        interval : float, optional
            Share of targets that are to lie between two ends, such as 0.9. ``step`` then returns
            ``prediction, low, high``, and ``observe(y)`` takes in the target (G, N) of the oldest
            step that waits for it, at once or many steps later. The ends follow the residuals of
            each series, so that the share holds under drift. After a fit with ``level``, they
            follow the inputs too, unless ``calibration`` or ``learn`` is given.
        alarm : bool, int or "frozen"
            Whether ``step`` also returns how unlikely the last residuals of each series are, (N,),
            from a robust model of residuals that knows no labels; 2 is roughly once in 100 steps. A
            number is the half-life of its memory in steps, not a level; what lasts for about that
            long becomes the rule. True: twice the length of the calibration, at least 1000.
            "frozen": nothing is learnt after the calibration, so an alarm lasts as long as its
            fault. ``alarm_shares`` of the stream says which output differs.
        calibration : tuple (x, y), optional
            Arrays (F, N, T) and (G, N, T) that the fit has not seen, for intervals and alarms to
            start from: the series of the stream if there are ``n_series``, else any. None: what a
            fit with ``level`` held out. An alarm needs none.
        learn : bool or float
            Whether the stream learns: ``learn(x, y)`` predicts and takes in the target, or ``step``
            and later ``observe(y)`` do. Each target makes an update of the stream's own copy of the
            model, with the loss, the kind of optimizer and the ``clip`` of the fit. A number is the
            highest learning rate; True: a hundredth of the first rate of the fit. See the notes.
        freeze : str, list of str, or callable, optional
            Names of parameters that do not learn, or of layers with all their parameters, as
            :func:`fluxutils_py.namedparams` has them; or ``freeze(name, parameter)``, which returns
            whether a parameter is held still. Parameters held still in the fit never learn.
        delay : int, optional
            By how many steps a target may be late; if more steps wait, this is an error. None:
            10,000.

        Returns
        -------
        EstimatorStream, or WatchedStream with ``interval``, ``alarm`` or ``learn``
            ``step(x)`` takes ``(F, N)`` and returns what ``method`` returns for that step of the
            series, ``(G, N)``. A later fit of the estimator does not change the stream. For
            pipelines, see :func:`fluxutils_py.stream`.

        Raises
        ------
        sklearn.exceptions.NotFittedError
            Before ``fit``.
        ValueError
            If ``state`` does not fit, there is no such method, an interval has nothing to start
            from, or the model cannot learn step by step.

        Notes
        -----
        An update uses the loss of one step of all series. Where all recurrent layers with
        parameters are diagonal (:class:`LRU`, :class:`MinGRU`, :class:`MinLSTM`), the gradient is
        exact, as with ``gradient="exact"`` of :class:`Spec`, and costs the same at each step; else
        it covers the last ``seqsize`` steps (64, if ``seqsize`` is None), which are computed again.
        The model is in evaluation mode: no dropout, no noise. The optimizer begins without memory,
        its learning rates are constant, and every target is an update, whatever ``accumulate`` is.
        Weights of classes do not count. The stream's ``state`` holds all of this.
        """
        options = StreamOptions(interval, alarm, calibration, learn, freeze, delay)

        def plain(est: Any, state: list[Tensor] | None) -> EstimatorStream:
            return EstimatorStream(est, n_series, state, method, options.learning)

        return watched_stream(plain, self, self, n_series, state, options)

    def score(
        self,
        x: object,
        y: object,
        sample_weight: object = None,
        *,
        lengths: object = None,
        starts: object = None,
        sharded: bool = False,
    ) -> float:
        """Return a score of the predictions, pooled over all live steps of all series; higher is
        better.

        The score fits the loss:

        - R2, the coefficient of determination (1 is perfect, 0 is as good as each feature's mean),
          for ``nn.MSELoss``, ``L1Loss``, ``SmoothL1Loss`` and ``HuberLoss``, also as functions;
        - the accuracy, for classifiers, and for cross-entropy with integer targets;
        - else minus the mean loss: the outputs may be in another unit than the targets, as the
          log-odds of ``nn.BCEWithLogitsLoss`` are. The loss is that of :meth:`evaluate`, without
          burn-in; the ``context`` of :func:`fluxutils_py.timesteps` is not read.
          For R2 with a loss function of your own, use ``scoring=pooled_scorer("r2")``.

        Steps without a target do not count. For the parameters see :meth:`fit`.
        """
        return run_score(self, x, y, sample_weight, lengths, starts, sharded)

    def evaluate(
        self,
        x: object,
        y: object,
        sample_weight: object = None,
        *,
        gradient: bool = False,
        lengths: object = None,
        starts: object = None,
        sharded: bool = False,
    ) -> Any:
        """Return the loss on data, and optionally its gradient, without training.

        The data are cut into windows as in the validation of :meth:`fit`, without ``rebatch``; the
        state is carried from each to the next. The model is in evaluation mode and does not change.
        Other parameters are those of :meth:`fit`.

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
        Source: ``fit!`` of FluxUtils.jl with ``runopt=false``, or, without the gradient, with
        ``runback=false``.
        """
        series = (x, y, sample_weight, lengths, starts, sharded)
        return run_evaluate(self, *series, gradient=gradient)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the fitted estimator to one file, which is never half-written; see :meth:`load`.

        The file holds parameters, optimizer, history, settings, and the structure of models built
        from modules of torch and of this package. It does not hold code: your own model or loss is
        only named. On several ranks, only rank 0 writes; the others return at once, and call
        ``get_communicator("auto").barrier()`` with rank 0 before they read the file.

        Raises
        ------
        sklearn.exceptions.NotFittedError
            Before ``fit``.
        """
        check_is_fitted(self, "model_")  # on all ranks, not only the one that writes
        if get_communicator(self.resolved_params().comm).rank == 0:
            save_estimator(self, path)

    def export(
        self,
        path: str | PathLike[str],
        format: str = "onnx",
        *,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
        prefix: str = "model",
        quantize: str | None = None,
        example: Any = None,
    ) -> float | None:
        """Write the fitted estimator to a file that runs without this package; see
        :func:`fluxutils_py.export`.

        Parameters and errors are those of that function, which takes pipelines too.
        """
        return export(
            self,
            path,
            format,
            input_names=input_names,
            output_names=output_names,
            prefix=prefix,
            quantize=quantize,
            example=example,
        )

    @classmethod
    def load(cls, path: str | PathLike[str], **arguments: Any) -> Self:
        """Read an estimator that :meth:`save` wrote. It runs no code from the file, so untrusted
        files are safe.

        Parameters
        ----------
        path : str or path-like
        **arguments
            Constructor arguments to use instead of those in the file: ``device`` to load it
            elsewhere; ``model`` and ``loss`` if they are your own code (an unfitted instance, a
            class or a function, as for the constructor). A class or function with the same name as
            in the fit gets the settings in the file, such as ``hidden`` after
            ``set_params(model__hidden=64)``, unless you set them in a ``functools.partial``.

        Raises
        ------
        LoadError
            If the file holds no estimator of this class (:func:`fluxutils_py.load` reads pipelines
            and the best of a search), or its parameters do not fit the model; the message names
            each mismatch.
        """
        estimator: Self = load_estimator(cls, path, arguments)
        return estimator

    # -- inside --------------------------------------------------------------------------------

    def _fit(self, *series: Any, groups: object = None, **call: Any) -> None:
        """Read the data, cut them into windows, build model and loop, and train.

        The arguments are those of :func:`begun_fit`. Ready-made estimators choose and calibrate
        around it.
        """
        if groups is not None:
            raise DataError(
                "groups are for ready-made estimators, such as SequenceRegressor; hold out groups "
                "yourself: fit(..., validation_data=(x, y))"
            )
        with begun_fit(self, *series, **call) as fit:
            data = fit.cut(fit.settings)
            fit.train(FitLoop(data, fit.ranks, fit.rng, fit.earlier))

    def _fitting(self) -> Callable[..., None]:
        """Return the method that fits, within scikit-learn's callbacks if there are any."""
        if not vars(self).get(ATTRIBUTE):
            return self._fit  # the way that a reader of a traceback follows
        return within_callbacks(self, self._fit)

    def resolved_params(self) -> Settings:
        """Return the constructor's arguments, with defaults in place of None.

        Internal, as is ``fitted_parts_``: both may change without notice.
        """
        return Settings.from_estimator(self)

    def __sklearn_tags__(self) -> Any:
        # what scikit-learn's tools and checks may give an estimator
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.target_tags.required = True
        tags.target_tags.multi_output = True
        return tags

    def __sklearn_clone__(self) -> Self:
        cloned = super().__sklearn_clone__()
        if isinstance(getattr(self, "opt", None), Optimizer):
            # copied together, so that the optimizer stays bound to the parameters of the model
            cloned.model, cloned.opt = copy.deepcopy((self.model, self.opt))
        return cloned
