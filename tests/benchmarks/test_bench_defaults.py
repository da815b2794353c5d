"""Real data as the benchmark of the defaults reads them, its contenders, its table and its picture."""

import json
import sys

import numpy as np
import pytest


@pytest.fixture
def real_data(module):
    return module("real_data")


@pytest.fixture
def contenders(module):
    return module("default_contenders")


@pytest.fixture
def bench(module):
    return module("bench_defaults")


@pytest.fixture
def picture(load_script):
    pytest.importorskip("matplotlib")
    return load_script("docs/defaults.py")


@pytest.fixture
def folder(tmp_path):
    """Some of the data sets, in files of a few lines."""
    for name in ("ucr", "cmapss", "occupancy", "nab"):
        (tmp_path / name).mkdir()
    head = "#made up: of numbers\n@problemName Small\n@classLabel true up down\n@data\n"
    train = "1,2,3:10,20,30:up\n4,5:40,50:down\n6,7,8:60,70,80:up\n"
    test = "1,2,3,4:10,20,30,40:down\n5:50:up\n\n"
    for name in ("GunPoint", "JapaneseVowels"):
        (tmp_path / "ucr" / f"{name}_TRAIN.ts").write_text(head + train)
        (tmp_path / "ucr" / f"{name}_TEST.ts").write_text(head + test)
    rows = [
        [unit, cycle, *range(100 * unit + cycle, 100 * unit + cycle + 24)]
        for unit, n_cycles in ((1, 130), (2, 3))
        for cycle in range(1, n_cycles + 1)
    ]
    text = "\n".join(" ".join(map(str, row)) + "  " for row in rows)
    for part in ("train", "test"):
        (tmp_path / "cmapss" / f"{part}_FD001.txt").write_text(text)
    (tmp_path / "cmapss" / "RUL_FD001.txt").write_text("7 \n140 \n")
    rooms = '"date","Temperature","Humidity","Light","CO2","HumidityRatio","Occupancy"\n'
    rooms += '"1","2015-02-04 17:51:00",23,27,426,721,0.5,1\n"2","2015-02-04 17:52:00",22,26,0,700,0.25,0\n'
    for name in ("datatest", "datatest2"):
        (tmp_path / "occupancy" / f"{name}.txt").write_text(rooms)
    first, *minutes = rooms.splitlines()
    training = "\n".join([first, *minutes * 5])
    (tmp_path / "occupancy" / "datatraining.txt").write_text(training)
    values = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    lines = "\n".join(f"2014-07-01 00:0{i}:00,{v}" for i, v in enumerate(values))
    (tmp_path / "nab" / "nyc_taxi.csv").write_text(f"timestamp,value\n{lines}\n")
    (tmp_path / "M4-Hourly-train.csv").write_text(
        '"V1","V2","V3","V4"\n"H1","1","2","3"\n"H2","9","9","9"\n"H3","9","9",""\n"H4","9","9",""\n"H5","4","8",""\n'
    )
    (tmp_path / "M4-Hourly-test.csv").write_text(
        '"V1","V2","V3"\n"H1","4","5"\n"H2","9","9"\n"H3","9","9"\n"H4","9","9"\n"H5","12","6"\n'
    )
    pages = [f"{page},2015-07-{day:02d},{day}" for page in '"a' for day in range(1, 12)]
    (tmp_path / "wikipedia_traffic_daily.csv").write_text(
        "Page,date,value\n" + "\n".join(pages).replace('"', "b") + "\n"
    )
    sensors = [f"PT08.S{i}({gas})" for i, gas in enumerate(("CO", "NMHC", "NOx", "NO2", "O3"), 1)]
    names = ["Date", "CO(GT)", *sensors, "T", "RH", "AH"]
    hours = [";".join(["10/03/2004", f"{t},5", *[str(t)] * 8]) for t in range(10)]
    hours[4] = hours[4].replace(";4;", ";-200;", 1)
    hours[9] = hours[9].replace("9,5", "-200")
    (tmp_path / "air_quality.csv").write_text("\n".join([";".join(names), *hours, ";" * 9]) + "\n")
    names = "hr,weekday,holiday,workingday,weathersit,temp,hum,windspeed,cnt"
    hours = [f"{t % 24},{t // 24},0,1,2,.1,.2,.3,{t}" for t in range(30)]
    (tmp_path / "bike_hour.csv").write_text("\n".join([names, *hours]) + "\n")
    return tmp_path


