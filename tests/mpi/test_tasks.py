"""Tasks on several ranks."""

import pytest


@pytest.mark.parametrize("n", [2, 3])
def test_ranks_with_unequal_batches_train_as_one_process(mpirun, n):
    out, _ = mpirun("tasks.py", n, str(n))
    assert out.split() == ["well"] * n
