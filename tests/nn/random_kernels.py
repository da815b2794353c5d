"""The native kernels on random shapes, against torch's own layers in float64, value and gradient.

    python tests/nn/random_kernels.py [CASES [SEED]]

Each case draws a layer, its sizes (ones and sizes that fill no vector included), biases, a state or
none, what is to have a gradient, which outputs the loss sees, type, instruction set, and threads.
Where the processor multiplies bfloat16, layers of float32 compute in it too, with a wider bound.
``case(seed)`` repeats one of them.
"""

from __future__ import annotations

import copy
import sys
from unittest import mock

import numpy as np
import torch
from torch import nn

from fluxutils_py.nn import (
    FLSTM,
    HFGRU,
    MGU,
    SGRU,
    SMGU,
    MinGRU,
    MinLSTM,
    Recur,
    linear_recurrence,
    native_kernels,
)
from fluxutils_py.nn import precision as precisions
from fluxutils_py.nn.kernels import library as kernels

CPU = torch.device("cpu")
ISAS = [name for name in kernels.ISAS if kernels.supports(name)]
OWN = {"FLSTM": FLSTM, "SGRU": SGRU, "MGU": MGU, "SMGU": SMGU, "HFGRU": HFGRU}
INPUT_GATED = {"MinGRU": MinGRU, "MinLSTM": MinLSTM}
TORCHS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
# Of outputs and gradients, relative to the largest; rounding grows with steps and layers.
BOUNDS = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 0.03}


def case(seed: int) -> float:
    """The largest error of one case, as a part of its bound. Sets torch's threads and the library
    in use.
    """
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)

    def one(*values):
        return values[rng.integers(len(values))]

    torch.set_num_threads(one(1, 1, 2, 3))
    kernels._use.library = kernels.Library(kernels.PATH, one(*ISAS))
    dtype = one(torch.float32, torch.float64)
    sizes = (
        one(1, 1, 2, 3, 5, 9, 23),
        one(1, 2, 3, 7, 8, 16, 17, 33, 65, 70),
        one(1, 2, 3, 4, 5, 11, 17),
    )
    H = one(1, 2, 3, 4, 5, 7, 10, 13, 24, 25, 33)
    if one(True, False, False, False):
        return _linear(one, dtype, *sizes[:2], H)
    return _layer(one, dtype, *sizes, H)


def _layer(one, dtype, S, B, F, H):
    kind, layers = one(*TORCHS, *OWN, *INPUT_GATED), one(1, 1, 2, 3)
    if kind in INPUT_GATED:
        model = INPUT_GATED[kind](F, H)
    elif kind in TORCHS:
        more = {"nonlinearity": one("tanh", "relu")} if kind == "RNN" else {}
        model = Recur(TORCHS[kind](F, H, layers, bias=one(True, False), **more))
    else:
        model = OWN[kind](F, H, layers, **({"alpha": one(1.0, 0.3)} if kind == "HFGRU" else {}))
        if kind != "HFGRU" and one(True, False):
            for cell in model.module.cells:
                cell.exact = True
    model = model.to(dtype)
    for p in model.parameters():
        p.requires_grad_(one(True, True, True, False))
    state = None
    if one(True, False):
        shape = (B, H) if kind in INPUT_GATED else (layers, B, H)
        n = 2 if kind in ("LSTM", "FLSTM") else 1
        state = tuple(torch.randn(shape, dtype=dtype) for _ in range(n))
    x = torch.randn(S, B, F, dtype=dtype)
    of_x, of_state, seen = one(True, False), one(True, False), one("y", "state", "both")
    cut = one(0, S // 2)

    def outcome(model, dtype, enabled):
        own = x.to(dtype).requires_grad_(of_x)
        before = (
            None if state is None else tuple(s.to(dtype).requires_grad_(of_state) for s in state)
        )
        model.reset()
        if before is not None:
            model.state = before if len(before) > 1 else before[0]
        with native_kernels(enabled):
            y = torch.cat([model(own[:cut]), model(own[cut:])]) if cut else model(own)
        after = [model.state] if isinstance(model.state, torch.Tensor) else list(model.state)
        outputs = [y] * (seen != "state") + after * (seen != "y")
        generator = torch.Generator().manual_seed(1)
        weights = [
            torch.randn(o.shape, generator=generator, dtype=torch.float64).to(dtype)
            for o in outputs
        ]
        given = [t for t in (own, *(before or ()), *model.parameters()) if t.requires_grad]
        loss = sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))
        found = [y, *after]
        if given and loss.requires_grad:
            found += torch.autograd.grad(loss, given, materialize_grads=True)
        return found

    exact = outcome(copy.deepcopy(model).double(), torch.float64, False)
    error = _error(outcome(model, dtype, True), exact, dtype)
    # where a sum is about 0, a rounded one may be on the other side of relu's kink
    if dtype is torch.float64 or getattr(model.module, "nonlinearity", "") == "relu":
        return error
    with mock.patch.object(precisions, "KERNEL_WIDE", 1), precisions.autocast("bfloat16", CPU):
        low = outcome(model, dtype, True)
    return max(error, _error(low, exact, torch.bfloat16))


def _linear(one, dtype, S, B, H):
    S = one(S, 64, 130)
    kind = (
        {torch.float32: torch.complex64, torch.float64: torch.complex128}[dtype]
        if one(True, False)
        else dtype
    )
    a = torch.randn(one((H,), (B, H), (S, 1, H), (S, B, H), ()), dtype=kind)
    a = a / (a.abs() + 0.05)
    given = [a, torch.randn(S, B, H, dtype=kind)] + [torch.randn(B, H, dtype=kind)] * one(0, 1)
    grads = [one(True, True, False) for _ in given]
    w = torch.randn(S, B, H, dtype=kind)

    def outcome(exact):
        own = [
            (t.to(torch.promote_types(t.dtype, torch.float64)) if exact else t.clone())
            for t in given
        ]
        own = [t.detach().requires_grad_(g) for t, g in zip(own, grads, strict=True)]
        with native_kernels(not exact):
            h = linear_recurrence(*own)
        if not any(grads):
            return [h]
        loss = (h * w).sum()
        return [
            h,
            *torch.autograd.grad(
                loss.real if loss.is_complex() else loss,
                [t for t in own if t.requires_grad],
            ),
        ]

    return _error(outcome(False), outcome(True), dtype)


def _error(found, exact, dtype):
    worst = 0.0
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.shape == theirs.shape
        if ours.numel():
            difference = (ours.to(theirs.dtype) - theirs).abs().max() / (1 + theirs.abs().max())
            worst = float(np.maximum(worst, difference.item() / BOUNDS[dtype]))  # NaN stays
    return worst


def main(cases: int = 10_000, seed: int = 0) -> int:
    worst, bad = 0.0, []
    for k in range(seed, seed + cases):
        error = case(k)
        worst = max(worst, error)
        if not error < 1:
            bad.append(k)
            print(f"seed {k}: {error:.3g} of the bound", flush=True)
    print(
        f"{cases} cases from seed {seed} on {', '.join(ISAS)}: {len(bad)} beyond the bound, worst "
        f"{worst:.3g} of it"
    )
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
