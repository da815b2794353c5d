"""Draw ``docs/defaults.png`` from ``docs/defaults.json``: ``python docs/defaults.py``.

``python benchmarks/bench_defaults.py --data FOLDER`` measures anew. A row for each data set, a mark for
each contender: for labels what is missing to a perfect score, for numbers and characters the error over
that of ridge (logistic regression for characters). Left is better in both. Contenders differ in colour
and in shape; what lies beyond the axis is drawn as an arrow at its edge. Printed is the text to show
the picture with.
"""

import json
import statistics
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).resolve().parent

# from top to bottom in a row; colours of Okabe and Ito, which are told apart with any kind of sight
STYLES = {
    "0.2.0": ("0.2.0", "#999999", "X"),
    "linear": ("linear", "#0072B2", "D"),
    "boosting": ("gradient boosting", "#009E73", "^"),
    "ours": ("fluxutils_py", "#D55E00", "o"),
    "lstm": ("LSTM, torch loop", "#CC79A7", "s"),
    "minirocket": ("MiniRocket", "#56B4E9", "P"),
}
TITLES = {
    "GunPoint": "GunPoint",
    "ArrowHead": "ArrowHead",
    "BasicMotions": "BasicMotions",
    "JapaneseVowels": "JapaneseVowels",
    "ItalyPowerDemand": "ItalyPower",
    "occupancy1": "room, test 1",
    "occupancy2": "room, test 2",
    "cmapss": "engines",
    "etth1_6": "oil, 6 hours",
    "etth1_24": "oil, 24 hours",
    "nab_ambient": "air",
    "nab_latency": "latency",
    "nab_machine": "machine",
    "nab_taxi": "taxis",
    "nab_cpu": "processor",
    "m4": "M4 hourly",
    "wikipedia": "Wikipedia",
    "air_quality": "carbon monoxide",
    "bikes": "bikes",
    "republic": "Plato",
}
BASE = "linear"
LEAST_MISSING, MOST_MISSING = 0.4, 80  # per cent; no mistake at all is drawn at the left edge
LEAST_RATIO, MOST_RATIO = 0.5, 2.5
DODGE = 0.13  # of a row, from mark to mark: equal scores lie beside each other


def missing(entry):
    """100 less the score in per cent, by contender; empty for what is no score of labels."""
    if not entry["larger_is_better"]:
        return {}
    return {name: 100 * (1 - found["score"]) for name, found in entry["found"].items()}


def ratios(entry):
    """Errors over that of the linear model, by contender; empty for scores of labels."""
    if entry["larger_is_better"] or BASE not in entry["found"]:
        return {}
    base = entry["found"][BASE]["score"]
    return {name: found["score"] / base for name, found in entry["found"].items()}


def draw_rows(ax, rows, least, most):
    """A row of marks for each set, from top to bottom."""
    ax.set(xscale="log", xlim=(least * 0.93, most * 1.07), ylim=(len(rows) - 0.5, -0.5))
    for row, values in enumerate(rows.values()):
        if row % 2 == 0:
            ax.axhspan(row - 0.5, row + 0.5, color="0.95", zorder=0)
        for order, (name, (_, colour, mark)) in enumerate(STYLES.items()):
            if name not in values:
                continue
            beyond = values[name] > most
            ax.plot(
                min(max(values[name], least), most),
                row + DODGE * (order - (len(STYLES) - 1) / 2),
                marker=">" if beyond else mark,
                markersize=11 if name == "ours" else 8,
                color=colour,
                markeredgecolor="white",
                markeredgewidth=0.8,
                zorder=10 if name == "ours" else 3,
                clip_on=False,
            )
    ax.set_yticks(range(len(rows)), [TITLES.get(name, name) for name in rows])
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.grid(axis="x", color="0.85", linewidth=0.7, zorder=1)
    ax.minorticks_off()


def draw(found, path):
    labels = {name: missing(entry) for name, entry in found["sets"].items()}
    numbers = {name: ratios(entry) for name, entry in found["sets"].items()}
    labels = {name: values for name, values in labels.items() if values}
    numbers = {name: values for name, values in numbers.items() if values}
    heights = [max(len(labels), 1), max(len(numbers), 1)]
    with plt.rc_context({"font.size": 13}):
        figure, axes = plt.subplots(
            2, 1, figsize=(6.4, 10.4), height_ratios=heights, layout="constrained"
        )
        draw_rows(axes[0], labels, LEAST_MISSING, MOST_MISSING)
        ticks = [0.4, 1, 2, 5, 10, 20, 50]
        axes[0].set_xticks(ticks, ["0", *(f"{tick:g}" for tick in ticks[1:])])
        axes[0].set_xlabel("labels: 100 \u2212 score, %")
        draw_rows(axes[1], numbers, LEAST_RATIO, MOST_RATIO)
        axes[1].axvline(1, color="0.4", linewidth=1, zorder=2)
        ticks = [0.5, 0.7, 1, 1.4, 2]
        axes[1].set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes[1].set_xlabel("numbers, characters: error; linear = 1")
        figure.legend(
            handles=legend(found),
            loc="outside upper center",
            ncols=2,
            frameon=False,
            handletextpad=0.2,
            columnspacing=1,
        )
        figure.savefig(path, dpi=110, metadata={"Description": alt_text(found)})
        plt.close(figure)


def ours_first():
    """The contenders in the order in which they are named."""
    return sorted(reversed(STYLES), key=lambda name: name != "ours")


def legend(found):
    """The marks with their names and the median seconds of a fit, ours first."""
    handles = []
    for name in ours_first():
        if name in found["contenders"]:
            title, colour, mark = STYLES[name]
            style = {
                "marker": mark,
                "color": colour,
                "linestyle": "none",
                "markersize": 9,
                "markeredgecolor": "white",
            }
            text = f"{title}, {median_seconds(found, name):.2g} s"
            handles.append(mpl.lines.Line2D([], [], label=text, **style))
    return handles


def median_seconds(found, name):
    """Of the fits of a contender over the sets that it takes part in."""
    return statistics.median(
        entry["found"][name]["seconds"]
        for entry in found["sets"].values()
        if name in entry["found"]
    )


def alt_text(found):
    """What the picture shows, for those who do not see it."""
    parts = []
    for name in ours_first():
        if name not in found["contenders"]:
            continue
        entries = found["sets"].values()
        wrong = [missing(entry)[name] for entry in entries if name in missing(entry)]
        relative = [ratios(entry)[name] for entry in entries if name in ratios(entry)]
        text = STYLES[name][0]
        if wrong:
            text += f" {100 - statistics.fmean(wrong):.1f} % on average"
        if relative and name != BASE:
            text += (
                f"{' and' if wrong else ''} {statistics.median(relative):.2f} of the linear error"
            )
        parts.append(text)
    n_labels = sum(bool(missing(entry)) for entry in found["sets"].values())
    return (
        f"Test scores of {n_labels} sets with labels and errors of "
        f"{len(found['sets']) - n_labels} with numbers or characters: mean score and median ratio. "
        f"{'; '.join(parts)}."
    )


def main():
    found = json.loads((HERE / "defaults.json").read_text("utf-8"))
    draw(found, HERE / "defaults.png")
    print(f"![{alt_text(found)}](../defaults.png)")


if __name__ == "__main__":
    main()
