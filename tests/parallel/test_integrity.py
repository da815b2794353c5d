"""One process is a replica of itself; what several ranks do is tested under mpirun."""

import torch
from torch import nn

from fluxutils_py.parallel import assert_replica_integrity, gather_from_jax_processes, gather_from_processes
from fluxutils_py.tree import as_tensor, leaves, map_tree


def test_one_process_has_integrity():
    assert_replica_integrity({"a": torch.tensor([1.0, float("nan")]), "b": "text"})


def test_one_process_gathers_what_it_gives():
    tree = {"a": [torch.ones(2, requires_grad=True)], "b": None}
    (found,) = gather_from_processes(tree)
    assert torch.equal(found["a"][0], torch.ones(2))
    assert not found["a"][0].requires_grad
    assert found["b"] is None
    assert gather_from_jax_processes is gather_from_processes


def test_leaves_have_paths_and_modules_stand_for_their_state():
    assert [path for path, _ in leaves([nn.Linear(2, 1), {"k": (1, None)}])] == ["0/weight", "0/bias", "1/k/0", "1/k/1"]


def test_trees_keep_their_containers():
    assert map_tree(lambda a, b: a * b, {"k": (1, [2])}, {"k": (3, [4])}) == {"k": (3, [8])}


def test_only_numbers_are_compared_as_tensors():
    assert as_tensor("text") is None
    assert as_tensor(None) is None
    assert as_tensor(2.5).item() == 2.5
    assert as_tensor(True).item() is True
