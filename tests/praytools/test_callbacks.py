"""Functions of other shapes as callbacks, and the history as a table."""

import sys
from types import SimpleNamespace

import pytest

from fluxutils_py.gomlx.loop_callbacks import NTimesDuringLoop, OnStart, PeriodicCallback
from fluxutils_py.praytools import callbacks as adapters
from fluxutils_py.praytools import cb, cby
from fluxutils_py.training import Loop, StepInfo, StopTraining, history_table


def run(*callbacks, losses=(3.0, None, 1.0)):
    loop = Loop(StepInfo)
    for callback in callbacks:
        loop.hooks.attach(callback)
    loop.run_epochs(losses, 2)
    return loop


def test_functions_without_arguments_and_of_the_loss_are_called_after_every_step():
    calls, losses = [], []
    run(cb(lambda: calls.append(1)), cby(losses.append))
    assert len(calls) == 6
    assert losses == [3.0, 1.0] * 2  # a step without a loss has none to give


def test_they_may_stop_training():
    def stop(*args):
        raise StopTraining

    assert run(cb(stop)).step == 1
    assert run(cby(stop), losses=(None, 2.0, 3.0)).step == 2


def test_an_error_names_the_function():
    def explode():
        raise KeyError("boom")

    with pytest.raises(KeyError) as caught:
        run(cb(explode))
    assert caught.value.__notes__ == ["raised by the on_step hook 'explode'"]


HISTORY = [{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": 0.25, "lr": 0.1}]


def test_the_history_is_a_table_with_a_row_for_each_epoch():
    pytest.importorskip("pandas")
    table = history_table(HISTORY)
    assert list(table.columns) == ["epoch", "loss", "lr"]
    assert table["loss"].tolist() == [0.5, 0.25]
    assert table["lr"].isna().tolist() == [True, False]
    assert len(history_table([])) == 0


def test_without_pandas_the_history_is_columns(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert history_table(HISTORY) == {"epoch": [1, 2], "loss": [0.5, 0.25], "lr": [None, 0.1]}
    assert history_table(run().history)["epoch"] == [1, 2]


# -- gomlx ---------------------------------------------------------------------------------------------


def number(batch):
    return StepInfo(float(batch), metrics={"number": batch})


def test_start_hooks_of_gomlx_get_the_dataset_of_each_run():
    loop, found = Loop(number), []
    OnStart(loop, "note", 0, lambda loop, dataset: found.append(dataset))
    first, second = [1, 2], [3, 4, 5]
    loop.run_epochs(first, 1)
    loop.run_steps(second, 2)
    loop.run_to_step(second, 5)
    assert [id(d) for d in found] == [id(first), id(second), id(second)]


def test_ntimes_counts_from_0_up_to_the_last_step_as_steps_do():
    loop, seen = Loop(number), []
    NTimesDuringLoop(
        loop, 4, "note", 0, lambda loop, metrics: seen.append((loop.loop_step, metrics["number"]))
    )
    loop.run_epochs([10, 11, 12, 13, 14, 15, 16], 1)
    assert seen[-1] == (6, 16)
    assert len(seen) == 4
    seen.clear()
    loop.run_steps(range(100, 200), 3)
    assert [step for step, _ in seen] == [7, 8, 9]


def test_periodic_callbacks_act_once_at_the_end_of_each_run():
    loop, seen = Loop(number), []
    PeriodicCallback(
        loop, 60.0, True, "note", 0, lambda loop, metrics: seen.append(loop.step), clock=lambda: 0.0
    )
    loop.run_steps(range(5), 5)
    assert seen == [5]


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_ranks_only_rank_0_writes_and_prints_what_all_record(tmp_path, rank):
    lines = []
    cby, history = adapters.initevalcby(
        steps=1, resultdir=tmp_path / "out", printer=lines.append, clock=lambda: 0.0
    )
    hook = adapters.cby(cby)
    hook.on_step(SimpleNamespace(rank=rank, batch_loss=2.0))
    assert [record["loss"] for record in history] == [2.0]
    assert (tmp_path / "out").exists() == (rank == 0)
    assert len(lines) == (rank == 0)
