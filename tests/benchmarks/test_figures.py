"""The figures of README and of the pages are those of the results.

A line below is a piece of text as it stands on a page, with ``{0}``, ``{1}``, ... for the figures,
and then where each of them comes from: section, table, row and column of a file of results. A
failure shows the piece as it has to be.
"""

import json
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ("RESULTS.md", "RESULTS_bfloat16.md", "RESULTS_defaults.md")

BENCHMARKS = "docs/background/benchmarks.md"
FIT = "fit > {} > {} > ratio"
PREDICT = "predict > {} > {} > ratio"
FEW = "few_series > time > LSTM, 10, {}, {}, {} > {}"
WEAK = "ranks > {}: F > {} > speed"
M4 = "m4 > M4 > {} > {}"
ETTH1 = "etth1 > ETTh1, test, 7 series, {} > {} > {}"


def fits(row):
    """A contender on the two shapes."""
    return [FIT.format("small", row), FIT.format("large", row)]


def few(units, steps):
    """The ratios of 1, 4 and 8 series, training, then prediction."""
    return [
        FEW.format(units, series, steps, task)
        for task in ("training", "prediction")
        for series in (1, 4, 8)
    ]


def forecasts(address, rows, *columns):
    return [address.format(row, column) for row in rows for column in columns]


ONE, DEFAULTS = "**fluxutils_py, mean of 3**", "**fluxutils_py, defaults**"
SEEDS = [f"fluxutils_py, seed {i}" for i in range(3)]
PEERS = [f"NeuralForecast 3.3.0 {name}" for name in ("NHITS", "DLinear", "LSTM")]
NAIVE = "seasonal naive"
OURS = "**fluxutils_py, seed 0**"

