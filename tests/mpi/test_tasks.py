"""Tasks on several ranks."""

import pytest


@pytest.mark.parametrize("n", [2, 3])
def test_ranks_with_unequal_batches_train_as_one_process(ran, n):
    ran("tasks", n)
