"""A folder of checkpoints: what a killed save left there, and a second run that saves there too."""

import json
import os
import re
import subprocess
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fluxutils_py.training import Checkpointer, Loop, StepInfo, plain_files


def names(folder):
    return sorted(os.listdir(folder))


def test_what_a_killed_save_left_is_not_listed_and_is_cleared_away(tmp_path):
    checkpoints = Checkpointer(tmp_path)
    checkpoints.write({"i": 1}, 1)
    (tmp_path / ".checkpoint-n0000002-step-00000009.pt.x3_ab.part").write_bytes(b"half")
    (tmp_path / ".checkpoint-n0000002-step-00000009.json.x3_ab.part").write_bytes(b"{")
    (tmp_path / "checkpoint-n0000002-step-00000009.json").write_text("{}")
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
        match=rf"^checkpoint-n0000002-step-00000000\.pt .*process {os.getpid()} .* none: .*{tmp_path}",
    ):
        second.save(Loop(StepInfo))
    assert names(tmp_path) == files
    assert second.restore()
    assert second.save(Loop(StepInfo)).name.startswith("checkpoint-n0000003-")
    (tmp_path / "checkpoint-n0000003-step-00000000.json").unlink()
    with pytest.raises(
        FileExistsError,
        match=r"^checkpoint-n0000003-\S+ .*number 2: ",
    ):
        first.save(Loop(StepInfo))
    second.latest().unlink()  # as a damaged one
    second.save(Loop(StepInfo))
    second.save(Loop(StepInfo))


def test_a_file_that_another_run_takes_for_a_leftover(tmp_path, monkeypatch):
    def save(content, file):
        Checkpointer(tmp_path).write({}, 7)

    checkpoints, real = Checkpointer(tmp_path), torch.save
    monkeypatch.setattr(
        torch, "save", lambda *args: (monkeypatch.setattr(torch, "save", real), save(*args))
    )
    with pytest.raises(FileExistsError, match=r"\.part was removed .*another run"):
        checkpoints.write({}, 1)
    assert checkpoints.latest_step() == 7


@pytest.mark.parametrize(
    ("module", "name"),
    [(plain_files, "check_path"), (torch, "load"), (plain_files, "check_archive")],
)
def test_a_checkpoint_that_another_run_removes_while_it_is_read_is_explained(
    tmp_path, monkeypatch, module, name
):
    model, real = nn.Linear(1, 1), getattr(module, name)
    Checkpointer(tmp_path).write(
        {"model": {name: values + 1 for name, values in model.state_dict().items()}}, 1
    )
    before = model.weight.item()

    def remove_first(path, *args, **kwargs):
        Path(path).unlink()
        return real(path, *args, **kwargs)

    monkeypatch.setattr(module, name, remove_first)
    with pytest.raises(FileExistsError, match=r"was removed .*another run"):
        Checkpointer(tmp_path).track(model=model).restore()
    assert model.weight.item() == before


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
    told = re.compile(
        rf"FileExistsError: .*another run saves to {re.escape(str(tmp_path / 'both'))} too",
        re.DOTALL,
    )
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


@pytest.mark.parametrize("links", [True, False])
def test_a_backup_stays_when_keep_removes_its_checkpoint(tmp_path, monkeypatch, links):
    if not links:  # as on some file systems

        def no_links(*_):
            raise PermissionError("Operation not permitted")

        monkeypatch.setattr(os, "link", no_links)
    counted = {"n": 1}
    saves = Checkpointer(tmp_path, keep=1).track(counted=counted)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        saves.backup()
    saves.save(SimpleNamespace(step=1))
    backup = saves.backup()
    assert saves.backup() == backup  # once more
    for counted["n"] in (2, 3):
        saves.save(SimpleNamespace(step=counted["n"]))
    assert [path.name[-4:] for path in saves.paths()] == ["3.pt"]
    kept = Checkpointer(tmp_path / "backup").track(counted=counted)
    assert kept.paths() == [backup]
    assert (kept.restore(), counted) == (True, {"n": 1})
    assert json.loads(backup.with_suffix(".json").read_text())["step"] == 1
