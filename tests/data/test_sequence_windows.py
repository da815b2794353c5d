"""Minibatches cut from series, against lists of windows made by hand and plain slices."""

import numpy as np
import pytest

from fluxutils_py.data import SampleWeight, SequenceWindows, SeriesArray
from fluxutils_py.data import blocks as blocks_module
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import DataError
from fluxutils_py.inputs import as_series

N, T = 5, 7
LENGTHS = np.array([7, 2, 5, 7, 1])
ALL_ROWS = {
    "whole": Segments.from_lengths(N, T),
    "of other lengths": Segments.from_lengths(N, T, LENGTHS),
    "folded": Segments.from_lengths(N, T).fold(16),
    "folded with lengths": Segments.from_lengths(N, T, LENGTHS).fold(11),
    "one": Segments.from_lengths(1, T),
    "of one step": Segments.from_lengths(N, 1),
}
# batchsize, seqsize, overlap, burn_in
SIZES = [
    *[(2, 3, 0, 0), (1, 1, 0, 0), (5, 7, 0, 0), (3, 2, 0, 0), (99, 99, 0, 0)],
    *[(2, 3, 2, 0), (2, 3, 5, 0), (5, 1, 3, 0), (4, 7, 2, 0), (3, 2, 99, 0)],
    *[(2, 3, 0, 1), (2, 3, 0, 4), (3, 2, 0, 6), (4, 9, 0, 2), (2, 3, 0, 99)],
    *[(2, 3, 2, 4), (3, 2, 4, 1), (2, 1, 1, 1)],
]


def arrays(n_features=3, n_outputs=2, dtype="f8"):
    x = np.arange(n_features * N * T, dtype=dtype).reshape(n_features, N, T) + 1
    y = -np.arange(n_outputs * N * T, dtype=dtype).reshape(n_outputs, N, T) - 1
    return x, y


def cut(x, y=(), weight=None, *, batchsize=2, seqsize=3, **kwargs):
    x, y = as_series(x, "x"), () if isinstance(y, tuple) and not y else as_series(y, "y")
    return SequenceWindows(x, y, weight, batchsize=batchsize, seqsize=seqsize, **kwargs)


def by_hand(lengths, batchsize, seqsize, overlap=0, burn_in=0):
    """Rows, first step, n_overlap, end, and whether it counts, of each window of each group."""
    groups = []
    for first in range(0, len(lengths), batchsize):
        rows = list(range(first, min(first + batchsize, len(lengths))))
        longest, windows, t = max(lengths[r] for r in rows), [], 0
        while t < longest:
            counts = t >= burn_in
            stop = min(t + seqsize, longest if counts else min(burn_in, longest))
            n_overlap = 0
            while counts and n_overlap < overlap and t - n_overlap > burn_in:
                n_overlap += 1
            windows.append((rows, t - n_overlap, n_overlap, stop, counts))
            t = stop
        groups.append(windows)
    return groups


# -- which windows there are ---------------------------------------------------------------------------


def test_time_runs_before_series():
    x, _ = arrays()
    got = [
        (
            w.index.segments.series.tolist(),
            w.index.start,
            w.x[0].shape[0],
            w.index.first,
            w.index.last,
        )
        for w in cut(x)
    ]
    assert got == [
        *[([0, 1], 0, 3, True, False), ([0, 1], 3, 3, False, False), ([0, 1], 6, 1, False, True)],
        *[([2, 3], 0, 3, True, False), ([2, 3], 3, 3, False, False), ([2, 3], 6, 1, False, True)],
        *[([4], 0, 3, True, False), ([4], 3, 3, False, False), ([4], 6, 1, False, True)],
    ]


