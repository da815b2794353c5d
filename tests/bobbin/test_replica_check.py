"""One process is a replica of itself; what several ranks do is tested under mpirun."""

import torch

from fluxutils_py.bobbin import assert_replica_integrity, gather_from_processes
from fluxutils_py.bobbin.evaluation import gather_from_jax_processes


def test_one_process_has_integrity():
    assert_replica_integrity({"a": torch.tensor([1.0, float("nan")]), "b": "text"})


def test_one_process_gathers_what_it_gives():
    tree = {"a": [torch.ones(2, requires_grad=True)], "b": None}
    (found,) = gather_from_processes(tree)
    assert torch.equal(found["a"][0], torch.ones(2))
    assert not found["a"][0].requires_grad
    assert found["b"] is None
    assert gather_from_jax_processes is gather_from_processes
