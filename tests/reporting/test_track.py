"""Runs of trackers: what MLflow, trackio and plain logs hold after a fit."""

import copy
import inspect
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import mlflow
import numpy as np
import pytest
import torch
import trackio
from torch import nn
from trackio.sqlite_storage import SQLiteStorage

import fluxutils_py
from fluxutils_py import Estimator, Spec
from fluxutils_py.nn import LSTM
from fluxutils_py.reporting import TensorBoard, Track
from fluxutils_py.training import Checkpointer, EveryNSteps, StopTraining

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 7, 11)).astype("f4")
Y = X.mean(0, keepdims=True)
STEPS = 9  # of an epoch: 3 groups of at most 3 series, 3 windows of at most 4 steps


def make(*callbacks, epochs=3, **options):
    torch.manual_seed(0)
    spec = Spec(epochs, 3, 4, shuffle=True)
    return Estimator(
        nn.Sequential(LSTM(2, 3), nn.Linear(3, 1)),
        opt=partial(torch.optim.SGD, lr=0.1),
        spec=spec,
        callbacks=list(callbacks),
        random_state=0,
        verbose=False,
        **options,
    )


class MlflowRun:
    """As the documentation of ``Track`` has it."""

    def __init__(self):
        self.config = self

    def update(self, settings):
        mlflow.log_params(settings)

    def log(self, numbers, step):
        mlflow.log_metrics(numbers, step=step)

    def log_artifact(self, path):
        mlflow.log_artifact(path, "model")


def test_the_lines_for_mlflow_are_those_of_the_documentation():
    lines = inspect.getsource(MlflowRun).splitlines()
    lines = [line for line in lines[3:] if line]
    documented = [line.removeprefix("    ") for line in inspect.getdoc(Track).splitlines()]
    assert [line for line in documented if line in lines] == lines


class Log:
    """Anything with ``log``."""

    def __init__(self):
        self.logged = []

    def log(self, values, step):
        self.logged.append((step, values))

    def curve(self, tag):
        return [(step, values[tag]) for step, values in self.logged if tag in values]


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    mlflow.set_tracking_uri(uri)
    yield mlflow.MlflowClient()
    mlflow.end_run()
    mlflow.set_tracking_uri(None)


def metric(client, run, tag):
    history = client.get_metric_history(run.info.run_id, tag)
    return sorted((m.step, m.value) for m in history)


@pytest.mark.slow
def test_mlflow_gets_parameters_curves_and_the_estimator(server, tmp_path):
    run = mlflow.start_run()
    est = make(Track(MlflowRun(), trigger=4)).fit(X, Y, validation_data=(X[:, :3], Y[:, :3]))
    data = server.get_run(run.info.run_id).data
    assert data.params["spec__epochs"] == "3"
    assert data.params["opt__lr"] == "0.1"
    assert "callbacks" not in data.params
    assert metric(server, run, "train/loss") == [
        (STEPS * (k + 1), loss) for k, loss in enumerate(est.loss_curve_)
    ]
    assert [v for _, v in metric(server, run, "validation/loss")] == est.validation_loss_curve_
    assert [s for s, _ in metric(server, run, "train/batch_loss")] == [4, 8, 12, 16, 20, 24]
    path = server.download_artifacts(run.info.run_id, "model/estimator.pt", str(tmp_path))
    np.testing.assert_array_equal(fluxutils_py.load(path).predict(X), est.predict(X))
    # whoever started the run ends it
    assert mlflow.active_run().info.run_id == run.info.run_id


@pytest.mark.slow
def test_every_number_of_tensorboard_is_logged(scalars, tmp_path):
    log = Log()
    make(TensorBoard(tmp_path, trigger=2), Track(log, trigger=2)).fit(X, Y)
    expected = scalars(tmp_path)
    for tag, curve in expected.items():
        found = [(step, float(np.float32(value))) for step, value in log.curve(tag)]
        if tag == "trainer/steps_per_sec":  # by clocks of their own
            assert [step for step, _ in found] == [step for step, _ in curve]
        else:
            assert found == curve, tag
    assert {tag for _, values in log.logged for tag in values} == set(expected)


