"""A folder of checkpoints: what a killed save left there, and a second run that saves there too."""

import os
import re
import subprocess
import textwrap

import pytest
import torch
from torch import nn

from fluxutils_py.files import atomic_write
from fluxutils_py.training import Checkpointer, Loop, StepInfo


def names(folder):
    return sorted(os.listdir(folder))


def test_what_a_killed_save_left_is_not_listed_and_is_cleared_away(tmp_path):
    checkpoints = Checkpointer(tmp_path)
    checkpoints.write({"i": 1}, 1)
    for ending in ("pt", "json"):
        child = os.fork()
        if child == 0:
            with atomic_write(tmp_path / f"checkpoint-n0000002-step-00000009.{ending}") as f:
                f.write(b"half")
                os._exit(0)
        os.waitpid(child, 0)
    assert len(names(tmp_path)) == 4
    assert checkpoints.read() == {"i": 1}
    assert len(checkpoints.paths()) == 1
    checkpoints.write({"i": 2}, 2)
    assert names(tmp_path) == [
        f"checkpoint-n0000002-step-00000002.{kind}" for kind in ("json", "pt")
    ]


def test_a_second_run_in_the_folder_is_refused_and_both_can_go_on(tmp_path):
    model = nn.Linear(1, 1)
    first, second = (Checkpointer(tmp_path, keep=-1).track(model=model) for _ in range(2))
    # starts anew, and so does the first, which neither restores nor knows of others
    assert not second.restore()
    for _ in range(2):
        first.save(Loop(StepInfo))
    files = names(tmp_path)
    with pytest.raises(
        FileExistsError,
        match=rf"^{tmp_path}/checkpoint-n0000002-step-00000000\.pt .*another run .*number 0",
    ):
        second.save(Loop(StepInfo))
    assert names(tmp_path) == files
    assert second.restore()
    assert second.save(Loop(StepInfo)).name.startswith("checkpoint-n0000003-")
    (tmp_path / "checkpoint-n0000003-step-00000000.json").unlink()
    with pytest.raises(
        FileExistsError,
        match=r"checkpoint-n0000003-\S+ .*number 2\.",
    ):
        first.save(Loop(StepInfo))
    second.latest().unlink()  # as a damaged one
    second.save(Loop(StepInfo))
    second.save(Loop(StepInfo))


@pytest.mark.slow
def test_of_two_processes_that_fit_into_one_folder_one_ends_as_if_alone(tmp_path, python):
    """Such as ranks of a job that was restarted, whose launcher alone was killed."""
    program = textwrap.dedent("""
        import sys
        import numpy as np, torch
        from fluxutils_py import Estimator
        from fluxutils_py.training import Checkpointer, EveryNSteps

        folder, answer = sys.argv[1:]
        x = np.random.default_rng(0).normal(size=(2, 3, 40)).astype("float32")
        checkpoints = Checkpointer(folder, trigger=EveryNSteps(3))
        est = Estimator(spec={"epochs": 9, "seqsize": 10}, random_state=0, callbacks=[checkpoints]).fit(x, x[:1])
        torch.save(est.model_.state_dict(), answer)
    """)

    def start(folder, answer):
        command = [python, "-c", program, tmp_path / folder, tmp_path / answer]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    both = [start("both", name) for name in ("a.pt", "b.pt")]
    alone = start("alone", "alone.pt")
    said = [p.communicate(timeout=300)[1] for p in (*both, alone)]
    failed = [text for p, text in zip((*both, alone), said, strict=True) if p.returncode]
    told = re.compile("FileExistsError: .*another run that saves to this|FileNotFoundError: .*both")
    assert [text for text in failed if not told.search(text)] == []
    expected = torch.load(tmp_path / "alone.pt")
    # neither knew of the other before both had saved: started again, it goes on
    if len(failed) == 2:
        start("both", "a.pt").communicate(timeout=300)
    ended = [torch.load(tmp_path / name) for name in ("a.pt", "b.pt") if (tmp_path / name).exists()]
    assert ended
    assert all(
        torch.equal(expected[name], values) for state in ended for name, values in state.items()
    )
