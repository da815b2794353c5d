"""How long a window takes through the native kernels, forwards and backwards, beside torch's own
layers.

Both run by turns in one process and one thread, on the same windows, for every instruction set that
the processor has; every round gives a ratio, and the table shows the median and the range of those.
``torch again`` is the A/A control. torch itself uses the best instructions; with
``ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2`` it is held to AVX2 and only the row of that set
is a comparison. *one step* is a call of a cell and back through it, autograd included.

    OMP_NUM_THREADS=1 python benchmarks/bench_kernels.py [--rounds 9] [--layers LSTM GRU RNN]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from common import Report, Table, interleaved, median, parse, parser, ratios, spread
from torch import Tensor, nn

from fluxutils_py.nn import Recur, native_kernels
from fluxutils_py.nn.kernels import library as kernels

# F, H, B, S
SHAPES = [
    (10, 10, 100, 100),
    (10, 32, 100, 100),
    (32, 64, 64, 64),
    (32, 128, 64, 64),
    (1, 16, 20, 10),
]
LAYERS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
CELLS = {"LSTM": nn.LSTMCell, "GRU": nn.GRUCell, "RNN": nn.RNNCell}
BASE = "torch"


def learn(layer: Recur, x: Tensor, given: Tensor) -> list[Tensor]:
    """Outputs and gradients of a window or a step from the zero state."""
    layer.reset()
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, list(layer.parameters()), given)]


def predict(layer: Recur, x: Tensor) -> list[Tensor]:
    layer.reset()
    with torch.no_grad():
        return [layer(x)]


def contenders(run: Callable[..., list[Tensor]]) -> dict[str, Callable[[], list[Tensor]]]:
    def by_torch() -> list[Tensor]:
        with native_kernels(False):
            return run()

    def by_kernels(isa: str) -> list[Tensor]:
        kernels._use.library = libraries[isa]
        return run()

    libraries = {
        isa: kernels.Library(kernels.PATH, isa) for isa in kernels.ISAS if kernels.supports(isa)
    }
    found = {BASE: by_torch, "torch again (A/A)": by_torch}
    return found | {isa: partial(by_kernels, isa) for isa in libraries}


def seconds_of(run: Callable[[], object], repeats: int) -> float:
    """Of one call, on average."""
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - began) / repeats


def compare(
    table: Table, what: str, run: Callable[..., list[Tensor]], rounds: int, seconds: float
) -> None:
    """Adds a row for each contender; each turn takes about so many seconds."""
    found = contenders(run)
    expected = found[BASE]()
    for name, contender in found.items():
        for a, b in zip(contender(), expected, strict=True):
            if (apart := float((a - b).abs().max() / b.abs().max())) > 1e-4:
                raise SystemExit(f"{what}: {name} and torch differ by {apart:.1e}")
    repeats = {name: max(1, int(seconds / seconds_of(c, 2))) for name, c in found.items()}
    taken = interleaved(
        {name: partial(seconds_of, c, repeats[name]) for name, c in found.items()}, rounds
    )
    for name in found:
        ratio = spread(ratios(taken[name], taken[BASE]))
        table.rows.append([what, name, ratio, f"{1e6 * median(taken[name]):.0f}"])


def main() -> None:
    made = parser(__doc__, rounds=9)
    made.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    args = parse(made)
    torch.set_num_threads(1)
    report = Report(__doc__, args)
    if kernels.library_in_use() is None:
        report.leave_out("native kernels", kernels.kernels_in_use())
        return
    seconds = 0.001 if args.quick else 0.1
    for name in args.layers:
        table = Table(
            f"{name}, float32",
            ["F, H, B, S", "contender", "ratio to torch (range)", "microseconds"],
        )
        for n_in, n_out, n_series, n_steps in SHAPES[-1:] if args.quick else SHAPES:
            torch.manual_seed(0)
            layer = Recur(LAYERS[name](n_in, n_out))
            x, given = torch.randn(n_steps, n_series, n_in), torch.randn(n_steps, n_series, n_out)
            sizes = f"{n_in}, {n_out}, {n_series}, {n_steps}"
            compare(table, sizes, partial(learn, layer, x, given), args.rounds, seconds)
            compare(
                table, f"{sizes}, forwards only", partial(predict, layer, x), args.rounds, seconds
            )
        cell = Recur(CELLS[name](10, 10))
        step = partial(learn, cell, torch.randn(100, 10), torch.randn(100, 10))
        compare(table, "10, 10, 100, one step", step, args.rounds, seconds)
        report.add(table)


if __name__ == "__main__":
    main()
