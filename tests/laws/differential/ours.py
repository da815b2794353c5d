"""The same case for the package: its model, loss, optimizer, spec and estimator."""

import dataclasses
from collections import namedtuple
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fluxutils_py import Estimator, EstimatorClassifier, EstimatorRegressor, Spec
from fluxutils_py.nn import (
    FLSTM,
    GRU,
    HFGRU,
    LRU,
    LSTM,
    MGU,
    RNN,
    SGRU,
    TCN,
    CausalConv1d,
    MinGRU,
    MinLSTM,
    Recur,
    SequenceStack,
    SlidingWindowAttention,
)
from fluxutils_py.training import Checkpointer, EveryNSteps
from tests.plain_networks import plain_classifier, plain_regressor

from .arrays import IGNORED, N_LABELS, N_WORDS, NAMES
from .cases import CLASSIFIERS, READY_MADE, STACKS
from .loop import CrossEntropy, Elementwise, Summed
from .nets import Convolution, Net

KERNEL = 3
CLASS_WEIGHT = [0.5, 2.0, 1.25]


class Leaky(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.rate, self.gain = (
            nn.Parameter(torch.randn(n_out)),
            nn.Parameter(torch.randn(n_out, n_in)),
        )

    def forward(self, x, state):  # (B, F)
        h, count = (x.new_zeros(len(x), len(self.rate)),) * 2 if state is None else state
        h = h + torch.sigmoid(self.rate) * (x @ self.gain.T - h)
        count = count + 1
        return h / torch.sqrt(1 + 0.1 * count), (h, count)


class Windowed(nn.Module):
    """Takes windows, and says so."""

    takes_windows = True

    def __init__(self, n_in, hidden, n_out):
        super().__init__()
        self.lstm, self.head = LSTM(n_in, hidden), nn.Linear(hidden, n_out)

    def forward(self, x):
        return self.head(self.lstm(x))


class Stepwise(nn.Module):
    """Takes single steps only."""

    def __init__(self, n_in, hidden, n_out):
        super().__init__()
        self.gru, self.head = Recur(nn.GRU(n_in, hidden)), nn.Linear(hidden, n_out)

    def forward(self, x):
        n_series, _ = x.shape
        return self.head(self.gru(x)).reshape(n_series, -1)


class CausalConvolution(nn.Module):
    takes_windows = True

    def __init__(self, n_in, hidden, n_out):
        super().__init__()
        self.conv, self.head = nn.Conv1d(n_in, hidden, KERNEL), nn.Linear(hidden, n_out)

    def forward(self, x):  # (S, B, F)
        h = self.conv(F.pad(x.permute(1, 2, 0), (KERNEL - 1, 0)))
        return self.head(torch.tanh(h).permute(2, 0, 1))


class Wired(nn.Module):
    """Words in, or several inputs, or several outputs, around a body from one input to one output."""

    def __init__(self, body, splits, embedding=None):
        super().__init__()
        self.embedding, self.body, self.splits = embedding, body, splits
        if hasattr(body, "takes_windows"):
            self.takes_windows = True

    def forward(self, *xs):
        x = torch.cat(xs, -1) if self.embedding is None else self.embedding(xs[0][..., 0])
        out = self.body(x)
        return out.split(self.splits, -1) if len(self.splits) > 1 else out


def layers(net, n_in, hidden):
    made = {
        "linear": [],
        "lstm": [nn.LSTM(n_in, hidden)],
        "gru": [GRU(n_in, hidden)],
        "rnn": [RNN(n_in, hidden)],
        "rnn_relu": [nn.RNN(n_in, hidden, nonlinearity="relu")],
        "lstm2": [LSTM(n_in, hidden, num_layers=2)],
        "gru2": [nn.GRU(n_in, hidden, 2)],
        "lstmcell": [nn.LSTMCell(n_in, hidden)],
        "grucell": [Recur(nn.GRUCell(n_in, hidden))],
        "rnncell": [nn.RNNCell(n_in, hidden)],
        "leaky": [Recur(Leaky(n_in, hidden))],
        "gru_leaky": [GRU(n_in, hidden), Recur(Leaky(hidden, hidden))],
        "lstm_rnn": [LSTM(n_in, hidden), nn.RNN(hidden, hidden)],
        "flstm": [FLSTM(n_in, hidden)],
        "sgru": [SGRU(n_in, hidden)],
        "mgu2": [MGU(n_in, hidden, num_layers=2)],
        "hfgru": [HFGRU(n_in, hidden)],
        "lstm_init": [LSTM(n_in, hidden, trainable_init=True)],
        "grucell_init": [Recur(nn.GRUCell(n_in, hidden), trainable_init=True)],
        "mingru": [MinGRU(n_in, hidden)],
        "minlstm": [MinLSTM(n_in, hidden)],
        "lru": [LRU(n_in, hidden, n_states=2)],
        "causalconv": [CausalConv1d(n_in, hidden, 3, 2)],
        "tcn": [TCN(n_in, hidden, n_levels=2, kernel_size=2)],
        "attention": [SlidingWindowAttention(n_in, hidden, n_heads=1, window=3)],
        "mingru2": [SequenceStack(MinGRU, n_in, hidden, n_layers=2)],
    }
    return made[net]


def sizes(case):
    """Outputs of the head."""
    if case["outputs"] == "labels":
        return [N_LABELS]
    return [1, case["targets"] - 1] if case["outputs"] == "two" else [case["targets"]]


def build_model(case):
    torch.manual_seed(case["data"])
    net, hidden, splits = case["net"], case["hidden"], sizes(case)
    words = case["inputs"] == "words"
    n_in, n_out = 2 if words else case["features"], sum(splits)
    embedding = nn.Embedding(N_WORDS, n_in) if words else None
    bodies = {"conv": CausalConvolution, "windowed": Windowed, "stepwise": Stepwise}
    if net in bodies:
        body = bodies[net](n_in, hidden, n_out)
    else:
        recurrent = [
            Recur(m) if words and isinstance(m, TORCHS_OWN) else m
            for m in layers(net, n_in, hidden)
        ]
        body = nn.Sequential(*recurrent, nn.Linear(hidden if recurrent else n_in, n_out))
    plain = case["inputs"] == "one" and len(splits) == 1
    return body if plain else Wired(body, splits, embedding)


TORCHS_OWN = nn.LSTM | nn.GRU | nn.RNN | nn.LSTMCell | nn.GRUCell | nn.RNNCell


def build_net(case):
    """The oracle's model."""
    splits = sizes(case)
    if case["net"] == "conv":
        return Convolution(KERNEL, splits)
    return Net(STACKS[case["net"]], case["hidden"], splits, embedded=case["inputs"] == "words")


def _call(model, xs):
    return model(*xs) if isinstance(xs, tuple) else model(xs)


def _pairs(out, ys):
    return list(zip(out, ys, strict=True)) if isinstance(ys, tuple) else [(out, ys)]


def quartic(difference):
    return difference**2 + 0.1 * difference**4


def custom(model, xs, ys):
    return sum(quartic(out - y).mean() for out, y in _pairs(_call(model, xs), ys))


def custom_steps(model, xs, ys):
    total, n = 0, len(xs[0]) if isinstance(xs, tuple) else len(xs)
    for t in range(n):
        x = tuple(a[t] for a in xs) if isinstance(xs, tuple) else xs[t]
        y = tuple(a[t] for a in ys) if isinstance(ys, tuple) else ys[t]
        total = total + sum(
            quartic(out - target).mean() for out, target in _pairs(_call(model, x), y)
        )
    return total / n


def custom_ws(model, xs, ys, ws):
    """``ws`` has one column, or one for each output of each target."""
    pairs = _pairs(_call(model, xs), ys)
    sizes = [y.shape[-1] for _, y in pairs]
    columns = ws.split(sizes, -1) if ws.shape[-1] > 1 else [ws] * len(sizes)
    n_live = sum(float((w > 0).double().mean(-1).sum()) for w in columns) / len(columns)
    return (
        sum(
            (quartic(out - y) * w).sum() / n
            for (out, y), w, n in zip(pairs, columns, sizes, strict=True)
        )
        / n_live
    )


LOSSES = {  # for the package; the oracle's criterion
    None: (lambda: None, Elementwise(torch.square)),
    "l1": (nn.L1Loss, Elementwise(torch.abs)),
    "huber": (
        lambda: nn.HuberLoss(delta=0.5),
        Elementwise(lambda d: torch.where(d.abs() < 0.5, d**2 / 2, 0.5 * (d.abs() - 0.25))),
    ),
    "smooth": (
        lambda: F.smooth_l1_loss,
        Elementwise(lambda d: torch.where(d.abs() < 1, d**2 / 2, d.abs() - 0.5)),
    ),
    "summed": (lambda: nn.MSELoss(reduction="sum"), Summed(torch.square)),
    "custom": (lambda: custom, Elementwise(quartic)),
    "custom_steps": (lambda: custom_steps, Elementwise(quartic)),
    "custom_ws": (lambda: custom_ws, Elementwise(quartic)),
    "ce": (nn.CrossEntropyLoss, CrossEntropy()),
    "ce_weights": (
        lambda: nn.CrossEntropyLoss(weight=torch.tensor(CLASS_WEIGHT)),
        CrossEntropy(CLASS_WEIGHT),
    ),
    "ce_ignore": (lambda: nn.CrossEntropyLoss(ignore_index=IGNORED), CrossEntropy()),
}


def make_optimizer(case):
    """For the oracle."""
    if case["opt"] == "instance":
        return grouped
    return OPTIMIZERS["ready" if case["estimator"] in READY_MADE else case["opt"]]


def criterion(case):
    return CrossEntropy() if case["estimator"] in CLASSIFIERS else LOSSES[case["loss"]][1]


OPTIMIZERS = {
    "adam": partial(torch.optim.Adam, lr=2e-2, eps=1e-3),
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.03, momentum=0.9, nesterov=True),
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-3),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, eps=1e-3),
    "default": torch.optim.AdamW,
    "ready": partial(torch.optim.AdamW, lr=2e-2, weight_decay=0.01),
}


