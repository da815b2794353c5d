"""Losses over windows against the criteria themselves, and against sums written out."""

import functools
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fluxutils_py.errors import DataError, ShapeError
from fluxutils_py.nn import GRU, LSTM, Recur
from fluxutils_py.nn.losses import SeqLoss, as_loss, needs_weights, seqloss, takes_weights
from fluxutils_py.nn.states import reset

SHAPES = [(7, 4), (1, 1), (5, 3), (1, 5), (6, 1)]  # steps, series; 3 is the number of features too
ATOL = 1e-12
IGNORED = 2


class Given(nn.Module):
    """A model whose outputs are its parameter, whatever the input: gradients show what each step
    contributes.
    """

    takes_windows = True

    def __init__(self, out):
        super().__init__()
        self.out = nn.Parameter(out.clone())

    def forward(self, x):
        return self.out


def data(n_steps, n_series, n_outputs=2):
    xs = torch.randn(n_steps, n_series, 3, dtype=torch.float64)
    ys = torch.randn(n_steps, n_series, n_outputs, dtype=torch.float64)
    return xs, ys


def weights_for(n_steps, n_series):
    """Uneven, with one step in three masked, but never all."""
    ws = torch.rand(n_steps, n_series, 1, dtype=torch.float64) + 0.1
    ws.view(-1)[1::3] = 0
    return ws


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=ATOL)


# -- one window ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_steps", "n_series"), SHAPES)
@pytest.mark.parametrize(
    "criterion", [F.mse_loss, nn.L1Loss(), nn.HuberLoss(delta=0.3), F.smooth_l1_loss]
)
def test_fused_stepwise_and_the_criterion_on_the_whole_window_agree(criterion, n_steps, n_series):
    xs, ys = data(n_steps, n_series)
    fused = nn.Sequential(LSTM(3, 5), nn.Linear(5, 2)).double()
    cell = nn.LSTMCell(3, 5)
    stepwise = nn.Sequential(Recur(cell), nn.Linear(5, 2)).double()
    for p, q in zip(stepwise.parameters(), fused.parameters(), strict=True):
        p.data.copy_(q.data)
    stepwise.takes_windows = False

    loss = seqloss(criterion)
    value = loss(fused, xs, ys)
    assert value.shape == ()
    torchs, _ = fused[0].module(xs)
    close(value, criterion(fused[1](torchs), ys))
    close(loss(stepwise, xs, ys), value)
    close(stepwise[0].state[0], fused[0].state[0][0])

    # the mean over the steps, as FluxUtils.jl has it
    reset(fused)
    close(sum(criterion(fused(x), y) for x, y in zip(xs, ys, strict=True)) / n_steps, value)

    value.backward()
    reset(fused)
    expected = torch.autograd.grad(
        criterion(fused[1](fused[0].module(xs)[0]), ys), list(fused.parameters())
    )
    for p, g in zip(fused.parameters(), expected, strict=True):
        close(p.grad, g)


def test_the_state_moves_on_by_one_window():
    xs, ys = data(9, 4)
    model = nn.Sequential(GRU(3, 5), nn.Linear(5, 2)).double()
    loss = seqloss(nn.MSELoss())
    parts = loss(model, xs[:4], ys[:4]) * 4 + loss(model, xs[4:], ys[4:]) * 5
    reset(model)
    close(parts / 9, loss(model, xs, ys))


# -- weights -------------------------------------------------------------------------------------------


WEIGHABLE = {
    "mse": (F.mse_loss, lambda o, y: ((o - y) ** 2).mean()),
    "MSELoss": (nn.MSELoss(), lambda o, y: ((o - y) ** 2).mean()),
    "MSELoss, unreduced": (nn.MSELoss(reduction="none"), lambda o, y: ((o - y) ** 2).mean()),
    "L1Loss": (nn.L1Loss(), lambda o, y: (o - y).abs().mean()),
    "a partial": (
        functools.partial(F.huber_loss, delta=0.3),
        lambda o, y: F.huber_loss(o, y, delta=0.3),
    ),
    "logits": (nn.BCEWithLogitsLoss(), F.binary_cross_entropy_with_logits),
    "own, one value a step": (
        lambda o, y: (o - y).abs().amax(-1),
        lambda o, y: (o - y).abs().max(),
    ),
    "own, with its axis": (
        lambda o, y: (o - y).abs().amax(-1, keepdim=True),
        lambda o, y: (o - y).abs().max(),
    ),
    "own, one value an output": (lambda o, y: (o - y) ** 4, lambda o, y: ((o - y) ** 4).mean()),
}


