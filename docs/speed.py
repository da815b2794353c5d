"""Draw ``docs/speed.png`` from ``benchmarks/RESULTS.md``: ``python docs/speed.py``.

Time to train beside a hand-written PyTorch loop, for three shapes of the section ``fit``: medians
and ranges of the rounds. What takes more than the axis shows is written beside its bar.
"""

import re
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).resolve().parent
ROWS = {  # as the picture calls them: as RESULTS.md calls them
    "fluxutils_py": "Estimator.fit",
    "PyTorch loop, by hand": "loop, fused AdamW",
    "skorch": "skorch",
    "Lightning": "Lightning",
    "Keras": "Keras",
}
TITLES = {
    "one series": "LSTM(64), one series of 20,000 steps",
    "small": "LSTM(10), 1000 series of 1000 steps",
    "large": "LSTM(128), 256 series of 1024 steps",
}
LIMIT = 1.6  # of the axis


def ratios(shape: str) -> dict[str, tuple[float, ...]]:
    """Median, least and greatest ratio to the loop of each contender: of the first row that begins
    with its name.
    """
    section = (
        (HERE.parent / "benchmarks/RESULTS.md")
        .read_text("utf-8")
        .split("\n## fit\n")[1]
        .split("\n## ")[0]
    )
    table = section.split(f"**{shape}: ")[1].split("\n**")[0]
    found = {}
    for name, begins in ROWS.items():
        row = re.search(
            rf"^\| {re.escape(begins)}[^|]*\| ([\d.]+) \(([\d.]+)-([\d.]+)\) \|",
            table,
            re.MULTILINE,
        )
        if row is not None:
            found[name] = tuple(float(number) for number in row.groups())
    return found


def draw(path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(11, 2.6), sharey=True, layout="constrained")
    for ax, (shape, title) in zip(axes, TITLES.items(), strict=True):
        for place, (name, (median, least, greatest)) in enumerate(ratios(shape).items()):
            is_ours, fits = name == "fluxutils_py", median < LIMIT
            ax.barh(
                place, min(median, LIMIT), color="tab:orange" if is_ours else "0.75", height=0.65
            )
            if fits:
                ax.plot([least, min(greatest, LIMIT)], [place, place], color="0.2", linewidth=1)
            x, text = (
                (min(greatest, LIMIT) + 0.03, f"{median:.2f}")
                if fits
                else (LIMIT - 0.03, f"{median:.1f} \u2192")
            )
            ax.text(
                x,
                place,
                text,
                ha="left" if fits else "right",
                va="center",
                weight="bold" if is_ours else "normal",
            )
        ax.set(xlim=(0, LIMIT), xlabel="time to train; PyTorch loop = 1")
        ax.set_title(title, fontsize="medium")
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.tick_params(axis="y", length=0)
    axes[0].set_yticks(range(len(ROWS)), ROWS)
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    draw(HERE / "speed.png")
