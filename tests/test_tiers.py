"""What the first tier runs, and everything. Matrices of tests run some of their combinations: those of a covering."""

import random
from collections import Counter
from itertools import combinations, product

import pytest

pytest_plugins = ["pytester"]
TESTS = """
import pytest

@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", "xy")
@pytest.mark.parametrize(("c", "d"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_matrix(a, b, c, d): pass

@pytest.mark.apart
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", "xyzu")
def test_apart(a, b): pass

@pytest.mark.parametrize(("a", "error"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_list(a, error): pass

@pytest.mark.few
@pytest.mark.parametrize("a", range(5))
def test_few(a): pass

@pytest.mark.slow
def test_long(): pass
"""


@pytest.fixture
def conftest(request):
    [plugin] = {p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "covering")}
    return plugin


@pytest.mark.parametrize("sizes", [(3, 6, 11), (4, 2, 17), (2, 2), (2, 3, 2, 4)])
@pytest.mark.parametrize("n_together", [1, 2])
def test_all_values_together_are_kept(sizes, n_together, conftest):
    rows = list(product(*map(range, sizes)))
    random.Random(3).shuffle(rows)
    kept = [rows[i] for i in conftest.covering(rows, n_together)]
    for axes in combinations(range(len(sizes)), n_together):
        found = {tuple(row[axis] for axis in axes) for row in kept}
        assert found == set(product(*(range(sizes[axis]) for axis in axes)))
    largest = sorted(sizes)[-n_together:]
    least = largest[0] * (largest[1] if n_together == 2 else 1)
    assert least <= len(kept) <= 1.25 * least


def test_values_of_a_shorter_list_are_chosen_in_turn(conftest):
    rows = list(product("abc", range(7)))
    kept = [rows[i] for i in conftest.covering(rows, 1)]
    assert sorted(number for _, number in kept) == list(range(7))
    assert sorted(Counter(letter for letter, _ in kept).values()) == [2, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "n_tests"),
    [
        ([], 4 + 4 + 4 + 1),
        (["-m", ""], 12 + 4 + 4 + 5 + 1),
        (["test_some.py"], 12 + 4 + 4 + 5 + 1),
        (["test_some.py", "-m", "slow"], 8 + 4 + 1),
        (["test_some.py::test_list"], 4),
    ],
)
def test_the_first_tier_has_each_value_and_everything_each_pair(
    arguments, n_tests, pytester, conftest
):
    source = conftest.__file__
    with open(source) as file:
        pytester.makeconftest(file.read())
    pytester.makepyprojecttoml(
        '[tool.pytest.ini_options]\nmarkers = ["slow", "few", "apart"]\naddopts = ["-m", "not slow"]\n'
    )
    pytester.makepyfile(test_some=TESTS)
    done = pytester.runpytest_subprocess("--collect-only", "-q", "-p", "no:xdist", *arguments)
    assert sum("::" in line for line in done.outlines) == n_tests