@pytest.mark.parametrize(("n_steps", "n_series"), SHAPES)
@pytest.mark.parametrize("kind", WEIGHABLE)
def test_a_weighted_loss_is_the_weighted_sum_over_live_steps_by_their_number(
    kind, n_steps, n_series
):
    criterion, cell = WEIGHABLE[kind]
    xs, ys = data(n_steps, n_series)
    ys = ys.sigmoid()
    model = Given(torch.randn_like(ys))
    ws = weights_for(n_steps, n_series)
    total, n_live = 0.0, 0
    for t in range(n_steps):
        for b in range(n_series):
            if ws[t, b] != 0:
                total = total + ws[t, b, 0] * cell(model.out[t, b], ys[t, b])
                n_live += 1
    close(seqloss(criterion)(model, xs, ys, ws), total / n_live)


CRITERIA = {
    **{k: c for k, (c, _) in WEIGHABLE.items()},
    "mse, summed": functools.partial(F.mse_loss, reduction="sum"),
    "L1Loss, summed": nn.L1Loss(reduction="sum"),
    "own, summed by keyword": lambda o, y, reduction="sum": (
        getattr(F.l1_loss(o, y, reduction="none"), reduction)()
        if reduction != "none"
        else F.l1_loss(o, y, reduction="none")
    ),
    "KLDivLoss": nn.KLDivLoss(reduction="batchmean"),
}
CLASS_CRITERIA = {
    "cross_entropy": F.cross_entropy,
    "CrossEntropyLoss": nn.CrossEntropyLoss(),
    "with an ignored class": nn.CrossEntropyLoss(ignore_index=IGNORED),
    "with class weights": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.5, 2.0]).double()),
    "with both": nn.CrossEntropyLoss(
        weight=torch.tensor([1.0, 5.0, 0.5, 2.0]).double(), ignore_index=IGNORED
    ),
    "smoothed": nn.CrossEntropyLoss(
        weight=torch.tensor([1.0, 5.0, 0.5, 2.0]).double(),
        ignore_index=IGNORED,
        label_smoothing=0.2,
    ),
    "summed": nn.CrossEntropyLoss(reduction="sum", ignore_index=IGNORED),
    "a partial": functools.partial(
        F.cross_entropy, weight=torch.ones(4).double() * 3, ignore_index=IGNORED
    ),
    "nll_loss": F.nll_loss,
    "NLLLoss": nn.NLLLoss(weight=torch.tensor([1.0, 5.0, 0.5, 2.0]).double()),
}


@pytest.mark.parametrize("kind", CRITERIA)
def test_equal_weights_are_no_weights(kind):
    loss = seqloss(CRITERIA[kind])
    xs, ys = data(5, 3)
    model = Given(torch.rand_like(ys))
    ys = ys.sigmoid()
    close(loss(model, xs, ys, torch.ones(5, 3, 1).double()), loss(model, xs, ys))


@pytest.mark.parametrize("kind", CRITERIA)
def test_masked_steps_give_no_gradient_and_live_ones_their_weight(kind):
    loss = seqloss(CRITERIA[kind])
    xs, ys = data(5, 3)
    model = Given(torch.rand_like(ys))
    ys = ys.sigmoid()
    ws = weights_for(5, 3)
    loss(model, xs, ys, ws).backward()
    assert torch.equal(model.out.grad.abs().sum(-1, keepdim=True) == 0, ws == 0)
    masked, model.out.grad = model.out.grad, None
    loss(model, xs, ys, torch.ones_like(ws)).backward()
    # alike but for the weights, and for the number of steps where the criterion is a mean
    there = (model.out.grad != 0) & (ws != 0)
    ratio = (masked / model.out.grad / ws)[there]
    assert len(ratio) >= (ws != 0).sum()
    summed = "summed" in kind or kind == "KLDivLoss"
    close(ratio, torch.full_like(ratio, 1.0 if summed else ws.numel() / float((ws != 0).sum())))