# -- data --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["GunPoint", "JapaneseVowels"])
def test_series_of_unequal_lengths_and_their_labels(real_data, folder, name):
    data = real_data.load(name, folder)
    assert data.x_train.tolist() == [
        [[1, 2, 3], [4, 5, 0], [6, 7, 8]],
        [[10, 20, 30], [40, 50, 0], [60, 70, 80]],
    ]
    assert data.y_train.tolist() == ["up", "down", "up"]
    assert data.train_lengths.tolist() == [3, 2, 3]
    assert data.x_test.shape == (2, 2, 4)
    assert data.test_lengths.tolist() == [4, 1]
    assert data.per_series
    assert data.is_classification
    assert data.score(np.array(["down", "down"])) == 0.5


def test_what_goes_with_the_inputs_of_the_same_step(real_data, folder):
    data = real_data.load("air_quality", folder)
    assert data.x_train[0, 0].tolist() == [0, 1, 2, 3, 3, 5, 6]  # the last value of a sensor
    assert data.x_test[7, 0].tolist() == list(range(10))
    np.testing.assert_array_equal(data.y_test[0, 0], [np.nan] * 7 + [7.5, 8.5, np.nan])
    assert data.y_train[0, 0].tolist() == [t + 0.5 for t in range(7)]
    assert data.score(np.full((1, 1, 10), 7.5)) == pytest.approx(np.sqrt(0.5))
    data = real_data.load("bikes", folder)
    assert data.x_train.shape == (12, 1, 21)
    assert data.x_test[0, 0, [0, 6, 24]] == pytest.approx([0, 1, 0], abs=1e-6)
    assert data.y_test[0, 0, 29] == pytest.approx(np.log(30))


def test_life_of_engines_is_capped_and_judged_at_the_last_cycle(real_data, folder):
    data = real_data.load("cmapss", folder)
    assert data.x_train.shape == (24, 2, 130)
    assert data.x_train[[0, 23], 1, 2].tolist() == [203, 226]
    assert data.x_train[:, 1, 3:].max() == 0  # behind the end
    life = data.y_train[0]
    assert life[0, [0, 3, 4, 5, 129]].tolist() == [125, 125, 125, 124, 0]
    np.testing.assert_array_equal(life[1, :4], [2, 1, 0, np.nan])
    assert np.argwhere(np.isfinite(data.y_test[0])).tolist() == [[0, 129], [1, 2]]
    predicted = np.zeros_like(data.y_test)
    assert data.score(predicted) == pytest.approx(np.sqrt((7**2 + 125**2) / 2))


def test_columns_of_the_room(real_data, folder):
    data = real_data.load("occupancy2", folder)
    assert data.x_test[:, 0, 0].tolist() == [23, 27, 426, 721, 0.5]
    assert data.y_test.tolist() == [[[1, 0]]]
    assert data.score(data.y_test) == 1
    assert data.score(np.ones_like(data.y_test)) == pytest.approx(1 / 3)  # mean of 2/3 and 0


