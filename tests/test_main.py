"""The demonstration, ``python -m fluxutils_py``."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure

from fluxutils_py.__main__ import RESET, STATEFUL, draw, main, prepare, read_csv


@pytest.fixture
def csv_file(tmp_path):
    """Writes lines of text to a file and returns its name."""

    def write(*lines):
        path = tmp_path / "file.csv"
        path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
        return str(path)

    return write


def shown_table(text):
    """Names and errors in the printed table."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return {name.strip(): float(mse) for name, mse in rows[1:]}


@pytest.mark.slow
def test_stateful_model_is_best_on_made_data(tmp_path, capsys):
    picture = tmp_path / "picture.png"
    assert main(["--steps", "4000", "--epochs", "25", "--out", str(picture)]) == 0
    text = capsys.readouterr().out
    found = shown_table(text)
    assert list(found) == [
        "stateful LSTM",
        "same LSTM, reset every 16 steps",
        "naive: the last value",
    ]
    assert found["stateful LSTM"] < 0.8 * found["same LSTM, reset every 16 steps"]
    assert found["same LSTM, reset every 16 steps"] < found["naive: the last value"]
    content = picture.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(content) > 20_000
    assert f"Picture: {picture}" in text


@pytest.mark.slow
def test_csv_file_is_forecast_and_scored_on_its_last_fifth(tmp_path, capsys, csv_file):
    rng = np.random.default_rng(0)
    z = np.round(np.stack([np.sin(np.arange(403) / 3), rng.normal(size=403).cumsum()], 1), 6)
    lines = [f"2020-01-01 {i},{a},some text,{b}" for i, (a, b) in enumerate(z)]
    data = csv_file("date,wave,note,walk", *lines)
    assert main(["--data", data, "--epochs", "2", "--out", str(tmp_path / "p.png")]) == 0
    text = capsys.readouterr().out
    # the 81 rows from 322 on
    assert "next step, 2 columns, 81 times" in text
    z = (z - z[:241].mean(0)) / z[:241].std(0)
    naive = np.mean([(z[t + 1] - z[t]) ** 2 for t in range(321, 402)])
    assert shown_table(text)["naive: the last value"] == pytest.approx(naive, abs=1e-4)


@pytest.mark.slow
def test_same_seed_gives_the_same_table(tmp_path, capsys):
    texts = []
    for _ in range(2):
        assert (
            main(
                ["--steps", "500", "--epochs", "2", "--seed", "3", "--out", str(tmp_path / "p.svg")]
            )
            == 0
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_the_picture_shows_the_last_column_in_its_own_units():
    rows = np.arange(300.0)[:, None] ** [1, 2] + [50, 7]  # the liveliest part is the last
    data = prepare(rows, ["a", "b"])
    truth = np.full((2, 300), np.nan)
    truth[:, :-1] = data.values[1:].T
    found = {STATEFUL: truth + 1, RESET: truth + 2}
    figure, est = (
        Figure(),
        SimpleNamespace(n_iter_=2, loss_curve_=[3, 2], validation_loss_curve_=[5, 4]),
    )
    draw(figure, "title", data, est, found)
    left, right = figure.axes
    shown = {line.get_label(): line for line in left.lines}
    scale = rows[:180, 1].std()
    for label, away in {"target": 0, STATEFUL: scale, RESET: 2 * scale}.items():
        assert shown[label].get_xdata().tolist() == list(range(240, 300))
        np.testing.assert_allclose(shown[label].get_ydata(), rows[240:, 1] + away, rtol=1e-5)
    assert left.get_ylabel() == "b, 1 step ahead"
    assert [line.get_ydata().tolist() for line in right.lines] == [[3, 2], [5, 4]]


def test_without_matplotlib_there_is_a_table_and_a_hint(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what makes "import matplotlib" fail
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["--steps", "500", "--epochs", "1", "--out", str(tmp_path / "p.png")]) == 0
    text = capsys.readouterr().out
    assert len(shown_table(text)) == 3
    assert text.endswith("No picture: matplotlib is not installed; pip install matplotlib\n")
    assert not list(tmp_path.iterdir())


def test_only_numeric_columns_are_read_and_missing_values_filled(csv_file):
    values, names = read_csv(
        csv_file("day,a,word,b,none", "1 May,,x,1.5,", "", "2 May,2,z,NA,", "3 May,3,y,inf,NaN")
    )
    assert names == ["a", "b"]
    np.testing.assert_array_equal(values, [[2, 1.5], [2, 1.5], [3, 1.5]])


def test_columns_of_one_name_are_all_kept(csv_file):
    values, names = read_csv(csv_file("a,a", "1,2", "3,4"))
    assert names == ["a", "a_1"]
    np.testing.assert_array_equal(values, [[1, 2], [3, 4]])


@pytest.mark.slow
def test_constant_column_is_harmless(tmp_path, capsys, csv_file):
    data = csv_file("a,b", *(f"5,{i % 7}" for i in range(170)))
    assert main(["--data", data, "--epochs", "1", "--out", str(tmp_path / "p.png")]) == 0
    assert np.isfinite(list(shown_table(capsys.readouterr().out).values())).all()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a,b", "x,y"], "no column of numbers below a header, with commas between columns"),
        (["a;b", "1;2"], "could not convert string to float: b'1;2'"),
        (
            ["a,b", "1,2", "3"],
            "Some errors were detected !\n    Line #3 (got 1 columns instead of 2)",
        ),
        (["a", *"12345"], "5 rows are too few: give at least 170"),
    ],
)
def test_bad_csv_file_is_said_in_one_sentence(lines, message, capsys, csv_file):
    path = csv_file(*lines)
    assert main(["--data", path]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"fluxutils_py: {message}")


def test_bad_argument_is_said_before_training(tmp_path, capsys):
    image = tmp_path / "p.csv"
    image.write_bytes(b"\x89PNG\xff")
    for arguments, message in {
        ("--steps", "100"): "100 rows are too few: give at least 170",
        ("--out", "nowhere/p.png"): "nowhere/p.png",
        ("--out", "picture.nothing"): "Format 'nothing' is not supp",
        ("--data", str(image)): "'utf-8' codec",
    }.items():
        assert main(arguments) == 1
        assert message in capsys.readouterr().err
    for name in ("--epochs", "--steps"):
        with pytest.raises(SystemExit, match="2"):
            main([name, "0"])
        assert "must be at least 1" in capsys.readouterr().err


def test_module_runs_as_a_program(python, tmp_path):
    done = subprocess.run(
        [python, "-m", "fluxutils_py", "--data", "missing.csv"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1
    assert "missing.csv not found" in done.stderr