@pytest.mark.parametrize(("batchsize", "seqsize", "overlap", "burn_in"), SIZES)
@pytest.mark.parametrize("which", ALL_ROWS)
def test_windows_are_those_made_by_hand(which, batchsize, seqsize, overlap, burn_in):
    rows = ALL_ROWS[which]
    x, y = arrays()
    windows = cut(
        x, y, batchsize=batchsize, seqsize=seqsize, overlap=overlap, burn_in=burn_in, segments=rows
    )
    groups = by_hand(rows.length.tolist(), batchsize, seqsize, overlap, burn_in)
    found = list(windows)
    assert len(windows) == len(found) == sum(len(g) for g in groups)
    expected = [
        (*w, i == 0, w is g[-1], g[i + 1] if w is not g[-1] else None)
        for g in groups
        for i, w in enumerate(g)
    ]
    seen = np.zeros((len(rows), T), int)
    for w, (chosen, start, n_overlap, stop, counts, first, last, after) in zip(
        found, expected, strict=True
    ):
        assert (
            w.index.start,
            w.index.n_overlap,
            w.index.has_loss,
            w.index.first,
            w.index.last,
        ) == (
            start,
            n_overlap,
            counts,
            first,
            last,
        )
        assert w.index.next_start == (after[1] if after is not None and after[1] < stop else None)
        assert w.x[0].shape == (stop - start, len(chosen), 3)
        assert w.y[0].shape == (stop - start - n_overlap, len(chosen), 2)
        n_live = 0
        for i, r in enumerate(chosen):
            s, begin, length = int(rows.series[r]), int(rows.start[r]), int(rows.length[r])
            assert int(w.index.segments.series[i]) == s
            for t in range(start, stop):
                exists = t < length
                plain = x[:, s, begin + t] if exists else np.zeros(3)
                assert w.x[0][t - start, i].tolist() == plain.tolist()
                if t >= start + n_overlap:
                    plain = y[:, s, begin + t] if exists else np.zeros(2)
                    assert w.y[0][t - start - n_overlap, i].tolist() == plain.tolist()
                    assert exists == (w.w is None or bool(w.w[t - start - n_overlap, i, 0]))
                    n_live += exists and counts
                    seen[r, t] += exists
        assert w.n_live == n_live
        assert w.w is None or w.w.shape == (stop - start - n_overlap, len(chosen), 1)
        assert w.missing_steps is None
    assert (seen == (np.arange(T) < rows.length[:, None])).all()  # each step once, nothing dropped


