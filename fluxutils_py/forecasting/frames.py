"""Convert long data frames of any library to arrays, and arrays to frames."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from numbers import Number
from typing import Any

import numpy as np

from fluxutils_py.errors import DataError
from fluxutils_py.validation import require_package

LARGEST_TIME = 2**62  # integer times, so that the steps after them are integers too
LARGEST_MICROSECOND = 9_190_000_000_000_000  # of dates in nanoseconds: until 2261


def require(name: str, extra: str = "forecast") -> Any:
    """Import a library that forecasting needs, or raise ImportError that says what to install."""
    return require_package(name, extra, "forecasting")


def is_frame(value: Any) -> bool:
    """Return whether a value is a data frame rather than an array."""
    kind = type(value)  # of the class: a lazy frame computes its columns
    return hasattr(kind, "columns") and not hasattr(kind, "__array_interface__")


def refuse_equal_columns(frame: Any, name: str) -> None:
    """Raise DataError if two columns of a frame have one name."""
    of_arrow = hasattr(type(frame), "column_names")  # its columns are values
    names = list(map(str, frame.column_names if of_arrow else getattr(frame, "columns", ())))
    twice = sorted({column for column in names if names.count(column) > 1})
    if twice:
        way = (
            f", as with {name}.loc[:, ~{name}.columns.duplicated()]"
            if hasattr(frame, "iloc")
            else ""
        )
        raise DataError(
            f"{name} has more than one column {twice[0]!r} (columns: {', '.join(names)}); rename "
            f"or drop one{way}"
        )


class Frame:
    """Read a data frame of pandas, polars, pyarrow or another library that narwhals supports,
    column by column.

    Parameters
    ----------
    frame : data frame
    name : str
        Name of the frame in error messages.
    """

    def __init__(self, frame: Any, name: str) -> None:
        nw = require("narwhals")
        if hasattr(frame, "collect") and not hasattr(frame, "iloc"):
            raise TypeError(f"{name} is a lazy frame; give {name}.collect()")
        refuse_equal_columns(frame, name)
        try:
            self.frame = nw.from_native(frame, eager_only=True)
        except TypeError:
            kind = type(frame).__name__
            way = f"; give pyarrow.Table.from_batches([{name}])" if kind == "RecordBatch" else ""
            raise TypeError(
                f"{name} must be a data frame of pandas or polars, or a table of pyarrow, got "
                f"{kind}{way}"
            ) from None
        self.name, self.n_rows = name, len(self.frame)

    @property
    def is_polars(self) -> bool:
        return "polars" in str(self.frame.implementation).lower()

    def require(self, columns: dict[str, str]) -> None:
        """Raise DataError unless the columns are there; ``columns`` maps each to the argument that
        names it.
        """
        names = list(map(str, self.frame.columns))
        for column, argument in columns.items():
            if column not in names:
                raise DataError(
                    f"{self.name} has no column {column!r} (columns: {', '.join(names)}), which "
                    f"{argument} names{self._way_to_column(column, argument, names)}"
                )

    def _way_to_column(self, column: str, argument: str, names: list[str]) -> str:
        index = getattr(self.frame.to_native(), "index", None)
        if column in getattr(index, "names", ()):
            return f"; it is in the index: give {self.name}.reset_index()"
        if argument == "time_col" and getattr(getattr(index, "dtype", None), "kind", "") == "M":
            return f"; the index holds dates: give {self.name}.reset_index(names={column!r})"
        if near := difflib.get_close_matches(column, names, 1):
            return f"; did you mean {near[0]!r}?"
        if argument == "id_col":
            return (
                "; for a single series add the column, for one series per column make one row per "
                "series and time, as with pandas.melt"
            )
        return ""

    def dtype(self, column: str) -> Any:
        """Return the narwhals type of a column.

        Those of pandas with a time zone such as America/New_York or Etc/GMT+5 are unknown to
        narwhals 2.
        """
        nw, found = require("narwhals"), self.frame.schema[column]
        if found == nw.Unknown:
            native: Any = getattr(self.frame[column].to_native(), "dtype", None)
            if getattr(native, "tz", None) is not None:
                return nw.Datetime(native.unit, str(native.tz))
        return found

    def label_type(self, column: str) -> Any:
        """Return the type of a column of ids: of narwhals, or of pyarrow, which joins equal kinds
        of text only.
        """
        dtype = self.dtype(column)
        if self.backend != "pyarrow" or dtype.is_numeric():
            return dtype
        return self.frame[column].to_native().type

    def _type_and_way(self, column: str, way: str) -> str:
        """Return the type of a column, and how to convert it: ``way`` is that of pandas."""
        dtype = self.dtype(column)
        if self.backend == "pyarrow":
            return (
                f"{self.frame[column].to_native().type}; convert it, as with pyarrow.compute.cast"
            )
        return f"{dtype}; convert it, as with {way}"

    def labels(self, column: str, missing: bool = False) -> np.ndarray:
        """Return a column of labels as objects, None where missing; DataError if one is and
        ``missing`` is False.
        """
        values = self.frame[column]
        absent = values.is_null().to_numpy()
        if values.dtype.is_float():  # NaN is no null in polars
            absent = np.isnan(values.to_numpy().astype(np.float64))
        if not missing:
            self._refuse_missing(column, absent)
        found = np.empty(self.n_rows, object)
        found[:] = values.to_list()
        self._refuse_nested(column, found)
        found[absent] = None
        return found

    def _refuse_nested(self, column: str, labels: np.ndarray) -> None:
        """Raise DataError if a label is a list or the like, which only some types of columns can
        hold.
        """
        nw, dtype = require("narwhals"), self.frame.schema[column]
        if not dtype.is_nested() and dtype not in (nw.Object, nw.Unknown):
            return
        for row, label in enumerate(labels):
            if isinstance(label, list | dict | set | np.ndarray):
                raise DataError(
                    f"column {column!r} of {self.name} is {label!r} in row {row}, a "
                    f"{type(label).__name__}; labels are text, numbers, dates or booleans: make a "
                    "column of each part"
                )

    def is_category(self, column: str) -> bool:
        """Return whether a column is neither numeric nor boolean.

        Raises
        ------
        DataError
            If it holds numbers in a column of objects: each different number would be a category.
        """
        nw, dtype = require("narwhals"), self.dtype(column)
        if dtype == nw.Object:
            known = [v for v in self.frame[column].to_list() if not _is_missing(v)]
            if known and all(_is_number(v) for v in known):
                raise DataError(
                    f"column {column!r} of {self.name} holds numbers such as {known[0]}, but is of "
                    f"type {dtype}; convert it, as with pandas.to_numeric, or to text if they are "
                    "categories"
                )
        return not dtype.is_numeric() and dtype != nw.Boolean

    def numbers(self, column: str, missing: bool) -> np.ndarray:
        """Return a column of numbers as float64, NaN where missing.

        Raises
        ------
        DataError
            If the column is not numeric or has infinite values, or has missing ones and ``missing``
            is False.
        """
        nw, values = require("narwhals"), self.frame[column]
        if not values.dtype.is_numeric() and values.dtype != nw.Boolean:
            raise DataError(
                f"column {column!r} of {self.name} must hold numbers, it is of type "
                f"{self._type_and_way(column, 'pandas.to_numeric')}"
            )
        found = values.cast(nw.Float64).to_numpy().astype(np.float64)
        bad = np.isinf(found)
        if bad.any():
            row = int(bad.argmax())
            raise DataError(
                f"column {column!r} of {self.name} is {found[row]} in row {row}; leave it out, or "
                "set NaN"
            )
        if not missing:
            self._refuse_missing(column, np.isnan(found))
        return found

    def times(self, column: str) -> TimeColumn:
        """Return a column of dates or integers; DataError names the row of what is neither."""
        nw, values, dtype = require("narwhals"), self.frame[column], self.dtype(column)
        self._refuse_missing(column, values.is_null().to_numpy())
        if dtype.is_integer():
            self._require_range(column, LARGEST_TIME)
            return TimeColumn(values.to_numpy().astype(np.int64), None, None, dtype)
        if dtype.is_float():
            numbers = values.to_numpy()
            self._refuse_missing(column, np.isnan(numbers))
            self._require_range(column, LARGEST_TIME)
            odd = numbers != np.round(numbers)
            if odd.any():
                row = int(odd.argmax())
                raise DataError(
                    f"column {column!r} of {self.name} is {numbers[row]} in row {row}; times are "
                    "integers"
                )
            return TimeColumn(numbers.astype(np.int64), None, None, nw.Int64())
        if not (dtype == nw.Date or dtype == nw.Datetime):
            raise DataError(
                f"column {column!r} of {self.name} must hold dates or integers, it is of type "
                f"{self._type_and_way(column, 'pandas.to_datetime')}"
            )
        zone = getattr(dtype, "time_zone", None)
        self._require_nanoseconds(column)
        if zone is None:
            at = values.cast(nw.Datetime("ns")).to_numpy().astype("M8[ns]").astype(np.int64)
            return TimeColumn(at, at, None, dtype)
        if values.dtype == nw.Unknown:  # pandas
            native = values.to_native()
            utc, local = (
                native.dt.tz_convert("UTC").dt.tz_localize(None),
                native.dt.tz_localize(None),
            )
        else:
            utc = values.dt.convert_time_zone("UTC").dt.replace_time_zone(None)
            local = values.dt.replace_time_zone(None)
        as_ns = [v.to_numpy().astype("M8[ns]").astype(np.int64) for v in (utc, local)]
        return TimeColumn(as_ns[0], as_ns[1], zone, dtype)

    def _require_range(self, column: str, largest: int) -> None:
        values = self.frame[column].to_numpy()
        outside = (
            (values > largest)
            if values.dtype.kind == "u"
            else (values > largest) | (values < -largest)
        )
        if outside.any():
            row = int(outside.argmax())
            raise DataError(
                f"column {column!r} of {self.name} is {values[row]} in row {row}; integer times "
                f"lie between {-largest} and {largest}"
            )

    def _require_nanoseconds(self, column: str) -> None:
        """Raise DataError where a date is none in nanoseconds: the conversion would wrap."""
        nw, values, dtype = require("narwhals"), self.frame[column], self.dtype(column)
        if getattr(dtype, "time_unit", None) == "ns":
            return
        if values.dtype == nw.Unknown:  # of pandas, with a time zone
            values = nw.from_native(
                values.to_native().dt.tz_convert("UTC").dt.tz_localize(None), series_only=True
            )
        elif getattr(dtype, "time_zone", None) is not None:
            values = values.dt.convert_time_zone("UTC").dt.replace_time_zone(None)
        at = values.cast(nw.Datetime("us")).to_numpy().astype("M8[us]").astype(np.int64)
        outside = np.abs(at) > LARGEST_MICROSECOND
        if outside.any():
            row = int(outside.argmax())
            raise DataError(
                f"column {column!r} of {self.name} is {self.frame[column].to_list()[row]} in row "
                f"{row}; dates lie between the years 1678 and 2261. For others give integers, such "
                "as the year"
            )

    def _refuse_missing(self, column: str, missing: np.ndarray) -> None:
        if missing.any():
            raise DataError(
                f"column {column!r} of {self.name} is missing in row {int(missing.argmax())}; fill "
                "it in, or drop the row"
            )

    @property
    def backend(self) -> str:
        """Name of the library, for :func:`make_frame`."""
        return str(self.frame.implementation.value)


# More than 12 branches: each library and type of column is one case.
def make_frame(columns: dict[str, Any], like: dict[str, Any], backend: str) -> Any:
    """Make a frame of the library ``backend`` from arrays.

    ``like`` maps columns to their types, as from :meth:`Frame.dtype` and :meth:`Frame.label_type`.

    Integers that a type does not hold, such as the times after the last one of int8, become int64.
    NaN becomes null where the library has both.
    """
    nw = require("narwhals")
    made = nw.from_dict({k: _to_column(v) for k, v in columns.items()}, backend=backend)
    casts, own_types = [], {}
    for name, dtype in like.items():
        column = nw.col(name)
        if not hasattr(dtype, "is_temporal"):  # of pyarrow
            own_types[name] = dtype
            continue
        if getattr(dtype, "time_zone", None) is not None:
            column = column.cast(nw.Datetime(dtype.time_unit)).dt.replace_time_zone("UTC")
            casts.append(column.dt.convert_time_zone(dtype.time_zone))
        elif dtype.is_temporal():
            casts.append(column.cast(dtype))
        elif dtype.is_integer():
            casts.append(column.cast(dtype if _holds(dtype, columns[name]) else nw.Int64()))
        elif (
            dtype in (nw.Categorical, nw.Enum) and backend != "pandas"
        ):  # polars joins equal types only
            casts.append(column.cast(_category_type(dtype, columns[name])))
    if backend != "pandas":
        numbers = [name for name, v in columns.items() if np.asarray(v).dtype.kind == "f"]
        casts += [
            nw.when(~nw.col(name).is_nan()).then(nw.col(name)).alias(name) for name in numbers
        ]
    native = (made.with_columns(casts) if casts else made).to_native()
    return with_arrow_types(native, own_types)


def with_arrow_types(table: Any, types: dict[str, Any]) -> Any:
    """Return a table of pyarrow whose columns have types; categories get larger codes where they
    need them.
    """
    for name, dtype in types.items():
        column = require("pyarrow").array(table[name].to_pylist(), type=dtype)
        table = table.set_column(table.schema.get_field_index(name), name, column)
    return table


def _holds(dtype: Any, values: np.ndarray) -> bool:
    """Return whether an integer type of narwhals holds all values."""
    if not len(values):
        return True
    bounds = np.iinfo(str(dtype).lower())
    return bounds.min <= min(values) and max(values) <= bounds.max


def _category_type(dtype: Any, values: np.ndarray) -> Any:
    """Return the type for labels: an Enum with its categories, or a Categorical if it lacks one of
    the labels.
    """
    nw = require("narwhals")
    if dtype == nw.Enum and set(values) <= set(dtype.categories):
        return dtype
    return nw.Categorical()


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Number) and not isinstance(value, bool | np.bool_)


def _to_column(values: np.ndarray) -> Any:
    """Convert an object array to a list, so that the library infers its type."""
    return values.tolist() if values.dtype == object else values


@dataclass(frozen=True)
class TimeColumn:
    """Times as integers, or as nanoseconds since 1970.

    Attributes
    ----------
    absolute : ndarray of int64
        Integers as given, or nanoseconds in UTC (in local time if there is no time zone).
    local : ndarray of int64 or None
        Nanoseconds in local time. None for integer times.
    zone : str or None
    dtype : narwhals data type
    """

    absolute: np.ndarray
    local: np.ndarray | None
    zone: str | None
    dtype: Any

    @property
    def is_integer(self) -> bool:
        return self.local is None

    def on(self, is_local: bool) -> np.ndarray:
        return self.local if is_local and self.local is not None else self.absolute


def to_absolute(local: np.ndarray, zone: str | None) -> np.ndarray:
    """Convert local to UTC nanoseconds. A skipped time moves forward; of an ambiguous time take the
    first.
    """
    if zone is None:
        return local
    pd = require("pandas")
    at = pd.DatetimeIndex(local.astype("M8[ns]"))
    at = at.tz_localize(zone, ambiguous=np.ones(len(at), bool), nonexistent="shift_forward")
    return np.asarray(at.tz_convert("UTC").tz_localize(None).astype("M8[ns]").astype(np.int64))


def to_local(absolute: np.ndarray, zone: str | None) -> np.ndarray:
    if zone is None:
        return absolute
    pd = require("pandas")
    at = (
        pd.DatetimeIndex(absolute.astype("M8[ns]"))
        .tz_localize("UTC")
        .tz_convert(zone)
        .tz_localize(None)
    )
    return np.asarray(at.astype("M8[ns]").astype(np.int64))