@pytest.mark.parametrize(
    "criterion", [F.mse_loss, nn.MSELoss(reduction="sum"), nn.CrossEntropyLoss()]
)
def test_a_window_without_live_steps_has_the_loss_zero(criterion):
    model = Given(torch.randn(5, 3, 4))
    ys = (
        torch.randint(4, (5, 3, 1))
        if isinstance(criterion, nn.CrossEntropyLoss)
        else torch.randn(5, 3, 4)
    )
    value = seqloss(criterion)(model, torch.zeros(5, 3, 3), ys, torch.zeros(5, 3, 1))
    value.backward()
    assert value == 0
    assert not model.out.grad.any()


@pytest.mark.parametrize(
    "criterion", [functools.partial(F.mse_loss, reduction="sum"), nn.MSELoss(reduction="sum")]
)
def test_a_criterion_that_sums_is_averaged_over_the_steps_only(criterion):
    xs, ys = data(7, 4)
    model = Given(torch.randn_like(ys))
    close(seqloss(criterion)(model, xs, ys), ((model.out - ys) ** 2).sum() / 7)
    ws = weights_for(7, 4)
    close(seqloss(criterion)(model, xs, ys, ws), (ws * (model.out - ys) ** 2).sum() / 7)


def test_a_criterion_that_returns_one_number_cannot_be_weighted():
    xs, ys = data(5, 3)
    model = Given(torch.randn_like(ys))
    loss = seqloss(lambda o, y: (o - y).abs().max())
    close(loss(model, xs, ys), (model.out - ys).abs().max())
    with pytest.raises(ShapeError, match=r"weighted or masked.* \(\) for outputs"):
        loss(model, xs, ys, torch.ones(5, 3, 1))


# -- classes -------------------------------------------------------------------------------------------


def class_oracle(criterion, out, ys, ws):
    """The mean over the targets that count, by their class weights; or the sum, by the number of
    steps.
    """
    if isinstance(criterion, nn.Module):
        ignored, weight = criterion.ignore_index, criterion.weight
    else:
        keywords = getattr(criterion, "keywords", {})
        ignored, weight = keywords.get("ignore_index", -100), keywords.get("weight")
    smoothing = getattr(criterion, "label_smoothing", 0.0)
    logs = (
        out if criterion is F.nll_loss or isinstance(criterion, nn.NLLLoss) else out.log_softmax(-1)
    )
    weight = torch.ones(out.shape[-1]).double() if weight is None else weight
    total = share = 0.0
    for t in range(out.shape[0]):
        for b in range(out.shape[1]):
            c, w = int(ys[t, b]), float(ws[t, b])
            if c == ignored or w == 0:
                continue
            smooth = sum(weight[k] * logs[t, b, k] for k in range(out.shape[-1])) / out.shape[-1]
            total = total - w * ((1 - smoothing) * weight[c] * logs[t, b, c] + smoothing * smooth)
            share += float(weight[c])
    return total / (out.shape[0] if getattr(criterion, "reduction", "mean") == "sum" else share)


@pytest.mark.parametrize("kind", CLASS_CRITERIA)
def test_classes_are_weighted_as_written_out(kind):
    criterion = CLASS_CRITERIA[kind]
    out, ys = torch.randn(7, 4, 4, dtype=torch.float64), torch.randint(4, (7, 4, 1))
    assert (ys == IGNORED).any()
    model = Given(out.log_softmax(-1))
    xs = torch.zeros(7, 4, 3)
    ws = weights_for(7, 4)
    close(seqloss(criterion)(model, xs, ys, ws), class_oracle(criterion, model.out, ys, ws))
    close(
        seqloss(criterion)(model, xs, ys),
        class_oracle(criterion, model.out, ys, torch.ones_like(ws)),
    )
    flat = criterion(model.out.flatten(0, 1), ys.flatten())
    close(seqloss(criterion)(model, xs, ys), flat / 7 if kind == "summed" else flat)
    close(seqloss(criterion)(model, xs, ys, torch.ones_like(ws)), seqloss(criterion)(model, xs, ys))


