"""Matrices of tests that run only some of their combinations."""

import random
from itertools import combinations, product
from types import SimpleNamespace

import pytest


@pytest.fixture
def conftest(request):
    [plugin] = {p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "covering")}
    return plugin


@pytest.mark.parametrize("sizes", [(3, 6, 11), (4, 2, 17), (2, 2), (2, 3, 2, 4)])
def test_every_pair_of_values_is_kept(sizes, conftest):
    rows = list(product(*map(range, sizes)))
    random.Random(3).shuffle(rows)
    kept = [rows[i] for i in conftest.covering(rows)]
    for a, b in combinations(range(len(sizes)), 2):
        assert {(r[a], r[b]) for r in kept} == set(product(range(sizes[a]), range(sizes[b])))


def test_a_matrix_of_two_axes_stays_whole_and_one_of_three_shrinks_to_about_its_largest_pair(
    conftest,
):
    assert conftest.covering(list(product(range(4), range(5)))) == list(range(20))
    assert 66 <= len(conftest.covering(list(product(range(3), range(6), range(11))))) <= 80


def test_only_marked_tests_lose_combinations(conftest):
    def item(name, values, marked):
        return SimpleNamespace(
            parent="a file",
            originalname=name,
            callspec=SimpleNamespace(params=dict(zip("abc", values, strict=True))),
            get_closest_marker=lambda marker: marked or None,
        )

    rows = list(product(range(4), range(2), range(2)))
    whole = [item("whole", row, False) for row in rows]
    chosen = [item("chosen", row, True) for row in rows]
    kept = conftest.without_repeated_pairs(chosen + whole)
    assert kept[-len(whole) :] == whole
    assert 8 <= len(kept) - len(whole) < 12
