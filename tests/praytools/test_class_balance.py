"""Class-balanced samples, against counts and the data themselves."""

import threading

import h5py
import numpy as np
import pytest
import torch

from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.praytools.class_balance import balanced_sample, classindexes, initbatchprovider

LABELS = np.array([2, 0, 2, 7, 0, 2, 2, 7, 2, 0, 2, 7, 2])  # 0: 3, 2: 7, 7: 3


# -- classindexes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "t",
    [
        LABELS,
        LABELS.tolist(),
        LABELS.astype(float),
        LABELS.astype("U"),
        LABELS > 1,
        torch.from_numpy(LABELS),
        LABELS.astype(object),
        LABELS[:1],
    ],
    ids=["int", "list", "float", "str", "bool", "torch", "object", "one"],
)
def test_indices_are_those_of_a_plain_loop(t):
    expected = {}
    for i, label in enumerate(np.asarray(t).tolist()):
        expected.setdefault(label, []).append(i)
    got = classindexes(t)
    assert list(got) == sorted(expected)
    assert {c: i.tolist() for c, i in got.items()} == expected
    assert {type(c) for c in got} == {type(c) for c in expected}  # plain values, not NumPy's


def test_samples_without_a_label_are_in_no_class():
    got = classindexes([1.0, np.nan, 0.0, np.nan, 1.0])
    assert {c: i.tolist() for c, i in got.items()} == {0.0: [2], 1.0: [0, 4]}
    assert classindexes([]) == classindexes([np.nan]) == {}


def test_labels_must_be_a_vector_of_one_kind():
    with pytest.raises(ShapeError, match=r"^class labels .*\(N,\), got \(1, 3\)$"):
        classindexes([[1, 2, 3]])


# -- balanced_sample -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "per_class"), [(3, 1), (5, 1), (6, 2), (8, 2), (9, 3), (12, 3), (1000, 3)]
)
def test_classes_are_drawn_alike_and_no_sample_twice(n, per_class):
    ci = classindexes(LABELS)
    rng = np.random.default_rng(1)
    for _ in range(20):
        ii = balanced_sample(ci, n, rng)
        assert ii.dtype.kind == "i"
        assert LABELS[ii].tolist() == [0] * per_class + [2] * per_class + [7] * per_class
        assert len(set(ii.tolist())) == len(ii)


@pytest.mark.slow
def test_every_sample_of_a_class_is_drawn_as_often():
    ci, rng = classindexes(LABELS), np.random.default_rng(0)
    counts = np.bincount(
        np.concatenate([balanced_sample(ci, 6, rng) for _ in range(3000)]), minlength=len(LABELS)
    )
    expected = np.where(LABELS == 2, 2 / 7, 2 / 3) * 3000
    assert np.abs(counts - expected).max() < 5 * np.sqrt(3000 * 2 / 9)  # five standard deviations


@pytest.mark.parametrize("make", [lambda: 3, lambda: np.random.default_rng(3)])
def test_samples_depend_on_the_generator_alone(make):
    ci = classindexes(LABELS)
    before = np.random.get_state()[1].copy()  # noqa: NPY002  the global generator is left alone
    a, b = make(), make()
    np.testing.assert_array_equal(balanced_sample(ci, 6, a), balanced_sample(ci, 6, b))
    if not isinstance(a, int):
        draws = [tuple(balanced_sample(ci, 6, a)) for _ in range(5)]
        assert len(set(draws)) > 1
    assert len(balanced_sample(ci, 6)) == 6
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


@pytest.mark.parametrize(
    ("ci", "n", "error", "message"),
    [
        (
            {0: [1], 1: [2], 2: [0]},
            2,
            ValueError,
            "2 samples cannot be balanced over 3 classes; raise n",
        ),
        ({"a": [1], "b": []}, 4, DataError, "no samples of class 'b' to draw from"),
        ({}, 4, DataError, "no samples of class  to draw from"),
    ],
)
def test_what_cannot_be_balanced_is_refused(ci, n, error, message):
    with pytest.raises(error) as caught:
        balanced_sample(ci, n, 0)
    assert str(caught.value).startswith(message)


# -- initbatchprovider ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "axis", "first"),
    [
        ((13,), -1, False),
        ((13,), 0, True),
        ((5, 13), -1, False),
        ((5, 13), 1, False),
        ((13, 5), 0, True),
        ((13, 5), -2, True),
        ((4, 13, 3), 1, False),
        ((4, 3, 13), -1, False),
        ((13, 3, 4), -3, True),
    ],
)
def test_batches_are_samples_with_their_classes(shape, axis, first):
    x = np.random.default_rng(0).normal(size=shape)
    t = np.array(["c", "a", "b"])[LABELS % 3]  # sorted classes: a (1), b (2), c (0)
    provider = initbatchprovider(x, t, 7, axis=axis, random_state=0)
    seen = set()
    for _ in range(30):
        xb, yb = provider()
        assert xb.shape[axis] == 6
        y = yb.T if first else yb
        assert y.shape == (3, 6)
        assert y.sum(0).tolist() == [1] * 6
        assert y.sum(1).tolist() == [2] * 3
        for k in range(6):
            sample = np.take(xb, k, axis)
            # from the data
            (i,) = (i for i in range(13) if np.array_equal(np.take(x, i, axis), sample))
            assert "abc"[int(y[:, k].argmax())] == t[i]
            seen.add(i)
    assert seen == set(range(13))


