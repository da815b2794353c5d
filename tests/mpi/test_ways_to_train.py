"""Every way to train, on several ranks."""

import pytest


@pytest.mark.parametrize("n", [2, 3])
def test_ranks_train_as_one_process(mpirun, n):
    out, _ = mpirun("ways_to_train.py", n, str(n))
    assert out.split() == ["well"] * n
