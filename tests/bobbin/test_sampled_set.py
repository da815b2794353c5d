"""Uniform samples: the oracle is what chance must give, with fixed seeds."""

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass

import numpy as np
import pytest

from fluxutils_py.bobbin import SampledSet
from fluxutils_py.bobbin.treejson import dump_pytree_json, parse_pytree_json
from fluxutils_py.tree import tree_map


def generator(seed=3):
    return np.random.default_rng(seed)


def sampled(max_size, values, rng):
    return SampledSet(max_size, values, rng.random(len(values)))


def spread(counts, p, trials):
    """How many standard deviations chi-square of the counts is from its mean.

    Each of n elements is drawn with probability p in each trial, and the number drawn is fixed.
    """
    n = len(counts)
    expected = p * trials
    chi = ((counts - expected) ** 2).sum() / (expected * (1 - p)) * (n - 1) / n
    return (chi - (n - 1)) / np.sqrt(2 * (n - 1))


@pytest.mark.slow
def test_a_small_part_has_its_share_in_the_union():
    rng, trials = generator(), 2000
    counts = np.zeros(100)
    for _ in range(trials):
        small, large = sampled(10, range(10), rng), sampled(10, range(10, 100), rng)
        counts[list(pickle.loads(pickle.dumps(small)).union(large))] += 1
    assert counts.sum() == 10 * trials
    share = counts[:10].sum() / (10 * trials)
    # the variance of a hypergeometric count of 10 out of 100, 10 of them ours
    assert abs(share - 0.1) < 4 * np.sqrt(10 * 0.1 * 0.9 * 90 / 99 / trials) / 10
    assert abs(spread(counts, 0.1, trials)) < 4


@pytest.mark.slow
def test_elements_added_one_by_one_are_sampled_uniformly():
    rng, trials, counts = generator(), 1000, np.zeros(17)
    for _ in range(trials):
        found = SampledSet(5)
        for i in range(17):
            found = found.union(sampled(5, [i], rng))
        counts[list(found)] += 1
    assert counts.sum() == 5 * trials
    assert abs(spread(counts, 5 / 17, trials)) < 4


@pytest.mark.slow
def test_the_bound_would_see_numbers_drawn_anew():
    rng, trials, counts = generator(), 2000, np.zeros(100)
    for _ in range(trials):
        large = sampled(10, range(10, 100), rng)
        counts[list(sampled(10, range(10), rng).union(list(large)))] += 1
    assert 0.45 < counts[:10].sum() / (10 * trials) < 0.55
    assert spread(counts, 0.1, trials) > 100


def test_the_smallest_priorities_are_kept_in_their_order():
    found = SampledSet(3, "abcd", [0.4, 0.1, 0.3, 0.2])
    assert (found.values, found.priorities) == (("b", "d", "c"), (0.1, 0.2, 0.3))
    # bobbin's own case: the priority of x is -x
    parts = [SampledSet(5, xs, [-x for x in xs]) for xs in ((1, 2, 3), (0, 1, 2))]
    assert parts[0].union(parts[1]).values == (3, 2, 2, 1, 1)
    assert parts[0].union(parts[1]).priorities == (-3, -2, -2, -1, -1)


def test_a_union_does_not_depend_on_order_or_grouping():
    rng = generator()
    a, b, c = (sampled(4, range(10 * i, 10 * i + n), rng) for i, n in enumerate((3, 7, 5)))
    expected = sorted(pair for s in (a, b, c) for pair in zip(s.priorities, s, strict=True))[:4]
    for found in (a.union(b).union(c), c.union(a.union(b)), b.union(c).union(a)):
        assert [*zip(found.priorities, found, strict=True)] == expected


def test_a_sample_is_a_collection():
    empty = SampledSet(4)
    few = empty.union("ab")
    assert (len(empty), list(empty), "a" in empty) == (0, [], False)
    assert (len(few), set(few), "a" in few, "c" in few) == (2, {"a", "b"}, True, False)
    assert len(few.union(iter("cdef")).add("g")) == 4
    assert few.union([]) == few


def test_sets_do_not_change():
    few = SampledSet(2).union("abc")
    before = (few.values, few.priorities)
    few.add("d"), few.union("efghijkl")
    assert (few.values, few.priorities) == before
    with pytest.raises(FrozenInstanceError):
        few.values = ()


def test_numbers_are_fresh_and_numpys_global_generator_is_left_alone():
    before = pickle.dumps(np.random.get_state())  # noqa: NPY002  # the legacy global generator is what must stay
    assert SampledSet(1, "a").priorities != SampledSet(1, "a").priorities
    assert pickle.dumps(np.random.get_state()) == before  # noqa: NPY002  as above


@pytest.mark.parametrize(
    "copied", [lambda s: pickle.loads(pickle.dumps(s)), copy.copy, copy.deepcopy]
)
def test_copies_are_equal_but_draw_numbers_of_their_own(copied):
    few = SampledSet(5, "abc")
    found = copied(few)
    assert found == few
    assert found.add("x").priorities != few.add("x").priorities


@dataclass(frozen=True)
class Results:
    n: int
    samples: SampledSet

    def reduce(self, other):
        return Results(self.n + other.n, self.samples.union(other.samples))


def test_results_of_evaluation_hold_samples_and_go_through_json():
    one = Results(3, SampledSet(4, "abc")).reduce(Results(2, SampledSet(4, "de")))
    assert (one.n, len(one.samples)) == (5, 4)
    assert parse_pytree_json(dump_pytree_json(one), Results(0, SampledSet(4))) == one
    assert parse_pytree_json(dump_pytree_json(one), one).samples.add("x").max_size == 4
    assert tree_map(lambda leaf: leaf, one) == one


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: SampledSet(0), ValueError, r"max_size .*positive integer.* 0$"),
        (lambda: SampledSet(2.5), TypeError, r"max_size .*positive integer.* 2\.5$"),
        (lambda: SampledSet(3, "ab", [0.5]), ValueError, r"zip\(\)"),
        (
            lambda: SampledSet(3).union(SampledSet(2)),
            ValueError,
            r"2 .*united into .*3; .*max_size",
        ),
    ],
)
def test_what_gives_no_uniform_sample_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_larger_sample_may_be_united_into_a_smaller_one():
    assert SampledSet(2, "ab", [0.5, 0.1]).union(SampledSet(3, "cde", [0.2, 0.3, 0.4])).values == (
        "b",
        "c",
    )
