"""All laws at once: random cases against a loop that goes through one series and one step at a
time, in float64.

``python -m tests.laws.differential --cases 5000 --seed 1`` runs as many as there is time for; a
case that fails is printed with its number, and made as simple as it can be.
"""

import pytest

from .differential.cases import draw
from .differential.compare import run

TOGETHER = 10  # cases in a test


@pytest.mark.few
@pytest.mark.parametrize("first", range(0, 200, TOGETHER))
def test_random_cases_equal_a_naive_loop(first):
    failed = {
        number: found for number in range(first, first + TOGETHER) if (found := run(draw(number)))
    }
    assert not failed, "python -m tests.laws.differential --only NUMBER shrinks a case"
