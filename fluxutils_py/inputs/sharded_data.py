"""Read data of which each rank has its own series, and let the ranks agree on their form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

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

Arrays = list[tuple[int, np.dtype]]  # numbers of features, and types
# What data of all ranks have in common: facts for messages, and arguments of what makes a stand-in.
Form = tuple[Mapping[str, str], tuple[Any, ...]]


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
        inputs = form = None
        if not is_empty(x):
            inputs = read_inputs(x, schema, name=name, **bounds)
            if inputs.form not in ("native", "samples"):
                raise ValueError(
                    f"sharded=True divides series over ranks: give {name} as an array (F, N, T), "
                    "as a list of series (F, T_i), or as samples(x) of one"
                )
            facts, arrays = _describe_arrays(inputs.series)
            # plain texts, which any communicator can send
            names = None if inputs.names is None else tuple(map(str, inputs.names))
            kind = "samples(x)" if inputs.form == "samples" else "an array"
            facts = {
                "the form": "a list of series" if inputs.is_list else kind,
                **facts,
                "the names of features": "none" if names is None else ", ".join(names),
            }
            form = facts, (inputs.form, inputs.is_list, arrays, names)
        agreed = self._agree_on(form, name)
        if inputs is None:
            inputs = _stand_in(schema, name, *agreed)
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
            (is_given,) = self._agree_on(None, "sample_weight")
            # its value does not matter: the series has no steps
            return SampleWeight(np.ones(1), 1, inputs.T) if is_given else None
        weight = read_weight(sample_weight, inputs, beside_lengths=beside_lengths)
        is_given = weight is not None
        fact = {"the presence": "given" if is_given else "not given"}
        self._agree_on((fact, (is_given,)), "sample_weight")
        return weight

    def targets(self, y: object, inputs: Inputs, schema: Schema) -> Targets:
        """Read the targets of this rank's series, see :func:`read_targets`."""
        if inputs.is_stand_in:
            arrays, per_series, ndim = self._agree_on(None, schema.target_name)
            stand_ins: list[Any] = [np.zeros((n, 1, inputs.T), dtype) for n, dtype in arrays]
            if per_series:
                ((n, dtype),) = arrays  # a matrix or a vector, so that there is just one
                last = np.zeros(1, int)
                stand_ins = [last_step_targets(np.zeros((1, n), dtype), inputs.T, last)]
            series = tuple(SeriesArray(a, schema.target_name) for a in stand_ins)
            return Targets(series, per_series, ndim)
        targets = read_targets(y, inputs, schema)
        facts, arrays = _describe_arrays(targets.series)
        facts = {
            "the meaning": f"one target per {'series' if targets.per_series else 'step'}",
            **facts,
            "the number of axes": str(targets.ndim),
        }
        self._agree_on((facts, (arrays, targets.per_series, targets.ndim)), schema.target_name)
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

    def _agree_on(self, form: Form | None, name: str) -> tuple[Any, ...]:
        """Return of the form that the data of all ranks have what makes a stand-in; None is that of
        a rank without series.

        Raises
        ------
        DataError, RankError
            On every rank, if no rank has series, or the forms differ.
        """
        forms = self.ranks.allgather(form)
        known: list[Form] = [f for f in forms if f is not None]
        if not known:
            self.ranks.raise_on_all(
                DataError(f"no rank has any series: {name} is None, or without series, everywhere")
            )
        facts, content = known[0]
        for fact in facts:
            # a rank without series agrees with any other
            values = [(f or known[0])[0][fact] for f in forms]
            if len(set(values)) > 1:
                self.ranks.raise_on_all(
                    RankError(
                        f"ranks disagree about {fact} of {name}: {describe_by_rank(values)}; with "
                        "sharded=True, every rank has separate series, of the same features and "
                        "types"
                    )
                )
        return content


def is_empty(x: object) -> bool:
    """Whether a rank has no series: None, an array (F, 0, T), an empty list, or a tuple of them."""
    if isinstance(x, tuple):
        return len(x) > 0 and all(is_empty(a) for a in x)
    if x is None or (isinstance(x, list) and not x):
        return True
    shape = getattr(x, "shape", None)
    return shape is not None and len(shape) == 3 and shape[1] == 0


def _describe_arrays(series: Iterable[SeriesArray]) -> tuple[dict[str, str], Arrays]:
    """Return what arrays have in common with those of other ranks, as facts and as it is."""
    # in the byte order of the machine, which ranks need not share
    arrays = [(s.F, s.dtype.newbyteorder("=")) for s in series]
    facts = {
        "the features": ", ".join(str(n) for n, _ in arrays),
        "the dtype": ", ".join(str(dtype) for _, dtype in arrays),
    }
    return facts, arrays


def _stand_in(
    schema: Schema,
    name: str,
    form: str,
    is_list: bool,
    arrays: Arrays,
    names: tuple[str, ...] | None,
) -> Inputs:
    """Return inputs of this form of one series, of zeros and length 0."""
    x: list[Any] = [np.zeros((n, 1, 1), dtype) for n, dtype in arrays]
    if is_list:
        x = [[a[:, 0]] for a in x]
    if form == "samples":
        x = [samples(a) for a in x]
    # of one step: its columns are not those of a fit on a matrix or a view
    schema = replace(schema, fitted=None)
    inputs = read_inputs(tuple(x) if len(x) > 1 else x[0], schema, name=name)
    known = None if names is None else np.array(names, dtype=object)
    return replace(inputs, names=known, lengths=np.zeros(1, int))


def sharded_reader(ranks: RankGroup) -> SeriesReader:
    """Return what reads the series of a call with ``sharded=True``."""
    return SeriesReader() if ranks.is_single else ShardedReader(ranks)
