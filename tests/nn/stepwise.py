"""Layers against a formula, step by step in float64: values and gradients, for windows and pieces
of any size.
"""

import torch

S, B, F = 43, 9, 3  # steps, series (enough for the kernels of linear_rnn), features
CUTS = {
    "whole": [],
    "one": [1],
    "tens": [10, 20, 30, 40],
    "short": [2, 3, 5, 42],
    "each": list(range(1, S)),
}


def by_formula(step, x, state):
    """``step(x_t, state) -> (y_t, state)`` for each step of ``x`` (S, B, F)."""
    ys = []
    for x_t in x.unbind():
        y, state = step(x_t, state)
        ys.append(y)
    return torch.stack(ys)


def in_pieces(layer, x, cuts):
    """Windows (S, B, F); of one step, as a step (B, F). No gradient is cut."""
    layer_outputs = []
    for start, stop in zip([0, *cuts], [*cuts, len(x)], strict=True):
        y = layer(x[start]) if stop == start + 1 else layer(x[start:stop])
        layer_outputs.append(y[None] if y.dim() == 2 else y)
    return torch.cat(layer_outputs)


def assert_follows(layer, step, start=None, reset=lambda layer: layer.reset(), bound=1e-12):
    """Outputs, and gradients by input and parameters, are those of the formula, however time is
    cut.
    """
    layer = layer.double()
    torch.manual_seed(3)
    x = torch.randn(S, B, F, dtype=torch.float64, requires_grad=True)
    wanted = [x, *layer.parameters()]
    y = by_formula(step, x, start)
    weight = torch.randn_like(y)
    expected = [y, *torch.autograd.grad((y * weight).sum(), wanted)]
    assert all(float(g.abs().max()) > 0 for g in expected[1:])  # there is something to compare
    for name, cuts in CUTS.items():
        reset(layer)
        y = in_pieces(layer, x, cuts)
        found = [y, *torch.autograd.grad((y * weight).sum(), wanted)]
        for ours, theirs in zip(found, expected, strict=True):
            error = float(((ours - theirs).abs().max() / (1 + theirs.abs().max())).detach())
            assert error < bound, (name, tuple(theirs.shape), error)
