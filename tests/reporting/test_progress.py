"""What people see, and that there is nothing to see where nobody looks."""

import io
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fluxutils_py import Estimator, SequenceRegressor
from fluxutils_py.reporting import ProgressBar
from fluxutils_py.reporting.progress import EpochLog, say_once
from fluxutils_py.terminal import shows_progress
from fluxutils_py.training import Loop, StepInfo


@pytest.mark.parametrize(
    ("verbose", "expected"), [(True, True), (False, False), (0, False), (1, True), (None, False)]
)
def test_verbose_is_its_truth(verbose, expected):
    assert shows_progress(verbose) is expected


@pytest.mark.parametrize("verbose", ["yes", "", "Auto"])
def test_other_strings_are_refused(verbose):
    with pytest.raises(ValueError, match=f"verbose .*'auto', True .* got {verbose!r}"):
        shows_progress(verbose)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_auto_means_on_a_terminal_or_in_a_notebook(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert shows_progress("auto") is True
    for nowhere in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", nowhere)
        assert shows_progress("auto") is False
    for shell, expected in (
        (None, False),
        (SimpleNamespace(), False),
        (SimpleNamespace(kernel=1), True),
    ):
        monkeypatch.setitem(
            sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell)
        )
        assert shows_progress("auto") is expected
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    assert shows_progress("auto") is False


def run(batches, epochs, *hooks):
    loop = Loop(lambda loss: StepInfo(loss))
    for hook in (ProgressBar(), *hooks):
        loop.hooks.attach(hook)
    loop.run_epochs(batches, epochs)


def last_line(text):
    return text.replace("\r", "\n").strip().splitlines()[-1]


def test_the_bar_shows_steps_epoch_and_losses(capsys):
    def judge(loop):
        loop.record.update(validation_loss=0.123456, lr=7.0, test_loss=None)

    run([0.5, 1.5, 2.5], 2, SimpleNamespace(on_epoch=judge))
    out, err = capsys.readouterr()
    assert out == ""
    line = last_line(err)
    assert "6/6" in line
    assert "100%" in line
    assert "epoch=2, loss=1.5, mean_batch_loss=1.5, validation_loss=0.1235" in line
    assert "lr" not in line
    assert "test_loss" not in line
    assert err.endswith("\n")  # whatever is printed next begins on a line of its own


def test_the_bar_shows_the_loss_of_a_step_while_an_epoch_runs(capsys):
    bar = ProgressBar()
    loop = Loop(lambda loss: StepInfo(loss))
    loop.hooks.attach(bar)
    seen = []

    def look(loop):
        bar._bar.mininterval = 0  # drawn at every step
        bar._bar.miniters = 0
        seen.append(last_line(capsys.readouterr().err))

    loop.on_step("look", look, priority=101)
    loop.run_epochs([0.25, None, 1 / 3], 1)
    assert "2/3" in seen[1]
    assert "epoch 1" in seen[1]
    assert "loss" not in seen[1]  # that step had none
    assert "epoch 1, batch_loss 0.3333" in seen[2]


METRICS = {"batch_loss": 0.123456, "accuracy": 1 / 3, "table": {"no": "number"}, "none": None}


def test_metrics_of_steps_are_shown_in_place_of_their_loss(capsys):
    loop = Loop(lambda loss: StepInfo(loss, 1, METRICS))
    loop.hooks.attach(ProgressBar())
    loop.run_epochs([0.5, 1.5], 2)
    line = last_line(capsys.readouterr().err)
    assert "epoch=2, loss=1, mean_batch_loss=1, batch_loss=0.1235, accuracy=0.3333" in line
    assert "table" not in line
    assert "none" not in line


def test_the_bar_of_a_run_of_steps_ends_with_its_last_metrics(capsys):
    loop, batches = (
        Loop(lambda metrics: StepInfo(0.75, 1, metrics)),
        [{}, {"ema": 5.0}, METRICS, {}, {"nan": math.nan}],
    )
    loop.hooks.attach(ProgressBar())
    for n, end in (
        (3, "batch_loss 0.1235, accuracy 0.3333"),
        (1, "batch_loss 0.75"),
        (1, "nan nan"),
    ):
        loop.run_steps(batches, n)
        line = last_line(capsys.readouterr().err)
        assert f"{n}/{n}" in line
        assert line.endswith(f", {end}]")
        assert "epoch" not in line


