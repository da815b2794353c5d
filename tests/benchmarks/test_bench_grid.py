"""The grid of shapes, and the picture of it."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def grid(module):
    return module("bench_grid")


@pytest.fixture
def picture():
    """The program that draws, which is no part of a package either."""
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("grid_picture", ROOT / "docs" / "grid.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def cell(ratio, layer="LSTM", task="train", control=1.0, **sizes):
    sizes = {"F": 3, "H": 8, "B": 1, "S": 5} | sizes
    numbers = {"ratio": ratio, "control": control, "microseconds": 10.0}
    return {"layer": layer, "task": task, **sizes, **numbers}


def test_points_fill_every_quarter_of_every_axis_alike(grid):
    points = [point for point, _ in zip(grid.points(), range(200), strict=False)]
    for axis in zip(*points, strict=True):
        counts = [sum(math.floor(4 * p) == quarter for p in axis) for quarter in range(4)]
        assert min(counts) >= 44
        assert max(counts) <= 58


def test_sample_is_fixed_and_in_the_ranges(grid):
    shapes = grid.sample(200)
    assert shapes == grid.sample(200)
    assert shapes[:7] == grid.sample(7)
    assert len(set(shapes)) == 200
    limits = zip(grid.SMALLEST, grid.LARGEST, strict=True)
    for (least, most), sizes in zip(
        limits, zip(*(s[1:] for s in shapes), strict=True), strict=True
    ):
        assert least <= min(sizes) <= 2 * least
        assert most / 2 <= max(sizes) <= most
    assert {s.layer for s in shapes} == {"LSTM", "GRU"}
    assert max(map(grid.expected_seconds, shapes)) <= grid.LONGEST


@pytest.mark.slow
def test_program_measures_each_task_of_each_shape(grid, monkeypatch, tmp_path, capsys):
    shapes = [grid.Shape("LSTM", 3, 9, 2, 4), grid.Shape("GRU", 1, 8, 1, 1)]
    monkeypatch.setattr(grid, "sample", lambda n: shapes)
    monkeypatch.setattr(grid, "LEAST_TURN", 0.0)
    monkeypatch.setattr(grid, "instructions", lambda: "avx512")
    held = []

    def held_to_avx2(args):
        held.append(args.rounds)
        return [cell(2.0, "GRU", "predict") | {"set": "avx2"}]

    monkeypatch.setattr(grid, "held_to_avx2", held_to_avx2)
    found = tmp_path / "grid.json"
    monkeypatch.setattr(sys, "argv", ["bench_grid.py", "--rounds", "1", "--measured", str(found)])
    grid.main()
    cells = json.loads(found.read_text())["cells"]
    assert held == [1]
    assert [c["set"] for c in cells] == [*["avx512"] * 4, "avx2"]
    places = [(c["layer"], c["task"], c["F"], c["H"], c["B"], c["S"]) for c in cells[:4]]
    assert places == [
        ("LSTM", "train", 3, 9, 2, 4),
        ("LSTM", "predict", 3, 9, 2, 4),
        ("GRU", "train", 1, 8, 1, 1),
        ("GRU", "predict", 1, 8, 1, 1),
    ]
    assert all(c[name] > 0 for c in cells for name in ("ratio", "control", "microseconds"))
    out = capsys.readouterr().out
    assert "| GRU | predict | 1 |" in out
    assert "**avx2: the 12 largest ratios**" in out


@pytest.mark.slow
def test_layers_of_other_outputs_are_not_timed(grid, monkeypatch):
    monkeypatch.setattr(grid.Contender, "outputs", lambda self: self.x * self.threads)
    with pytest.raises(AssertionError, match="not close"):
        grid.contenders(grid.Shape("LSTM", 3, 9, 2, 4))


def test_summary_counts_what_is_behind_only_where_the_control_holds(grid):
    cells = [cell(0.5), cell(1.05), cell(1.3), cell(1.4, control=1.2), cell(2.0, layer="GRU")]
    assert grid.summary(cells).rows == [
        ["LSTM", "train", "4", "1", "1", "1.18", "1.40"],
        ["GRU", "train", "1", "0", "1", "2.00", "2.00"],
    ]
    assert [row[6] for row in grid.worst(cells, 2).rows] == ["2.00", "1.40"]


def test_tiles_hold_every_shape_of_the_sample(grid, picture):
    cells = [
        cell(i, s.layer, F=s.n_features, H=s.n_hidden, B=s.n_series, S=s.n_steps)
        for i, s in enumerate(grid.sample(200))
    ]
    n_rows = len(picture.SERIES) - 1
    n_columns = len(picture.UNITS) - 1
    placed = []
    for layer in ("LSTM", "GRU"):
        for (row, column), ratios in picture.tiles(cells, layer, "train").items():
            assert 0 <= row < n_rows
            assert 0 <= column < n_columns
            placed += ratios
    assert sorted(placed) == list(range(200))
    corners = [cell(1, H=256, B=200), cell(2, H=8, B=1), cell(3, H=15, B=1), cell(4, H=16, B=2)]
    assert picture.tiles(corners, "LSTM", "train") == {
        (n_rows - 1, n_columns - 1): [1],
        (0, 0): [2, 3],
        (1, 1): [4],
    }
    assert picture.names([1, 2, 4]) == ["1", "2\u20133"]


@pytest.mark.slow
def test_picture_and_its_text(picture, tmp_path):
    cells = [cell(0.5), cell(1.2, "GRU", H=70, B=9), cell(3, task="predict", control=0.5)]
    picture.draw(cells, tmp_path / "grid.png")
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")
    assert "LSTM, training: median 0.50, largest 0.50; GRU, training: median 1.20" in (
        picture.alt_text(cells)
    )
    assert picture.sentence(cells) == (
        "Of 3 measurements, 1 are ahead of torch; 1 take more than 1.1 of its time: GRU training "
        "of F=3, H=70, B=9, S=5 (1.20)."
    )
    assert picture.sentence(cells[:1]).startswith("Of 1 measurements, 1 are ahead of torch; none")
