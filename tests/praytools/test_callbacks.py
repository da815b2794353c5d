"""Functions of other shapes as callbacks, on one rank and several."""

from types import SimpleNamespace

import pytest

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


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_ranks_only_rank_0_writes_and_prints_what_all_record(tmp_path, rank, capsys):
    cby, history = adapters.initevalcby(steps=1, resultdir=tmp_path / "out")
    hook = adapters.cby(cby)
    hook.on_step(SimpleNamespace(rank=rank, batch_loss=2.0))
    assert [record["loss"] for record in history] == [2.0]
    assert (tmp_path / "out").exists() == (rank == 0)
    assert bool(capsys.readouterr().out) == (rank == 0)
