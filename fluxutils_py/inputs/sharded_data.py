"""Read data of which each rank has its own series, and let the ranks agree on their form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from fluxutils_py.data import SampleWeight, SeriesArray, samples
from fluxutils_py.data.segments import SeriesShards
from fluxutils_py.errors import DataError, RankError
from fluxutils_py.inputs.inputs import Inputs, Schema, read_inputs, read_weight
from fluxutils_py.inputs.labels import unique_labels
from fluxutils_py.inputs.targets import (
    SeriesReader,
    Targets,
    last_step_targets,
    read_targets,
)
from fluxutils_py.parallel import RankGroup
from fluxutils_py.parallel.communicator import describe_by_rank

Form = TypeVar("Form", bound="_Form")


@dataclass(frozen=True)
class ShardedReader(SeriesReader):
    """Reads the series of ranks that each have their own.

    With ``sharded=True``, each rank reads its own series, and the ranks exchange what depends on
    all series: sizes, labels, sums. A rank without series gets stand-ins: one series of zeros, of
    length 0, in the form that the other ranks have.

    Attributes
    ----------
    ranks : RankGroup
    """

    ranks: RankGroup

    def inputs(self, x: object, schema: Schema, *, name: str = "x", **bounds: Any) -> Inputs:
        """Read this rank's inputs, see :func:`read_inputs`, and number the series of all ranks.

        Raises
        ------
        ShapeError, DataError, ValueError
            If inputs do not fit.
        RankError
            If ranks have inputs of different kinds; names the ranks.
        """
        inputs = None
        if not is_empty(x):
            inputs = read_inputs(x, schema, name=name, **bounds)
            if inputs.form not in ("native", "samples"):
                raise ValueError(
                    f"sharded=True divides series over ranks: give {name} as an array (F, N, T), "
                    "as a list of series (F, T_i), or as samples(x) of one"
                )
        form = self._agree_on(None if inputs is None else _InputForm.of(inputs), name)
        if inputs is None:
            inputs = form.stand_in(schema, name)
        rows = inputs.local_series()
        # the series of a stand-in has no steps and is not counted
        rows_of_ranks = self.ranks.allgather(rows[rows.length > 0])
        return replace(inputs, shards=SeriesShards.of(rows_of_ranks, self.ranks.rank))

    def weight(
        self, sample_weight: object, inputs: Inputs, *, beside_lengths: bool = False
    ) -> SampleWeight | None:
        """Read the weights of this rank's series, see :func:`read_weight`; either all ranks have
        weights, or none.
        """
        if inputs.is_stand_in:
            form: _Form = self._agree_on(None, "sample_weight")
            # its value does not matter: the series has no steps
            return SampleWeight(np.ones(1), 1, inputs.T) if form == _WEIGHTS else None
        weight = read_weight(sample_weight, inputs, beside_lengths=beside_lengths)
        self._agree_on(_NO_WEIGHTS if weight is None else _WEIGHTS, "sample_weight")
        return weight

    def targets(self, y: object, inputs: Inputs, schema: Schema) -> Targets:
        """Read the targets of this rank's series, see :func:`read_targets`."""
        if inputs.is_stand_in:
            form: _TargetForm = self._agree_on(None, schema.target_name)
            return form.stand_in(inputs.T, schema.target_name)
        targets = read_targets(y, inputs, schema)
        self._agree_on(_TargetForm.of(targets), schema.target_name)
        return targets

    def classes(
        self, find: Callable[[], tuple[np.ndarray, int]], inputs: Inputs
    ) -> tuple[np.ndarray, int]:
        found = self.ranks.allgather((np.empty(0), 0) if inputs.is_stand_in else find())
        of_ranks = [classes for classes, _ in found]
        # an empty array of numbers would turn labels into texts
        with_labels = [classes for classes in of_ranks if len(classes)] or of_ranks[:1]
        return unique_labels(np.concatenate(with_labels)), sum(n for _, n in found)

    def gather(self, value: Any) -> list[Any]:
        return self.ranks.allgather(value)

    def add_up(self, t: Tensor) -> Tensor:
        """Add up large tensors of all ranks, in place."""
        self.ranks.allgather()  # errors of ranks first: the sum carries none
        self.ranks.call_comm(self.ranks.comm.allreduce_, t)
        return t

    def require_equal(self, values: Mapping[str, Any]) -> None:
        self.ranks.require_equal(values)

    def _agree_on(
        self,
        form: Form | None,
        name: str,
    ) -> Form:
        """Return the form that the data of all ranks have; None stands for a rank without series,
        which uses that of the others.

        Raises
        ------
        DataError, RankError
            On every rank, if no rank has series, or the forms differ.
        """
        forms = self.ranks.allgather(form)
        first: Form | None = next((f for f in forms if f is not None), None)
        if first is None:
            self.ranks.raise_on_all(
                DataError(f"no rank has any series: {name} is None, or without series, everywhere")
            )
        # a rank without series agrees with any other
        facts_of_ranks = [first.facts if f is None else f.facts for f in forms]
        for fact in first.facts:
            values = [facts[fact] for facts in facts_of_ranks]
            if len(set(values)) > 1:
                self.ranks.raise_on_all(
                    RankError(
                        f"ranks disagree about {fact} of {name}: {describe_by_rank(values)}; with "
                        "sharded=True, every rank has separate series, of the same features and "
                        "types"
                    )
                )
        return first


