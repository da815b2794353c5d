"""The estimator: fit and predict on (F, N, T) arrays."""

from __future__ import annotations

from typing import Any, Self

from sklearn.utils.metadata_routing import UNUSED
from torch import Tensor

from fluxutils_py.estimator.estimator_base import EstimatorBase
from fluxutils_py.estimator.fitting import run_fit
from fluxutils_py.estimator.predicting import run_predict


class Estimator(EstimatorBase):
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
        None: ``torch.optim.AdamW``, fused where torch offers it; for the model that ``model=None`` is, with a learning
        rate of 0.01.
    spec : Spec, dict, namedtuple, dataclass, object, or None
        ``epochs``, ``batchsize``, ``seqsize`` and what else :class:`fluxutils_py.Spec` lists; what is left out means
        its defaults. None: all defaults, but 100 epochs.
    comm : "auto", "mpi", "torch", None, or a communicator
        Which processes train, predict and score together; every one makes the same calls with the same arguments, and
        has the same results. "auto": the ranks that ``mpirun``, ``srun`` or ``torchrun`` started; without them, and in
        child processes and threads, this process alone. ``batchsize`` is per rank: ``P`` ranks train as one with
        ``P * batchsize``, but for dropout and batch normalisation, which see each rank's own series. An error on one
        rank is an error on all. See :class:`fluxutils_py.parallel.Communicator` for one's own.
    n_jobs : int or None
        Threads to train in: the series of each minibatch are divided over them. -1: as many as there are cores; None:
        1, on torch's own threads. The result is that of one thread, to rounding, and bit-identical from run to run
        (with dropout too, though the numbers drawn are others). A ``loss`` of your own must be a mean over the live
        steps of its window, and thread-safe; batch normalisation is refused.
    device : str, torch.device or None
        Where to train. None: where the model is.
    callbacks : callable, object, or list of such
        A function is called with the :class:`fluxutils_py.training.Loop` after every step; an object may have
        ``on_start``, ``on_step``, ``on_epoch``, ``on_end``, ``on_close``. Raise
        :class:`fluxutils_py.training.StopTraining`, or call ``loop.stop()``, to end training. With a
        :class:`fluxutils_py.training.Checkpointer`, ``fit`` called again with the same arguments and the same folder,
        in another process too, goes on where the last checkpoint is, in the middle of an epoch, and ends bit for bit as
        if it had not been interrupted; with more ``epochs``, it goes on for those. A checkpoint of a different fit
        raises ``LoadError``, see the notes. An estimator that is fitted already, and goes on by ``warm_start`` or
        ``partial_fit``, saves but goes on from itself: give each call of a program a folder of its own.
    warm_start : bool
        Whether ``fit`` goes on from the last fit.
    random_state : int, numpy.random.Generator, numpy.random.RandomState, or None
        Source of all randomness: dropout, shuffling, and the initial weights of a model that is given as a class or
        function (those of an instance were drawn when it was built). The global generators of torch and NumPy are
        left as they were. None: different each time.
    verbose : "auto" or bool
        Whether to tell of progress. On a terminal and in a notebook it is a bar. Elsewhere it is a line for each epoch
        in the log, ``logging.getLogger("fluxutils_py")``, of level INFO, from rank 0; with True it goes to stderr where
        logging is not set up to show it. False: neither.
    target : "auto", "step" or "series"
        What a plain vector or matrix ``y`` holds, if the inputs are series of several steps. "series": one row per
        series, (N,) or (N, G), learnt at its last step. "step": all steps, (N, G * T), as ``samples(y)`` looks once
        another tool, such as ``TransformedTargetRegressor``, has made a matrix of it. "auto": all steps if the columns
        are a multiple of T, else one row per series; where T is 10 or less, or ``x`` an array, so many columns may be
        either: an error asks.

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
        Per epoch: ``epoch, loss, mean_batch_loss, seconds``, ``folds`` (most pieces that a series was cut into, see
        ``rebatch`` of :class:`fluxutils_py.Spec`), and what hooks added (``validation_loss``, ``lr``);
        :func:`fluxutils_py.training.history_table` makes a table of it.
    n_features_in_ : int, or tuple of int for several inputs
        Features per step; of a matrix or a view, its columns.
    feature_names_in_ : ndarray of str
        Of a data frame.
    n_outputs_ : int, or tuple of int for several outputs

    Notes
    -----
    A ``Checkpointer``'s folder belongs to one fit. Compared are all settings that a result depends on: spec, scheduler,
    loss, modules, optimizer and its groups, ``random_state`` (of a generator, its kind), and for functions of your own
    their compiled code, defaults and closures (not global variables, nor lists and objects in closures). The data are
    compared by digests: of all values if they are in memory or in a file of up to 64 MiB, else of all features at 8
    steps at 8 evenly spaced places along each of the two axes, series and time. Digests are computed at 1 to 2 GB/s,
    and only with a ``Checkpointer``. Epochs, ``device``, ``n_jobs``, ``verbose`` and other callbacks may change.

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

    Killed and run again, this makes the steps that are left, if any:

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
        target: str = "auto",
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
        self.target = target

    def fit(
        self,
        x: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        validation_data: Any = None,
        epochs: int | None = None,
        lengths: Any = None,
        starts: Any = None,
    ) -> Self:
        """Train on series.

        Parameters
        ----------
        x : array of shape (F, N, T), tuple of such, view, or matrix
            Inputs: features, series, time steps. NumPy arrays or memory maps in any memory order, h5py datasets, or
            anything with ``shape`` that takes three slices; only the window at hand is read. Fastest in time-major
            memory, ``(T, N, F)`` in C order, transposed. float64 gives float64 parameters, integers stay integers.
            :func:`fluxutils_py.samples` and :func:`fluxutils_py.timesteps` of such an array, or parts of them, are
            for tools that split; between the gaps of ``timesteps`` the state is forgotten. A matrix or data frame has
            one row per series of a single step, and is float64 unless it is float32. Series of unequal length may be a
            list of arrays (F, T_i), which are not copied; ``y`` is then a list of (G, T_i), or one target per series.
        y : array of shape (G, N, T), tuple of such, view, vector or matrix
            Targets. A step with NaN targets carries no loss; its inputs still move the state (if they are NaN, the step
            counts as zeros). Where some outputs are NaN, the others carry loss. Rows of ``samples(y)``,
            ``timesteps(y)``, or of a plain vector or matrix belong to the rows of ``x``: a matrix of G * T columns
            beside ``samples(x)`` holds all steps. A vector (N,) or matrix (N, G) for series of several steps is one
            target per series, to be predicted at its last step; see ``target``.
        sample_weight : array of shape (N,), (N, T) or (1, N, T), optional
            Weights of series or steps, scaled to mean 1 over the steps that count. Steps of weight 0 do not count.
            For ``timesteps``, (T,) or (T, N); for a list of series, a list of (T_i,).
        validation_data : (x, y), (x, y, sample_weight), ... or (x, y, sample_weight, lengths, starts), optional
            Series for the validation loss after each epoch, which never disturbs training.
        epochs : int, optional
            In place of the spec's, for this call.
        lengths, starts : array of int, shape (N,), optional
            Series ``n`` has the steps ``starts[n]`` (default 0) to ``starts[n] + lengths[n]`` (default T); the rest is
            padding. It begins with the zero state there, ``burn_in`` counts from there, and the series of a minibatch
            are walked through side by side, each from its own start.

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
        RemoteError, RankError
            On ranks whose fellows failed, or were given something else; see :class:`fluxutils_py.parallel.RankGroup`.

        Notes
        -----
        An error after updates (a NaN in a memory map, an error in a callback) puts an earlier fit back, with all its
        attributes. Without an earlier fit, or going on from it (``warm_start``, ``partial_fit``), what was learnt
        until then stays, as after ``KeyboardInterrupt``; an error before the first update changes nothing.
        """
        how = {"lengths": lengths, "starts": starts, "epochs": epochs, "resume": self.warm_start}
        run_fit(self, x, y, sample_weight, validation_data, can_hold_out=True, **how)
        return self

    def partial_fit(
        self, x: Any, y: Any, sample_weight: Any = None, *, lengths: Any = None, starts: Any = None
    ) -> Self:
        """Train for one more epoch, on these series, from where the last ``fit`` or ``partial_fit`` ended.

        Model, optimizer, learning-rate schedule, random generator and history go on; the state starts from zero. The
        first call builds them. Parameters as in :meth:`fit`.
        """
        run_fit(self, x, y, sample_weight, lengths=lengths, starts=starts, epochs=1, resume=True)
        return self

    def predict(
        self,
        x: Any,
        out: Any = None,
        *,
        state: list[Tensor] | None = None,
        return_state: bool = False,
        lengths: Any = None,
        starts: Any = None,
    ) -> Any:
        """The model's outputs for series.

        Each series is walked through from its start with a state of its own. The result does not depend on how many
        series or steps are computed together. Training state is not touched.

        Parameters
        ----------
        x : array of shape (F, N, T), tuple of such, view, or matrix
            As in :meth:`fit`; any N and T. A step without any input (all features NaN) moves the state as zeros do,
            and its prediction is NaN. Each stretch of ``timesteps(x, context=k)`` is warmed through the ``k`` steps
            before it.
        out : array of shape (G, N, T), or a tuple of such, optional
            Where to write: a NumPy array, a memory map, an h5py dataset, or anything that takes slices. Of several
            ranks each gets the whole in its own array; but into one map of the same file each writes its own series.
        state : list of Tensor, optional
            Where to go on: what an earlier call with ``return_state=True`` or :func:`fluxutils_py.states` returned, for
            the same series in the same order. Copies and NumPy arrays will do. None: from zero.
        return_state : bool
            Whether to return the state as well: a plain list of tensors, equal to :func:`fluxutils_py.states` of the
            model after each series' own last step. Chunks of time, each given the last one's state, give what one
            call gives, to rounding. The state of a model without recurrent layers that takes windows is its last
            ``overlap`` inputs, (k, N, F) of each input.
        lengths, starts : array of int, shape (N,), optional
            As in :meth:`fit`; predictions outside a series are NaN.

        Returns
        -------
        ndarray of shape (G, N, T) in time-major memory, or ``out``; a tuple for several outputs
            For a list of series, a list of (G, T_i). For a view, the matrix with the view's rows: (N, G * T) or
            (T, G * N). For a matrix, (N, G). Where targets were one per series, (N, G). A vector where the targets were
            one. With ``return_state``, a pair of that and the state.

        Raises
        ------
        sklearn.exceptions.NotFittedError
            Before ``fit``.
        ValueError
            If ``x``, ``out`` or ``state`` do not fit the model, or ``x`` holds single NaNs or infinities.
        """
        return run_predict(
            self, x, out, "predict", state=state, return_state=return_state, lengths=lengths, starts=starts
        )
