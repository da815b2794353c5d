"""Number of series per minibatch across ranks, as set by the spec or stored in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import SpecError
from fluxutils_py.estimator.estimator_settings import Settings
from fluxutils_py.estimator.spec import read_spec

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
        cls, settings: Settings, n_ranks: int, saved: Mapping[str, Any] | None = None
    ) -> MinibatchSize:
        """Return the size for the settings of an estimator; see :func:`whole_batchsize`.

        ``saved`` is the :meth:`state_dict` in the checkpoint that the fit continues from. With weak
        scaling and the same ``batchsize`` as then, the whole minibatch stays as it was, whatever
        the number of ranks.
        """
        batchsize = read_spec(settings.spec).batchsize
        whole = whole_batchsize(batchsize, settings.scaling, n_ranks)
        size = cls(settings.scaling, batchsize, n_ranks, whole)
        # with strong scaling, a minibatch has the same size on any number of ranks
        if saved is None or saved["whole"] == whole or settings.scaling == "strong":
            return size
        if (saved["scaling"], saved["batchsize"]) != (settings.scaling, batchsize):
            return size  # restoring the checkpoint of a different fit raises the error
        return cls(settings.scaling, batchsize, n_ranks, saved["whole"], resumed=True)

    def state_dict(self) -> dict[str, Any]:
        return {"scaling": self.scaling, "batchsize": self.batchsize, "whole": self.whole}

    def describe(self, rows: Segments, *, sharded: bool = False) -> str:
        """Return a line such as ``4 ranks train on minibatches of 32 series, 8 on each rank``.

        ``rows`` are those of an epoch: there may be fewer than a minibatch has. With ``sharded``,
        each rank has its own.
        """
        whole = min(self.whole, len(rows))  # a small data set makes one minibatch
        least, remainder = divmod(whole, self.n_ranks)
        each = f"{least} on each rank"
        if sharded:
            each = "each rank on its own"
        elif remainder:
            each = f"{least} or {least + 1} on each rank"
        quantity = f"all {whole}" if whole == len(rows) else str(whole)
        minibatches = f"{quantity} {'pieces of series' if rows.folds > 1 else 'series'}"
        why = f"batchsize={self.batchsize}, scaling={self.scaling!r}"
        if self.resumed:
            why += f", which continues with the {self.whole} of its checkpoint"
        if self.n_ranks == 1:
            return f"this process trains on minibatches of {minibatches} ({why})"
        return f"{self.n_ranks} ranks train on minibatches of {minibatches}, {each} ({why})"


def whole_batchsize(batchsize: int, scaling: object, n_ranks: int) -> int:
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
