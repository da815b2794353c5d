"""Summaries of several ranks: the first writes them."""

import pytest


def test_the_first_of_two_ranks_writes(ran):
    pytest.importorskip("tensorboard")
    ran("event_files", 2)