def test_the_bar_of_a_run_that_finishes_an_epoch_counts_its_own_steps(capsys):
    loop, batches = Loop(StepInfo), [1.0, 2.0, 3.0]
    loop.run_steps(batches, 2)
    loop.hooks.attach(ProgressBar())
    loop.run_epochs(batches, 2)
    assert "4/4" in last_line(capsys.readouterr().err)


def test_the_bar_of_a_run_that_goes_on_begins_where_it_was_interrupted(capsys):
    states, batches = [], [1.0, 2.0, 3.0]
    loop = Loop(StepInfo)
    loop.on_step("save", lambda loop: states.append(loop.state_dict()))
    loop.run_epochs(batches, 2)
    rest = Loop(StepInfo)
    rest.hooks.attach(ProgressBar())
    rest.load_state_dict(states[3])
    rest.run_epochs(batches, 2)
    shown = capsys.readouterr().err
    assert "4/6" in shown
    assert "3/6" not in shown
    assert "6/6" in last_line(shown)


def test_a_bar_of_unknown_length_counts_on(capsys):
    run(iter([1.0, 1.0]), 1)
    line = last_line(capsys.readouterr().err)
    assert line.startswith("2step")
    assert "%" not in line


def test_the_bar_is_closed_after_an_error(capsys):
    def step(loss):
        if loss is None:
            raise RuntimeError("no loss")
        return StepInfo(loss)

    bar, loop = ProgressBar(), Loop(step)
    loop.hooks.attach(bar)
    with pytest.raises(RuntimeError, match="no loss"):
        loop.run_epochs([1.0, None], 1)
    assert bar._bar.disable  # as tqdm leaves it
    assert capsys.readouterr().err.endswith("\n")
    ProgressBar().on_close(loop)  # never started: nothing to close


@pytest.fixture
def data(rng):
    x = rng.normal(size=(2, 5, 8)).astype("f4")
    return x, x[:1]


SPEC = {"epochs": 3, "batchsize": 2, "seqsize": 4, "rebatch": False}


def test_a_verbose_fit_shows_a_bar_on_stderr(capsys, data, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    est = Estimator(spec=SPEC, verbose=True, random_state=0).fit(*data, validation_data=data)
    out, err = capsys.readouterr()
    assert out == ""
    line = last_line(err)
    assert "18/18" in line  # 3 groups of 2 windows, 3 epochs
    assert f"epoch=3, loss={est.loss_curve_[-1]:.4g}" in line
    assert f"validation_loss={est.validation_loss_curve_[-1]:.4g}" in line


@pytest.mark.parametrize("verbose", [False, 0, None, "auto"])
def test_other_fits_are_silent(capfd, data, verbose):
    est = Estimator(spec=SPEC, verbose=verbose, random_state=0).fit(*data)
    est.predict(data[0])
    assert capfd.readouterr() == ("", "")


def test_a_line_is_shown_once_by_every_way_to_show_progress(capfd, caplog):
    say_once(EpochLog(), "so it is")
    assert capfd.readouterr() == ("", "so it is\n")  # nothing else shows the log
    for progress in (EpochLog(insist=True), ProgressBar()):
        say_once(progress, "so it is")
    assert capfd.readouterr() == ("", "")
    say_once(ProgressBar(), "above the bar")
    assert capfd.readouterr() == ("", "above the bar\n")
    with caplog.at_level("INFO", "fluxutils_py"):
        say_once(EpochLog(), "in the log")
    assert caplog.messages == ["in the log"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_watching_changes_nothing(capsys, data):
    shown, silent = (
        Estimator(spec=SPEC, verbose=v, random_state=0).fit(*data) for v in (True, False)
    )
    assert shown.loss_curve_ == silent.loss_curve_
    assert np.array_equal(shown.predict(data[0]), silent.predict(data[0]))


@pytest.mark.slow
def test_stages_without_epochs_are_said_before_they_begin(capsys, rng):
    x = rng.normal(size=(1, 3, 40))
    settings = {"max_updates": 50, "random_state": 0}
    for cell, words in (("linear+lstm", "linear model"), ("linear", "closed form")):
        SequenceRegressor(cell=cell, verbose=True, **settings).fit(x, x)
        assert words in capsys.readouterr().err.splitlines()[0]
        SequenceRegressor(cell=cell, **settings).fit(x, x)
        assert capsys.readouterr().err == ""