@pytest.mark.parametrize(("batchsize", "seqsize", "overlap", "burn_in"), SIZES)
@pytest.mark.parametrize("which", ALL_ROWS)
def test_equal_lengths_leave_nothing_to_mask(which, batchsize, seqsize, overlap, burn_in):
    rows = ALL_ROWS[which]
    x, y = arrays()
    windows = cut(
        x,
        y,
        batchsize=batchsize,
        seqsize=seqsize,
        overlap=overlap,
        burn_in=burn_in,
        segments=rows,
        equal_lengths=True,
    )
    found = list(windows)
    assert len(windows) == len(found)
    seen = []
    for w in found:
        assert w.w is None
        assert w.index.segments.min_length == w.index.segments.max_length
        assert len(w.index.segments) <= batchsize
        if w.index.first:
            seen += zip(
                w.index.segments.series.tolist(),
                w.index.segments.start.tolist(),
                w.index.segments.length.tolist(),
                strict=True,
            )
    assert sorted(seen) == sorted(zip(rows.series, rows.start, rows.length, strict=True))
    lengths = [length for _, _, length in seen]
    assert lengths == sorted(lengths, reverse=True)
    alike = [lengths.count(n) for n in set(lengths)]
    # no fuller than they could be
    assert sum(w.index.first for w in found) == sum(-(-n // batchsize) for n in alike)


def test_windows_can_be_walked_through_again():
    x, y = arrays()
    windows = cut(x, y)
    first, second = list(windows), list(windows)
    assert all(np.array_equal(a.x[0], b.x[0]) for a, b in zip(first, second, strict=True))


# -- order of series -----------------------------------------------------------------------------------


@pytest.mark.parametrize("equal_lengths", [False, True])
def test_shuffling_draws_a_new_order_of_rows_and_keeps_time(equal_lengths):
    n_series = 40
    x = np.arange(n_series * T, dtype=float).reshape(1, n_series, T)
    rows = Segments.from_lengths(n_series, T, np.where(np.arange(n_series) % 3, T, 5))
    windows = cut(x, x, batchsize=6, seqsize=2, segments=rows, equal_lengths=equal_lengths)
    n_windows = len(windows)

    def order():
        found, expected_start, group = [], 0, None
        for w in windows:
            if w.index.first:
                found += w.index.segments.series.tolist()
                expected_start, group = 0, w.index.segments
            assert w.index.start == expected_start
            assert w.index.segments is group
            expected_start += w.x[0].shape[0]
            for i, s in enumerate(w.index.segments.series):
                for t in range(w.index.start, min(expected_start, rows.length[s])):
                    assert w.x[0][t - w.index.start, i, 0] == x[0, s, t]
        return found

    given = order()
    rng = np.random.default_rng(5)
    windows.shuffle(rng)
    first = order()
    assert order() == first  # until the next shuffle
    windows.shuffle(rng)
    second = order()
    assert sorted(first) == sorted(second) == list(range(n_series))
    assert len({tuple(o) for o in (given, first, second)}) == 3
    # groups of other lengths may have other windows
    assert len(windows) == n_windows or not equal_lengths
    assert len(list(windows)) == len(windows)
    windows.shuffle(np.random.default_rng(5))
    assert order() == first
    windows.shuffle(None)
    assert order() == given


# -- what is read --------------------------------------------------------------------------------------


class Recording:
    """Something that takes three slices, and writes down which."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.reads = array, array.shape, array.dtype, []

    def __getitem__(self, key):
        self.reads.append([range(*k.indices(n)) for k, n in zip(key, self.shape, strict=True)])
        return self.array[key].copy()


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(
    ("batchsize", "seqsize", "overlap", "burn_in"), [(2, 3, 0, 0), (3, 2, 3, 1), (2, 99, 0, 0)]
)
@pytest.mark.parametrize("which", ["whole", "folded", "folded with lengths"])
def test_only_the_steps_of_the_window_being_yielded_are_read(
    which, batchsize, seqsize, overlap, burn_in, shuffled
):
    rows = ALL_ROWS[which]
    x, y = (Recording(a) for a in arrays())
    windows = cut(
        x, y, batchsize=batchsize, seqsize=seqsize, overlap=overlap, burn_in=burn_in, segments=rows
    )
    windows.check()
    windows.shuffle(np.random.default_rng(0) if shuffled else None)
    assert len(windows) > 0
    walk = iter(windows)
    assert x.reads == y.reads == []
    for w in walk:
        span = range(w.index.start, w.index.start + w.x[0].shape[0])
        cells = sorted(
            (int(s), int(begin) + t)
            for s, begin in zip(w.index.segments.series, w.index.segments.start, strict=True)
            for t in span
        )
        for source in (x, y):
            read = sorted((s, t) for _, ns, ts in source.reads for s in ns for t in ts)
            assert read == [c for c in cells if c[1] < T]
            source.reads.clear()


def test_the_data_are_never_written_to():
    x, y = arrays()
    x[:, 1, 2:4] = np.nan
    y[:, 1, 2:4] = np.nan
    w = np.random.default_rng(0).uniform(size=(N, T))
    w[2] = 0
    for a in (x, y, w):
        a.flags.writeable = False  # whoever writes to it gets an error
    for rows in (ALL_ROWS["folded"], ALL_ROWS["of other lengths"]):
        windows = cut(x, y, SampleWeight(w, N, T), segments=rows, overlap=2)
        windows.check()
        assert len(list(windows)) == len(windows)


# -- weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["whole", "of other lengths", "folded", "folded with lengths"])
@pytest.mark.parametrize("overlap", [0, 2])
def test_weights_come_with_their_steps(which, overlap):
    rows = ALL_ROWS[which]
    x, y = arrays()
    plain = np.random.default_rng(0).uniform(0.5, 2, (N, T))
    plain[1, 0] = plain[3, 2:5] = 0
    weight = SampleWeight(plain, N, T)
    weight.scale = 3.0
    total = 0
    for w in cut(x, y, weight, segments=rows, overlap=overlap):
        start = w.index.start + w.index.n_overlap
        assert w.w.shape == (*w.y[0].shape[:2], 1)
        for i, (s, begin, length) in enumerate(
            zip(
                w.index.segments.series,
                w.index.segments.start,
                w.index.segments.length,
                strict=True,
            )
        ):
            for t in range(start, start + w.y[0].shape[0]):
                expected = 3 * plain[s, begin + t] if t < length else 0
                assert w.w[t - start, i, 0] == expected
        assert w.n_live == (w.w > 0).sum()
        total += w.n_live
    n_rows = np.arange(T) < (LENGTHS if "length" in which else np.full(N, T))[:, None]
    assert total == ((plain > 0) & n_rows).sum()


# -- what is not a number ------------------------------------------------------------------------------


def test_steps_without_a_target_do_not_count():
    x, y = arrays()
    y[1, 2, 4] = np.nan  # one of two outputs
    y[:, 0, 0] = np.nan
    windows = cut(x, y)
    windows.check()
    assert windows.has_missing_targets
    dead = {(2, 4), (0, 0)}
    n_live = 0
    for w in windows:
        stop = w.index.start + w.x[0].shape[0]
        inside = [
            (s, t) for s, t in dead if s in w.index.segments.series and w.index.start <= t < stop
        ]
        assert (w.w is None) == (not inside)
        for s, t in inside:
            i = w.index.segments.series.tolist().index(s)
            assert w.w[t - w.index.start, i, 0] == 0
            assert w.y[0][t - w.index.start, i].tolist() == [0, 0]  # the whole step
            # its input still moves the state
            assert w.x[0][t - w.index.start, i].tolist() == x[:, s, t].tolist()
        assert w.n_live == w.x[0].shape[0] * len(w.index.segments) - len(inside)
        assert w.w is None or (w.w == 0).sum() == len(inside)
        n_live += w.n_live
    assert n_live == N * T - 2


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_inputs_of_steps_that_do_not_count_may_be_anything(value):
    x, y = arrays()
    x[1, 2, 4] = value
    y[:, 2, 4] = np.nan
    x[0, 3, 1] = value
    weight = np.ones((N, T))
    weight[3, 1] = 0
    windows = cut(x, y, SampleWeight(weight, N, T), batchsize=99, seqsize=99)
    windows.check()
    (w,) = windows
    for s, t in ((2, 4), (3, 1)):
        assert w.x[0][t, s].tolist() == [0, 0, 0]  # the whole step, not single features
        assert w.w[t, s, 0] == 0
    assert np.isfinite(w.x[0]).all()
    x[:, 2, 4] = x[:, 3, 1] = 0
    assert np.array_equal(w.x[0], x.transpose(2, 1, 0))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_follows_the_end_of_a_row_may_be_anything(value):
    x, y = arrays()
    padded = np.arange(T) >= LENGTHS[:, None]
    x[:, padded] = y[:, padded] = value
    windows = cut(x, y, segments=Segments.from_lengths(N, T, LENGTHS), batchsize=99, seqsize=99)
    windows.check()
    (w,) = windows
    assert w.w[:, :, 0].tolist() == (~padded.T).tolist()
    assert not w.x[0][padded.T].any()
    assert not w.y[0][padded.T].any()
    assert w.n_live == LENGTHS.sum()


PLACES = [(0, 0, 0), (2, 4, 6), (1, 3, 5)]


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["whole", "folded"])
def test_an_input_that_is_no_number_is_an_error_that_names_the_place(which, value, place, mapped):
    x, y = arrays()
    x[place] = value
    windows = cut(*(map(Recording, (x, y)) if mapped else (x, y)), segments=ALL_ROWS[which])
    message = (
        rf"^x is {value} at feature {place[0]}, series {place[1]}, step {place[2]}; fill it in"
    )
    if not mapped:
        with pytest.raises(DataError, match=message):
            windows.check()
    else:
        windows.check()
    with pytest.raises(DataError, match=message):
        list(windows)


def test_windows_before_the_bad_one_are_yielded_from_a_map():
    x, y = arrays()
    x[0, 1, 5] = np.nan
    walk = iter(cut(Recording(x), Recording(y)))
    assert next(walk).index.start == 0
    with pytest.raises(DataError, match="series 1, step 5"):
        next(walk)


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_an_infinite_target_is_an_error(value):
    x, y = arrays()
    y[1, 2, 3] = value
    windows = cut(x, y)
    message = f"^y is {value} at feature 1, series 2, step 3; .*target"
    with pytest.raises(DataError, match=message):
        windows.check()
    with pytest.raises(DataError, match=message):
        list(windows)


def test_one_of_several_arrays_is_named():
    x, y = arrays()
    other = x.copy()
    other[2, 1, 0] = np.nan
    with pytest.raises(DataError, match=r"^x\[1\] is nan .*2, series 1, step 0"):
        cut((x, other), y).check()
    with pytest.raises(DataError, match=r"^y\[1\] is inf .*0, series 0, step 0"):
        cut(x, (y, np.full_like(y, np.inf))).check()


def test_a_step_counts_only_with_all_its_targets():
    x, y = arrays()
    z = y.copy()
    y[:, 0, 1] = np.nan
    z[0, 1, 2] = np.nan
    (w,) = cut(x, (y, z), batchsize=99, seqsize=99)
    assert [tuple(p) for p in np.argwhere(w.w[:, :, 0] == 0)] == [(1, 0), (2, 1)]
    y[:, 0, 1] = z[:, 1, 2] = 0
    assert np.array_equal(w.y[0], y.transpose(2, 1, 0))
    assert np.array_equal(w.y[1], z.transpose(2, 1, 0))


def test_of_several_outputs_those_that_are_there_count_where_that_is_wanted():
    x, y = arrays(n_outputs=3)
    y[:, 0, 1] = np.nan  # a whole step
    (w,) = cut(x, y, batchsize=99, seqsize=99, mask_per_output=True)
    assert np.array_equal(w.w, ~np.isnan(y[:1]).transpose(2, 1, 0))
    y[1, 2, 3] = np.nan
    (w,) = cut(x, y, batchsize=99, seqsize=99, mask_per_output=True)
    assert np.array_equal(w.w, ~np.isnan(y).transpose(2, 1, 0))
    assert np.array_equal(w.y[0], np.nan_to_num(y).transpose(2, 1, 0))


@pytest.mark.parametrize("mapped", [False, True])
def test_without_targets_a_step_without_input_is_a_gap(mapped):
    x, _ = arrays()
    x[:, 2, 4:6] = np.nan
    x[:, 0, 0] = np.nan
    windows = cut(Recording(x) if mapped else x, batchsize=99, seqsize=99)
    windows.check()
    (w,) = windows
    assert [tuple(p) for p in np.argwhere(w.missing_steps)] == [(0, 0), (4, 2), (5, 2)]
    assert np.array_equal(w.x[0], np.nan_to_num(x).transpose(2, 1, 0))
    assert w.y == ()
    assert w.n_live == N * T - 3
    assert all(v.missing_steps is None or v.missing_steps.any() for v in cut(x))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_without_targets_a_step_with_some_input_is_an_error(value):
    x, _ = arrays()
    x[:2, 3, 1] = value
    for windows in (cut(x), cut(Recording(x))):
        with pytest.raises(
            DataError,
            match=f"x is {value} .* 0, series 3, step 1; .* NaN",
        ):
            list(windows)


def test_with_one_target_the_inputs_of_all_steps_count():
    x, y = arrays()
    y[:, :, :-1] = np.nan
    x[:, 2, 4] = np.nan  # a step without input
    windows = cut(x, y, one_target=True, batchsize=99, seqsize=99)
    windows.check()
    (w,) = windows
    assert np.array_equal(w.x[0], np.nan_to_num(x).transpose(2, 1, 0))
    assert np.array_equal(w.w[:, :, 0], np.broadcast_to(np.arange(T)[:, None] == T - 1, (T, N)))
    message = "^x is {} .* series 3, step {}; .* NaN in all"
    for place, value, step in (
        ((0, 3, 1), np.nan, 1),
        ((0, 3, 1), np.inf, 1),
        ((slice(None), 3, T - 1), np.nan, T - 1),
    ):
        bad = x.copy()
        bad[place] = value
        for seqsize in (99, 1):
            with pytest.raises(DataError, match=message.format(value, step)):
                cut(bad, y, one_target=True, batchsize=1, seqsize=seqsize).check()
            with pytest.raises(DataError, match=message.format(value, step)):
                list(cut(*map(Recording, (bad, y)), one_target=True, batchsize=1, seqsize=seqsize))


def test_integers_and_booleans_pass_unlooked_at():
    x, y = arrays(dtype="i8")
    flags = x % 2 == 0
    windows = cut((x, flags), y)
    windows.check()
    assert not windows.has_missing_targets
    for w in windows:
        assert [a.dtype for a in w.x] == [np.int64, bool]
        assert w.w is None


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_large_numbers_are_finite(dtype):
    """Their sum is not."""
    x, y = arrays(dtype=dtype)
    x[:] = y[:] = np.finfo(dtype).max
    windows = cut(x, y)
    windows.check()
    assert not windows.has_missing_targets
    assert len(list(windows)) == len(windows)


@pytest.mark.parametrize("block", [1, 4, 30])
def test_checking_in_blocks_sees_every_place(monkeypatch, block):
    monkeypatch.setattr(blocks_module, "BLOCK", block)
    for place in PLACES:
        x, y = arrays()
        x[place] = np.nan
        with pytest.raises(DataError, match=f"series {place[1]}, step {place[2]}"):
            cut(x, y).check()


def test_missing_targets_are_known_of_arrays_in_memory_only():
    x, y = arrays()
    gaps = y.copy()
    gaps[0, 0, 0] = np.nan
    for target, known in ((y, False), (gaps, True), (Recording(gaps), False)):
        windows = cut(x, target)
        windows.check()
        assert windows.has_missing_targets == known


def test_several_inputs_are_cut_alike():
    x, y = arrays()
    other = SeriesArray(np.asfortranarray(2 * x[:1]), "other")
    windows = SequenceWindows(
        [SeriesArray(x, "x"), other], [SeriesArray(y, "y")], batchsize=3, seqsize=4
    )
    for w in windows:
        assert len(w.x) == 2
        assert np.array_equal(w.x[1], 2 * w.x[0][:, :, :1])


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("rows", ALL_ROWS)
@pytest.mark.parametrize("case", ["complete", "labels", "missing labels", "gaps", "weighted"])
def test_windows_of_arrays_known_to_be_complete_are_those_of_others(case, rows, overlap):
    """An array that was looked through before needs no look in each window."""
    x, y = arrays()
    weight = SampleWeight(np.arange(1.0, N + 1), N, T) if case == "weighted" else None
    if "labels" in case:
        y = (np.arange(N * T) % 3).reshape(1, N, T)
    if case == "gaps":
        y[0, 1, 1] = np.nan

    def windows():
        found = cut(x, y, weight, segments=ALL_ROWS[rows], seqsize=3, overlap=overlap)
        found.y[0].missing_label = 2 if case == "missing labels" else None
        return found

    checked = windows()
    checked.check()
    n_masked = 0
    for a, b in zip(checked, windows(), strict=True):
        assert a.index.start == b.index.start
        assert a.n_live == b.n_live
        assert (a.missing_steps is None) == (b.missing_steps is None)
        assert (a.w is None) == (b.w is None)
        n_masked += a.w is not None
        pairs = [*zip(a.x, b.x, strict=True), *zip(a.y, b.y, strict=True)]
        if a.w is not None:
            pairs.append((a.w, b.w))
        assert all(np.array_equal(u, v) for u, v in pairs)
    if case == "complete" and "lengths" not in rows:
        assert n_masked == 0 or rows == "folded"
    if case == "weighted" or (case == "missing labels" and rows == "whole"):
        assert n_masked > 0


@pytest.mark.parametrize("seqsize", [99, 4, 1])
def test_an_answer_at_the_last_step_needs_its_input(seqsize):
    x, _ = arrays()
    x[:, 2, 4] = np.nan  # a step without input before the last
    starts, lengths = np.arange(N) % 3, 5 + np.arange(N) % 2
    rows = Segments.from_lengths(N, T, lengths, starts)
    settings = {"batchsize": 3, "seqsize": seqsize, "segments": rows}

    def read(x):
        windows = SequenceWindows(as_series(x, "x"), one_target=True, **settings)
        windows.check()
        return [w.missing_steps for w in windows if w.missing_steps is not None]

    assert sum(int(m.sum()) for m in read(x)) >= 1
    for n in range(N):
        end = int(starts[n] + lengths[n])
        bad = x.copy()
        bad[:, n, end - 1 :] = np.nan
        with pytest.raises(DataError, match=f"series {n}, step {end - 1}; .*lengths="):
            read(bad)
        bad[:, n, end - 1] = 0  # outside the series anything may stand
        read(bad)


def test_changed_windows_are_others_of_the_same_data():
    windows = cut(*arrays())
    other = windows.changed(gap_value=np.nan, seqsize=2)
    assert (np.isnan(other.gap_value), other.seqsize) == (True, 2)
    assert (windows.gap_value, windows.seqsize) == (0, 3)
    assert other.x is windows.x
