"""Read data of which each rank has its own series, and let the ranks agree on what they have in
common.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from fluxutils_py.data import SampleWeight, SeriesArray, samples
from fluxutils_py.data.segments import SeriesShards
from fluxutils_py.errors import DataError, RankError
from fluxutils_py.inputs.inputs import Inputs, InputSchema, read_inputs, read_weight
from fluxutils_py.inputs.labels import check_classes, unique_labels
from fluxutils_py.inputs.moments import merge_moments
from fluxutils_py.inputs.targets import LastStepTargets, Targets, TargetSchema, read_targets
from fluxutils_py.parallel import RankGroup
from fluxutils_py.parallel.communicator import describe_by_rank


@dataclass(frozen=True)
class SeriesPool:
    """The ranks whose series make up the data of a call: all that have series of their own, or this
    process alone.

    With ``sharded=True``, each rank reads its own series, and the ranks exchange what depends on
    all series: sizes, labels, sums. A rank without series gets stand-ins: one series of zeros, of
    length 0, in the form that the other ranks have. For one process, every method is the plain
    reading.

    Attributes
    ----------
    ranks : RankGroup
    """

    ranks: RankGroup

    def inputs(
        self,
        x: Any,
        schema: InputSchema,
        *,
        name: str = "x",
        starts: Any = None,
        lengths: Any = None,
    ) -> Inputs:
        """Read this rank's inputs, see :func:`read_inputs`, and number the series of all ranks.

        Raises
        ------
        ShapeError, DataError, ValueError
            If inputs do not fit.
        RankError
            If ranks have inputs of different kinds; names the ranks.
        """
        if self.ranks.is_single:
            return read_inputs(x, schema, name=name, starts=starts, lengths=lengths)
        own = (
            None
            if is_empty(x)
            else read_inputs(x, schema, name=name, starts=starts, lengths=lengths)
        )
        if own is not None and own.form not in ("native", "samples"):
            raise ValueError(
                f"sharded=True divides series over ranks: give {name} as an array (F, N, T), as a "
                "list of series (F, T_i), or as samples(x) of one"
            )
        form = self._agree_on(None if own is None else _InputForm.of(own), name)
        if own is None:
            own = form.stand_in(schema, name)
        rows = own.whole()
        whole = self.ranks.allgather(rows[rows.length > 0])
        return replace(own, shards=SeriesShards.of(whole, self.ranks.rank))

    def weight(self, sample_weight: Any, inputs: Inputs) -> SampleWeight | None:
        """Read the weights of this rank's series, see :func:`read_weight`; either all ranks have
        weights, or none.
        """
        if self.ranks.is_single:
            return read_weight(sample_weight, inputs)
        empty = inputs.is_stand_in
        weight = None if empty else read_weight(sample_weight, inputs)
        given = self._agree_on(None if empty else _Given(weight is not None), "sample_weight")
        return SampleWeight(np.ones(1), 1, inputs.T) if empty and given.is_given else weight

    def targets(self, y: Any, inputs: Inputs, schema: TargetSchema) -> Targets:
        """Read the targets of this rank's series, see :func:`read_targets`."""
        if self.ranks.is_single:
            return read_targets(y, inputs, schema)
        own = None if inputs.is_stand_in else read_targets(y, inputs, schema)
        form = self._agree_on(None if own is None else _TargetForm.of(own), schema.name)
        return form.stand_in(inputs.T, schema.name) if own is None else own

    def classes(self, find: Callable[[], np.ndarray], inputs: Inputs) -> np.ndarray:
        """Return the classes of all ranks, sorted; ``find()`` returns those of this rank, of which
        there may be none.

        Raises
        ------
        DataError, ValueError
            If there are none, or they are no labels.
        """
        found = self.ranks.allgather(np.empty(0) if inputs.is_stand_in else find())
        return check_classes(
            unique_labels(np.concatenate([c for c in found if len(c)] or found[:1]))
        )

    # -- sums over all series --------------------------------------------------------------------------

    def total(self, values: Any) -> Any:
        """Add up arrays or numbers of all ranks."""
        return values if self.ranks.is_single else sum(self.ranks.allgather(values))

    def add_up(self, t: Tensor) -> Tensor:
        """Add up large tensors of all ranks, in place."""
        if not self.ranks.is_single:
            self.ranks.allgather()
            self.ranks.call_comm(self.ranks.comm.allreduce_, t)
        return t

    def moments(self, counts: Any, mean: Any, squares: Any) -> tuple[Any, Any, Any]:
        """Merge the numbers, means and squares of all ranks, see :func:`merge_moments`."""
        first, *others = self.ranks.allgather((counts, mean, squares))
        for other in others:
            first = merge_moments(*first, *other)
        return first

    def _agree_on(self, own: Any, name: str) -> Any:
        """Return what the ranks have in common; None stands for a rank without series, which takes
        what others have.
        """
        forms = self.ranks.allgather(own)
        first = next((form for form in forms if form is not None), None)
        if first is None:
            self.ranks.raise_on_all(
                DataError(f"no rank has any series: {name} is None, or without series, everywhere")
            )
        of_ranks = [first.texts() if form is None else form.texts() for form in forms]
        for what in first.texts():
            values = [texts[what] for texts in of_ranks]
            if len(set(values)) > 1:
                self.ranks.raise_on_all(
                    RankError(
                        f"ranks disagree about {what} of {name}: {describe_by_rank(values)}; with "
                        "sharded=True, every rank has series of its own, of the same features and "
                        "types"
                    )
                )
        return first


