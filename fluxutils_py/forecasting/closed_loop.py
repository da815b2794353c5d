"""Feed outputs of one-step models back as inputs, and generate sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fluxutils_py.errors import DataError, ShapeError, SpecError
from fluxutils_py.estimator import Estimator
from fluxutils_py.estimator.building import make_generator
from fluxutils_py.estimator.streaming import EstimatorStream
from fluxutils_py.forecasting.panel_windows import ArrayFNT
from fluxutils_py.validation import check_integer


def rollout(
    est: Estimator,
    x: ArrayFNT,
    n_steps: int,
    *,
    known: ArrayLike | None = None,
) -> np.ndarray:
    """Forecast many steps with a one-step model, by feeding its outputs back as inputs.

    Parameters
    ----------
    est : fitted Estimator
        Model trained to predict the next values of the first G input features.
    x : array of shape (F, N, T)
        The past; sets the state of the model.
    n_steps : int
    known : array of shape (F - G, N, n_steps - 1), optional
        The other features at the generated steps. Required if F > G.

    Returns
    -------
    ndarray of shape (G, N, n_steps)
        Outputs for the steps after the last of ``x``.

    Raises
    ------
    ShapeError
        If the outputs and ``known`` do not add up to the inputs.

    Examples
    --------
    >>> from fluxutils_py import Estimator
    >>> x = np.sin(np.arange(41.0))[None, None].astype("float32")
    >>> est = Estimator(spec={"epochs": 1, "seqsize": 20}, random_state=0).fit(
    ...     x[:, :, :-1], x[:, :, 1:]
    ... )
    >>> rollout(est, x, 3).shape
    (1, 1, 3)
    """
    check_integer("n_steps", n_steps, 1, error=SpecError)
    stream, y = _read_past(est, x, "predict")
    n_outputs, n_series = y.shape
    n_inputs = int(x.shape[0])
    # the last output is not fed back
    rest = np.empty((0, n_series, n_steps - 1)) if known is None else np.asarray(known)
    expected = (n_inputs - n_outputs, n_series, n_steps - 1)
    if rest.shape != expected:
        raise ShapeError(
            f"the model has {n_outputs} outputs and {n_inputs} inputs: known must be the other "
            f"inputs at the steps that are generated, of shape {expected}, got {rest.shape}"
        )
    out = np.empty((n_outputs, n_series, n_steps), y.dtype)
    for t in range(n_steps):
        out[:, :, t] = y
        if t + 1 < n_steps:
            y = stream.step(np.concatenate([y, rest[:, :, t].astype(y.dtype)]))
    return out


def generate(
    est: Estimator,
    x: ArrayLike,
    n_steps: int,
    *,
    temperature: float = 1.0,
    random_state: Any = None,
) -> np.ndarray:
    """Generate sequences of integers by sampling each next one from a model's scores.

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
        raise DataError(f"x must be integers of shape (1, N, T), got {x.dtype} of shape {x.shape}")
    random = make_generator(random_state)
    labels = getattr(est, "classes_", None)  # of a classifier
    method = "predict" if labels is None else "predict_log_proba"
    stream, scores = _read_past(est, x, method)
    out = np.empty((1, x.shape[1], n_steps), x.dtype)
    for t in range(n_steps):
        # Gumbel-max: the argmax of scores plus Gumbel noise is a sample from their softmax
        if temperature > 0:
            scores = scores / temperature + random.gumbel(size=scores.shape)
        drawn = scores.argmax(0)
        out[0, :, t] = drawn if labels is None else labels[drawn]
        if t + 1 < n_steps:
            scores = stream.step(out[:, :, t])
    return out


def _read_past(
    est: Estimator,
    x: ArrayFNT,
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
