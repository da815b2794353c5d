"""Compare fits and inputs between ranks, gather predictions, and choose devices."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fluxutils_py.data.digest import digest_arrays
from fluxutils_py.data.parts import array_split_slice
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import RankError, SpecError
from fluxutils_py.estimator.estimator_settings import Settings, as_callbacks
from fluxutils_py.estimator.fingerprint import sample_digests, shared_identity
from fluxutils_py.estimator.spec import read_spec
from fluxutils_py.parallel import RankGroup
from fluxutils_py.parallel.launcher import local_rank
from fluxutils_py.training.hooks import Hooks
from fluxutils_py.versions import installed_version

SCALINGS = ("weak", "strong")


@dataclass(frozen=True)
class MinibatchSize:
    """The number of series in a minibatch over all ranks, and where it comes from.

    Attributes
    ----------
    scaling : {"weak", "strong"}
        Whether ``batchsize`` is the size of a rank's share or of the whole.
    batchsize : int
        As in the spec.
    n_ranks : int
    whole : int
    resumed : bool
        Whether ``whole`` is that of a checkpoint, made by another number of ranks.
    """

    scaling: str
    batchsize: int
    n_ranks: int
    whole: int
    resumed: bool = False

    @classmethod
    def of(
        cls, settings: Any, n_ranks: int, saved: Mapping[str, Any] | None = None
    ) -> MinibatchSize:
        """Return the size for the settings of an estimator; see :func:`whole_batchsize`.

        ``saved`` is the :meth:`state_dict` in the checkpoint that the fit goes on from. With weak
        scaling and the same ``batchsize`` as then, the whole minibatch stays as it was, whatever
        the number of ranks.
        """
        batchsize = int(read_spec(settings.spec).batchsize)
        whole = whole_batchsize(batchsize, settings.scaling, n_ranks)
        size = cls(settings.scaling, batchsize, n_ranks, whole)
        if saved is None or saved["whole"] == whole or settings.scaling == "strong":
            return size
        if (saved["scaling"], saved["batchsize"]) != (settings.scaling, batchsize):
            return size  # another fit, which the checkpoint refuses
        return cls(settings.scaling, batchsize, n_ranks, saved["whole"], resumed=True)

    def state_dict(self) -> dict[str, Any]:
        return {"scaling": self.scaling, "batchsize": self.batchsize, "whole": self.whole}

    def describe(self, rows: Segments, *, sharded: bool = False) -> str:
        """Return a line for the user, such as ``4 ranks train on minibatches of 32 series, 8 on
        each rank (...)``.

        ``rows`` are those of an epoch, of which there may be fewer; with ``sharded``, ranks have
        their own.
        """
        whole = min(self.whole, len(rows))
        least, more = divmod(whole, self.n_ranks)
        each = f"{least} or {least + 1} on each rank" if more else f"{least} on each rank"
        if sharded:
            each = "each rank on its own"
        minibatches = (
            f"{'all ' * (whole == len(rows))}{whole} {'pieces of ' * (rows.folds > 1)}series"
        )
        why = f"batchsize={self.batchsize}, scaling={self.scaling!r}"
        if self.resumed:
            why += f", which goes on with the {self.whole} of its checkpoint"
        if self.n_ranks == 1:
            return f"this process trains on minibatches of {minibatches} ({why})"
        return f"{self.n_ranks} ranks train on minibatches of {minibatches}, {each} ({why})"


def whole_batchsize(batchsize: int, scaling: Any, n_ranks: int) -> int:
    """Return the number of series in a minibatch over all ranks.

    Raises
    ------
    SpecError
        If ``scaling`` is neither ``"weak"`` nor ``"strong"``.
    """
    if scaling not in SCALINGS:
        raise SpecError(
            "scaling must be 'weak' (batchsize counts the series on each rank) or 'strong' (in "
            f"the whole minibatch), got {scaling!r}"
        )
    return batchsize * n_ranks if scaling == "weak" else batchsize


OF_DATA = ("the shape of", "the dtype of", "the starts")
CHUNK = 1 << 23  # largest number of values in a message


def require_same_fit(training: Any) -> None:
    """Raise on every rank unless all have the same fit; then copy the model of rank 0 to all ranks.

    Compares the model, optimizer, spec, versions, and the sizes and a sample of the data.

    Raises
    ------
    RankError
        If they differ; names the first difference, with the value of each rank.
    """
    ranks, data, model = training.loop.ranks, training.data, training.step.model
    if ranks.is_single:
        return
    texts = shared_identity(training)
    of_data = {
        name: text for name, text in texts.items() if name.startswith(OF_DATA)
    } | sample_digests(data)
    try:
        ranks.require_equal(of_data)
    except RankError as error:
        if ranks.call != "fit":  # of a forecaster, which needs all series
            raise
        raise RankError(
            f"{error}. If each rank is to train on series of its own, call {ranks.call}(..., "
            "sharded=True)"
        ) from None
    ranks.require_equal(
        {
            **{
                f"the version of {name}": installed_version(name)
                for name in ("fluxutils_py", "torch")
            },
            "the epochs so far": training.loop.epoch,
            "scaling": data.settings.scaling,
            **texts,
            "the scale of the targets": str(data.codec.scale),
            "hooks that all ranks need": [
                data.validation is not None,
                training.scheduler is not None,
            ],
        }
    )
    ranks.broadcast(list(model.parameters()) + list(model.buffers()))
    n = min(len(data.windows.segments), training.size.whole)
    if n < ranks.size and ranks.rank == 0:
        warnings.warn(
            f"{ranks.size} ranks share {n} series: some have nothing to do",
            UserWarning,
            stacklevel=4,
        )


def course_of_fit(settings: Settings, resume: bool, epochs: int | None) -> dict[str, Any]:
    """Return what decides which collectives a fit makes, beside what the fits themselves compare
    later.
    """
    hooks = Hooks()
    for callback in as_callbacks(settings.callbacks):
        hooks.attach(callback)
    spec = read_spec(settings.spec)
    return {
        "whether the fit goes on with the model of an earlier one": resume,
        "epochs": spec.epochs if epochs is None else epochs,
        "early_stopping": settings.early_stopping,
        "patience": spec.patience,
        "scaling": settings.scaling,
        **hooks.describe_collective(),
    }


def require_same_inputs(ranks: RankGroup, inputs: Any) -> None:
    """Raise on every rank unless the inputs of all ranks have equal sizes."""
    ranks.require_equal(
        {f"the shape of {s.name}": (s.F, s.N, s.T) for s in inputs.series}
        | {"the form of x": inputs.form}
        | {
            "the starts and lengths": digest_arrays(
                *(a for a in (inputs.starts, inputs.lengths) if a is not None)
            )
        }
    )


def gather_rows(values: np.ndarray | None, ranks: RankGroup) -> np.ndarray:
    """Gather an array, of whose rows each rank has filled its part, on every rank.

    A rank without rows may pass None; it then takes shape and dtype from rank 0.
    """
    shape, dtype = ranks.allgather(None if values is None else (values.shape, values.dtype))[0]
    values = np.zeros(shape, dtype) if values is None else values
    gather_parts(values, 0, ranks)
    return values


def gather_parts(target: Any, axis: int, ranks: RankGroup) -> None:
    """Fill the array on every rank from the ranks' parts along ``axis``, which must not be the last
    axis.
    """
    for root in range(ranks.size) if not ranks.is_single else ():
        where = [slice(None)] * len(target.shape)
        where[axis] = array_split_slice(target.shape[axis], ranks.size, root)
        n_values = (
            math.prod(target.shape[:-1])
            * (where[axis].stop - where[axis].start)
            // max(1, target.shape[axis])
        )
        step = max(1, CHUNK // max(1, n_values))
        for start in range(0, target.shape[-1], step):
            where[-1] = slice(start, start + step)
            part = np.ascontiguousarray(target[tuple(where)])
            if part.dtype.kind == "O":
                part = ranks.comm.allgather(part if ranks.rank == root else None)[root]
            elif part.size:
                ranks.comm.broadcast_(torch.from_numpy(part.reshape(-1).view(np.uint8)), root)
            if ranks.rank != root:
                target[tuple(where)] = part


def memmap_location(target: Any) -> tuple[Any, ...] | None:
    """Return the file and position that an array maps, to detect ranks that write to the same file;
    else None.
    """
    if not isinstance(target, np.memmap) or target.filename is None or target.mode == "c":
        return None
    return os.path.realpath(target.filename), target.offset, target.shape, target.strides


def device_of_rank(device: Any, ranks: RankGroup) -> Any:
    """Return the device of this rank; ``device="cuda"`` distributes the GPUs of a machine over its
    ranks.
    """
    if ranks.is_single or device is None or str(device) != "cuda" or torch.cuda.device_count() < 2:
        return device
    return f"cuda:{local_rank() % torch.cuda.device_count()}"
