"""Generators as plain data."""

import io

import numpy as np
import pytest
import torch

from fluxutils_py.errors import LoadError
from fluxutils_py.training.generator_state import (
    RandomGenerators,
    get_generator_state,
    set_generator_state,
)

KINDS = [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64]


def saved(state):
    """Through a file from which no code runs."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_of_numpy_goes_on(kind):
    rng, other = np.random.Generator(kind(1)), np.random.Generator(kind(2))
    rng.random(7, dtype="f4")  # half of a number is kept for the next
    state = saved(get_generator_state(rng))
    set_generator_state(other, state)
    assert np.array_equal(rng.random(9, dtype="f4"), other.random(9, dtype="f4"))
    assert np.array_equal(rng.permutation(20), other.permutation(20))


def test_a_generator_of_torch_goes_on():
    a, b = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    torch.randn(5, generator=a)
    state = saved(get_generator_state(a))
    first = torch.randn(40, generator=a)
    set_generator_state(b, state)
    assert torch.equal(torch.randn(40, generator=b), first)


def test_everything_goes_on_together():
    a, b = (
        RandomGenerators(rng=np.random.default_rng(0)),
        RandomGenerators(rng=np.random.default_rng(1)),
    )
    state = saved(a.state_dict())
    first = torch.rand(3), a.generators["rng"].random(3)
    torch.manual_seed(99)
    b.load_state_dict(state)
    assert torch.equal(torch.rand(3), first[0])
    assert np.array_equal(b.generators["rng"].random(3), first[1])


def test_generators_of_other_kinds_or_names_are_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(TypeError):
        set_generator_state(rng, get_generator_state(torch.Generator()))
    with pytest.raises(ValueError, match="PCG64"):
        set_generator_state(rng, get_generator_state(np.random.Generator(np.random.MT19937(0))))
    before = torch.get_rng_state()
    with pytest.raises(LoadError, match=r"generators \['a'\], .*\['b'\]$"):
        RandomGenerators(b=rng).load_state_dict(RandomGenerators(a=rng).state_dict())
    assert torch.equal(torch.get_rng_state(), before)
