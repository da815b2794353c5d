"""``estimator/collectives.py``: what ``batchsize`` counts on several ranks, and what a checkpoint
changes.
"""

import pytest

from fluxutils_py import Estimator, EstimatorClassifier, SequenceRegressor
from fluxutils_py.data.segments import Segments
from fluxutils_py.errors import SpecError
from fluxutils_py.estimator.estimator_settings import MinibatchSize, whole_batchsize


def size(scaling="weak", batchsize=8, n_ranks=1, saved=None):
    settings = Estimator(
        spec={"epochs": 1, "batchsize": batchsize, "seqsize": 5}, scaling=scaling
    ).resolved_params()
    return MinibatchSize.of(settings, n_ranks, saved)


def saved(**how):
    return size(**how).state_dict()


def test_weak_counts_the_series_of_a_rank_and_strong_those_of_all():
    assert [whole_batchsize(8, scaling, 3) for scaling in ("weak", "strong")] == [24, 8]
    for kind in (Estimator, EstimatorClassifier):
        assert kind().scaling == "weak"
        assert kind(scaling="strong").resolved_params().scaling == "strong"
    assert SequenceRegressor().resolved_params().scaling == "strong"


@pytest.mark.parametrize("scaling", ["Weak", None, 2])
def test_any_other_scaling_is_an_error(scaling):
    with pytest.raises(SpecError, match=r"^scaling .*'weak' .*'strong' .*got "):
        size(scaling)


def test_the_minibatch_of_a_checkpoint_stays_whatever_the_number_of_ranks():
    assert size(n_ranks=3, saved=saved(n_ranks=2)).whole == 16
    assert size(n_ranks=3, saved=saved()).whole == 8
    once = size(n_ranks=3, saved=saved(n_ranks=2))
    assert size(n_ranks=3, saved=once.state_dict()).whole == 16  # on as many ranks as the last, too
    assert once.resumed
    assert not size(n_ranks=2, saved=saved(n_ranks=2)).resumed


def test_the_same_minibatch_written_otherwise_is_the_same():
    assert not size(batchsize=4, n_ranks=4, saved=saved(n_ranks=2)).resumed
    assert size(batchsize=4, n_ranks=4, saved=saved(n_ranks=2)).whole == 16
    assert size("strong", 16, 3, saved(n_ranks=2)).whole == 16


def test_another_batchsize_is_not_taken_for_that_of_the_checkpoint():
    assert size(batchsize=4, n_ranks=2, saved=saved(n_ranks=2)).whole == 8
    assert size("strong", 8, 2, saved(n_ranks=2)).whole == 8
    assert size("weak", 8, 2, saved(scaling="strong", n_ranks=2)).whole == 16


def test_the_line_for_the_user():
    many = Segments.from_lengths(40, 9)
    assert size(n_ranks=4).describe(many) == (
        "4 ranks train on minibatches of 32 series, 8 on each rank (batchsize=8, scaling='weak')"
    )
    assert size("strong", n_ranks=3).describe(many) == (
        "3 ranks train on minibatches of 8 series, 2 or 3 on each rank (batchsize=8, "
        "scaling='strong')"
    )
    assert size(n_ranks=3, saved=saved(n_ranks=2)).describe(many) == (
        "3 ranks train on minibatches of 16 series, 5 or 6 on each rank (batchsize=8, "
        "scaling='weak', which continues with the 16 of its checkpoint)"
    )
    assert size(saved=saved(n_ranks=2)).describe(many) == (
        "this process trains on minibatches of 16 series (batchsize=8, scaling='weak', which "
        "continues with the 16 of its checkpoint)"
    )
    few = Segments.from_lengths(2, 9)
    assert size("strong", n_ranks=3).describe(few) == (
        "3 ranks train on minibatches of all 2 series, 0 or 1 on each rank (batchsize=8, "
        "scaling='strong')"
    )
    assert size("strong", n_ranks=3).describe(few.fold(8)) == (
        "3 ranks train on minibatches of all 8 pieces of series, 2 or 3 on each rank (batchsize=8, "
        "scaling='strong')"
    )
    assert size(n_ranks=3).describe(many, sharded=True) == (
        "3 ranks train on minibatches of 24 series, each rank on its own (batchsize=8, "
        "scaling='weak')"
    )