def grouped(params):
    """The last parameter learns faster."""
    *others, last = params
    return torch.optim.SGD([{"params": [last], "lr": 0.2}, {"params": others}], lr=0.05)


SCHEDULERS = {
    "steps": partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5),
    "exponential": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.8),
    "plateau": partial(torch.optim.lr_scheduler.ReduceLROnPlateau, factor=0.3, patience=0),
}

SEQUENCE_FIELDS = [
    "epochs",
    "batchsize",
    "seqsize",
    "shuffle",
    "overlap",
    "burn_in",
    "clip",
    "rebatch",
    "max_updates",
    "lr_schedule",
    "gradient",
]
# the loop computes in full
SPEC_FIELDS = [f.name for f in dataclasses.fields(Spec) if f.name != "precision"]


def plain_spec(case):
    """For the oracle. Where there is one target per series, at its last step, nothing is folded."""
    fields = {name: case[name] for name in SPEC_FIELDS}
    only_ends = case["outputs"] == "last"
    if only_ends:
        fields["rebatch"] = False
    return SimpleNamespace(**fields, schedule_every=case["schedule_every"], only_ends=only_ends)


def build_spec(case):
    fields = {name: case[name] for name in SPEC_FIELDS}
    if case["scheduler"] is not None:
        schedule = SCHEDULERS[case["scheduler"]]
        every = case["schedule_every"]
        fields["lr_schedule"] = schedule if every == "epoch" else (every, schedule)
    if case["spec_form"] == "dict":
        return {**fields, "remark": "not read"}
    if case["spec_form"] == "namedtuple":
        return namedtuple("settings", SPEC_FIELDS)(**fields)
    return SimpleNamespace(**fields) if case["spec_form"] == "object" else Spec(**fields)


