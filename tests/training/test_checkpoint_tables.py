"""fluxutils_py.training.checkpoint_tables, and the command that prints them."""

import json
from types import SimpleNamespace

import pytest
from torch import nn

from fluxutils_py.__main__ import main
from fluxutils_py.training import Checkpointer
from fluxutils_py.training.checkpoint_tables import list_checkpoints


def save(folder, n_out, *losses):
    checkpoints = Checkpointer(folder, keep=-1).track(
        model=nn.Sequential(nn.Linear(3, n_out), nn.BatchNorm1d(n_out))
    )
    for i, loss in enumerate(losses, 1):
        info = SimpleNamespace(batch_loss=loss, metrics={"mae": 2 * loss})
        checkpoints.save(SimpleNamespace(step=10 * i, step_info=info))
    return checkpoints.paths()


def cells(line):
    return line.replace(" MB", "MB").split()


def test_steps_losses_and_sizes_are_listed(tmp_path, capsys):
    paths = save(tmp_path / "run", 5, 0.5, 0.25)
    assert main(["checkpoints", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path / 'run'}:"
    assert cells(lines[1]) == ["checkpoint", "step", "size", "parameters", "batch_loss", "mae"]
    for line, path, step, loss in zip(lines[2:], paths, (10, 20), (0.5, 0.25), strict=True):
        size = f"{path.stat().st_size / 1e6:.3g}MB"
        # 3*5+5, 4*5, 1
        assert cells(line) == [
            path.name,
            str(step),
            size,
            "41",
            f"{loss:g}",
            f"{2 * loss:g}",
        ]


def test_runs_are_compared_by_their_newest(tmp_path, capsys):
    save(tmp_path / "a", 5, 0.5, 0.25)
    save(tmp_path / "b", 7, 0.125)
    (tmp_path / "c").mkdir()
    assert main(["checkpoints", *(str(tmp_path / name) for name in "abc")]) == 0
    text = capsys.readouterr().out
    assert f"{tmp_path / 'c'}: no checkpoints" in text
    table = text.split("\n\n")[-1].splitlines()
    assert [cells(line)[:3] for line in table[1:4]] == [
        [str(tmp_path / "a"), "2", "20"], [str(tmp_path / "b"), "1", "10"], [str(tmp_path / "c"), "0", "none"]
    ]  # fmt: skip
    assert cells(table[1])[-2:] == ["0.25", "0.5"]
    assert "model.0.weight: (5, 3), (7, 3)" in table
    assert not any(line.startswith("model.1.num_batches_tracked") for line in table)


def test_damaged_checkpoints_are_named_and_not_fatal(tmp_path, capsys):
    first, second, third = save(tmp_path, 5, 0.5, 0.25, 0.125)
    second.write_bytes(second.read_bytes()[:200])
    third.with_suffix(".json").write_text("[")
    assert main(["checkpoints", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [cells(line)[3] for line in lines[2:5]] == ["41", "damaged", "41"]
    assert lines[5].startswith(f"{second} is damaged")
    assert [one.damage is None for one in list_checkpoints(tmp_path)] == [True, False, True]
    assert list_checkpoints(tmp_path)[2].metrics == {}
    assert json.loads(first.with_suffix(".json").read_text())["step"] == 10


def test_a_folder_that_is_not_there_is_an_error(tmp_path, capsys):
    assert main(["checkpoints", str(tmp_path / "no")]) == 1
    assert str(tmp_path / "no") in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["checkpoints"])
