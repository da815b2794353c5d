"""What the arguments of a fit mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fluxutils_py.data import SeriesArray
from fluxutils_py.data.segments import Segments
from fluxutils_py.data.weights import block_slices
from fluxutils_py.estimator.spec import Spec
from fluxutils_py.estimator.targets import Targets
from fluxutils_py.nn.losses import SeqLoss, takes_weights
from fluxutils_py.training.hooks import Hooks

MIN_WINDOWS_PER_FOLD = 8  # windows that a piece of a series holds at least, for its state to mean something
FLOATS = {"float16": torch.float32, "float32": torch.float32, "bool": torch.float32, "float64": torch.float64}


def count_classes(y: SeriesArray) -> int:
    """One more than the largest label."""
    largest = max(int(np.asarray(y.array[:, n, t]).max()) for n, t in block_slices(y.N, y.T, y.F))
    return largest + 1


def float_dtype(arrays: tuple[SeriesArray, ...]) -> torch.dtype | None:
    """The floating type that a model should have for these data; None (its own) if all are integers."""
    found = [FLOATS.get(a.dtype.newbyteorder("=").name, torch.float64) for a in arrays if a.kind == "float"]
    return None if not found else torch.float64 if torch.float64 in found else torch.float32


def folded(rows: Segments, spec: Spec, batchsize: int) -> Segments:
    """The rows, cut into pieces as ``spec.rebatch`` says, for minibatches of so many (of all ranks)."""
    if spec.rebatch != "auto":
        return rows.fold(batchsize)
    if spec.seqsize is None:
        return rows
    return rows.fold(batchsize, max(MIN_WINDOWS_PER_FOLD * int(spec.seqsize), int(spec.burn_in) + 1))


def as_callbacks(callbacks: Any) -> list[Any]:
    """The list of callbacks that an estimator's argument means; each is checked to be one."""
    if callbacks is None:
        return []
    found = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    for callback in found:
        Hooks().attach(callback)
    return found


def supports_output_masks(loss: Any, targets: Targets) -> bool:
    """Whether a loss can do without single outputs of a step; of probabilities of classes, it needs all."""
    if not isinstance(loss, SeqLoss):
        return takes_weights(loss)
    return all(s.F == 1 for s in targets.series) if loss.classes else loss.elementwise


def takes_no_weights_message(loss: Any) -> str:
    """Why a loss cannot weigh or mask, and what to do."""
    name = getattr(loss, "__name__", repr(loss))
    return f"the loss {name} takes no weights: give it a fourth argument, loss(model, xs, ys, ws), or use seqloss"