@pytest.mark.parametrize("kind", CLASS_CRITERIA)
def test_masked_and_ignored_targets_give_no_gradient(kind):
    ys, ws = torch.randint(4, (7, 4, 1)), weights_for(7, 4)
    model = Given(torch.randn(7, 4, 4, dtype=torch.float64))
    seqloss(CLASS_CRITERIA[kind])(model, torch.zeros(7, 4, 3), ys, ws).backward()
    ignores = kind in ("with an ignored class", "with both", "smoothed", "summed", "a partial")
    dead = (ws == 0) | (ys == IGNORED if ignores else False)
    assert torch.equal(model.out.grad.abs().sum(-1, keepdim=True) == 0, dead)


def test_targets_that_are_all_ignored_give_zero_and_not_nan():
    model = Given(torch.randn(3, 2, 4))
    loss = seqloss(nn.CrossEntropyLoss(ignore_index=1))
    value = loss(model, torch.zeros(3, 2, 3), torch.ones(3, 2, 1, dtype=torch.int64))
    value.backward()
    assert value == 0
    assert not model.out.grad.any()


def test_class_probabilities_are_targets_too():
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.5]).double())
    out = torch.randn(5, 3, 3, dtype=torch.float64)
    ys = torch.rand(5, 3, 3, dtype=torch.float64).softmax(-1)
    close(seqloss(criterion)(Given(out), out, ys), criterion(out.flatten(0, 1), ys.flatten(0, 1)))
    ws = weights_for(5, 3)
    each = -(criterion.weight * ys * out.log_softmax(-1)).sum(-1, keepdim=True)
    close(seqloss(criterion)(Given(out), out, ys, ws), (ws * each).sum() / (ws != 0).sum())


def test_integer_targets_need_no_output_axis():
    out, ys = torch.randn(5, 3, 4, dtype=torch.float64), torch.randint(4, (5, 3))
    close(
        seqloss(F.cross_entropy)(Given(out), out, ys),
        F.cross_entropy(out.flatten(0, 1), ys.flatten()),
    )


@pytest.mark.parametrize(
    ("out", "ys"),
    [
        (torch.zeros(5, 3, 4), torch.zeros(5, 3, 2, dtype=torch.int64)),
        (torch.zeros(5, 3, 4), torch.zeros(5, 3, 1)),  # floats: not probabilities, not labels
        (torch.zeros(5, 3), torch.zeros(5, 3, 1, dtype=torch.int64)),
        (torch.zeros(5, 2, 4), torch.zeros(5, 3, 1, dtype=torch.int64)),
    ],
)
def test_scores_that_do_not_fit_the_targets_are_refused(out, ys):
    with pytest.raises(
        ShapeError,
        match=r"\(S, B, V\).*\(S, B, 1\) or prob",
    ):
        seqloss(nn.CrossEntropyLoss())(Given(out), torch.zeros(5, 3, 3), ys)


def test_class_weights_follow_the_type_of_the_scores():
    criterion = nn.CrossEntropyLoss(weight=torch.ones(4))
    out, ys = torch.randn(5, 3, 4, dtype=torch.float64), torch.randint(4, (5, 3, 1))
    value = seqloss(criterion)(Given(out), out, ys)
    assert value.dtype == torch.float64
    close(value, F.cross_entropy(out.flatten(0, 1), ys.flatten()))
    assert criterion.weight.dtype == torch.float32  # the user's own stays as it is


def test_other_buffers_of_a_criterion_follow_too():
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0, 3.0]))
    xs, ys = data(5, 3)
    ys = ys.sigmoid()
    model = Given(torch.randn_like(ys))
    expected = F.binary_cross_entropy_with_logits(
        model.out, ys, pos_weight=torch.tensor([2.0, 3.0]).double()
    )
    close(seqloss(criterion)(model, xs, ys), expected)


