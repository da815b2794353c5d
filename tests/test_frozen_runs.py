"""The bits of 24 runs are those that are noted for this processor and these versions; after a change
that is meant, ``python -m tests.frozen_runs --write`` notes them anew.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.frozen_runs import FILE, RUNS, digests, machine

EXPECTED = json.loads(Path(FILE).read_text()).get(machine())


@pytest.mark.slow
@pytest.mark.skipif(EXPECTED is None, reason=f"no bits are noted for {machine()}")
@pytest.mark.parametrize("name", RUNS)
def test_the_bits_are_those_that_are_noted(name):
    if name == "two_ranks" and shutil.which("mpirun") is None:
        pytest.skip("no mpirun")
    assert digests([name]) == {name: EXPECTED[name]}
