"""What a step returns."""

import dataclasses

import pytest

from fluxutils_py.training.step_info import StepInfo


def test_bobbins_names_are_views_of_ours():
    info = StepInfo(0.5, 3, {"accuracy": 0.25})
    assert (info.loss, info.loss_aux_out) == (0.5, {"accuracy": 0.25})


def test_a_result_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        StepInfo(0.5).batch_loss = 1.0
    assert StepInfo(0.5).metrics == {}
