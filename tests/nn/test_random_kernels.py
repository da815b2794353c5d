"""Three hundred of the random cases of random_kernels.py."""

import importlib.util
from pathlib import Path

import pytest
import torch

from fluxutils_py.nn.kernels import library as kernels

spec = importlib.util.spec_from_file_location(
    "random_kernels", Path(__file__).with_name("random_kernels.py")
)
random_kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(random_kernels)

pytestmark = pytest.mark.skipif(kernels.library_in_use() is None, reason=kernels.kernels_in_use())


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setattr(kernels._use, "library", kernels._use.library)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.few
@pytest.mark.parametrize("first", range(0, 300, 50))
def test_random_shapes_agree_with_float64_without_the_kernels_in_value_and_gradient(first):
    errors = {seed: random_kernels.case(seed) for seed in range(first, first + 50)}
    assert {seed: error for seed, error in errors.items() if not error < 1} == {}
