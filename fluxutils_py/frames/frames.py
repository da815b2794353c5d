"""Read and write columns of data frames of any library, by narwhals."""

from __future__ import annotations

import difflib
from numbers import Number
from typing import Any

import numpy as np

from fluxutils_py.errors import DataError
from fluxutils_py.validation import require_package

LARGEST_TIME = 2**62  # integer times, so that the steps after them are integers too
LARGEST_EXACT = 2**53  # integers up to it are floats without rounding


def require(name: str) -> Any:
    """Import a library that frames need, or raise ImportError that says what to install."""
    return require_package(name, "forecast", "work with data frames")


def is_frame(value: object) -> bool:
    """Return whether a value is a data frame rather than an array."""
    cls = type(value)  # not of the value: a lazy frame would compute its columns
    return hasattr(cls, "columns") and not hasattr(cls, "__array_interface__")


class Frame:
    """Read a data frame of pandas, polars, pyarrow or another library that narwhals supports,
    column by column.

    Parameters
    ----------
    frame : data frame
    name : str
        Name of the frame in error messages.
    remedy : str
        What they say to do about a missing value.
    """

    def __init__(
        self, frame: Any, name: str, *, remedy: str = "fill it in, or drop the row"
    ) -> None:
        nw = require("narwhals")
        try:
            self.frame = nw.from_native(frame, eager_only=True)
        except TypeError:
            raise TypeError(
                f"{name} must be a data frame of pandas or polars in memory, or a table of "
                f"pyarrow, got {type(frame).__name__}: read a file with pandas.read_csv or "
                "polars.read_parquet, and collect() a lazy frame"
            ) from None
        self.name = name
        self.remedy = remedy
        self.n_rows = len(self.frame)
        # once: the library makes it anew at each access; an error if two columns have one name
        self.schema = self.frame.schema

    def require(self, columns: dict[str, str]) -> None:
        """Raise DataError unless the columns are there; ``columns`` maps each to the argument that
        names it.
        """
        names = list(map(str, self.frame.columns))
        present = set(names)
        for column, argument in columns.items():
            if column in present:
                continue
            remedy = ""
            # of pandas, whose index narwhals does not show as a column
            if column in getattr(getattr(self.frame.to_native(), "index", None), "names", ()):
                remedy = f"; it is in the index: give {self.name}.reset_index()"
            # before the advice for wide frames: a slip in a name is more common
            elif near := difflib.get_close_matches(column, names, 1):
                remedy = f"; did you mean {near[0]!r}?"
            elif argument == "id_col":
                remedy = "; if each column is a series, make rows of them, as with pandas.melt"
            raise DataError(
                f"{self.name} has no column {column!r} (columns: {', '.join(names)}), which "
                f"{argument} names{remedy}"
            )

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

    def _wrong_type(
        self,
        column: str,
        expected: str,
        function: str,
    ) -> DataError:
        """Return the error for a column that the ``function`` of pandas would convert."""
        return DataError(
            f"column {column!r} of {self.name} must hold {expected}, it is of type "
            f"{self.dtype(column)}; convert it, as with {function}"
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
        labels[absent] = None
        return labels

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
            known = self.frame[column].drop_nulls().to_list()
            # booleans are Numbers too
            if known and all(isinstance(v, Number) and not isinstance(v, bool) for v in known):
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
        numbers = values.astype(np.float64)
        numbers[absent] = np.nan
        return numbers

    def values(self, column: str, missing: bool = False) -> np.ndarray:
        """Return a column as labels if it holds categories, else as numbers."""
        read = self.labels if self.is_category(column) else self.numbers
        return read(column, missing)

    def typed(self, column: str, labels: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return a column in its own type, and a mask of missing values.

        Integers and booleans are 0 where missing, floats are NaN. With ``labels``, a column may
        also hold text or categories: they are objects, None where missing, unless all of them are
        numbers or booleans.
        """
        if labels and self.is_category(column):
            named = self.labels(column, missing=True)
            absent = require("pandas").isna(named)
            present = named[~absent].tolist()
            # unless all are numbers, such as those of categories
            if not present or not all(isinstance(v, bool | int | float) for v in present):
                return named, absent
            plain = np.zeros(len(named), np.array(present).dtype)
            plain[~absent] = present
            return plain, absent
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

    def targets(
        self, column: str, typed: tuple[np.ndarray, np.ndarray], dtype: np.dtype
    ) -> np.ndarray:
        """Return what :meth:`typed` gave as another type: NaN among floats, or None among objects,
        where a value is missing.

        Raises
        ------
        DataError
            If a float would round an integer.
        """
        values, missing = typed
        if dtype.kind == "f" and values.dtype.kind in "iu":
            rounded = (values > LARGEST_EXACT) | (values < -LARGEST_EXACT)
            remedy = (
                ", which a float rounds, and targets are floats where some are missing: convert "
                "it to text if these are labels, to floats if not"
            )
            self.refuse(column, rounded, remedy, values)
        values = values.astype(dtype)
        if dtype.kind in "fO":
            values[missing] = np.nan if dtype.kind == "f" else None
        return values

    def times(self, column: str, zone: str | None = None) -> tuple[np.ndarray, str | None]:
        """Return a column of integers, int64, or of dates, ``datetime64[ns]`` in UTC or without a
        time zone, and the time zone; DataError names the row of what is neither.

        ``zone`` takes the place of another one that the column has.
        """
        nw = require("narwhals")
        dtype = self.dtype(column)
        values = self.frame[column]
        self._refuse_missing(column, values.is_null().to_numpy())
        if dtype.is_integer():
            times = values.to_numpy()
            # before the conversion, which would wrap around without an error
            outside = (times > LARGEST_TIME) | (times < -LARGEST_TIME)
            self.refuse(column, outside, f"; integer times are at most {LARGEST_TIME}", times)
            return times.astype(np.int64), None
        if not (dtype == nw.Date or dtype == nw.Datetime):
            raise self._wrong_type(column, "dates or integers", "pandas.to_datetime")
        own_zone = getattr(dtype, "time_zone", None)
        if values.dtype == nw.Unknown:  # of pandas, see dtype
            utc = values.to_native().dt.tz_convert("UTC").dt.tz_localize(None)
            values = nw.from_native(utc, series_only=True)
        elif own_zone is not None:
            values = values.dt.convert_time_zone("UTC").dt.replace_time_zone(None)
        try:
            at = values.cast(nw.Datetime("ns")).to_numpy()
        except Exception as error:  # each library has its own
            raise DataError(
                f"column {column!r} of {self.name} holds dates outside of the years 1678 to 2261 "
                f"({error}); for such dates give integers, such as the year"
            ) from error
        return at.astype("M8[ns]"), own_zone and (zone or own_zone)

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
                f"column {column!r} of {self.name} is missing in row {int(missing.argmax())}; "
                f"{self.remedy}"
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

    ``like`` maps columns to their types, as from :meth:`Frame.dtype`.

    Integers that a type does not hold, such as the times after the last one of int8, become int64.
    NaN becomes null where the library has both.
    """
    nw = require("narwhals")
    # a list of objects, so that the library infers its type
    given = {k: v.tolist() if v.dtype == object else v for k, v in columns.items()}
    made = nw.from_dict(given, backend=backend)
    # after from_dict, which would guess other types
    casts = [
        _with_type(nw.col(name), dtype, columns[name], backend) for name, dtype in like.items()
    ]
    if backend != "pandas":
        floats = [nw.col(k) for k, v in columns.items() if v.dtype.kind == "f"]
        # without a branch for NaN, "when" gives null there
        casts += [nw.when(~column.is_nan()).then(column) for column in floats]
    return made.with_columns(casts).to_native()


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
    if dtype.is_integer():
        bounds = np.iinfo(str(dtype).lower())
        holds_all = ((values >= bounds.min) & (values <= bounds.max)).all()
        return column.cast(dtype if holds_all else nw.Int64())
    # polars joins equal types only
    is_category = backend != "pandas" and dtype in (nw.Categorical, nw.Enum)
    return column.cast(dtype) if dtype.is_temporal() or is_category else column


def to_absolute(local: np.ndarray, zone: str | None) -> np.ndarray:
    """Convert local to UTC nanoseconds. A skipped time moves forward; of an ambiguous time the
    first is used.
    """
    if zone is None:
        return local
    is_first = np.ones(len(local), bool)
    at = _dates(local).tz_localize(zone, ambiguous=is_first, nonexistent="shift_forward")
    return np.asarray(at.astype(np.int64))


def to_local(absolute: np.ndarray, zone: str | None) -> np.ndarray:
    """Convert UTC to local nanoseconds."""
    if zone is None:
        return absolute
    at = _dates(absolute).tz_localize("UTC").tz_convert(zone).tz_localize(None)
    return np.asarray(at.astype(np.int64))


def _dates(nanoseconds: np.ndarray) -> Any:
    return require("pandas").DatetimeIndex(nanoseconds.astype("M8[ns]"))