def is_empty(x: object) -> bool:
    """Whether a rank has no series: None, an array (F, 0, T), an empty list, or a tuple of them."""
    if isinstance(x, tuple):
        return len(x) > 0 and all(is_empty(a) for a in x)
    if x is None or (isinstance(x, list) and not x):
        return True
    shape = getattr(x, "shape", None)
    return shape is not None and len(shape) == 3 and shape[1] == 0


class _ArrayForm(NamedTuple):
    n_features: int
    dtype: np.dtype

    @classmethod
    def of(cls, series: SeriesArray) -> _ArrayForm:
        # in the byte order of the machine, which ranks need not share
        return cls(series.F, series.dtype.newbyteorder("="))


def _describe_arrays(arrays: Iterable[_ArrayForm]) -> dict[str, str]:
    return {
        "the features": ", ".join(str(a.n_features) for a in arrays),
        "the dtype": ", ".join(str(a.dtype) for a in arrays),
    }


@dataclass(frozen=True)
class _Form:
    """What data of all ranks have in common; ``facts`` names it for messages."""

    facts: Mapping[str, str]


_WEIGHTS = _Form({"the presence": "given"})
_NO_WEIGHTS = _Form({"the presence": "not given"})


@dataclass(frozen=True)
class _InputForm(_Form):
    form: str
    is_list: bool
    arrays: tuple[_ArrayForm, ...]
    names: tuple[str, ...] | None

    @classmethod
    def of(cls, inputs: Inputs) -> _InputForm:
        arrays = tuple(map(_ArrayForm.of, inputs.series))
        # plain texts, which any communicator can send
        names = None if inputs.names is None else tuple(map(str, inputs.names))
        form = "samples(x)" if inputs.form == "samples" else "an array"
        facts = {
            "the form": "a list of series" if inputs.is_list else form,
            **_describe_arrays(arrays),
            "the names of features": "none" if names is None else ", ".join(names),
        }
        return cls(facts, inputs.form, inputs.is_list, arrays, names)

    def stand_in(
        self,
        schema: Schema,
        name: str,
    ) -> Inputs:
        """Return inputs of this form of one series, of zeros and length 0."""
        arrays = [np.zeros((a.n_features, 1, 1), a.dtype) for a in self.arrays]
        x: list[Any] = [[a[:, 0]] for a in arrays] if self.is_list else arrays
        if self.form == "samples":
            x = [samples(a) for a in x]
        # of one step: its columns are not those of a fit on a matrix or a view
        schema = replace(schema, fitted=None)
        inputs = read_inputs(tuple(x) if len(x) > 1 else x[0], schema, name=name)
        names = None if self.names is None else np.array(self.names, dtype=object)
        return replace(inputs, names=names, lengths=np.zeros(1, int))


@dataclass(frozen=True)
class _TargetForm(_Form):
    arrays: tuple[_ArrayForm, ...]
    per_series: bool
    ndim: int

    @classmethod
    def of(cls, targets: Targets) -> _TargetForm:
        arrays = tuple(map(_ArrayForm.of, targets.series))
        facts = {
            "the meaning": f"one target per {'series' if targets.per_series else 'step'}",
            **_describe_arrays(arrays),
            "the number of axes": str(targets.ndim),
        }
        return cls(facts, arrays, targets.per_series, targets.ndim)

    def stand_in(
        self,
        n_steps: int,
        name: str,
    ) -> Targets:
        """Return targets of this form for one series."""
        arrays: list[Any]
        if self.per_series:
            ((n, dtype),) = self.arrays  # a matrix or a vector, so that there is just one
            arrays = [last_step_targets(np.zeros((1, n), dtype), n_steps, np.zeros(1, int))]
        else:
            arrays = [np.zeros((n, 1, n_steps), dtype) for n, dtype in self.arrays]
        return Targets(tuple(SeriesArray(a, name) for a in arrays), self.per_series, self.ndim)


def sharded_reader(ranks: RankGroup) -> SeriesReader:
    """Return what reads the series of a call with ``sharded=True``."""
    return SeriesReader() if ranks.is_single else ShardedReader(ranks)
