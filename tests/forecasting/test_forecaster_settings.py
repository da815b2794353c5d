"""Sizes and numbers of networks and steps that settings leave open."""

import pytest

from fluxutils_py.forecasting import Forecaster
from fluxutils_py.forecasting.forecaster_settings import with_size


@pytest.mark.parametrize(
    ("n_values", "expected"),
    [
        (500, (32, 100, 4)),
        (9_999, (32, 156, 4)),
        (10_000, (96, 156, 4)),
        (49_999, (96, 781, 4)),
        (10**6, (96, 1500, 2)),
    ],
)
def test_sizes_follow_the_number_of_values(n_values, expected):
    sized = with_size(Forecaster(3), n_values)
    assert (sized.hidden_size, sized.max_steps, sized.n_models) == expected


def test_what_is_set_stays():
    given = Forecaster(3, hidden_size=7, max_steps=9, n_models=2)
    sized = with_size(given, 500)
    assert (sized.hidden_size, sized.max_steps, sized.n_models) == (7, 9, 2)
    assert given.get_params() == Forecaster(3, hidden_size=7, max_steps=9, n_models=2).get_params()
