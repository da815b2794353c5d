"""Weights and masks among labels: element_weights."""

import pytest
import torch

from fluxutils_py.errors import DataError
from fluxutils_py.gomlx.running_metrics import target_and_weight, weights_differ


def test_mask_and_weights_in_any_order_are_multiplied():
    y, mask, w = (
        torch.zeros(3),
        torch.tensor([True, False, True]),
        torch.tensor([2.0, torch.nan, 0.5]),
    )
    for labels in (y, mask, w), (y, w, mask):
        target, weight = target_and_weight(labels)
        assert target is y
        assert weight.tolist() == [2.0, 0.0, 0.5]
    assert target_and_weight(y) == (y, None)
    with pytest.raises(DataError, match="int64"):
        target_and_weight((y, torch.zeros(3, dtype=torch.int64)))


def test_equal_weights_do_not_differ():
    assert not weights_differ(torch.full((3, 1), 0.1))
    assert weights_differ(torch.tensor([1.0, 0.0]))
    assert not weights_differ(None)
