"""All laws at once: random cases against a loop that goes through one series and one step at a
time, in float64.

``python -m tests.laws.differential --cases 5000 --seed 1`` runs as many as there is time for; a
case that fails is printed with its number, and made as simple as it can be.
"""

import pytest

from .differential.cases import draw
from .differential.compare import run

DRAWN = 200
TESTS = 7
# of which a case has any of many, or which say nothing by themselves
NUMBERS = {"data", "n_series", "n_steps", "features", "hidden", "batchsize", "seqsize"}


@pytest.fixture(scope="module")
def numbers(request):
    """Of the cases drawn, those in which each value of each setting occurs, twice where it can."""
    [plugin] = {p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "covering")}
    rows = [
        tuple(str(v) for k, v in draw(number).items() if k not in NUMBERS)
        for number in range(DRAWN)
    ]
    once = plugin.covering(rows, 1)
    rest = sorted({*range(DRAWN)} - {*once})
    return [*once, *(rest[i] for i in plugin.covering([rows[i] for i in rest], 1))]


@pytest.mark.few
@pytest.mark.parametrize("part", range(TESTS))
def test_random_cases_equal_a_naive_loop(part, numbers):
    failed = {number: found for number in numbers[part::TESTS] if (found := run(draw(number)))}
    assert not failed, "python -m tests.laws.differential --only NUMBER shrinks a case"
