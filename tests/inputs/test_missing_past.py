"""Arrays noted by identity: what is warned of, and what is forgotten."""

import warnings

import numpy as np
import pytest

from fluxutils_py.inputs import missing_past
from fluxutils_py.inputs.missing_past import misses_past, note_missing_past, warn_of_missing_past


def test_an_array_is_known_by_identity_and_forgotten_with_it():
    x = np.zeros((2, 3, 4))
    note_missing_past(x)
    assert misses_past(x)
    assert not misses_past(x.copy())
    assert not misses_past(x[:, :, 1:])
    with pytest.warns(UserWarning, match=r"stream\(pipeline"):
        warn_of_missing_past(x)
    key = id(x)
    del x
    assert key not in missing_past._made


def test_a_list_is_known_by_its_arrays():
    arrays = [np.zeros((2, 4)), np.zeros((2, 5))]
    note_missing_past(arrays[1:])
    assert misses_past(arrays)
    assert not misses_past(arrays[:1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_missing_past(arrays[:1])
