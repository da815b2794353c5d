"""Summaries of several ranks: the first writes them."""


def test_the_first_of_two_ranks_writes(ran):
    ran("event_files", 2)
