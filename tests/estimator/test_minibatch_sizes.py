"""What ``batchsize`` counts on several ranks, and what a checkpoint changes."""

from types import SimpleNamespace

import pytest

from fluxutils_py import Estimator, EstimatorClassifier, SequenceRegressor
from fluxutils_py.errors import SpecError
from fluxutils_py.estimator.fit_data import (
    describe_minibatches,
    minibatch_size,
    total_batchsize,
)


def settings_of(scaling, batchsize):
    spec = {"epochs": 1, "batchsize": batchsize, "seqsize": 5}
    return Estimator(spec=spec, scaling=scaling).resolved_params()


def size(scaling="weak", batchsize=8, n_ranks=1, saved=None):
    return total_batchsize(settings_of(scaling, batchsize), n_ranks, saved)


def saved(scaling="weak", batchsize=8, n_ranks=1, saved=None):
    windows = SimpleNamespace(batchsize=size(scaling, batchsize, n_ranks, saved))
    return minibatch_size(settings_of(scaling, batchsize), windows)


def described(scaling="weak", n_ranks=1, saved=None):
    windows = SimpleNamespace(batchsize=size(scaling, 8, n_ranks, saved))
    return describe_minibatches(settings_of(scaling, 8), windows, n_ranks)


def test_weak_counts_the_series_of_a_rank_and_strong_those_of_all():
    assert [size(scaling, 8, 3) for scaling in ("weak", "strong")] == [24, 8]
    for kind in (Estimator, EstimatorClassifier):
        assert kind().scaling == "weak"
        assert kind(scaling="strong").resolved_params().scaling == "strong"
    assert SequenceRegressor().resolved_params().scaling == "strong"


@pytest.mark.parametrize("scaling", ["Weak", None, 2])
def test_any_other_scaling_is_an_error(scaling):
    with pytest.raises(SpecError, match=r"^scaling .*'weak' .*'strong' .*got "):
        size(scaling)


def test_the_minibatch_of_a_checkpoint_stays_whatever_the_number_of_ranks():
    assert size(n_ranks=3, saved=saved(n_ranks=2)) == 16
    assert size(n_ranks=3, saved=saved()) == 8
    once = saved(n_ranks=3, saved=saved(n_ranks=2))
    assert size(n_ranks=3, saved=once) == 16  # on as many ranks as the last, too


def test_the_same_minibatch_written_otherwise_is_the_same():
    assert size(batchsize=4, n_ranks=4, saved=saved(n_ranks=2)) == 16
    assert size("strong", 16, 3, saved(n_ranks=2)) == 16


def test_another_batchsize_is_not_taken_for_that_of_the_checkpoint():
    assert size(batchsize=4, n_ranks=2, saved=saved(n_ranks=2)) == 8
    assert size("strong", 8, 2, saved(n_ranks=2)) == 8
    assert size("weak", 8, 2, saved(scaling="strong", n_ranks=2)) == 16


def test_the_line_for_the_user():
    assert described() is None
    assert described(n_ranks=4) == (
        "4 ranks share minibatches of 32 series (batchsize=8, scaling='weak')"
    )
    assert described("strong", 3) == (
        "3 ranks share minibatches of 8 series (batchsize=8, scaling='strong')"
    )
    # of the checkpoint
    assert described(saved=saved(n_ranks=2)) == (
        "one rank trains on minibatches of 16 series (batchsize=8, scaling='weak')"
    )
