"""Operations: each can be packed and written, and weights of 8 bits."""

import numpy as np

from fluxutils_py.steps.operations import Dots, LagValues, Names, Operation, quantized


def names(quantize=False):
    tables = {}

    def table(name, values):
        tables[name] = np.array(values)
        return name

    return tables, Names("x", "y", "r", ["s0"], 3, 5, table, "{:.1f}f".format, quantize)


def test_each_operation_has_a_number_and_a_text():
    kinds = [Operation]
    for kind in kinds:
        kinds += kind.__subclasses__()
    kinds.remove(Operation)
    assert sorted(kind.kind for kind in kinds) == list(range(16))  # as csrc/kernels.h has them
    for kind in kinds:
        assert hasattr(kind, "text") or kind.c is not Operation.c, kind


def test_a_text_names_the_tables_that_it_defines():
    tables, found = names()
    lags = LagValues(0, 6, numbers=(1, 4), states=(0,))
    assert lags.c(found) == ["@_step_lags(x, s0, 3, numbers, 2, 5, y, 3);"]
    assert tables["numbers"].tolist() == [1, 4]
    tables, found = names(quantize=True)
    wide = Dots(0, 1, np.ones((1, 70)), np.zeros(1))
    assert wide.c(found) == ["@_step_dense_int8(x, w, w_scale, b, y, 70, 1, 1);"]
    assert tables["w"].tolist() == [[127]] * 70


def test_outputs_have_their_own_scale(rng):
    weight = rng.normal(size=(4, 3)) * [1, 1e-3, 0]
    integers, scale = quantized(weight)
    assert integers.dtype == np.int8
    assert integers.shape == (4, 3)
    assert abs(integers).max(0).tolist() == [127, 127, 0]
    largest = abs(weight).max(0)
    assert (abs(integers * scale - weight) <= 0.5001 * largest / 127).all()
    assert np.isfinite(scale).all()
    # no inputs
    assert quantized(np.zeros((0, 2)))[0].shape == (0, 2)
