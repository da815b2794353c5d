"""Operations: each can be packed and written, and weights of 8 bits."""

import numpy as np

from fluxutils_py.steps.operations import Operation, quantized


def test_each_operation_can_be_packed_and_written():
    kinds = [Operation]
    for kind in kinds:
        kinds += kind.__subclasses__()
    alone = [kind for kind in kinds if not kind.__subclasses__()]
    assert len(alone) > 10
    for kind in alone:
        assert kind.pack is not Operation.pack, kind
        assert kind.c is not Operation.c, kind


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
