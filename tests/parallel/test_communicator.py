"""Words for ranks."""

from fluxutils_py.parallel.communicator import describe_by_rank, name_ranks


def test_values_of_ranks_in_words():
    assert describe_by_rank([1, 2, 1, 1]) == "1 on ranks 0, 2 and 3, 2 on rank 1"
    assert name_ranks([2]) == "rank 2"
