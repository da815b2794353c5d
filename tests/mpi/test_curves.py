"""Summaries of several ranks: the first writes them."""

import pytest


def test_the_first_of_two_ranks_writes(mpirun, tmp_path):
    pytest.importorskip("tensorboard")
    out, _ = mpirun("curves.py", 2, tmp_path)
    assert len(out.splitlines()) == 3
