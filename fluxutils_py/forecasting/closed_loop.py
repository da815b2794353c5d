"""Feed outputs of one-step models back as inputs, and generate sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fluxutils_py.errors import DataError, ShapeError, SpecError
from fluxutils_py.estimator import Estimator
from fluxutils_py.estimator.building import make_generator
from fluxutils_py.estimator.streams.streaming import EstimatorStream
from fluxutils_py.nn.losses import SeqLoss, as_loss
from fluxutils_py.nn.precision import undisturbed
from fluxutils_py.validation import check_integer


@undisturbed()
def rollout(
    est: Estimator,
    x: Any,
    n_steps: int,
    *,
    known: ArrayLike | None = None,
    next_input: Callable[[np.ndarray], ArrayLike] | None = None,
) -> np.ndarray:
    """Forecast many steps with a one-step model, by feeding its outputs back as inputs.

    Parameters
    ----------
    est : fitted Estimator
        Model trained to predict the next values of the first G input features, or their scores.
    x : array of shape (F, N, T)
        The past; sets the state of the model.
    n_steps : int
    known : array of shape (F - G, N, n_steps - 1), optional
        The other features at the generated steps. Required if F > G.
    next_input : callable, optional
        Makes the next inputs (G, N) from the outputs at a step, ``next_input(outputs)``: it may
        decode them, or draw a sample. None: the outputs are the next inputs.

    Returns
    -------
    ndarray of shape (G, N, n_steps)
        What was fed back, for the steps after the last of ``x``.

    Raises
    ------
    ShapeError
        If what is fed back and ``known`` do not add up to the inputs.
    SpecError
        If there is no ``next_input``, and the outputs are scores, as the loss tells.

    Examples
    --------
    >>> from fluxutils_py import Estimator
    >>> x = np.sin(np.arange(41.0))[None, None].astype("float32")
    >>> est = Estimator(spec={"epochs": 1, "seqsize": 20}, random_state=0).fit(
    ...     x[:, :, :-1], x[:, :, 1:]
    ... )
    >>> rollout(est, x, 3).shape
    (1, 1, 3)

    Notes that sound together are drawn from their log-odds:

    >>> from torch import nn
    >>> notes = (np.random.default_rng(0).random((4, 2, 41)) < 0.3).astype("float32")
    >>> est = Estimator(loss=nn.BCEWithLogitsLoss(), spec={"epochs": 1, "seqsize": 20})
    >>> est = est.fit(notes[:, :, :-1], notes[:, :, 1:])
    >>> rng = np.random.default_rng(1)
    >>> rollout(
    ...     est, notes, 3, next_input=lambda z: rng.random(z.shape) < 1 / (1 + np.exp(-z))
    ... ).shape
    (4, 2, 3)
    """
    check_integer("n_steps", n_steps, 1, error=SpecError)
    settings = est.resolved_params()
    loss = as_loss(settings.loss)
    is_of_scores = isinstance(loss, SeqLoss) and loss.scores and not settings.is_classifier
    if next_input is None and is_of_scores:
        raise SpecError(
            f"the outputs of a model trained with {loss!r} are scores, not values of the next "
            "inputs: give next_input=, which makes inputs of them, such as lambda z: z > 0 for the "
            "log-odds of labels, or rng.random(z.shape) < 1 / (1 + np.exp(-z)) to draw them; for "
            "symbols, use generate"
        )
    stream, y = _read_past(est, x, "predict")
    return _feed_back(stream, y, n_steps, x, known, next_input or np.asarray)


def _feed_back(
    stream: EstimatorStream,
    outputs: np.ndarray,
    n_steps: int,
    x: Any,
    known: ArrayLike | None,
    next_input: Callable[[np.ndarray], ArrayLike],
) -> np.ndarray:
    """Return the inputs (G, N, n_steps) after ``x``, made from the outputs (G, N) at each step."""
    n_inputs, n_series = int(x.shape[0]), int(x.shape[1])
    # the last output is not fed back
    rest = np.empty((0, n_series, n_steps - 1)) if known is None else np.asarray(known)
    made = []
    for t in range(n_steps):
        new = np.asarray(next_input(outputs))
        if new.dtype.kind == "b":
            new = new.astype(outputs.dtype)
        made.append(new)
        if t == 0:
            n_made = len(new) if new.ndim else 0
            expected = (n_inputs - n_made, n_series, n_steps - 1)
            if new.shape != (n_made, n_series) or rest.shape != expected:
                raise ShapeError(
                    f"{n_made} outputs, of shape {new.shape}, are fed back to {n_inputs} inputs of "
                    f"{n_series} series: known must be the others at the steps that are generated, "
                    f"of shape {expected}, got {rest.shape}; or let next_input return fewer"
                )
        if t + 1 < n_steps:
            outputs = stream.step(np.concatenate([new, rest[:, :, t].astype(new.dtype)]))
    return np.stack(made, 2)


@undisturbed()
def generate(
    est: Estimator,
    x: ArrayLike,
    n_steps: int,
    *,
    temperature: float = 1.0,
    random_state: Any = None,
) -> np.ndarray:
    """Generate sequences of integers by sampling each next one from a model's scores.

    For several labels or values at each step, see :func:`rollout` with ``next_input``.

    Parameters
    ----------
    est : fitted Estimator or EstimatorClassifier
        Model that takes integers (1, N, T) and scores the next one: an Estimator with outputs (V,
        N, T) trained with cross-entropy, or a classifier with integer labels.
    x : array of int, shape (1, N, T)
        Beginnings of the sequences.
    n_steps : int
    temperature : float
        Divides the scores before sampling. 0: use the largest score.
    random_state : int, Generator, RandomState or None

    Returns
    -------
    ndarray of int, shape (1, N, n_steps)

    Raises
    ------
    ValueError
        If ``temperature`` is negative, or ``x`` does not hold integers of shape (1, N, T).
    """
    check_integer("n_steps", n_steps, 1, error=SpecError)
    if not temperature >= 0:
        raise ValueError(f"temperature must be 0 or more, got {temperature!r}")
    # integers are few: the beginnings need not be read in parts
    x = np.asarray(x)
    if x.dtype.kind not in "iu" or x.ndim != 3 or x.shape[0] != 1:
        raise DataError(
            f"x must be integers of shape (1, N, T), got {x.dtype} of shape {x.shape}; for several "
            "labels or values at each step, use rollout(est, x, n_steps, next_input=...)"
        )
    random = make_generator(random_state)
    labels = getattr(est, "classes_", None)  # of a classifier
    if labels is not None and labels.dtype.kind not in "iu":
        raise DataError(
            f"the labels of this classifier are {labels.dtype}, not inputs for it: fit on "
            "integers as x and y, such as np.unique(text, return_inverse=True)[1]"
        )
    method = "predict" if labels is None else "predict_log_proba"
    stream, scores = _read_past(est, x, method)

    def draw(scores: np.ndarray) -> np.ndarray:
        # Gumbel-max: the argmax of scores plus Gumbel noise is a sample from their softmax
        if temperature > 0:
            scores = scores / temperature + random.gumbel(size=scores.shape)
        drawn = scores.argmax(0)[None]
        return (drawn if labels is None else labels[drawn]).astype(x.dtype)

    return _feed_back(stream, scores, n_steps, x, None, draw)


def _read_past(
    est: Estimator,
    x: Any,
    method: str,
) -> tuple[EstimatorStream, np.ndarray]:
    """Return a stream that has read ``x``, and its output at the last step."""
    last = int(x.shape[2]) - 1
    state = None
    if last > 0:
        # windows are faster than the steps of a stream
        _, state = est.predict(x[:, :, :last], return_state=True)
    stream = est.stream(int(x.shape[1]), state, method=method)
    return stream, stream.step(np.asarray(x[:, :, last]))
