"""How long a recurrent layer and ``Estimator.fit`` take in bfloat16 beside float32, and what it
costs in error.

Both compute the same windows, and train the same model, by turns; ``float32 again`` is the A/A
control, ``torch's bfloat16`` torch's own layer under autocast. The error of ETTh1 is that of forecasts of 24 hours of seven series in the four test months, by the
protocol of bench_etth1.py, of an LSTM of 64 units, which bfloat16 computes, and a linear bypass:
the mean over three seeds.

    python benchmarks/bench_precision.py [--rounds 7] [--threads 2] [--device cpu] [--data
    ETTh1.csv]
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import (
    Report,
    Table,
    cores,
    interleaved,
    median,
    parse,
    parser,
    ratios,
    spread,
    stopwatch,
)
from etth1_windows import TRAIN, VAL, arrays, errors, only, read
from torch import Tensor, nn
from work import COLUMNS, SHAPES, Shape, outcome, turns, two_windows
from work import make as make_data

from fluxutils_py import Estimator, Spec, net2vec
from fluxutils_py.nn import GRU, LSTM, native_kernels
from fluxutils_py.nn.precision import autocast

BASE, AIM, MOST_WORSE = "float32", 0.85, 1.01
LAYER_AIM = 0.65  # of the first of WINDOWS
WINDOWS = [  # F, H, B, S
    (LSTM, 32, 128, 64, 64),
    (LSTM, 32, 64, 64, 64),
    (LSTM, 32, 256, 32, 64),
    (LSTM, 10, 128, 1, 100),
    (GRU, 32, 128, 64, 64),
]
SHAPES = {"large": SHAPES["large"], "wide": Shape(32, 128, 256, 256, 64, 64, 1)}
SEEDS = (0, 1, 2)


def by_fit(
    x: np.ndarray,
    y: np.ndarray,
    model: nn.Module,
    shape: Shape,
    precision: str,
    device: str,
) -> Tensor:
    spec = Spec(
        epochs=shape.epochs, batchsize=shape.batchsize, seqsize=shape.seqsize, precision=precision
    )
    est = Estimator(model, F.mse_loss, None, spec, device=device, verbose=False)
    return net2vec(est.fit(x, y)).cpu()


def learn(layer: nn.Module, x: Tensor, given: Tensor, precision: str, native: bool) -> Tensor:
    """A window from the zero state, and the gradients of the weights."""
    layer.reset()
    with native_kernels(native), autocast(precision, x.device):
        y = layer(x)
    return torch.autograd.grad(y, list(layer.parameters()), given.to(y.dtype))[0]


def compare_layers(report: Report, rounds: int, quick: bool) -> None:
    """One window through a layer and back."""
    ways = {
        BASE: ("float32", True),
        "float32 again (A/A)": ("float32", True),
        "bfloat16": ("bfloat16", True),
        "torch's bfloat16": ("bfloat16", False),
    }
    rows, found = [], []
    for make, n_in, n_out, n_series, n_steps in WINDOWS[-1:] if quick else WINDOWS:
        torch.manual_seed(0)
        layer = make(n_in, n_out)
        x, given = torch.randn(n_steps, n_series, n_in), torch.randn(n_steps, n_series, n_out)
        runs = {name: partial(learn, layer, x, given, *way) for name, way in ways.items()}
        try:
            runs["torch's bfloat16"]()
        except RuntimeError:  # torch has no such layer on this processor
            del runs["torch's bfloat16"]
        contenders = {
            name: partial(stopwatch, lambda run: [run() for _ in range(1 if quick else 10)], run)
            for name, run in runs.items()
        }
        seconds = interleaved(contenders, rounds)
        found.append(median(ratios(seconds["bfloat16"], seconds[BASE])))
        sizes = f"{make.__name__} {n_in}, {n_out}, {n_series}, {n_steps}"
        rows += [[sizes, name, spread(ratios(seconds[name], seconds[BASE]))] for name in runs]
    notes = [f"bfloat16, first row: {found[0]:.3f} (aim: at most {LAYER_AIM})."]
    columns = ["F, H, B, S", "contender", "ratio to float32 (range)"]
    report.add(Table("a layer, forwards and backwards", columns, rows, notes))


def compare(name: str, report: Report, rounds: int, quick: bool, device: str) -> None:
    shape = SHAPES[name].quick() if quick else SHAPES[name]
    data = make_data(shape)
    small, part = two_windows(data, shape)
    contenders = {
        BASE: partial(by_fit, precision="float32", device=device),
        "float32 again (A/A)": partial(by_fit, precision="float32", device=device),
        "bfloat16": partial(by_fit, precision="bfloat16", device=device),
    }
    for train in contenders.values():
        train(*small, part)
    vectors: dict[str, Tensor] = {}
    seconds = interleaved(turns(contenders, data, shape, vectors), rounds)
    rows, _ = outcome(seconds, vectors, BASE, data, shape)
    found = median(ratios(seconds["bfloat16"], seconds[BASE]))
    report.add(
        Table(
            f"{name}: {shape.training}",
            COLUMNS,
            rows,
            [f"bfloat16: {found:.3f} (aim: at most {AIM})."],
        )
    )


class Network(nn.Module):
    """LSTM layers and a linear bypass."""

    def __init__(self, n_in: int, n_out: int, n_hidden: int = 64) -> None:
        super().__init__()
        self.rnn, self.head, self.bypass = (
            LSTM(n_in, n_hidden),
            nn.Linear(n_hidden, n_out),
            nn.Linear(n_in, n_out),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)) + self.bypass(x)


def etth1(report: Report, path: Path, quick: bool, device: str) -> None:
    x, naive, truth = arrays(read(path))
    change = truth - naive
    spec = Spec(epochs=1 if quick else 30, batchsize=16, seqsize=48, clip=1.0, patience=5)
    rows, mses = [], {}
    for precision in ("float32", "bfloat16"):
        found = []
        for seed in SEEDS[: 1 if quick else None]:
            torch.manual_seed(seed)
            model = Network(x.shape[0], change.shape[0])
            opt = partial(torch.optim.AdamW, lr=3e-3)
            own = dataclasses.replace(spec, precision=precision)
            est = Estimator(
                model, F.mse_loss, opt, own, random_state=seed, device=device, verbose=False
            )
            held_out = x[..., :VAL], only(change, TRAIN, VAL)[..., :VAL]
            est.fit(
                x[..., :TRAIN], only(change, 0, TRAIN - 24)[..., :TRAIN], validation_data=held_out
            )
            found.append(errors(est.predict(x) + naive, truth))
        mses[precision] = float(np.mean([mse for mse, _ in found]))
        rows.append(
            [precision, f"{mses[precision]:.4f}", f"{np.mean([mae for _, mae in found]):.4f}"]
        )
    ratio = mses["bfloat16"] / mses["float32"]
    title = f"ETTh1, 24 hours ahead, {len(found)} seed{'s' * (len(found) > 1)}"
    notes = [f"bfloat16 over float32: {ratio:.4f} (aim: at most {MOST_WORSE})."]
    report.add(Table(title, ["precision", "MSE", "MAE"], rows, notes))


def main() -> None:
    made = parser(__doc__, rounds=7)
    made.add_argument("--threads", type=int, default=cores(), help="of torch")
    made.add_argument("--device", default="cpu")
    made.add_argument("--data", type=Path, help="ETTh1.csv; without it the error is left out")
    args = parse(made)
    torch.set_num_threads(args.threads)
    report = Report(__doc__, args)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        return report.leave_out("all of it", "there is no CUDA device, or torch was built without")
    if args.device == "cpu":
        compare_layers(report, args.rounds, args.quick)
    for name in SHAPES:
        compare(name, report, args.rounds, args.quick, args.device)
    if args.data is None:
        return report.leave_out("the error of ETTh1", "no --data")
    etth1(report, args.data, args.quick, args.device)


if __name__ == "__main__":
    main()
