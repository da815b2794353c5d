"""Summaries of several ranks: the first writes them."""

import pytest


def test_the_first_of_two_ranks_writes(mpirun, tmp_path):
    pytest.importorskip("tensorboard")
    out, _ = mpirun("event_files.py", 2, tmp_path)
    assert len(out.splitlines()) == 3
