"""fluxutils_py.estimator.persistence."""

import pytest
from torch import nn

from fluxutils_py.errors import LoadError
from fluxutils_py.estimator.persistence import build_bounded

STORED = nn.Linear(3, 2).state_dict()


def test_what_fits_is_built_on_the_processor():
    model = build_bounded(lambda: nn.Linear(3, 2), STORED, "a.pt")
    assert {p.device.type for p in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("sizes", [(3, 10**10), (4, 2)])
def test_shapes_are_compared_before_memory_is_taken(sizes):
    with pytest.raises(
        LoadError, match=rf"a\.pt(.|\n)*weight: .*\[2, 3\].*\[{sizes[1]}, {sizes[0]}\]"
    ):
        build_bounded(lambda: nn.Linear(*sizes), STORED, "a.pt")


def test_models_of_far_more_parameters_are_refused():
    with pytest.raises(LoadError, match=r"a\.pt.*far more parameters"):
        build_bounded(lambda: nn.LSTM(1, 1, num_layers=10**6), STORED, "a.pt")
    assert len(nn.Sequential(*(nn.Linear(1, 1) for _ in range(300)))) == 300


def test_models_that_look_at_values_while_they_are_built_are_built():
    class Looks(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            float(self.weight.sum())

    assert build_bounded(Looks, STORED, "a.pt").weight.shape == (2, 3)