def test_only_samples_for_training_are_drawn():
    x = np.arange(13)
    train = np.array([12, 1, 3, 4, 7, 8, 8, 10])
    mask = np.isin(x, train)
    for indices in (train, train.tolist(), mask, mask.tolist(), torch.from_numpy(train)):
        provider = initbatchprovider(x, LABELS, indices, 6, random_state=0)
        seen = {int(i) for _ in range(50) for i in provider()[0]}
        assert seen == set(train.tolist())


def test_batches_of_the_same_seed_are_the_same():
    x = np.arange(13)
    a, b = (initbatchprovider(x, LABELS, 6, random_state=5) for _ in range(2))
    batches = [a()[0].tolist() for _ in range(5)]
    assert batches == [b()[0].tolist() for _ in range(5)]
    assert len({tuple(v) for v in batches}) > 1


def test_a_batch_is_a_copy():
    x = np.zeros((2, 13))
    provider = initbatchprovider(x, LABELS, 6, random_state=0)
    xb, yb = provider()
    xb += 1
    yb += 1
    assert (x == 0).all()
    assert (provider()[1].sum(0) == 1).all()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", "float32"),
        ("float64", "float64"),
        ("float16", "float16"),
        ("int64", "float32"),
        ("bool", "float32"),
    ],
)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_classes_have_the_floating_dtype_of_the_data(dtype, expected, kind):
    x = np.zeros((2, 13), dtype)
    xb, yb = initbatchprovider(torch.from_numpy(x) if kind == "torch" else x, LABELS, 6)()
    assert type(xb) is type(yb) is (torch.Tensor if kind == "torch" else np.ndarray)
    assert str(xb.dtype).removeprefix("torch.") == dtype
    assert str(yb.dtype).removeprefix("torch.") == expected


def test_tensors_and_lazy_arrays_give_what_arrays_give(tmp_path):
    x = np.random.default_rng(0).normal(size=(4, 13, 3))
    expected, onehot = initbatchprovider(x, LABELS, 6, axis=1, random_state=2)()
    xb, yb = initbatchprovider(
        torch.from_numpy(x), torch.from_numpy(LABELS), 6, axis=1, random_state=2
    )()
    np.testing.assert_array_equal(xb.numpy(), expected)
    np.testing.assert_array_equal(yb.numpy(), onehot)
    mapped = np.memmap(tmp_path / "x", float, "w+", shape=x.shape)
    mapped[:] = x
    np.testing.assert_array_equal(
        initbatchprovider(mapped, LABELS, 6, axis=1, random_state=2)()[0], expected
    )
    with h5py.File(tmp_path / "x.h5", "w") as f:
        lazy = f.create_dataset("x", data=x)
        np.testing.assert_array_equal(
            initbatchprovider(lazy, LABELS, 6, axis=1, random_state=2)()[0], expected
        )
    np.testing.assert_array_equal(
        initbatchprovider(x.tolist(), LABELS, 6, axis=1, random_state=2)()[0], expected
    )


def test_several_inputs_are_drawn_together_by_their_indices():
    x, z = np.arange(13) ** 2, np.stack([np.arange(13), np.arange(13)])
    ii, _ = initbatchprovider(np.arange(13), LABELS, 6)()
    np.testing.assert_array_equal(z[:, ii] ** 2, [x[ii], x[ii]])
    with pytest.raises(ShapeError, match=r"\(2, 13\).*np\.arange"):
        initbatchprovider((x, x), LABELS, 6, axis=0)


def test_many_threads_draw_the_batches_of_one():
    x = np.arange(13)
    plain = initbatchprovider(x, LABELS, 6, random_state=0)
    expected = sorted(plain()[0].tolist() for _ in range(200))
    provider, got = initbatchprovider(x, LABELS, 6, random_state=0), []
    threads = [
        threading.Thread(target=lambda: got.extend(provider()[0].tolist() for _ in range(50)))
        for _ in range(4)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    assert sorted(got) == expected


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (
            (np.zeros((2, 12)), LABELS, 6),
            ShapeError,
            "data of shape (2, 12) must have the 13 samples of targets along axis -1",
        ),
        (
            (np.zeros(13), LABELS, 2),
            ValueError,
            "2 samples cannot be balanced over 3 classes; raise n",
        ),
        ((np.zeros(13), LABELS, [0, 1, 2], 6), DataError, "no samples of class 7 to draw from"),
        ((np.zeros(13), LABELS, [], 6), DataError, "no samples of class 0, 2, 7 to draw from"),
        ((np.zeros(0), [], 6), DataError, "no samples of class  to draw from"),
    ],
)
def test_what_cannot_be_provided_is_refused_when_it_is_made(args, error, message):
    with pytest.raises(error) as caught:
        initbatchprovider(*args)
    assert str(caught.value).startswith(message)


def test_an_axis_that_data_lack_is_named():
    with pytest.raises(ShapeError) as caught:
        initbatchprovider(np.zeros((13, 2)), LABELS, 6, axis=2)
    message = "data of shape (13, 2) must have the 13 samples of targets along axis 2"
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("arguments", [(), ([0], 6, 1)])
def test_the_number_of_arguments_is_checked(arguments):
    with pytest.raises(
        TypeError,
        match=r"initbatchprovider\(data, targets, n\)",
    ):
        initbatchprovider(np.zeros(13), LABELS, *arguments)
