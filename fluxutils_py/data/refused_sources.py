"""Things that are not arrays, or arrays that cannot be read, each with a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fluxutils_py.errors import DataError

# The beginning of the module of a class or of a base class, its name, and the remedy; {0} is the
# argument's name. No library is imported to find out: the import would be slow, or fail.
REMEDIES = [
    ("torch.utils.data", "Dataset", "give the tensors that it is made of, as arrays (F, N, T)"),
    (
        "torch.utils.data",
        "DataLoader",
        "give the arrays (F, N, T) that it cuts, of which fit makes minibatches (batchsize in "
        "spec), or train on its batches with fluxutils_py.gomlx.Trainer",
    ),
    (
        "torch.nn.utils.rnn",
        "PackedSequence",
        "give a list of series (F, T_i): [a.T for a in torch.nn.utils.rnn.unpack_sequence({0})]",
    ),
    ("zarr", "Group", 'use one of its arrays: {0}["name"]'),
    ("h5py", "Group", 'use one of its datasets: {0}["name"]'),
    ("netCDF4", "Dataset", 'use one of its variables: {0}["name"]'),
    (
        "xarray",
        "Dataset",
        'use one of its variables, {0}["name"], or all of them by {0}.to_dataarray()',
    ),
    ("polars", "LazyFrame", "compute it: {0}.collect()"),
    ("dask.dataframe", "DataFrame", "compute it: {0}.compute()"),
    ("dask.dataframe", "Series", "compute it: {0}.compute()"),
    ("dask_expr", "DataFrame", "compute it: {0}.compute()"),
    ("dask_expr", "Series", "compute it: {0}.compute()"),
    ("pyarrow", "Dataset", "read it: {0}.to_table().to_pandas()"),
    ("pyarrow", "ParquetFile", "read it: {0}.read().to_pandas()"),
    ("pyarrow", "RecordBatchReader", "read it: {0}.read_pandas()"),
    (
        "datasets.dataset_dict",
        "DatasetDict",
        'use a split and a column: {0}["train"].with_format("numpy")[:]["name"]',
    ),
    ("datasets", "Dataset", 'use a column as an array: {0}.with_format("numpy")[:]["name"]'),
    ("datasets", "IterableDataset", "stack its rows to an array, as with np.stack"),
    ("datasets", "Column", 'use the column as an array: dataset.with_format("numpy")[:]["name"]'),
    ("awkward", "Array", "give a list of series (F, T_i): [awkward.to_numpy(a) for a in {0}]"),
    ("scipy.sparse", "_spbase", "make it dense: {0}.toarray()"),
    ("scipy.sparse", "spmatrix", "make it dense: {0}.toarray()"),
]


def refuse_source(value: object, name: str) -> None:
    """Raise DataError for what cannot be read as an array, though users may pass it for one.

    Parameters
    ----------
    value : object
    name : str
        Name used in error messages.

    Raises
    ------
    DataError
        It names what came, and how to make it an array.
    """
    if isinstance(value, np.ndarray):
        return
    remedy = (
        _remedy_for_class(value)
        or _remedy_for_tensor(value)
        or _remedy_for_unknown_size(value)
        or _remedy_for_one_pass(value)
    )
    if remedy:
        cls = type(value)
        raise DataError(
            f"{name} must be an array, got {cls.__module__}.{cls.__qualname__}, which cannot be "
            "read as one as it is; " + remedy.format(name)
        )


def _remedy_for_class(value: object) -> str | None:
    # by name, also of base classes: users subclass some of these
    for cls in type(value).__mro__:
        for module, class_name, remedy in REMEDIES:
            if cls.__name__ == class_name and f"{cls.__module__}.".startswith(module):
                return remedy
    return None


def _remedy_for_tensor(value: Any) -> str | None:
    """Return the remedy for a tensor without a counterpart in NumPy."""
    # no isinstance, which would import torch
    if type(value).__module__.split(".")[0] != "torch" or not hasattr(value, "layout"):
        return None
    if value.is_nested:
        return "it is nested; give a list of series (F, T_i): list({0}.unbind())"
    if str(value.layout) != "torch.strided":
        return f"its layout is {value.layout}; make it dense: {{0}}.to_dense()"
    if value.is_meta:
        return "it is on the device meta, without values; give one with values"
    if value.is_quantized:
        return "it is quantized: {0}.dequantize()"
    if str(value.dtype).startswith(("torch.bfloat16", "torch.float8", "torch.float4")):
        return f"its dtype is {value.dtype}, which NumPy has not: {{0}}.float()"
    return None


def _remedy_for_unknown_size(value: object) -> str | None:
    shape = getattr(value, "shape", None)
    # dask has NaN for sizes that it has not computed
    if not isinstance(shape, tuple) or not any(isinstance(n, float) and n != n for n in shape):
        return None
    return f"its shape {shape} is not known; find it first: {{0}}.compute_chunk_sizes()"


def _remedy_for_one_pass(value: object) -> str | None:
    # NumPy would make an array of one object of either
    if isinstance(value, Iterator):
        return (
            "it can be read once and has no length; make a list of series (F, T_i) or an array of "
            "it: list({0})"
        )
    if isinstance(value, set | frozenset):
        return "it has no order; give a list or an array"
    return None
