"""scikit-learn's callbacks (1.9, SLEP023, experimental): the protocol, all in one place.

A fit is a task, and each epoch a task inside of it. Estimators inherit :class:`CallbackSupport`,
run their fit by :func:`run_with_callbacks`, and begin the task by :func:`begin_fit`. A fit without
callbacks does none of this.

Source: https://scikit-learn.org/stable/modules/generated/sklearn.callback.html
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary

import sklearn

from fluxutils_py.parallel import is_main_process

try:
    from sklearn.callback import CallbackSupportMixin, FitCallback, with_callbacks
except ImportError:  # an older version, or one that has given up the experiment
    CallbackSupportMixin = object
    FitCallback = None

ATTRIBUTE = "_skl_callbacks"  # where scikit-learn keeps them

Result = TypeVar("Result")
Attributes = Callable[[], dict[str, Any]]


class CallbackSupport(CallbackSupportMixin):
    """Gives an estimator ``set_callbacks``."""

    def set_callbacks(self, *callbacks: Any) -> Self:
        """Set callbacks of scikit-learn, which see the fit and each of its epochs as tasks.

        Parameters
        ----------
        *callbacks : object
            Objects with ``setup``, ``on_fit_task_begin``, ``on_fit_task_end`` and ``teardown``,
            such as ``sklearn.callback.ProgressBar()``; one whose ``on_fit_task_end`` returns True
            after an epoch ends the training. They replace those of an earlier call. On several
            ranks, rank 0 alone calls them.

        Returns
        -------
        object
            Itself.

        Raises
        ------
        TypeError
            If an object is no such callback; callbacks of this package go to ``callbacks``.
        ImportError
            If this version of scikit-learn has no callbacks.

        Notes
        -----
        A callback that asks for ``fitted_estimator`` gets a copy of the model as it is then, with
        its optimizer; on several ranks, it predicts on its rank alone. Clones have the same
        callbacks. ``X`` and ``y`` are those of ``fit``.
        """
        if FitCallback is None:
            raise ImportError(
                f"set_callbacks needs scikit-learn's callbacks, which version 1.9 has, and "
                f"{sklearn.__version__} lacks: install another version, or give callbacks of this "
                "package, as in Estimator(callbacks=...)"
            )
        for callback in callbacks:
            # a class has all methods too
            if isinstance(callback, type) or not isinstance(callback, FitCallback):
                raise TypeError(
                    f"set_callbacks got {callback!r}, expected an object with setup, "
                    "on_fit_task_begin, on_fit_task_end and teardown, as scikit-learn has them; a "
                    "callback of this package goes to callbacks=[...] of the estimator, in a "
                    "pipeline by set_params(estimator__callbacks=[...])"
                )
        set_all: Self = super().set_callbacks(*callbacks)
        return set_all


# -- tasks ---------------------------------------------------------------------------------------

# the tasks of the fits that are running
_running: WeakKeyDictionary[object, FitTasks] = WeakKeyDictionary()


def nothing() -> None:
    """End a task that did not begin."""


def has_callbacks(est: Any) -> bool:
    """Whether a fit has to be run by :func:`run_with_callbacks`."""
    return bool(vars(est).get(ATTRIBUTE))


def run_with_callbacks(est: Any, fit: Callable[[], Result]) -> Result:
    """Run a fit, and let the callbacks of an estimator, if any, end whatever happens."""
    if not has_callbacks(est):
        return fit()

    try:
        result: Result = with_callbacks(lambda _: fit())(est)
        return result
    finally:
        _running.pop(est, None)


def within_callbacks(est: Any, fit: Callable[..., Result]) -> Callable[..., Result]:
    """Return a fit that lets the callbacks of an estimator, if any, end whatever happens."""
    if not has_callbacks(est):
        return fit  # the way that a reader of a traceback follows
    return lambda *given, **named: run_with_callbacks(est, lambda: fit(*given, **named))


def run_as_one_task(
    est: Any, fit: Callable[[], Result], x: object, metadata: dict[str, Any] | None = None
) -> Result:
    """Run a fit without epochs as one task, on rank 0."""

    def whole() -> Result:
        end_fit = begin_fit(est, x, metadata=metadata)
        result = fit()
        end_fit()
        return result

    return run_with_callbacks(est, whole if is_main_process() else fit)


def hooks_of(est: Any) -> list[Any]:
    """Return the hooks that a loop has to call for the callbacks of an estimator."""
    return [_running[est]] if has_callbacks(est) and est in _running else []


def begin_fit(
    est: Any,
    x: object,
    y: object = None,
    metadata: dict[str, Any] | None = None,
    *,
    n_epochs: int | None = 0,
    fitted: Attributes | None = dict,
) -> Callable[[], None]:
    """Begin the task of a fit, within :func:`run_with_callbacks`; return what ends it.

    Parameters
    ----------
    est : estimator
        One with :class:`CallbackSupport`.
    x, y : object
        The data, as the user gave them.
    metadata : dict, optional
        Further arguments of ``fit`` that a scorer takes too.
    n_epochs : int, optional
        The number of tasks inside, at most; None: not known yet. Other than 0, :func:`hooks_of` has
        the hook that begins and ends them.
    fitted : callable
        Returns the attributes of a copy that is as if the fit had ended now. None: there is no
        such copy before the end.
    """
    if not has_callbacks(est):
        return nothing
    data = {"estimator": est, "X": x, "y": y, "metadata": metadata}
    root = est._init_callback_context(max_subtasks=n_epochs)
    root.call_on_fit_task_begin(**data)
    if n_epochs != 0:
        _running[est] = FitTasks(root, data, fitted)

    def end() -> None:
        # the estimator is what is to be copied
        root.call_on_fit_task_end(**data, reconstruction_attributes=lambda: {ATTRIBUTE: []})

    return end


class FitTasks:
    """Hook that begins a task at the start of each epoch, and ends it at the end.

    Parameters
    ----------
    root : sklearn.callback.CallbackContext
        The task of the fit.
    data : dict
        Arguments of all calls.
    fitted : callable, optional
        As in :func:`begin_fit`.
    """

    name = "scikit-learn's callbacks"
    priority = 70  # after all that changes the model at the end of an epoch, and reports

    def __init__(self, root: Any, data: dict[str, Any], fitted: Attributes | None) -> None:
        self.root = root
        self.data = data
        self.fitted = fitted
        self.epoch: Any = None  # its task

    def attributes(self) -> dict[str, Any] | None:
        if self.fitted is None:
            return None
        # without callbacks, in case the copy is fitted
        return {**self.fitted(), ATTRIBUTE: []}

    def begin_epoch(self) -> None:
        self.epoch = self.root.subcontext(task_name="epoch")
        self.epoch.call_on_fit_task_begin(**self.data, reconstruction_attributes=self.attributes)

    def on_start(self, loop: Any) -> None:
        if loop.epoch < loop.start_epoch + loop.n_epochs:
            self.begin_epoch()

    def on_epoch(self, loop: Any) -> None:
        epoch = self.epoch
        self.epoch = None
        stop = epoch.call_on_fit_task_end(**self.data, reconstruction_attributes=self.attributes)
        if stop:
            loop.stop()
        is_last = loop.epoch + 1 >= loop.start_epoch + loop.n_epochs
        if not (is_last or stop or loop.stopped):
            self.begin_epoch()

    def on_end(self, loop: Any) -> None:
        # another hook has stopped the training: what has begun ends, without data
        if self.epoch is not None:
            self.epoch.call_on_fit_task_end(estimator=self.data["estimator"])
            self.epoch = None
