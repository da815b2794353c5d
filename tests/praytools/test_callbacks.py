"""Functions of other shapes as callbacks, and the history as a table."""

from types import SimpleNamespace

import pytest

from fluxutils_py.gomlx.loop_callbacks import NTimesDuringLoop, PeriodicCallback
from fluxutils_py.praytools import callbacks as adapters
from fluxutils_py.praytools import cb, cby
from fluxutils_py.training import Loop, StepInfo, StopTraining


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


# -- gomlx ---------------------------------------------------------------------------------------------


def number(batch):
    return StepInfo(float(batch), metrics={"number": batch})


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
def test_of_several_ranks_only_rank_0_writes_and_prints_what_all_record(tmp_path, rank, capsys):
    cby, history = adapters.initevalcby(steps=1, resultdir=tmp_path / "out")
    hook = adapters.cby(cby)
    hook.on_step(SimpleNamespace(rank=rank, batch_loss=2.0))
    assert [record["loss"] for record in history] == [2.0]
    assert (tmp_path / "out").exists() == (rank == 0)
    assert bool(capsys.readouterr().out) == (rank == 0)