@pytest.mark.slow
def test_a_forecast_is_trained_before_and_judged_behind_the_cut(real_data, folder):
    data = real_data.load("nab_taxi", folder)
    assert data.x_train.tolist() == [[[3, 1, 4, 1, 5, 9]]]
    np.testing.assert_array_equal(data.y_train, [[[1, 4, 1, 5, 9, np.nan]]])
    assert data.x_test.shape == (1, 1, 10)
    np.testing.assert_array_equal(data.y_test, [[[*[np.nan] * 5, 2, 6, 5, 3, np.nan]]])
    assert data.score(data.x_test) == pytest.approx(1)  # as now
    assert data.score(data.y_test) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "hours"), [("etth1_6", 6), ("etth1_24", 24)])
def test_months_of_the_transformer(real_data, tmp_path, name, hours):
    n_hours = 20 * 720 + 50
    names = "date,HUFL,HULL,MUFL,MULL,LUFL,LULL,OT"
    rows = (f"2016,{t},0,0,0,0,0,{-t}" for t in range(n_hours))
    (tmp_path / "ETTh1.csv").write_text("\n".join([names, *rows]) + "\n")
    data = real_data.load(name, tmp_path)
    assert data.x_train.shape == (7, 1, 12 * 720)
    assert data.x_test.shape == (7, 1, 20 * 720)
    y, y_test = data.y_train[0, 0], data.y_test[0, 0]
    np.testing.assert_array_equal(y[:-hours], -np.arange(hours, 12 * 720))
    assert np.isnan(y[-hours:]).all()
    judged = np.flatnonzero(np.isfinite(y_test))
    np.testing.assert_array_equal(judged + hours, np.arange(16 * 720, 20 * 720))
    np.testing.assert_array_equal(y_test[judged], -(judged + hours))
    assert data.score(data.x_test[-1:]) == pytest.approx(hours)


def test_m4_series_have_scales_and_ends_of_their_own(real_data, folder):
    data = real_data.load("m4", folder)
    np.testing.assert_allclose(data.x_test[0], [[0.5, 1, 1.5, 2, 2.5], [2 / 3, 4 / 3, 2, 1, 0]])
    assert data.train_lengths.tolist() == [3, 2]
    assert data.test_lengths.tolist() == [5, 4]
    np.testing.assert_allclose(data.x_train[0], [[0.5, 1, 1.5], [2 / 3, 4 / 3, 0]])
    nan = np.nan
    np.testing.assert_allclose(data.y_train[0], [[1, 1.5, nan], [4 / 3, nan, nan]])
    np.testing.assert_allclose(data.y_test[0], [[nan, nan, 2, 2.5, nan], [nan, 2, 1, nan, nan]])


def test_pages_are_series(real_data, folder):
    data = real_data.load("wikipedia", folder)
    assert data.x_test.shape == (1, 2, 11)
    assert data.x_train.shape == (1, 2, 9)
    np.testing.assert_allclose(data.x_test[0, 1], np.log1p(np.arange(1, 12)), rtol=1e-6)


def test_characters_come_after_each_other(real_data, tmp_path):
    text = "abcd efgh " * 36 + "abcd efgh abcd efg" + "h abcd Zfgh abcd efghi"
    (tmp_path / "republic.txt").write_text(text)
    data = real_data.load("republic", tmp_path)
    assert data.x_train.shape == data.y_train.shape == (1, 32, 11)
    assert data.x_train.dtype.kind == "i"
    np.testing.assert_array_equal(data.x_train.reshape(-1)[1:], data.y_train.reshape(-1)[:-1])
    alphabet = sorted("abcdefgh ")
    known = "".join(alphabet[i] for i in data.x_test[0, 0])
    assert known == "abcd  fgh abcd efgh"  # what was never seen is a blank
    assert data.y_test[0, 0, -2:].tolist() == [alphabet.index("h"), alphabet.index(" ")]
    uniform = np.full((9, *data.y_test.shape[1:]), 1 / 9)
    assert data.score(uniform) == pytest.approx(np.log2(9))


def test_a_set_that_is_not_there_is_named(real_data, folder):
    with pytest.raises(ValueError, match="GunPoints"):
        real_data.load("GunPoints", folder)
    with pytest.raises(FileNotFoundError):
        real_data.load("ArrowHead", folder)