def is_empty(x: Any) -> bool:
    """Whether a rank has no series: None, an array (F, 0, T), an empty list, or a tuple of them."""
    if isinstance(x, tuple):
        return len(x) > 0 and all(is_empty(a) for a in x)
    shape = getattr(x, "shape", None)
    return (
        x is None
        or (isinstance(x, list) and not x)
        or (shape is not None and len(shape) == 3 and shape[1] == 0)
    )


@dataclass(frozen=True)
class _InputForm:
    """What inputs of all ranks have in common."""

    form: str
    is_tuple: bool
    is_list: bool
    arrays: tuple[tuple[int, np.dtype], ...]  # features and type
    columns: Any
    names: tuple[str, ...] | None

    @classmethod
    def of(cls, inputs: Inputs) -> _InputForm:
        arrays = tuple((s.F, s.dtype.newbyteorder("=")) for s in inputs.series)
        names = None if inputs.names is None else tuple(map(str, inputs.names))
        columns = (
            None if inputs.form == "samples" else inputs.columns
        )  # those of samples(x) grow with T
        return cls(inputs.form, len(arrays) > 1, inputs.is_list, arrays, columns, names)

    def texts(self) -> Mapping[str, str]:
        return {
            "the form": "a list of series"
            if self.is_list
            else "samples(x)"
            if self.form == "samples"
            else "an array",
            "the features": ", ".join(str(n) for n, _ in self.arrays),
            "the dtype": ", ".join(str(d) for _, d in self.arrays),
            "the names of features": "none" if self.names is None else ", ".join(self.names),
        }

    def stand_in(self, schema: InputSchema, name: str) -> Inputs:
        arrays = tuple(np.zeros((n, 1, 1), dtype) for n, dtype in self.arrays)
        x: Any = [[a[:, 0]] for a in arrays] if self.is_list else list(arrays)
        if self.form == "samples":
            x = [samples(a) for a in x]
        inputs = read_inputs(
            tuple(x) if self.is_tuple else x[0], replace(schema, fitted=None), name=name
        )
        names = None if self.names is None else np.array(self.names, dtype=object)
        return replace(inputs, names=names, lengths=np.zeros(1, int))


@dataclass(frozen=True)
class _TargetForm:
    """What targets of all ranks have in common."""

    arrays: tuple[tuple[int, np.dtype], ...]
    per_series: bool
    ndim: int

    @classmethod
    def of(cls, targets: Targets) -> _TargetForm:
        arrays = tuple((s.F, s.dtype.newbyteorder("=")) for s in targets.series)
        return cls(arrays, targets.per_series, targets.ndim)

    def texts(self) -> Mapping[str, str]:
        return {
            "the meaning": f"one target per {'series' if self.per_series else 'step'}",
            "the features": ", ".join(str(n) for n, _ in self.arrays),
            "the dtype": ", ".join(str(d) for _, d in self.arrays),
            "the number of axes": str(self.ndim),
        }

    def stand_in(self, n_steps: int, name: str) -> Targets:
        zeros: list[Any] = [np.zeros((n, 1, n_steps), dtype) for n, dtype in self.arrays]
        if self.per_series:
            ((n, dtype),) = self.arrays
            zeros = [LastStepTargets(np.zeros((1, n), dtype), n_steps, np.zeros(1, int))]
        return Targets(tuple(SeriesArray(a, name) for a in zeros), self.per_series, self.ndim)


@dataclass(frozen=True)
class _Given:
    is_given: bool

    def texts(self) -> Mapping[str, str]:
        return {"the presence": "given" if self.is_given else "not given"}


def ranks_of_call(comm: Any, call: str, sharded: bool) -> RankGroup:
    """Return the ranks for a ``comm`` argument; those of a call with ``sharded=True`` reject calls
    without it.
    """
    if not isinstance(sharded, bool | np.bool_):
        raise TypeError(
            f"sharded must be True (each rank has its own series) or False, got {sharded!r}"
        )
    return RankGroup.from_comm(comm, f"{call}(sharded=True)" if sharded else call)
