"""Feed outputs of one-step models back as inputs, and generate sequences."""

from __future__ import annotations

from typing import Any

import numpy as np

from fluxutils_py.errors import DataError, ShapeError, SpecError
from fluxutils_py.estimator.building import make_generator
from fluxutils_py.estimator.estimator import Estimator
from fluxutils_py.estimator.streaming import EstimatorStream
from fluxutils_py.validation import check_integer


def rollout(est: Estimator, x: Any, n_steps: int, *, known: Any = None) -> np.ndarray:
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
    live, y = _warmed(est, x, "predict")
    n_outputs, n_series = y.shape
    n_inputs = int(x.shape[0])
    rest = np.empty((0, n_series, n_steps - 1)) if known is None else np.asarray(known)
    if rest.shape != (n_inputs - n_outputs, n_series, n_steps - 1):
        raise ShapeError(
            f"the model has {n_outputs} outputs and {n_inputs} inputs: known must be the other "
            "inputs at the steps that are generated, of shape "
            f"{(n_inputs - n_outputs, n_series, n_steps - 1)}, got {rest.shape}"
        )
    out = np.empty((n_outputs, n_series, n_steps), y.dtype)
    for t in range(n_steps):
        out[:, :, t] = y
        if t + 1 < n_steps:
            y = live.step(np.concatenate([y, rest[:, :, t].astype(y.dtype)]))
    return out


def generate(
    est: Estimator, x: Any, n_steps: int, *, temperature: float = 1.0, random_state: Any = None
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
        Divides the scores before sampling. 0 takes the largest score.
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
    x = np.asarray(x)
    if x.dtype.kind not in "iu" or x.ndim != 3 or x.shape[0] != 1:
        raise DataError(f"x must be integers of shape (1, N, T), got {x.dtype} of shape {x.shape}")
    random, labels = make_generator(random_state), getattr(est, "classes_", None)
    live, scores = _warmed(est, x, "predict" if labels is None else "predict_log_proba")
    out = np.empty((1, x.shape[1], n_steps), x.dtype)
    for t in range(n_steps):
        # Gumbel-max: the argmax of scores plus Gumbel noise is a sample from their softmax
        if temperature > 0:
            scores = scores / temperature + random.gumbel(size=scores.shape)
        drawn = scores.argmax(0)
        out[0, :, t] = drawn if labels is None else labels[drawn]
        if t + 1 < n_steps:
            scores = live.step(out[:, :, t])
    return out


def _warmed(est: Estimator, x: Any, method: str) -> tuple[EstimatorStream, np.ndarray]:
    """Return a stream that has read ``x``, and its output at the last step."""
    n_steps, state = int(x.shape[2]), None
    if n_steps > 1:
        _, state = est.predict(x[:, :, : n_steps - 1], return_state=True)
    live = est.stream(int(x.shape[1]), state, method=method)
    return live, live.step(np.asarray(x[:, :, n_steps - 1]))