FIGURES = [
    ("README.md", "64 and 100 series in {0:.2f} to {1:.2f} of the time", *fits("Estimator.fit")),
    ("README.md", "one long series in {0:.2f}.", FIT.format("one series", "Estimator.fit")),
    (
        "README.md",
        "takes {0:.0f} to {1:.0f} microseconds",
        "stream > one series, in a loop of steps alone > 16 > stream",
        "stream > one series, in a loop of steps alone > 128 > stream",
    ),
    (
        "README.md",
        "an sMAPE of {0:.2f} % after {1} seconds of training.",
        M4.format(ONE, "sMAPE"),
        M4.format(ONE, "seconds"),
    ),
    # -- the page of benchmarks: training
    (BENCHMARKS, "| A/A | {0} | {1} |", *fits("fused again")),
    (BENCHMARKS, "that is not fused | {0} | {1} |", *fits("loop, AdamW")),
    (BENCHMARKS, "| **`Estimator.fit`** | **{0}** | **{1}** |", *fits("Estimator.fit")),
    (BENCHMARKS, "two ranks, the same work | {0} | {1} |", *fits("Estimator.fit, 2 r")),
    (BENCHMARKS, "by a subclass | {0} | {1} |", *fits("skorch")),
    (BENCHMARKS, "manual optimisation | {0} | {1} |", *fits("Lightning")),
    (BENCHMARKS, "with a work-around | {0:all.1f} | {1:all.1f} |", *fits("Keras")),
    (
        BENCHMARKS,
        "loop, fit | {0} MiB, {1} MiB | {2} MiB, {3} MiB |",
        *(
            f"fit > {shape} > {row} > memory"
            for shape in ("small", "large")
            for row in ("loop, fused AdamW", "Estimator.fit")
        ),
    ),
    # -- few series
    *(
        (
            BENCHMARKS,
            f"| {units} | {{0:.2f}}, {{1:.2f}}, {{2:.2f}} | {{3:.2f}}, {{4:.2f}}, {{5:.2f}} |",
            *few(units, 200 if units == 256 else 1000),
        )
        for units in (16, 32, 64, 128, 256)
    ),
    (
        BENCHMARKS,
        "windows of 100, takes {0}.",
        FIT.format("one series", "Estimator.fit"),
    ),
    # -- prediction and streams
    (
        BENCHMARKS,
        "`predict` takes {0} and {1} of the time of a loop over windows on the two shapes, and {2} on one",
        *(PREDICT.format(shape, "Estimator.predict") for shape in ("small", "large", "one series")),
    ),
    (
        BENCHMARKS,
        "takes {0:.1f} us for 16 units, {1:.1f} for 64 and {2:.1f} for 128.",
        *(
            f"stream > one series, in a loop of steps alone > {units} > stream"
            for units in (16, 64, 128)
        ),
    ),
    *(
        (
            BENCHMARKS,
            f"| {units} | {{0:.2f}}, {{1:.2f}}, {{2:.2f}} | {{3:.2f}}, {{4:.2f}}, {{5:.2f}} |",
            *(
                f"stream > LSTM({units}) and a linear head, {series} series > {row} > ratio"
                for row in ("stream", "stream of a pipeline")
                for series in (1, 100, 1000)
            ),
        )
        for units in (16, 64, 128)
    ),
    # -- bfloat16
    (
        BENCHMARKS,
        "takes {0:.2f} (128 units) and {1:.2f} (256) of",
        *(f"RESULTS_bfloat16 > {shape}: F > bfloat16 > ratio" for shape in ("large", "wide")),
    ),
    # -- ranks
    *(
        (
            BENCHMARKS,
            f"| {name} | {{0}} | {{1}} |",
            WEAK.format("small", row),
            WEAK.format("large", row),
        )
        for name, row in {
            "two ranks under `mpirun`": "2 ranks x 1, mpirun",
            "two ranks under `torchrun`": "2 ranks x 1, torchrun",
            "torch's `DistributedDataParallel` with gloo": "2 ranks x 1, DDP",
            "two threads of torch": "1 rank x 2 threads",
            "A/A": "1 x 1 again",
        }.items()
    ),
    # -- files
    (
        BENCHMARKS,
        "takes {0:.1f} times a memcpy of its bytes. It takes {1:.1f} times from a file in C order "
        "`(F, N, T)`, {2:.0f} times through h5py, and {3:.0f} times through",
        *(
            f"windows > window of > {row} > time"
            for row in ("mapped HDF5, (T, N, F)", "mapped HDF5, (F, N, T)", "h5py", "torch Data")
        ),
    ),
    # -- forecasts
    (
        BENCHMARKS,
        "({0:.2f}, {1:.2f}, {2:.2f}) | **{3:.2f}** | **.74** | {4} |",
        *forecasts(M4, SEEDS, "sMAPE"),
        *forecasts(M4, [ONE], "sMAPE", "seconds"),
    ),
    (
        BENCHMARKS,
        "| **the defaults**, with nine quantiles | **{0:.2f}** | **{1:bare.2f}** | {2} |",
        *forecasts(M4, [DEFAULTS], "sMAPE", "MASE", "seconds"),
    ),
    (
        BENCHMARKS,
        "| seasonal naive, 24 h | {0:.2f} | {1} | |",
        *forecasts(M4, [NAIVE], "sMAPE", "MASE"),
    ),
    *(
        (
            BENCHMARKS,
            "| {0:.2f} | {1:bare.2f} | {2} |",
            *forecasts(M4, [peer], "sMAPE", "MASE", "seconds"),
        )
        for peer in PEERS
    ),
    (
        BENCHMARKS,
        "| seasonal naive, 24 h | {0:bare.3f} | {1:bare.3f} |",
        *(ETTH1.format(hours, NAIVE, "MSE") for hours in ("24 hours", "96 hours")),
    ),
    *(
        (
            BENCHMARKS,
            f"{said} | {bold}{{0:bare.3f}}{bold} ({{1}}) | {bold}{{2:bare.3f}}{bold} ({{3}}) |",
            *(
                ETTH1.format(hours, row, column)
                for hours in ("24 hours", "96 hours")
                for column in ("MSE", "seconds")
            ),
        )
        for said, bold, row in [
            ("| **one network**, mean of three seeds", "**", ONE),
            ("| **the defaults**", "**", DEFAULTS),
            ("NHITS", "", PEERS[0]),
            ("DLinear", "", PEERS[1]),
            ("LSTM", "", PEERS[2]),
        ]
    ),
    *(
        (
            BENCHMARKS,
            f"| {said} | {{0:bracket.3f}} | {{1:bracket.3f}} | {{2:bracket.3f}} | "
            "{3:bracket.3f} | {4:.3f} | {5} | {6} | {7} |",
            *(
                f"gift > {task}, test > {row} > MASE"
                for row in (OURS, "NeuralForecast 3.3.0 NHITS", "NeuralForecast 3.3.0 P", "stats")
            ),
            *(
                f"gift > {task}, test > {OURS} > {column}"
                for column in ("CRPS", "in 80", "in 50", "seconds")
            ),
        )
        for said, task in {
            "M4 Hourly, 48 hours": "m4_hourly",
            "ETTh1, 48 hours": "ett1 H short",
            "ETTh1, 480 hours": "ett1 H medium",
            "ETTh1, 720 hours": "ett1 H long",
            "days of ETTh1, 30 days": "ett1 D",
        }.items()
    ),
]


