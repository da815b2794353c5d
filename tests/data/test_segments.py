"""Which rows a minibatch has, against lists made by hand and by NumPy's array_split."""

import numpy as np
import pytest

from fluxutils_py.data.segments import Segments

LENGTHS = [None, [9, 9, 9, 9, 9], [9, 1, 4, 2, 7], [1, 1, 1, 1, 1], [3, 9, 8, 9, 1]]


def as_list(rows):
    return list(zip(rows.series.tolist(), rows.start.tolist(), rows.length.tolist(), strict=True))


def test_whole_rows_are_the_series():
    assert as_list(Segments.from_lengths(3, 7)) == [(0, 0, 7), (1, 0, 7), (2, 0, 7)]
    assert as_list(Segments.from_lengths(2, 7, np.array([5, 1]))) == [(0, 0, 5), (1, 0, 1)]
    assert len(Segments.from_lengths(3, 7)) == 3


def test_rows_are_chosen_by_slices_and_by_indices():
    rows = Segments(np.array([4, 4, 0, 2]), np.array([0, 3, 0, 1]), np.array([3, 2, 5, 4]))
    assert as_list(rows[1:3]) == [(4, 3, 2), (0, 0, 5)]
    assert as_list(rows[np.array([3, 0, 3])]) == [(2, 1, 4), (4, 0, 3), (2, 1, 4)]
    assert as_list(rows[rows.length > 3]) == [(0, 0, 5), (2, 1, 4)]
    assert (rows.max_length, rows.min_length, rows.common_start) == (5, 2, None)
    assert rows[np.array([0, 2])].common_start == 0
    assert rows[3:].common_start == 1


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 2), (0, 3), (2, 5), (4, 9), (5, 6), (7, 8), (9, 12), (0, 1)]
)
def test_steps_are_live_until_the_end_of_their_row(start, stop):
    rows = Segments(np.array([0, 1, 2]), np.array([0, 5, 1]), np.array([9, 2, 5]))
    live = [[t < n for n in (9, 2, 5)] for t in range(start, stop)]
    got = rows.step_mask(start, stop)
    if all(map(all, live)):
        assert got is None
    else:
        assert got.tolist() == live
        assert got.dtype == bool


@pytest.mark.parametrize("batchsize", [1, 4, 5, 9, 10, 11, 14, 15, 24, 44, 45, 46, 100, 1000])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_folds_are_those_of_array_split(lengths, batchsize):
    n_series, n_steps = 5, 9
    rows = Segments.from_lengths(n_series, n_steps, None if lengths is None else np.array(lengths))
    folded = rows.fold(batchsize)
    lengths = lengths or [n_steps] * n_series
    n = batchsize // n_series
    if n < 2 or max(lengths) <= n:
        assert folded is rows
        return
    expected = []
    for series, length in enumerate(lengths):
        # too short a series stays whole
        for fold in np.array_split(np.arange(length), n if length > n else 1):
            expected.append((series, fold[0], len(fold)))
    assert as_list(folded) == expected
    steps = [(s, t) for s, start, length in as_list(folded) for t in range(start, start + length)]
    # once each, nothing dropped
    assert steps == [(s, t) for s, length in enumerate(lengths) for t in range(length)]
    assert folded.min_length >= 1
    assert len(folded) <= batchsize


@pytest.mark.parametrize(
    ("n_series", "n_steps", "batchsize"), [(2, 12, 8), (1, 12, 3), (3, 10, 6), (2, 12, 12)]
)
def test_folds_of_series_that_divide_are_those_of_a_reshape(n_series, n_steps, batchsize):
    x = np.arange(n_series * n_steps).reshape(n_series, n_steps)
    n = batchsize // n_series
    rows = Segments.from_lengths(n_series, n_steps).fold(batchsize)
    got = [x[s, start : start + length].tolist() for s, start, length in as_list(rows)]
    # row b * n + k holds fold k of series b
    assert got == x.reshape(n_series * n, n_steps // n).tolist()


def test_rows_that_begin_within_a_series_are_folded_from_there():
    rows = Segments(np.array([4, 2]), np.array([10, 3]), np.array([7, 4]))
    assert as_list(rows.fold(6)) == [
        (4, 10, 3),
        (4, 13, 2),
        (4, 15, 2),
        (2, 3, 2),
        (2, 5, 1),
        (2, 6, 1),
    ]


@pytest.mark.parametrize(("n_series", "batchsize"), [(5, 9), (5, 1), (1, 1), (8, 8), (300, 256)])
def test_a_minibatch_that_is_half_full_is_left_alone(n_series, batchsize):
    rows = Segments.from_lengths(n_series, 7)
    assert rows.fold(batchsize) is rows


def test_series_of_one_step_cannot_be_folded():
    rows = Segments.from_lengths(2, 1)
    assert rows.fold(100) is rows
