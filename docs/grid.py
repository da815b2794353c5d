"""Draw ``docs/grid.png``, and ``docs/grid_avx2.png`` of a processor held to AVX2, from
``docs/grid.json``: ``python docs/grid.py``.

``python benchmarks/bench_grid.py --measured docs/grid.json`` measures anew. A picture has a panel
for each layer and task, over the units and the series; a tile joins the shapes of any features and
steps that fall into it. It shows the median of their ratios, as colour and number, and the largest
one below. Colours are centred at 1; a tile whose median is above 1 is hatched, so that it is told
apart without colour, too. Printed are the text to show the picture with, and where the package is
not ahead.
"""

import itertools
import json
import statistics
import textwrap
from pathlib import Path

import matplotlib as mpl
import numpy as np
from PIL import Image

mpl.use("Agg")
from matplotlib import colors, patches
from matplotlib import pyplot as plt

HERE = Path(__file__).resolve().parent
UNITS = [8, 16, 32, 64, 128, 257]  # edges of the tiles
SERIES = [1, 2, 4, 8, 16, 32, 64, 201]
PANELS = [(layer, task) for task in ("train", "predict") for layer in ("LSTM", "GRU")]
TASKS = {"train": "training", "predict": "prediction"}
FACTOR = 4  # the colours end at 1/4 and 4
BEHIND = 1.1  # as bench_grid.py counts it


def tiles(cells, layer, task):
    """The ratios of one panel by place: (row of series, column of units)."""
    found = {}
    for cell in cells:
        if (cell["layer"], cell["task"]) == (layer, task):
            row = int(np.searchsorted(SERIES, cell["B"], "right")) - 1
            column = int(np.searchsorted(UNITS, cell["H"], "right")) - 1
            found.setdefault((row, column), []).append(cell["ratio"])
    return found


def names(edges):
    """What the tiles between these edges are called."""
    pairs = itertools.pairwise(edges)
    return [str(a) if b - a == 1 else f"{a}\u2013{b - 1}" for a, b in pairs]


def draw_panel(ax, found, norm, colours):
    for (row, column), ratios in found.items():
        middle = statistics.median(ratios)
        face = colours(norm(middle))
        is_behind = middle > 1
        tile = patches.Rectangle(
            (column, row), 1, 1, facecolor=face, edgecolor="white" if not is_behind else "black"
        )
        if is_behind:
            tile.set_hatch("//")
        ax.add_patch(tile)
        # white on dark, black on light, as the eye weighs red, green and blue
        dark = np.dot(face[:3], [0.299, 0.587, 0.114]) < 0.55
        shown = {"ha": "center", "va": "center", "color": "white" if dark else "black"}
        if is_behind:
            shown["bbox"] = {"facecolor": face, "edgecolor": "none", "pad": 2}
        ax.text(column + 0.5, row + 0.62, f"{middle:.2f}", weight="bold", **shown)
        ax.text(column + 0.5, row + 0.25, f"\u2264 {max(ratios):.2f}", size="x-small", **shown)
    ax.set(xlim=(0, len(UNITS) - 1), ylim=(0, len(SERIES) - 1))
    ax.set_xticks(np.arange(len(UNITS) - 1) + 0.5, names(UNITS))
    ax.set_yticks(np.arange(len(SERIES) - 1) + 0.5, names(SERIES))
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_facecolor("0.93")  # where there is no shape


def draw(cells, path):
    figure, axes = plt.subplots(
        2, 2, figsize=(9, 8), sharex=True, sharey=True, layout="constrained"
    )
    norm = colors.LogNorm(1 / FACTOR, FACTOR, clip=True)
    colours = mpl.colormaps["PuOr_r"]
    for ax, (layer, task) in zip(axes.flat, PANELS, strict=True):
        draw_panel(ax, tiles(cells, layer, task), norm, colours)
        ax.set_title(f"{layer}, {TASKS[task]}", fontsize="medium")
    figure.supxlabel("units H", fontsize="medium")
    figure.supylabel("series B", fontsize="medium")
    bar = figure.colorbar(mpl.cm.ScalarMappable(norm, colours), ax=axes, shrink=0.6, aspect=30)
    bar.set_label("time; that of torch's layer = 1")
    ticks = [0.25, 0.5, 1, 2, 4]
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    bar.ax.minorticks_off()
    figure.savefig(path, dpi=100)
    plt.close(figure)
    picture = Image.open(path).convert("RGB")  # a quarter of the size with 160 colours
    picture.quantize(160, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        path, optimize=True
    )


def alt_text(cells):
    """What the picture shows, for those who do not see it."""
    parts = []
    for layer, task in PANELS:
        found = [c["ratio"] for c in cells if (c["layer"], c["task"]) == (layer, task)]
        if found:
            parts.append(
                f"{layer}, {TASKS[task]}: median {statistics.median(found):.2f}, "
                f"largest {max(found):.2f}"
            )
    first = "Heat maps of the time over that of torch's layers, by units and series"
    if cells and cells[0].get("set") == "avx2":
        first = "The same with AVX2"
    return f"{first}. {'; '.join(parts)}."


def sentence(cells):
    """Where the package is not ahead."""
    n_ahead = sum(c["ratio"] < 1 for c in cells)
    start = f"Of {len(cells)} measurements, {n_ahead} are ahead of torch"
    behind = [c for c in cells if c["ratio"] > BEHIND and 1 / BEHIND <= c["control"] <= BEHIND]
    if not behind:
        return (
            f"{start}; none takes more than {BEHIND} of its time where the control is within "
            f"{BEHIND}."
        )
    shapes = ", ".join(
        f"{c['layer']} {TASKS[c['task']]} of F={c['F']}, H={c['H']}, B={c['B']}, S={c['S']} "
        f"({c['ratio']:.2f})"
        for c in sorted(behind, key=lambda c: -c["ratio"])
    )
    return f"{start}; {len(behind)} take more than {BEHIND} of its time: {shapes}."


def main():
    cells = json.loads((HERE / "grid.json").read_text("utf-8"))["cells"]
    sets = dict.fromkeys(cell.get("set") for cell in cells)  # the processor's own first
    for isa, name in zip(sets, ("grid.png", "grid_avx2.png"), strict=False):
        part = [cell for cell in cells if cell.get("set") == isa]
        draw(part, HERE / name)
        print(f"![{alt_text(part)}](../{name})\n")
        print(textwrap.fill(sentence(part), 120))


if __name__ == "__main__":
    main()
