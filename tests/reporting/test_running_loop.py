"""The loop that hooks of reporting expect, against the loop of training."""

from fluxutils_py.reporting.running_loop import RunningLoop
from fluxutils_py.training import Loop, StepInfo


def test_the_loop_has_what_the_hooks_of_reporting_read():
    expected = {*RunningLoop.__annotations__, "batch_loss", "metrics"}
    seen = []
    loop = Loop(lambda batch: StepInfo(batch))
    loop.on_step(
        "look", lambda loop: seen.append({name for name in expected if hasattr(loop, name)})
    )
    loop.run_epochs([1.0], 1)
    assert seen == [expected]
