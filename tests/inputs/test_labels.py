"""Labels as integers, their classes and weights, against NumPy and scikit-learn."""

import numpy as np
import pytest
from sklearn.utils import compute_sample_weight

from fluxutils_py.data import SampleWeight, SeriesArray
from fluxutils_py.data.segments import Segments
from fluxutils_py.data.weights import loss_blocks
from fluxutils_py.errors import DataError
from fluxutils_py.inputs.labels import (
    LabelEncoder,
    check_classes,
    class_weight_array,
    count_classes,
    find_classes,
    is_label,
    weights_of_classes,
)
from tests.versions import skip_before

N, T = 7, 11
RNG = np.random.default_rng(3)
WORDS = np.array(["down", "level", "up"])


def test_labels_are_their_places_among_the_classes():
    labels = RNG.choice(WORDS, size=(1, N, T))
    codes = LabelEncoder(WORDS)(labels)
    assert (WORDS[codes] == labels).all()
    objects = labels.astype(object)
    objects[0, 2, 3:5] = None, np.nan
    codes = LabelEncoder(WORDS)(objects)
    assert (codes[0, 2, 3:5] == -100).all()
    assert (codes == -100).sum() == 2
    assert is_label(objects).sum() == N * T - 2
    with pytest.raises(ValueError, match=r"^y .*\['up'\] .*\['down', 'level'\]"):
        LabelEncoder(WORDS[:2])(labels)
    assert set(LabelEncoder(WORDS[:2], unknown=-1)(labels).ravel()) == {-1, 0, 1}


def test_classes_are_what_occurs_with_a_weight_in_a_series():
    labels = np.full((1, N, T), 2)
    labels[0, 0, 0], labels[0, 1, 5], labels[0, 2, 9] = 0, 1, 7
    assert found(labels, None) == ([0, 1, 2, 7], N * T)
    w = np.ones((N, T))
    w[1] = 0
    assert found(labels, SampleWeight(w, N, T)) == ([0, 2, 7], (N - 1) * T)
    rows = Segments.from_lengths(N, T, np.full(N, 9))
    assert found(labels, None, rows) == ([0, 1, 2], 9 * N)
    rows = Segments.from_lengths(N, T).without_first(1)
    assert found(labels, None, rows) == ([1, 2, 7], N * (T - 1))
    with pytest.raises(DataError, match="no step of y that counts has a label"):
        check_classes(*find_classes(np.full((1, N, T), np.nan), None))


def found(*given):
    classes, n = find_classes(*given)
    return classes.tolist(), n


@pytest.mark.parametrize("n_labels", [60, 61])
def test_many_classes_are_a_warning_if_few_labels_are_of_the_same(n_labels):
    classes = np.arange(30)
    assert check_classes(classes, n_labels).tolist() == classes.tolist()
    skip_before("scikit-learn", "1.7", "a warning of many classes")
    with pytest.warns(UserWarning, match="greater than 50% of the number of samples"):
        check_classes(classes, 58)


@pytest.mark.parametrize("weighted", [False, True])
def test_balanced_weights_are_those_of_scikit_learn(weighted):
    codes = RNG.choice(3, p=[0.6, 0.3, 0.1], size=(1, N, T))
    codes[0, 3, 2:4] = -100
    y = SeriesArray(codes, "y")
    y.missing_label = -100
    burn_in, rows = 2, Segments.from_lengths(N, T, np.full(N, T - 1))
    w = RNG.integers(0, 3, (N, T))
    given = SampleWeight(w, N, T) if weighted else None
    counts = count_classes(loss_blocks([y], rows.without_first(burn_in), given), 3)
    found = class_weight_array(weights_of_classes("balanced", WORDS, lambda: counts), codes, given)[
        0, :, :
    ]
    counted = np.broadcast_to((np.arange(T) >= burn_in) & (np.arange(T) < T - 1), (N, T))
    counted = counted & (codes[0] >= 0)
    repeated = codes[0][counted].repeat(w[counted] if weighted else 1)
    of_class = dict(zip(repeated, compute_sample_weight("balanced", repeated), strict=True))
    wanted = np.array([of_class[c] for c in codes[0][counted]]) * (w[counted] if weighted else 1)
    assert np.allclose(found[counted], wanted, atol=1e-12)


def test_weights_of_a_dict_are_those_of_its_classes():
    codes = RNG.integers(0, 3, (1, N, T))
    of_class = weights_of_classes({"up": 5}, WORDS, dict)
    found = class_weight_array(of_class, codes, SampleWeight(np.full(N, 2.0), N, T))[0, 1:3, 4:9]
    assert np.array_equal(found, np.where(codes[0, 1:3, 4:9] == 2, 10, 2))
    for weight in (-1, np.nan, np.inf, "much"):
        with pytest.raises(ValueError, match=rf"^class_weight gives 'up' the weight {weight!r}"):
            weights_of_classes({"up": weight}, WORDS, dict)