# -- shapes and types ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out", "ys", "hint"),
    [
        ((5, 3), (5, 3, 1), "; end the model with an output axis, as nn.Linear"),
        ((5, 3, 1), (5, 3), ""),
        ((5, 3, 1), (5, 3, 2), ""),
        ((5, 3, 2), (5, 3, 1), ""),
        ((5, 1, 2), (5, 3, 2), ""),
    ],
)
@pytest.mark.parametrize(
    "criterion", [F.mse_loss, nn.L1Loss(), functools.partial(F.huber_loss, delta=2.0)]
)
@pytest.mark.parametrize("weighted", [False, True])
def test_shapes_that_torch_would_broadcast_are_refused(out, ys, hint, criterion, weighted):
    ws = (torch.ones(5, 3, 1),) if weighted else ()
    with pytest.raises(ShapeError) as caught:
        seqloss(criterion)(Given(torch.zeros(out)), torch.zeros(5, 3, 3), torch.zeros(ys), *ws)
    message = str(caught.value)
    assert message.startswith(f"the model gives {out} for targets of shape {ys}: seqloss(")
    assert hint in message
    assert ("output axis" in message) == bool(hint)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), F.mse_loss])
def test_a_model_of_one_step_is_told_to_return_all(criterion, weighted):
    """The usual classifier of torch: batch_first=True, and a head on the last step."""
    ws = (torch.ones(5, 3, 1),) if weighted else ()
    ys = torch.zeros(5, 3, 1).to(torch.int64 if isinstance(criterion, nn.Module) else torch.float32)
    with pytest.raises(ShapeError, match=r"\(5, 9\).*all steps.*batch_first=False"):
        seqloss(criterion)(Given(torch.zeros(5, 9)), torch.zeros(5, 3, 2), ys, *ws)


def test_labels_out_of_range_do_not_count_those_to_be_ignored():
    xs, out = torch.zeros(5, 3, 2), torch.zeros(5, 3, 8)
    ys = torch.arange(15).reshape(5, 3, 1) % 9  # one more label than scores
    ys[0] = -100
    with pytest.raises(DataError, match=r"from 0 to 8, .*8 scores.*-100 marks"):
        seqloss(nn.CrossEntropyLoss())(Given(out), xs, ys)


def test_an_own_criterion_may_take_other_shapes():
    """Mean and log variance for each target."""
    xs, ys = data(5, 3, 1)
    model = Given(torch.randn(5, 3, 2, dtype=torch.float64))
    loss = seqloss(lambda o, y: 0.5 * (o[..., 1:] + (y - o[..., :1]) ** 2 * (-o[..., 1:]).exp()))
    mean, log_variance = model.out.split(1, -1)
    density = torch.distributions.Normal(mean, (0.5 * log_variance).exp()).log_prob(ys)
    constant = 0.5 * math.log(2 * math.pi)
    close(loss(model, xs, ys), -density.mean() - constant)
    ws = weights_for(5, 3)
    close(loss(model, xs, ys, ws), (ws * (-density - constant)).sum() / (ws != 0).sum())


def asymmetric(yhat, y):
    return torch.where(yhat > y, 2 * (yhat - y) ** 2, (yhat - y) ** 2)


