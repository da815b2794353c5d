"""Tables of what evaluation finds."""

from types import SimpleNamespace

import torch
from torch import nn

from fluxutils_py.gomlx import Trainer, report_eval
from fluxutils_py.gomlx.running_metrics import MeanMetric
from fluxutils_py.training import InMemory, Loop
from fluxutils_py.training.dataset import as_dataset


def dataset(n, name):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return as_dataset([((x,), (x.sum(1, keepdim=True),))], name=name)


def absolute(prediction, label):
    return (prediction - label).abs()


def cells(table):
    return [line.split() for line in table.splitlines()]


def test_a_table_has_a_row_for_each_dataset_and_a_column_for_each_metric():
    model = nn.Linear(3, 1).double()
    trainer = Trainer(model, nn.MSELoss(), eval_metrics=[MeanMetric(absolute)])
    data, tables = [dataset(11, "train"), dataset(7, "held-out")], []
    report_eval(trainer, *data, printer=tables.append)
    expected = [["dataset", "loss", "loss_fn", "absolute"]]
    for d in data:
        (x,), (y,) = next(iter(d)).inputs, next(iter(d)).labels
        off = (model(x) - y).detach()
        square, size = (f"{v.mean().item():.4g}" for v in (off.square(), off.abs()))
        expected.append([d.name, square, square, size])
    (table,) = tables
    assert cells(table) == expected
    assert len({len(line) for line in table.splitlines()}) == 1  # columns are aligned


def test_a_table_is_printed_when_a_run_ends(capsys):
    model = nn.Linear(3, 1)
    x = torch.randn(13, 3)
    data = InMemory(x, x[:, :1], batchsize=5, name="all")
    trainer = Trainer(model, nn.MSELoss(), torch.optim.Adam)
    loop = Loop(trainer)
    loop.on_end("report", lambda loop: report_eval(trainer, data))
    loop.run_epochs(data, 2)
    assert cells(capsys.readouterr().out)[1] == ["all", *(f"{trainer.eval(data)['loss']:.4g}",) * 2]


def test_what_a_dataset_lacks_or_is_no_number_is_shown_as_it_is():
    found = iter(
        [{"loss": float("nan"), "share": torch.tensor(0.123456)}, {"loss": None, "text": "?"}]
    )
    tables = []
    report_eval(SimpleNamespace(eval=lambda data: next(found)), [], (), printer=tables.append)
    assert cells(tables[0]) == [
        ["dataset", "loss", "share", "text"],
        ["list", "nan", "0.1235", "None"],
        ["tuple", "None", "None", "?"],
    ]


def test_datasets_of_one_name_are_numbered_in_their_order():
    tables, trainer = [], SimpleNamespace(eval=lambda data: {"n": len(list(data))})
    report_eval(trainer, [1, 2], (3,), [4, 5, 6], dataset(5, "dev"), printer=tables.append)
    assert tables == ["dataset   n\nlist      2\ntuple     1\nlist (2)  3\ndev       1"]
    tables.clear()
    named = [dataset(5, name) for name in ("dev", "dev (1)", "dev")]
    report_eval(trainer, *named, printer=tables.append)
    assert [row.rpartition("  ")[0].strip() for row in tables[0].splitlines()[1:]] == [
        "dev",
        "dev (1)",
        "dev (2)",
    ]
