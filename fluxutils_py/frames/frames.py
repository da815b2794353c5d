"""Convert long data frames of any library to arrays, and arrays to frames."""

from __future__ import annotations

import difflib
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from numbers import Number
from typing import Any

import numpy as np

from fluxutils_py.errors import DataError
from fluxutils_py.validation import require_package

LARGEST_TIME = 2**62  # integer times, so that the steps after them are integers too
LARGEST_EXACT = 2**53  # integers up to it are floats without rounding
NUMBERS: dict[type, tuple[str, ...]] = {bool: ("?",), int: ("i8", "u8"), float: ("f8",)}
LARGEST_MICROSECOND = 9_190_000_000_000_000  # of dates in nanoseconds: until 2261


def require(name: str, extra: str = "forecast") -> Any:
    """Import a library that frames need, or raise ImportError that says what to install."""
    return require_package(name, extra, "work with data frames")


def is_frame(value: object) -> bool:
    """Return whether a value is a data frame rather than an array."""
    cls = type(value)  # not of the value: a lazy frame would compute its columns
    return hasattr(cls, "columns") and not hasattr(cls, "__array_interface__")


def refuse_equal_columns(frame: Any, name: str) -> None:
    """Raise DataError if two columns of a frame have one name."""
    columns: Any = getattr(frame, "columns", ())
    if hasattr(type(frame), "column_names"):  # of pyarrow, where "columns" are the values
        columns = frame.column_names
    # pandas has labels of any type, and two that print alike would look equal in a message
    names = list(map(str, columns))
    twice = sorted(column for column, n in Counter(names).items() if n > 1)
    if not twice:
        return
    remedy = "rename or drop one"
    if hasattr(frame, "iloc"):
        remedy += f", as with {name}.loc[:, ~{name}.columns.duplicated()]"
    raise DataError(
        f"{name} has more than one column {twice[0]!r} (columns: {', '.join(names)}); {remedy}"
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
        # frames of pandas have no collect, but a column may have that name
        if hasattr(frame, "collect") and not hasattr(frame, "iloc"):
            raise TypeError(f"{name} is a lazy frame; give {name}.collect()")
        refuse_equal_columns(frame, name)
        try:
            self.frame = nw.from_native(frame, eager_only=True)
        except TypeError:
            came = type(frame).__name__
            if came == "RecordBatch":
                came += f"; give pyarrow.Table.from_batches([{name}])"
            raise TypeError(
                f"{name} must be a data frame of pandas or polars, or a table of pyarrow, got "
                f"{came}"
            ) from None
        self.name = name
        self.n_rows = len(self.frame)
        self.schema = self.frame.schema  # once: the library makes it anew at each access

    @property
    def is_polars(self) -> bool:
        return "polars" in str(self.frame.implementation).lower()

    def require(self, columns: dict[str, str]) -> None:
        """Raise DataError unless the columns are there; ``columns`` maps each to the argument that
        names it.
        """
        names = list(map(str, self.frame.columns))
        present = set(names)
        for column, argument in columns.items():
            if column not in present:
                raise DataError(
                    f"{self.name} has no column {column!r} (columns: {', '.join(names)}), which "
                    f"{argument} names{self._column_remedy(column, argument, names)}"
                )

    def _column_remedy(
        self,
        column: str,
        argument: str,
        names: list[str],
    ) -> str:
        # of pandas, whose index narwhals does not show as a column
        index = getattr(self.frame.to_native(), "index", None)
        if column in getattr(index, "names", ()):
            return f"; it is in the index: give {self.name}.reset_index()"
        if argument == "time_col" and getattr(getattr(index, "dtype", None), "kind", "") == "M":
            return f"; the index holds dates: give {self.name}.reset_index(names={column!r})"
        # before the advice for wide frames: a slip in a name is more common
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
        nw = require("narwhals")
        dtype = self.schema[column]
        if dtype == nw.Unknown:
            native: Any = getattr(self.frame[column].to_native(), "dtype", None)
            if getattr(native, "tz", None) is not None:
                return nw.Datetime(native.unit, str(native.tz))
        return dtype

    def label_type(self, column: str) -> Any:
        """Return the type of a column of ids: of narwhals, or of pyarrow, which joins equal kinds
        of text only.
        """
        dtype = self.dtype(column)
        if self.backend != "pyarrow" or dtype.is_numeric():
            return dtype
        return self.frame[column].to_native().type

    def _wrong_type(
        self,
        column: str,
        expected: str,
        function: str,
    ) -> DataError:
        """Return the error for a column that the ``function`` of pandas would convert."""
        dtype = self.dtype(column)
        if self.backend == "pyarrow":
            dtype = self.frame[column].to_native().type
            function = "pyarrow.compute.cast"
        return DataError(
            f"column {column!r} of {self.name} must hold {expected}, it is of type {dtype}; "
            f"convert it, as with {function}"
        )

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
        labels = np.empty(self.n_rows, object)
        # not np.array: labels of one type would become an array of it
        labels[:] = values.to_list()
        self._refuse_nested(column, labels)
        labels[absent] = None
        return labels

    def _refuse_nested(self, column: str, labels: np.ndarray) -> None:
        """Raise DataError if a label is a list or the like, which only some types of columns can
        hold.
        """
        nw = require("narwhals")
        dtype = self.schema[column]
        # a loop over the rows is slow, and most types cannot hold such labels
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
        nw = require("narwhals")
        dtype = self.dtype(column)
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
        values, absent = self.typed(column)
        if not missing:
            self._refuse_missing(column, absent)
        return self.converted(column, (values, absent), np.dtype(np.float64))

    def values(self, column: str, missing: bool = False) -> np.ndarray:
        """Return a column as labels if it holds categories, else as numbers."""
        read = self.labels if self.is_category(column) else self.numbers
        return read(column, missing)

    def typed(self, column: str, labels: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return a column in its own type, and a mask of missing values.

        Integers and booleans are 0 where missing, floats are NaN. With ``labels``, a column may
        also hold text or categories: they are objects, None where missing, unless all of them are
        integers or booleans.
        """
        if labels and self.is_category(column):
            return _typed_labels(self.labels(column, missing=True))
        nw = require("narwhals")
        values = self.frame[column]
        is_boolean = values.dtype == nw.Boolean
        if not values.dtype.is_numeric() and not is_boolean:
            raise self._wrong_type(column, "numbers", "pandas.to_numeric")
        # wider integers and decimals are none of NumPy's types
        dtype = np.dtype(getattr(np, str(values.dtype).lower(), bool if is_boolean else np.float64))
        if dtype.kind == "f":
            numbers = values.cast(nw.Float64).to_numpy().astype(dtype)
            # one infinite value would make every mean infinite
            self.refuse(column, np.isinf(numbers), "; leave it out, or set NaN", numbers)
            return numbers, np.isnan(numbers)
        known = values.fill_null(False if is_boolean else 0).to_numpy()
        return known.astype(dtype, copy=False), values.is_null().to_numpy()

    def converted(
        self,
        column: str,
        typed: tuple[np.ndarray, np.ndarray],
        dtype: np.dtype,
        exact: bool = False,
    ) -> np.ndarray:
        """Return what :meth:`typed` gave as another type: NaN, or None among objects, where a value
        is missing.

        Raises
        ------
        DataError
            If a value is missing among integers, or the type does not hold one. With ``exact``
            also if a float would round an integer.
        """
        values, missing = typed
        if dtype.kind == "O":
            values = values.astype(object)
            values[missing] = None
            return values
        if dtype.kind != "f":
            self._refuse_missing(column, missing)
        self.refuse(column, _is_lost(values, dtype), f", which is none of {dtype}", values)
        if exact and dtype.kind == "f" and values.dtype.kind in "iu":
            rounded = (values > LARGEST_EXACT) | (values < -LARGEST_EXACT)
            remedy = (
                ", which a float rounds, and there are steps without a target, or other targets "
                "that are floats: convert it to text if these are labels, to floats if not"
            )
            self.refuse(column, rounded, remedy, values)
        values = values.astype(dtype)
        if dtype.kind == "f":
            values[missing] = np.nan
        return values

    def times(self, column: str) -> TimeColumn:
        """Return a column of dates or integers; DataError names the row of what is neither."""
        nw = require("narwhals")
        dtype = self.dtype(column)
        self._refuse_missing(column, self.frame[column].is_null().to_numpy())
        if dtype.is_integer() or dtype.is_float():
            return TimeColumn(self._integer_times(column), None, None)
        if not (dtype == nw.Date or dtype == nw.Datetime):
            raise self._wrong_type(column, "dates or integers", "pandas.to_datetime")
        zone = getattr(dtype, "time_zone", None)
        if zone is None:
            # the same column: differences in it do not depend on a time zone
            utc = local = self.frame[column]
        else:
            utc, local = self._without_zone(column)
        # dates in nanoseconds have been checked by their library
        if getattr(dtype, "time_unit", None) != "ns":
            self._require_nanoseconds(column, utc)
        return TimeColumn(_nanoseconds(utc), _nanoseconds(local), zone)

    def _integer_times(self, column: str) -> np.ndarray:
        numbers = self.frame[column].to_numpy()
        self._refuse_missing(column, np.isnan(numbers))
        # before the conversion, which would wrap around without an error
        outside = (numbers > LARGEST_TIME) | (numbers < -LARGEST_TIME)
        remedy = f"; integer times are between {-LARGEST_TIME} and {LARGEST_TIME}"
        self.refuse(column, outside, remedy, numbers)
        self.refuse(column, numbers != np.round(numbers), "; times are integers", numbers)
        return numbers.astype(np.int64)

    def _without_zone(self, column: str) -> tuple[Any, Any]:
        """Return a column of dates with a time zone in UTC and in local time, both without one."""
        nw = require("narwhals")
        values = self.frame[column]
        if values.dtype != nw.Unknown:
            utc = values.dt.convert_time_zone("UTC").dt.replace_time_zone(None)
            return utc, values.dt.replace_time_zone(None)
        dates = values.to_native().dt  # of pandas, see dtype
        utc = nw.from_native(dates.tz_convert("UTC").dt.tz_localize(None), series_only=True)
        return utc, nw.from_native(dates.tz_localize(None), series_only=True)

    def _require_nanoseconds(self, column: str, utc: Any) -> None:
        """Raise DataError where nanoseconds cannot hold a date: the conversion would wrap."""
        # in microseconds, of which int64 holds all years that a library has
        at = utc.cast(require("narwhals").Datetime("us")).to_numpy()
        outside = np.abs(at.astype("M8[us]").astype(np.int64)) > LARGEST_MICROSECOND
        remedy = (
            "; dates must be between the years 1678 and 2261. For others give integers, such as "
            "the year"
        )
        self.refuse(column, outside, remedy)

    def refuse(
        self,
        column: str,
        bad: np.ndarray,
        remedy: str,
        values: np.ndarray | None = None,
    ) -> None:
        """Raise DataError, with value and row, if a row of a column is bad.

        ``remedy`` ends the sentence. ``values`` are shown in place of the column.
        """
        if bad.any():
            row = int(bad.argmax())
            value = (self.frame[column] if values is None else values)[row]
            raise DataError(f"column {column!r} of {self.name} is {value} in row {row}{remedy}")

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


def make_frame(
    columns: dict[str, np.ndarray],
    like: dict[str, Any],
    backend: str,
) -> Any:
    """Make a frame of the library ``backend`` from arrays.

    ``like`` maps columns to their types, as from :meth:`Frame.dtype` and :meth:`Frame.label_type`.

    Integers that a type does not hold, such as the times after the last one of int8, become int64.
    NaN becomes null where the library has both.
    """
    nw = require("narwhals")
    made = nw.from_dict({k: _to_column(v, backend) for k, v in columns.items()}, backend=backend)
    arrow_types = {k: v for k, v in like.items() if not hasattr(v, "is_temporal")}
    # after from_dict, which would guess other types
    casts = [
        _with_type(nw.col(name), dtype, columns[name], backend)
        for name, dtype in like.items()
        if name not in arrow_types
    ]
    if backend != "pandas":
        floats = [nw.col(k) for k, v in columns.items() if np.asarray(v).dtype.kind == "f"]
        # without a branch for NaN, "when" gives null there
        casts += [nw.when(~column.is_nan()).then(column) for column in floats]
    return with_arrow_types(made.with_columns(casts).to_native(), arrow_types)


def _with_type(
    column: Any,
    dtype: Any,
    values: np.ndarray,
    backend: str,
) -> Any:
    """Return the expression that gives a column a data type of narwhals."""
    nw = require("narwhals")
    zone = getattr(dtype, "time_zone", None)
    if zone is not None:
        # the values are in UTC
        utc = column.cast(nw.Datetime(dtype.time_unit)).dt.replace_time_zone("UTC")
        return utc.dt.convert_time_zone(zone)
    if dtype.is_integer() and not _holds(dtype, values):
        return column.cast(nw.Int64())
    if dtype.is_temporal() or dtype.is_integer():
        return column.cast(dtype)
    # polars joins equal types only
    if backend != "pandas" and dtype in (nw.Categorical, nw.Enum):
        return column.cast(_category_type(dtype, values))
    return column


def with_arrow_types(table: Any, types: dict[str, Any]) -> Any:
    """Return a table of pyarrow whose columns have types; categories get larger codes where they
    need them.
    """
    for name, dtype in types.items():
        column = _arrow_array(table[name].to_pylist(), dtype)
        table = table.set_column(table.schema.get_field_index(name), name, column)
    return table


def _arrow_array(values: list[Any], dtype: Any) -> Any:
    pa = require("pyarrow")
    if not pa.types.is_dictionary(dtype):
        return pa.array(values, type=dtype)
    # in two steps, as pyarrow before 24 makes no dictionary of large strings from a list
    encoded = pa.array(values, type=dtype.value_type).dictionary_encode()
    codes = encoded.indices
    if len(encoded.dictionary) <= np.iinfo(str(dtype.index_type)).max:
        codes = codes.cast(dtype.index_type)
    return pa.DictionaryArray.from_arrays(codes, encoded.dictionary, ordered=dtype.ordered)


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
    # a category outside of an Enum would be an error of polars
    if dtype == nw.Enum and set(values) <= set(dtype.categories):
        return dtype
    return nw.Categorical()


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and value != value)


def _is_number(value: object) -> bool:
    return isinstance(value, Number) and not isinstance(value, bool | np.bool_)


def _nanoseconds(dates: Any) -> np.ndarray:
    """Convert a column of dates without a time zone to nanoseconds since 1970."""
    at = dates.cast(require("narwhals").Datetime("ns")).to_numpy()
    return np.asarray(at.astype("M8[ns]").astype(np.int64))


def _to_column(values: np.ndarray, backend: str) -> Any:
    """Convert an object array to a list, so that the library infers its type."""
    if values.dtype != object:
        return values
    labels = values.tolist()
    if backend == "pandas" and {type(v) for v in labels} in ({int, type(None)}, {bool, type(None)}):
        # of the list pandas would make floats, or objects
        return require("pandas").array(labels)
    return labels


def _typed_labels(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return labels as numbers or booleans if all are of one such type, and a mask of missing
    ones.
    """
    missing = np.array([label is None for label in labels], bool)
    types = {type(label) for label in labels[~missing]}
    filled = [label or 0 for label in labels]
    for dtype in NUMBERS.get(types.pop(), ()) if len(types) == 1 else ():
        with suppress(OverflowError):
            return np.array(filled, dtype), missing
    return labels, missing


def _is_lost(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return where numbers are beyond the range of a type, or fractions of one of integers."""
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        # not above the maximum, which a float may round up
        outside = (values < bounds.min) | (values >= bounds.max + 1)
        return outside | (values % 1 != 0)
    with np.errstate(over="ignore"):
        return np.isinf(values.astype(dtype))


def as_target(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return predictions in the type of their targets where these are integers or booleans and all
    predictions are such, None where missing; else unchanged.

    Labels are floats where some steps have none.
    """
    known = ~np.isnan(values) if values.dtype.kind == "f" else np.zeros(0, bool)
    if dtype.kind not in "iub" or not known.any():
        return values
    numbers = values[known]
    fits = np.isin(numbers, (0, 1)) if dtype.kind == "b" else ~_is_lost(numbers, dtype)
    if not fits.all():
        return values
    if known.all():
        return values.astype(dtype)
    targets = np.full(len(values), None, object)
    targets[known] = numbers.astype(dtype)
    return targets


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
    """

    absolute: np.ndarray
    local: np.ndarray | None
    zone: str | None

    @property
    def is_integer(self) -> bool:
        return self.local is None

    def on(self, is_local: bool) -> np.ndarray:
        """Return the times in local time where there is one and ``is_local``, else the absolute."""
        return self.local if is_local and self.local is not None else self.absolute

    def in_zone(self, zone: str | None) -> TimeColumn:
        """Return times that have a time zone with the local time of another."""
        # in the local time of theirs, days and months would begin at other hours
        if zone is None or self.zone in (None, zone):
            return self
        return TimeColumn(self.absolute, to_local(self.absolute, zone), zone)


def to_absolute(local: np.ndarray, zone: str | None) -> np.ndarray:
    """Convert local to UTC nanoseconds. A skipped time moves forward; of an ambiguous time the
    first is used.
    """
    if zone is None:
        return local
    at = _dates(local)
    return _numbers(
        at.tz_localize(zone, ambiguous=np.ones(len(at), bool), nonexistent="shift_forward")
        .tz_convert("UTC")
        .tz_localize(None)
    )


def to_local(absolute: np.ndarray, zone: str | None) -> np.ndarray:
    """Convert UTC to local nanoseconds."""
    if zone is None:
        return absolute
    return _numbers(_dates(absolute).tz_localize("UTC").tz_convert(zone).tz_localize(None))


def _dates(nanoseconds: np.ndarray) -> Any:
    return require("pandas").DatetimeIndex(nanoseconds.astype("M8[ns]"))


def _numbers(dates: Any) -> np.ndarray:
    return np.asarray(dates.astype("M8[ns]").astype(np.int64))