class Figure(str):
    """The text of a cell. ``{:.2f}`` formats its first number, ``{:all.1f}`` all of them,
    ``{:bare.2f}`` the first one without a leading zero, ``{:percent}`` as a share of a hundred,
    ``{:bracket.2f}`` the one in brackets.
    """

    def __format__(self, spec):
        if spec.startswith("all"):
            return re.sub(r"[\d.]+", lambda found: f"{float(found[0]):{spec[3:]}}", self)
        text = self.strip("*")
        if spec.startswith("bracket"):
            return f"{float(text.split('(')[1].rstrip(')')):{spec.removeprefix('bracket')}}"
        if not spec:
            return text
        number = float(re.match(r"[\d.]+", text)[0])
        if spec == "percent":
            return f"{100 * number:.1f}"
        return f"{number:{spec.removeprefix('bare')}}".removeprefix(
            "0" if spec.startswith("bare") else " "
        )


@cache
def sections():
    """Sections of all files by name; what comes before the first one by the name of the file."""
    found = {}
    for name in FILES:
        path = ROOT / "benchmarks" / name
        found[path.stem], *parts = path.read_text("utf-8").split("\n## ")
        found |= {part.partition("\n")[0]: part for part in parts}
    return found


def cells_of(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def table(address):
    """The header and the rows of the table that an address names."""
    section, title = address.split(" > ")[:2]
    begins = f"\n**{title}"
    text = sections()[section]
    if begins not in text:
        return None
    lines = text.split(begins, 1)[1].split("\n\n")[1].splitlines()
    return cells_of(lines[0]), [cells_of(line) for line in lines[2:]]


def first(names, begins):
    """The place of the name that is, or else begins like this."""
    return next(
        (i for i, name in enumerate(names) if name == begins),
        next(i for i, name in enumerate(names) if name.startswith(begins)),
    )


def figure(address):
    """The cell of an address: ``section > table > row > column``, each by how it begins."""
    *_, row, column = address.split(" > ")
    header, rows = table(address)
    if header[1:4] == ["F", "H", "B"]:  # several columns tell rows apart
        names = [", ".join(cells[:5]) for cells in rows]
    elif header[:2] == ["F, H, B, S", "contender"]:
        names = [", ".join(cells[:2]) for cells in rows]
    else:
        names = [cells[0] for cells in rows]
    cells = rows[first(names, row)]
    return Figure(cells[first(header[1:], column) + 1])


def words(path):
    return " ".join((ROOT / path).read_text("utf-8").split())


@pytest.mark.parametrize(
    ("page", "text", "addresses"),
    [(page, text, addresses) for page, text, *addresses in FIGURES],
    ids=[f"{page}-{text[:24]}" for page, text, *_ in FIGURES],
)
def test_a_page_has_the_figures_of_the_results(page, text, addresses):
    assert {a for a in addresses if table(a) is None} == set()
    assert text.format(*map(figure, addresses)) in words(page)


def test_the_figures_of_many_shapes_are_those_of_the_results():
    results = (ROOT / "benchmarks/RESULTS_both_sets.md").read_text("utf-8")
    rows = re.findall(r"\| all \| 108 \| 0 \| (\S+) \| (\S+) \|", results)
    (median, most), (of_avx2, most_of_avx2) = rows
    page = words(BENCHMARKS)
    assert f"median of {median} of the loop's processor time, and at most {most}." in page
    assert f"With AVX2 alone, these are {of_avx2} and {most_of_avx2} " in page
    assert median == of_avx2
    assert f"the median is {median}, with AVX-512 and AVX2." in words("README.md")


def test_the_page_has_the_sentence_and_the_picture_of_the_grid(load_script):
    pytest.importorskip("matplotlib")
    grid = load_script("docs/grid.py")
    cells = json.loads((ROOT / "docs/grid.json").read_text("utf-8"))["cells"]
    page = words(BENCHMARKS)
    assert {cell["set"] for cell in cells} == {"avx512", "avx2"}
    for isa in ("avx512", "avx2"):
        part = [cell for cell in cells if cell["set"] == isa]
        sentence = grid.sentence(part).removeprefix("Of ")
        assert sentence in page
        assert grid.alt_text(part) in page


def test_a_figure_is_written_as_asked():
    found = Figure("0.986 (0.81-1.15)")
    assert f"{found} {found:.1f} {found:bare.2f} {found:all.1f} {found:percent}" == (
        "0.986 (0.81-1.15) 1.0 .99 1.0 (0.8-1.1) 98.6"
    )
    assert f"{Figure('0.743 (0.623)'):bracket.2f}" == "0.62"
