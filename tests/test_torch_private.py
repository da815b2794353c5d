"""Private names of torch are fenced into one file, and this says for which versions they are known
to work. That no other file reads private names is tested in test_architecture.py.
"""

from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import torch_private

KNOWN_TO_WORK = ("2.10", "2.11", "2.12", "2.13", "2.15")


def test_this_version_is_one_of_those_that_are_known_to_work():
    version = torch.__version__
    assert version.rpartition(".")[0] in KNOWN_TO_WORK, (
        f"torch {version} is new: check that everything in torch_private.py is still there, then "
        "add it here"
    )


def test_versions_count_changes_in_place():
    t = torch.zeros(3)
    before = torch_private.version_of(t)
    t += 1
    assert torch_private.version_of(t) == before + 1


@pytest.mark.parametrize("add", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_are_those_that_were_registered(add):
    layer = nn.Linear(1, 1)
    assert not any(torch_private.call_hooks_of(layer))
    getattr(layer, add)(lambda *_: None)
    assert any(torch_private.call_hooks_of(layer))


def test_arguments_of_an_operation_have_names():
    names = [a.name for a in torch_private.arguments_of(torch.ops.aten.rand.generator)]
    assert names[:2] == ["size", "generator"]


def test_an_uncompiled_call_has_the_hooks_of_the_module():
    layer = nn.Linear(2, 1)
    layer._compiled_call_impl = None  # where torch.compile puts its own
    layer.register_forward_hook(lambda module, args, out: out + 1)
    x = torch.ones(3, 2)
    assert torch.equal(torch_private.call_uncompiled(layer, x), layer.forward(x) + 1)


def test_parts_of_a_sparse_tensor_are_as_stored():
    indices = torch.tensor([[0, 0]])
    values = torch.tensor([1.0, 2.0])
    tensor = torch.sparse_coo_tensor(indices, values, (2,), check_invariants=True)
    stored = torch_private.sparse_parts(tensor)
    assert torch.equal(stored[0], indices)
    assert torch.equal(stored[1], values)  # not added up, as coalesce() would


def test_a_scheduler_does_not_warn_of_an_optimizer_that_counts_as_called():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    torch_private.note_optimizer_call(optimizer)
    scheduler.step()  # warnings are errors


def adamw_twins(**settings):
    """Two models with equal weights, and an optimizer for each."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).to(settings.get("dtype"))
        models.append(model)
    settings = {name: value for name, value in settings.items() if name != "dtype"}
    given = {"lr": 0.1, "fused": True, **settings}
    return models, [torch.optim.AdamW(m.parameters(), **deepcopy(given)) for m in models]


def set_gradients(models, k):
    torch.manual_seed(k)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()


def assert_same_fit(models, optimizers):
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)
        of_p, of_q = optimizers[0].state[p], optimizers[1].state[q]
        assert of_p.keys() == of_q.keys()
        assert all(torch.equal(of_p[name], of_q[name]) for name in of_p)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": torch.float64, "weight_decay": 0.3, "betas": (0.5, 0.7), "eps": 0.1},
        {"lr": torch.tensor(0.03), "maximize": True},
    ],
)
def test_the_kernel_of_adamw_steps_as_its_optimizer_does(settings):
    models, (optimizer, expected) = adamw_twins(**settings)
    schedulers = [torch.optim.lr_scheduler.StepLR(opt, 2) for opt in (optimizer, expected)]
    for k in range(7):
        set_gradients(models, k)
        stepped = torch_private.step_fused_adamw(optimizer)
        assert stepped == (k not in (0, 4))  # the first makes the state; the fifth is of torch
        if not stepped:
            optimizer.step()
        expected.step()
        assert_same_fit(models, (optimizer, expected))
        for scheduler in schedulers:
            scheduler.step()  # its warning of a step before the optimizer's would be an error
        if k == 3:  # another takes its state, and steps by torch
            optimizer.load_state_dict(deepcopy(expected.state_dict()))
            handle = optimizer.register_step_post_hook(lambda *_: None)
        if k == 4:
            handle.remove()


@pytest.mark.parametrize(
    "what", ["amsgrad", "plain", "hook", "two groups", "no gradient", "patched"]
)
def test_what_the_kernel_of_adamw_does_not_know_it_leaves_alone(what):
    settings = {"amsgrad": {"amsgrad": True}, "plain": {"fused": False}}.get(what, {})
    models, (optimizer, _) = adamw_twins(**settings)
    set_gradients(models, 0)
    optimizer.step()
    weight = models[0][0].weight
    if what == "hook":
        optimizer.register_step_pre_hook(lambda *_: None)
    if what == "two groups":
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    if what == "no gradient":
        weight.grad = None
    if what == "patched":
        optimizer.step = lambda: None
    before = weight.detach().clone(), int(optimizer.state[weight]["step"])
    assert not torch_private.step_fused_adamw(optimizer)
    assert torch.equal(weight, before[0])
    assert int(optimizer.state[weight]["step"]) == before[1]


@pytest.mark.parametrize("number", [1.5, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_flag_is_set_by_the_first_number_that_is_not_finite(number, dtype):
    found, one = torch.zeros(()), torch.ones(())
    for value in (2.0, number, 3.0):
        t = torch.tensor(value, dtype=dtype)
        torch_private.note_nonfinite(t, found, one)
        assert str(float(t)) == str(float(torch.tensor(value, dtype=dtype)))
    assert float(found) == (not np.isfinite(number))


def test_default_devices_go_and_come_back_and_other_modes_stay():
    class Other(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    before = torch_private.n_function_modes()
    assert not torch_private.has_other_modes_than_devices()
    with torch.device("meta"), Other(), torch.device("meta"):
        assert torch_private.has_other_modes_than_devices()
        with torch_private.without_default_device():
            assert torch_private.n_function_modes() == before + 1
            assert torch.zeros(1).is_cpu
        assert torch_private.n_function_modes() == before + 3
        assert torch.zeros(1).is_meta
    assert torch_private.n_function_modes() == before


def test_autocast_of_this_thread_is_known():
    assert not torch_private.has_autocast()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch_private.has_autocast()