class Killed(Exception):
    """The end of a run that is killed."""


class KillAt:
    """A callback that ends a run in the middle."""

    def __init__(self, step):
        self.step = step

    def on_step(self, loop):
        if loop.step >= self.step:
            raise Killed


class Start:
    """The parameters with which a fit begins."""

    params = None

    def on_start(self, loop):
        if self.params is None:
            self.params = [
                p.detach().double().clone() for p in loop.shared_data["model"].parameters()
            ]

    def on_step(self, loop):
        pass


class Orders:
    """Which rows a shuffled fit takes in each epoch: its inputs are recognised by their values."""

    def __init__(self):
        self.loop, self.seen, self._places = None, {}, {}

    def forget(self, data):
        """Before a fit on these data."""
        a, self.loop, self.seen = data.x[0][0], None, {}
        self._places = {
            np.float32(a[n, t]): (n, t) for n in range(a.shape[0]) for t in range(a.shape[1])
        }

    def on_start(self, loop):
        self.loop = loop

    def on_step(self, loop):
        pass

    def look(self, module, args):
        """A hook before the forward pass of the model."""
        if module.training and self.loop is not None:
            seen = self.seen.setdefault(self.loop.epoch, {})
            for value in args[0].detach().reshape(-1, args[0].shape[-1])[:, 0].tolist():
                if (place := self._places.get(np.float32(value))) is not None:
                    seen.setdefault(place)

    def rows(self, rows):
        """Per epoch, the rows by when they were first seen."""
        found = []
        for epoch in sorted(self.seen):
            row_of = {(n, t): (n, a, b) for n, a, b in rows for t in range(a, b)}
            found.append(
                list(dict.fromkeys(row_of[place] for place in self.seen[epoch] if place in row_of))
            )
        return found


