"""Draw ``docs/scaling.png`` from ``docs/scaling.json``: ``python docs/scaling.py``.

``python benchmarks/bench_parallel.py --only links --measured docs/scaling.json`` measures anew, two
ranks in two network namespaces. This fits a model to what it measured, prints what it finds, and
draws it for 2 to 1024 ranks. For ``P`` ranks, ``a = accumulate`` batches per update and ``n``
parameters, a batch takes::

    flops / speed  +  2 ceil(log2 P) m (delay + overhead)  +  2 (P - 1) / P * 32 (32 + n / a) bits / (share * rate)

where ``speed`` is fitted for each shape, ``m`` is the number of sums for each batch (1, or ``1 + 1 /
a`` with ``a > 1``), ``delay`` and ``rate`` are those of the link, and ``overhead`` (what the software
adds to a message) and ``share`` (what the vector uses of the rate) are fitted. Computation and
communication do not overlap.
"""

import json
import math
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

mpl.use("Agg")
HERE = Path(__file__).parent
N_TAIL = 32  # numbers that travel with each batch besides the gradient
FLOPS = {
    "small": 6 * 100 * 100 * 4 * 10 * (10 + 10),
    "large": 6 * 64 * 64 * 4 * 128 * (32 + 128),
}  # of a batch
N_PARAMS = {"small": 891, "large": 83_073}


def rounds(n_ranks, accumulate):
    """Messages one after the other for each batch: there and back through a tree."""
    sums = (
        1 if accumulate == 1 else 1 + 1 / accumulate
    )  # the tail of every batch, and the vector of every update
    return sums * 2 * math.ceil(math.log2(n_ranks))


def sent(n_params, n_ranks, accumulate):
    """Bits that each rank sends for each batch."""
    return 32 * (N_TAIL + n_params / accumulate) * 2 * (n_ranks - 1) / n_ranks


def fit(measured):
    """Seconds per flop of each shape, seconds per message besides the delay, and the share of the
    rate that is used.
    """
    shapes = sorted({m["shape"] for m in measured})
    rows, seconds = [], []
    for m in measured:
        n_rounds = rounds(2, m["accumulate"])
        compute = [FLOPS[m["shape"]] * (m["shape"] == s) for s in shapes]
        bits = sent(m["n_params"], 2, m["accumulate"]) / (m["rate"] * 1e9)
        scale = 1 / m["seconds"]  # so that errors are relative
        rows.append([scale * v for v in (*compute, n_rounds, bits)])
        seconds.append(1 - scale * n_rounds * m["delay"] * 1e-3)
    scales = np.abs(np.array(rows)).max(0)
    found = np.linalg.lstsq(np.array(rows) / scales, np.array(seconds), rcond=None)[0] / scales
    per_flop = dict(zip(shapes, found, strict=False))
    return per_flop, max(found[-2], 0.0), max(found[-1], 1.0)


def seconds(shape, n_ranks, accumulate, rate, delay, model):
    per_flop, per_message, per_bit = model
    compute = FLOPS[shape] * per_flop[shape]
    talk = rounds(n_ranks, accumulate) * (per_message + delay)
    return compute, talk + per_bit * sent(N_PARAMS[shape], n_ranks, accumulate) / rate


def share(shape, n_ranks, accumulate, rate, delay, model):
    """Share of the time that computes."""
    compute, talk = seconds(shape, n_ranks, accumulate, rate * 1e9, delay * 1e-3, model)
    return compute / (compute + talk)


def most_ranks(least, *case):
    """The largest power of two of ranks, up to 1024, of which at least this share of the time
    computes.
    """
    fitting = [2**k for k in range(1, 11) if share(case[0], 2**k, *case[1:]) >= least]
    return str(max(fitting)) if fitting else "none"


def main():
    measured = json.loads((HERE / "scaling.json").read_text())
    model = fit(measured)
    for shape, per_flop in model[0].items():
        print(
            f"{shape}: {1e-9 / per_flop:.1f} Gflop/s, {FLOPS[shape] * per_flop * 1e3:.2f} ms of "
            "computation per batch"
        )
    print(
        f"{model[1] * 1e6:.0f} us per message besides the delay; {1 / model[2]:.0%} of the rate is "
        "used"
    )
    for m in measured:
        of = sum(seconds(m["shape"], 2, m["accumulate"], m["rate"] * 1e9, m["delay"] * 1e-3, model))
        print(
            f"  {m['shape']}, {m['rate']:g} Gbit/s, {m['delay']:g} ms, "
            f"accumulate={m['accumulate']}:",
            end=" ",
        )
        print(f"{m['seconds'] * 1e3:.2f} ms measured, {of * 1e3:.2f} ms modelled")
    links = {(10, 0.1): "tab:blue", (10, 1): "tab:green", (1, 0.1): "tab:orange", (1, 1): "tab:red"}
    print("\n| shape | link | most ranks | with 8 batches per update |\n| --- | --- | --- | --- |")
    for shape in FLOPS:
        for rate, delay in ((10, 0), (1, 0), *links):
            cells = " | ".join(most_ranks(0.5, shape, a, rate, delay, model) for a in (1, 8))
            print(f"| {shape} | {rate} Gbit/s, {delay} ms | {cells} |")
    n_ranks = 2 ** np.arange(1, 11)
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.6), sharey=True, layout="constrained")
    for ax, shape in zip(axes, ("small", "large"), strict=True):
        for (rate, delay), colour in links.items():
            for accumulate, line in ((1, "-"), (8, "--")):
                shares = [share(shape, p, accumulate, rate, delay, model) for p in n_ranks]
                label = f"{rate} Gbit/s, {delay} ms" if accumulate == 1 else None
                ax.plot(n_ranks, shares, line, color=colour, label=label)
        ax.set(xlabel="ranks", title=f"{shape}: {N_PARAMS[shape]} parameters", ylim=(0, 1))
        ax.set_xscale("log", base=2)
        ax.set_xticks(n_ranks[::3], [str(p) for p in n_ranks[::3]])
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("share of the time that computes")
    axes[1].plot([], [], "--", color="0.4", label="8 batches per update")
    axes[1].legend(frameon=False, fontsize="small")
    figure.savefig(HERE / "scaling.png", dpi=120)


if __name__ == "__main__":
    main()
