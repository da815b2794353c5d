"""What ranks compare before a fit, as far as one rank tells; tests/mpi compares several."""

from types import SimpleNamespace

import numpy as np
import pytest
from torch import nn

from fluxutils_py.estimator import same_fit
from fluxutils_py.estimator.same_fit import (
    collective_settings,
    require_same_fit,
    require_same_inputs,
)
from fluxutils_py.inputs.inputs import Schema, read_inputs
from fluxutils_py.parallel import RankGroup
from fluxutils_py.training import Checkpointer
from tests.plain_networks import plain_regressor


def test_the_course_of_a_fit_depends_on_its_epochs_and_hooks(tmp_path):
    est = plain_regressor(epochs=7, early_stopping=True, patience=3)
    course = collective_settings(est.resolved_params(), False, None)
    assert course["epochs"] == 7
    assert course["patience"] == 3
    assert collective_settings(est.resolved_params(), False, 2)["epochs"] == 2
    est.set_params(callbacks=Checkpointer(tmp_path))
    assert collective_settings(est.resolved_params(), False, None) != course


def test_one_rank_has_the_inputs_of_all():
    inputs = read_inputs(np.zeros((2, 3, 4)), Schema("Estimator"), lengths=[4, 2, 3])
    require_same_inputs(RankGroup(), inputs)


@pytest.mark.parametrize("size", [1, 2])
def test_several_ranks_compare_their_fits_and_take_the_model_of_the_first(size, monkeypatch):
    compared, sent = {}, []
    ranks = SimpleNamespace(
        is_single=size == 1, size=size, rank=0, require_equal=compared.update, broadcast=sent.extend
    )
    monkeypatch.setattr(same_fit, "shared_identity", lambda loop: {"loss": "mse"})
    monkeypatch.setattr(same_fit, "_require_same_data", lambda loop, identity: None)
    data = SimpleNamespace(
        settings=SimpleNamespace(scaling="weak"),
        codec=SimpleNamespace(scale=None),
        validation=None,
        windows=SimpleNamespace(segments=range(1), batchsize=4),
    )
    loop = SimpleNamespace(ranks=ranks, model=nn.Linear(2, 1), epoch=3, scheduler=None, data=data)
    if size == 1:
        require_same_fit(loop)
        assert (compared, sent) == ({}, [])
        return
    with pytest.warns(UserWarning, match="2 ranks share 1 series"):
        require_same_fit(loop)
    assert (compared["loss"], compared["scaling"]) == ("mse", "weak")
    assert compared["the epochs so far"] == 3
    assert all(a is b for a, b in zip(sent, loop.model.parameters(), strict=True))