# -- contenders --------------------------------------------------------------------------------------


def test_lags_and_rolling_statistics_are_those_of_each_place_alone(contenders):
    x = (np.random.default_rng(0).normal(size=(2, 3, 11)) + 50).astype("float32")
    at = np.array([0, 2, 1, 1]), np.array([0, 1, 3, 10])
    lags, statistics = contenders.recent(x, 3, at), contenders.rolling(x, (4, 2), at)
    for row, (n, t) in enumerate(zip(*at, strict=True)):
        expected = [x[f, n, max(t - k, 0)] for f in range(2) for k in range(3)]
        np.testing.assert_array_equal(lags[row], expected)
        found = statistics[row].reshape(2, 3, 2)  # spans, statistics, features
        for span, of_span in zip((4, 2), found, strict=True):
            for f in range(2):
                piece = x[f, n, max(0, t - span + 1) : t + 1].astype(float)
                slope = np.polyfit(np.arange(len(piece)), piece, 1)[0] if len(piece) > 1 else 0
                expected = [piece.mean(), piece.std(), slope]
                np.testing.assert_allclose(of_span[:, f], expected, atol=1e-6)
    constant = contenders.rolling(
        np.full((1, 1, 50), np.float32(518.67)), (7,), ([0] * 50, range(50))
    )
    assert len(np.unique(constant, axis=0)) == 1


def test_windows_of_the_plain_loop_hold_each_target_once(contenders, real_data, folder):
    data = real_data.load("cmapss", folder)
    found = contenders.windows(data, data.y_train[0])
    assert found.x.shape == (100, 3, 24)  # engine 0 in two, engine 1 in one; its second has none
    assert int(found.live.sum()) == 133
    assert float(found.y[found.live].sum()) == pytest.approx(np.nansum(data.y_train))
    assert found.x[:3, 2, 0].tolist() == [201, 202, 203]
    series = contenders.windows(real_data.load("GunPoint", folder), np.array([0, 1, 0]))
    assert series.live.T.tolist() == [[0, 0, 1], [0, 1, 0], [0, 0, 1]]
    assert series.y[series.live].tolist() == [1, 0, 0]  # in the order of time


@pytest.mark.parametrize("name", ["linear", "boosting", "lstm"])
@pytest.mark.parametrize("data_name", ["GunPoint", "occupancy1", "nab_taxi"])
def test_contenders_predict_what_is_judged(
    contenders, real_data, folder, monkeypatch, name, data_name
):
    monkeypatch.setattr(contenders, "UPDATES", 2)
    data = real_data.load(data_name, folder)
    outcome = contenders.CONTENDERS[name].run(data, 0)
    assert np.isfinite(outcome.score)
    assert outcome.fit_seconds > 0


def test_who_cannot_take_part_says_why(contenders, real_data, folder):
    data = real_data.load("nab_taxi", folder)
    assert "numbers of steps" in contenders.CONTENDERS["minirocket"].why_not(data)
    absent = contenders.Contender("x", None, contenders.ALL, package="no_such_package")
    assert "no_such_package" in absent.why_not(data)
    assert contenders.CONTENDERS["ours"].why_not(data) == ""


# -- results -----------------------------------------------------------------------------------------


@pytest.fixture
def found():
    """Two contenders, a set of either kind."""

    def entry(metric, larger, **scores):
        return {
            "metric": metric,
            "larger_is_better": larger,
            "kind": "",
            "found": {
                name.replace("_", "."): {"score": score, "seconds": 2.0}
                for name, score in scores.items()
            },
        }

    machine = {
        "processor": "P",
        "cores": "2",
        "threads": "1",
        "torch": "2.10",
        "scikit-learn": "1.9",
    }
    names = {"linear": "ridge", "0.2.0": "old", "ours": "our own"}
    return {
        "contenders": {k: {"title": title, "machine": machine} for k, title in names.items()},
        "sets": {
            "GunPoint": entry("accuracy", True, ours=1.0, linear=0.9),
            "cmapss": entry("RMSE", False, ours=12.0, linear=16.0, **{"0_2_0": 80.0}),
        },
    }