@pytest.mark.slow
def test_a_run_gets_settings_and_the_file_where_it_takes_them():
    make(Track(Log()), epochs=1).fit(X, Y)
    log = Log()
    log.config = {}
    stored = []
    log.log_artifact = lambda path: stored.append(os.path.getsize(path))
    make(Track(log), epochs=1).fit(X, Y)
    assert log.config["opt__lr"] == 0.1
    assert "callbacks" not in log.config
    assert stored[0] > 0
    make(Track(log, save=False), epochs=1).fit(X, Y)
    assert len(stored) == 1


def stop_at(step, loop):
    if loop.step == step:
        raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("at", [14, 18], ids=["within", "end"])
def test_a_resumed_run_goes_on_at_its_step(at, tmp_path):
    whole = Log()
    make(Track(whole, trigger=1)).fit(X, Y)
    log = Log()
    saves = Checkpointer(tmp_path / "saved", trigger=EveryNSteps(5))
    with pytest.raises(KeyboardInterrupt):
        make(Track(log, trigger=1), saves, partial(stop_at, at)).fit(X, Y)
    make(Track(log, trigger=1), saves, partial(stop_at, 99)).fit(X, Y)
    for tag in ("train/batch_loss", "train/loss"):
        # what was written after the checkpoint is written once more, with the same values
        assert sorted(set(log.curve(tag))) == whole.curve(tag)


@pytest.mark.slow
def test_a_second_fit_in_a_run_follows_the_first():
    log = Log()
    make(Track(log), epochs=1).fit(X, Y)
    assert log.curve("train/loss")[0][0] == STEPS
    log.step = 20  # as runs of W&B have
    make(Track(log), epochs=1).fit(X, Y)
    assert log.curve("train/loss")[1][0] == 20 + STEPS


def fit_in_trackio():
    run = trackio.init("p", "a", embed=False, auto_log_cpu=False, auto_log_gpu=False)
    est = make(Track(run), epochs=2).fit(X, Y)
    run.finish()
    (kept,) = trackio.Api().runs("p")
    assert kept.config["spec__epochs"] == 2
    logs = SQLiteStorage.get_logs("p", "a")
    losses = [(log["step"], log["train/loss"]) for log in logs if "train/loss" in log]
    assert losses == [(STEPS, est.loss_curve_[0]), (2 * STEPS, est.loss_curve_[1])]
    stored = list(Path(os.environ["TRACKIO_DIR"]).rglob("*"))
    found = [path for path in stored if path.is_file() and path.read_bytes()[:2] == b"PK"]
    np.testing.assert_array_equal(fluxutils_py.load(found[0]).predict(X), est.predict(X))


@pytest.mark.slow
def test_a_run_of_trackio_offline(tmp_path):
    # it reads its folder when it is imported
    program = "from tests.reporting.test_track import fit_in_trackio; fit_in_trackio()"
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=300)


def test_only_rank_0_writes():
    log = Log()
    hook = Track(log)
    loop = SimpleNamespace(ranks=SimpleNamespace(rank=1), step=9, record={"loss": 1.0}, history=[])
    for event in (hook.on_start, hook.on_step, hook.on_epoch, hook.on_end, hook.on_close):
        event(loop)
    assert log.logged == []
    Track(None).on_start(loop)
    with pytest.raises(TypeError, match="rank 0"):
        make(Track(None)).fit(X, Y)


def test_copies_write_to_the_same_run():
    log = Log()
    hook = copy.deepcopy(Track(log, trigger=3))
    assert hook.run is log
    assert hook.every == 3


@pytest.mark.slow
def test_a_stopped_fit_is_tracked_to_its_end_and_a_failed_one_has_no_model():
    log = Log()
    stored = []
    log.log_artifact = stored.append

    def stop(loop):
        if loop.step == 5:
            raise StopTraining

    make(Track(log, trigger=1), stop).fit(X, Y)
    assert log.curve("train/batch_loss")[-1][0] == 5
    assert len(stored) == 1

    def fail(loop):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make(Track(log), fail).fit(X, Y)
    assert len(stored) == 1


@pytest.mark.parametrize("run", [3, "run", {}, mlflow], ids=str)
def test_other_things_are_refused(run):
    with pytest.raises(TypeError, match=r"Track .*log\(dict, step=\)"):
        Track(run)
    with pytest.raises(ValueError, match="trigger"):
        Track(Log(), trigger=0)