@pytest.mark.parametrize(
    ("out", "ys", "hint"),
    [
        ((5, 5), (5, 5, 1), "output axis"),  # torch would compare each series with each
        ((5, 3), (5, 3, 1), "output axis"),
        ((3, 1), (5, 3, 1), "self.gru(x)[0]"),
        ((1, 3, 2), (5, 3, 2), "steps and series"),
        ((5, 1, 1), (5, 3, 1), "steps and series"),
    ],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_an_own_criterion_gets_outputs_of_the_steps_and_series_of_the_targets(
    out, ys, hint, weighted
):
    ws = (torch.ones(*ys[:2], 1),) if weighted else ()
    with pytest.raises(ShapeError) as caught:
        seqloss(asymmetric)(Given(torch.zeros(out)), torch.zeros(*ys[:2], 3), torch.zeros(ys), *ws)
    message = str(caught.value)
    assert message.startswith(f"the model gives {out} for targets of shape {ys}: seqloss(asym")
    assert hint in message


def test_an_own_criterion_may_compare_other_features_and_scores_with_labels():
    quantiles = torch.randn(5, 5, 9)
    ys = torch.randn(5, 5, 1)
    close(seqloss(asymmetric)(Given(quantiles), ys, ys), asymmetric(quantiles, ys).mean())
    labels = torch.randint(9, (5, 5))  # (S, B), for scores (S, B, V)
    loss = seqloss(lambda scores, y: F.cross_entropy(scores.flatten(0, 1), y.flatten()))
    expected = F.cross_entropy(quantiles.flatten(0, 1), labels.flatten())
    close(loss(Given(quantiles), ys, labels), expected)


def test_integer_targets_take_the_type_of_the_output_where_the_criterion_compares_them():
    model = Given(torch.randn(5, 3, 1))
    ys = torch.randint(3, (5, 3, 1))
    close(seqloss(F.mse_loss)(model, model.out, ys), ((model.out - ys) ** 2).mean())
    close(
        seqloss(F.binary_cross_entropy_with_logits)(model, model.out, ys > 0),
        F.binary_cross_entropy_with_logits(model.out, (ys > 0).float()),
    )


def test_an_own_criterion_gets_integer_targets_as_they_are():
    out, ys = torch.randn(5, 3, 4), torch.randint(4, (5, 3, 1))
    loss = seqloss(lambda scores, y: F.cross_entropy(scores.flatten(0, 1), y.flatten()))
    close(loss(Given(out), out, ys), F.cross_entropy(out.flatten(0, 1), ys.flatten()))


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.a, self.b = LSTM(3, 5), nn.Linear(5, 2), nn.Linear(5, 1)

    def forward(self, x):
        h = self.rnn(x)
        return self.a(h), self.b(h)


@pytest.mark.parametrize("windows", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_the_losses_of_several_outputs_are_added(windows, weighted):
    model = TwoOutputs().double()
    model.takes_windows = windows
    xs, ya = data(5, 3)
    yb = torch.randn(5, 3, 1, dtype=torch.float64)
    ws = weights_for(5, 3) if weighted else None
    value = seqloss(F.l1_loss)(model, xs, (ya, yb), ws)
    model.takes_windows = True
    a, b = reset(model)(xs)
    parts = [seqloss(F.l1_loss)(Given(o.detach()), xs, y, ws) for o, y in ((a, ya), (b, yb))]
    close(value, sum(p.detach() for p in parts))
    assert value.requires_grad


def test_several_inputs_are_several_arguments():
    class TwoInputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = LSTM(5, 2)

        def forward(self, a, b):
            return self.rnn(torch.cat([a, b], -1))

    model = TwoInputs().double()
    a, ys = data(5, 3)
    b = torch.randn(5, 3, 2, dtype=torch.float64)
    value = seqloss(F.mse_loss)(model, (a, b), ys)
    close(value, F.mse_loss(model.rnn.module(torch.cat([a, b], -1))[0], ys))


def test_outputs_and_targets_of_different_number_are_refused():
    xs, ys = data(5, 3)
    model = TwoOutputs().double()
    with pytest.raises(ShapeError, match="the model gives 2 outputs for 1 targets"):
        seqloss(F.mse_loss)(model, xs, ys)
    with pytest.raises(ShapeError, match="the model gives 1 outputs for 2 targets"):
        seqloss(F.mse_loss)(Given(ys), xs, (ys, ys))


# -- making losses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "f", [F.mse_loss, nn.MSELoss(), functools.partial(F.huber_loss, delta=2.0), F.cross_entropy]
)
def test_losses_are_picklable(f):
    loss = pickle.loads(pickle.dumps(seqloss(f)))
    assert isinstance(loss, SeqLoss)
    classes = f is F.cross_entropy
    out = torch.randn(5, 3, 4)
    ys = torch.randint(4, (5, 3, 1)) if classes else torch.randn(5, 3, 4)
    assert loss(Given(out), out, ys) == seqloss(f)(Given(out), out, ys)
    assert loss.classes == classes


def test_a_loss_shows_its_criterion():
    assert repr(seqloss(F.mse_loss)) == "seqloss(mse_loss)"
    assert repr(seqloss(nn.L1Loss())) == "seqloss(L1Loss())"


@pytest.mark.parametrize("make", [seqloss, as_loss])
def test_a_class_in_place_of_a_criterion_is_refused_with_the_remedy(make):
    with pytest.raises(
        TypeError,
        match=r"criterion .*MSELoss'>.* MSELoss\(\)",
    ):
        make(nn.MSELoss)
    with pytest.raises(TypeError, match=r"criterion f\(yhat, y\), got 'mse'$"):
        make("mse")


def two(yhat, y):
    return F.mse_loss(yhat, y)


def three(model, xs, ys):
    return F.mse_loss(model(xs), ys)


def three_or_four(model, xs, ys, ws=None):
    return F.mse_loss(model(xs), ys)


def four(model, xs, ys, ws):
    return F.mse_loss(model(xs), ys)


def three_and_keyword(model, xs, ys, *, alpha=1.0):
    return F.mse_loss(model(xs), ys)


def five(model, xs, ys, ws, alpha):
    return alpha * F.mse_loss(model(xs), ys)


class Three:
    def __call__(self, model, xs, ys):
        return three(model, xs, ys)

    def method(self, model, xs, ys, ws):
        return four(model, xs, ys, ws)


class OwnCriterion(nn.Module):
    def forward(self, yhat: Tensor, y: Tensor) -> Tensor:
        return two(yhat, y)


class OwnWindowLoss(nn.Module):
    def forward(self, model: nn.Module, xs: Tensor, ys: Tensor, ws: Tensor | None = None) -> Tensor:
        return three(model, xs, ys)


@pytest.mark.parametrize(
    "criterion",
    [
        *(two, F.mse_loss, F.cross_entropy, F.huber_loss, torch.dist),
        *(nn.MSELoss(), nn.CrossEntropyLoss(), OwnCriterion()),
        *(functools.partial(F.huber_loss, delta=2.0), functools.partial(three, None)),
    ],
)
def test_a_function_of_two_arguments_is_a_criterion(criterion):
    loss = as_loss(criterion)
    assert isinstance(loss, SeqLoss)
    assert loss.criterion is criterion
    assert as_loss(loss) is seqloss(loss) is loss
    assert takes_weights(loss)
    assert not needs_weights(loss)


@pytest.mark.parametrize(
    ("loss", "takes", "needs"),
    [
        (three, False, False),
        (three_and_keyword, False, False),
        (three_or_four, True, False),
        (four, True, True),
        (Three(), False, False),
        (Three().method, True, True),
        (OwnWindowLoss(), True, False),
        (functools.partial(five, alpha=1.0), True, True),
        (functools.partial(three_and_keyword, alpha=2.0), False, False),
        (lambda model, xs, ys, *rest: three(model, xs, ys), True, False),
    ],
)
def test_a_function_of_three_or_four_arguments_is_a_loss_as_it_stands(loss, takes, needs):
    assert as_loss(loss) is loss
    assert takes_weights(loss) == takes
    assert needs_weights(loss) == needs


def test_no_loss_is_the_mean_squared_error():
    loss = as_loss(None)
    assert loss.criterion is F.mse_loss
    assert not loss.classes


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "criterion",
    [
        nn.L1Loss(),
        nn.MSELoss(reduction="sum"),
        nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 0.5]), ignore_index=1),
        nn.CrossEntropyLoss(reduction="sum"),
    ],
)
def test_losses_of_parts_add_up_to_that_of_the_whole(criterion, weighted):
    loss, model = seqloss(criterion), nn.Linear(4, 3)
    xs = torch.randn(7, 5, 4)  # (S, B, F)
    ys = torch.randint(3, (7, 5, 1)) if loss.classes else torch.randn(7, 5, 3)
    ws = torch.rand(7, 5, 1) * (torch.rand(7, 5, 1) > 0.4) if weighted else None
    whole, total = loss.divisors(ys, ws), 0.0
    for part in (slice(0, 2), slice(2, 5)):
        w = None if ws is None else ws[:, part]
        factors = (
            None
            if whole is None
            else [a / b for a, b in zip(loss.divisors(ys[:, part], w), whole, strict=True)]
        )
        value = loss(model, xs[:, part], ys[:, part], w)
        total += value if factors is None else value * factors[0]
    torch.testing.assert_close(total, loss(model, xs, ys, ws))


def test_labels_out_of_range_are_left_to_the_criterion():
    loss = seqloss(nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0])))
    assert loss.divisors(torch.tensor([[[0], [5]]])) == [1.0 + 3.0]


def test_a_criterion_without_settings_is_a_mean():
    assert seqloss(lambda o, y: (o - y).square().mean()).is_mean
    assert not seqloss(functools.partial(F.mse_loss, reduction="sum")).is_mean