def test_table_from_the_file(bench, found):
    scores, seconds = bench.tables(found)
    assert scores.columns[2:] == ["ridge", "old", "our own"]
    assert [row[2:] for row in scores.rows] == [
        ["0.900", "", "**1.000**"],
        ["16.000", "80.000", "**12.000**"],
    ]
    assert seconds.rows == [["GunPoint", "2", "", "2"], ["cmapss", "2", "2", "2"]]
    page = bench.document(found)
    assert "| our own | P, 1 of 2 cores | torch 2.10, scikit-learn 1.9 |" in page


@pytest.mark.slow
def test_runs_merge_into_the_file(bench, folder, monkeypatch, tmp_path, capsys):
    measured, results = tmp_path / "found.json", tmp_path / "page.md"

    def run(*arguments):
        where = ["--data", str(folder), "--measured", str(measured), "--results", str(results)]
        monkeypatch.setattr(sys, "argv", ["bench_defaults.py", *where, *arguments])
        bench.main()
        return json.loads(measured.read_text())

    run("--contenders", "linear", "--sets", "nab_taxi", "ArrowHead")
    assert "left out: ArrowHead" in capsys.readouterr().out
    again = run("--contenders", "boosting", "linear", "--sets", "GunPoint", "--seeds", "2")
    assert list(again["sets"]) == ["GunPoint", "nab_taxi"]  # in the order of the program
    assert list(again["sets"]["GunPoint"]["found"]) == ["linear", "boosting"]
    assert list(again["sets"]["nab_taxi"]["found"]) == ["linear"]
    assert len(again["sets"]["GunPoint"]["found"]["boosting"]["scores"]) == 2
    assert len(again["sets"]["GunPoint"]["found"]["linear"]["scores"]) == 1  # no seed matters
    before = results.read_text()
    results.unlink()
    run("--contenders")
    assert results.read_text() == before


@pytest.mark.slow
def test_picture_and_its_text(picture, found, tmp_path):
    picture.draw(found, tmp_path / "defaults.png")
    assert (tmp_path / "defaults.png").read_bytes().startswith(b"\x89PNG")
    assert picture.ratios(found["sets"]["cmapss"]) == {"ours": 0.75, "linear": 1, "0.2.0": 5}
    assert picture.missing(found["sets"]["GunPoint"])["linear"] == pytest.approx(10)
    text = picture.alt_text(found)
    assert "fluxutils_py 100.0 % on average and 0.75 of the linear error" in text
    assert "0.2.0 5.00 of the linear error" in text


def test_every_set_and_contender_is_drawn(picture, real_data, contenders):
    assert set(picture.TITLES) == set(real_data.LOADERS)
    assert set(picture.STYLES) == set(contenders.CONTENDERS)


# -- what is stored ----------------------------------------------------------------------------------


def test_stored_table_and_text_are_those_of_the_file(bench, picture):
    stored = json.loads(bench.MEASURED.read_text("utf-8"))
    assert bench.RESULTS.read_text("utf-8") == bench.document(stored)
    page = (bench.MEASURED.parent / "background" / "benchmarks.md").read_text("utf-8")
    assert picture.alt_text(stored) in " ".join(page.split()), "run python docs/defaults.py"


@pytest.mark.slow
def test_another_file_leaves_the_stored_table_alone(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["b", "--data", "x", "--measured", str(tmp_path / "a.json")])
    assert bench.arguments().results is None
    monkeypatch.setattr(sys, "argv", ["b", "--data", "x"])
    assert bench.arguments().results == bench.RESULTS
