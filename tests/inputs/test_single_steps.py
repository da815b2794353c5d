"""Single steps of series, and the choice of series."""

import numpy as np
import pytest

from fluxutils_py.errors import ShapeError
from fluxutils_py.inputs.single_steps import check_step_shape, series_indices


def test_a_step_of_another_shape_is_refused():
    check_step_shape(np.zeros((3, 5)), (3, 5))
    for shape in ((3, 4), (2, 5), (15,), (1, 3, 5)):
        with pytest.raises(ShapeError, match=r"3.*5"):
            check_step_shape(np.zeros(shape), (3, 5))


def test_a_step_that_is_no_array_is_refused_with_what_is_wanted():
    with pytest.raises(ShapeError, match=r"\(F, N\) = \(3, 5\).*got dict"):
        check_step_shape(np.asarray({"a": 1}), (3, 5))


@pytest.mark.parametrize(
    ("series", "indices"),
    [
        (2, [2]),
        (-1, [3]),
        ([0, 3], [0, 3]),
        (slice(1, 3), [1, 2]),
        (np.array([True, False, False, True]), [0, 3]),
    ],
)
def test_series_are_chosen_as_numpy_does(series, indices):
    assert series_indices(series, 4).tolist() == indices


@pytest.mark.parametrize("series", [4, [0, 9], np.array([True, False])])
def test_series_that_do_not_exist_are_refused(series):
    with pytest.raises(IndexError, match="4 series"):
        series_indices(series, 4)