def build_ready(case, callbacks):
    net = case["net"]
    spec = {name: case[name] for name in SEQUENCE_FIELDS}
    cell, layers = net.rstrip("2"), 2 if net.endswith("2") else 1
    make = plain_regressor
    if case["estimator"] == "SequenceClassifier":
        make = plain_classifier
        of_class = case["class_weight"]
        if isinstance(of_class, list):
            of_class = dict(zip(NAMES, of_class, strict=False))
        spec["class_weight"] = of_class
    return make(
        case["hidden"],
        layers,
        cell,
        **spec,
        lr=2e-2,
        callbacks=list(callbacks),
        warm_start=case["then"] == "warm_start",
        random_state=case["data"],
        verbose=False,
    )


def build_estimator(case, callbacks=(), orders=None):
    if case["estimator"] in READY_MADE:
        return build_ready(case, callbacks)
    model = build_model(case)
    if orders is not None:
        look = orders.look  # a bound method would be copied with the model
        model.register_forward_pre_hook(lambda module, args: look(module, args))
        callbacks = [*callbacks, orders]
    opt = None if case["opt"] == "default" else OPTIMIZERS.get(case["opt"])
    if case["opt"] == "instance":
        opt = grouped(list(model.parameters()))
    loss = LOSSES[case["loss"]][0]()
    kinds = {
        "Estimator": Estimator,
        "EstimatorRegressor": EstimatorRegressor,
        "EstimatorClassifier": EstimatorClassifier,
    }
    return kinds[case["estimator"]](
        model,
        loss,
        opt,
        build_spec(case),
        callbacks=list(callbacks),
        warm_start=case["then"] == "warm_start",
        random_state=case["data"],
        verbose=False,
    )


def checkpointer(folder, every):
    return Checkpointer(folder, keep=2, trigger=EveryNSteps(every))
