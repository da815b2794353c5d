"""Means of losses and accuracies over data."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import Estimator, Spec
from fluxutils_py.bobbin import MetricsEval, eval_batches
from fluxutils_py.bobbin.mean_metrics import Means
from fluxutils_py.bobbin.treejson import dump_pytree_json, parse_pytree_json
from fluxutils_py.gomlx import Trainer
from fluxutils_py.nn import LSTM
from fluxutils_py.training import InMemory, StopTraining
from fluxutils_py.training.minibatch import Minibatch
from fluxutils_py.training.running_metrics import MeanMetric, sparse_categorical_accuracy


def test_means_over_uneven_batches_are_those_over_all_data():
    x, y = torch.randn(23, 5).double(), torch.randint(3, (23,))
    model = nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.5)).double()
    task = MetricsEval(
        {"accuracy": sparse_categorical_accuracy, "loss": nn.CrossEntropyLoss()},
        higher_is_better=True,
    )
    scores = model[0](x)
    for data in (InMemory(x, y, batchsize=6), [(x[:20], y[:20]), (x[20:], y[20:])]):
        found = eval_batches(task, "dev", data, model)
        assert found.weight == 23
        assert found.means == {
            "accuracy": pytest.approx((scores.argmax(1) == y).double().mean().item(), rel=1e-14),
            "loss": pytest.approx(nn.functional.cross_entropy(scores, y).item(), rel=1e-14),
        }


def test_it_measures_what_a_trainer_does():
    x = torch.randn(11, 4, 3)
    batches = [
        Minibatch((x[:, :3],), (x[:, :3, :1],)),
        Minibatch((x[:7, 3:],), (x[:7, 3:, :1],), weight=2.5),
    ]
    model = nn.Sequential(LSTM(3, 4), nn.Linear(4, 1))
    trainer = Trainer(model, nn.MSELoss(), eval_metrics=[MeanMetric(nn.functional.l1_loss)])
    expected = trainer.eval(batches)
    found = eval_batches(
        MetricsEval({"mse": nn.MSELoss(), "mae": nn.L1Loss()}), "dev", batches, model
    ).means
    assert found == {
        "mse": pytest.approx(expected["loss"], 1e-14),
        "mae": pytest.approx(expected["l1_loss"], 1e-14),
    }


def test_several_inputs_and_labels_and_batches_of_no_weight():
    a, b = torch.randn(4, 2), torch.randn(4, 2)

    class Both(nn.Module):
        def forward(self, x, z):
            return x + z, x - z

    def measure(prediction, label):
        return (prediction[0] - label[0]).abs() + (prediction[1] - label[1]).abs()

    batches = [Minibatch((a, b), (a, b)), Minibatch((a * math.nan, b), (a, b), weight=0)]
    found = eval_batches(MetricsEval({"sum": measure}), "dev", batches, Both())
    assert found.means["sum"] == pytest.approx((b.abs() + (a - 2 * b).abs()).mean().item())


@pytest.mark.parametrize(
    ("mine", "best", "higher", "better"),
    [
        (1.0, 2.0, False, True),
        (2.0, 1.0, False, False),
        (1.0, 1.0, False, False),
        (1.0, 2.0, True, False),
        (2.0, 1.0, True, True),
        (1.0, math.nan, False, True),
        (math.nan, 1.0, False, False),
        (math.nan, math.nan, True, False),
    ],
)
def test_the_first_measure_decides_and_nan_is_never_better(mine, best, higher, better):
    one, other = (Means({"loss": 3 * value, "other": 0.0}, 3.0, higher) for value in (mine, best))
    assert one.is_better_than(other) is better


def test_they_are_shown_and_written_and_saved():
    written = []

    class Writer:
        def scalar(self, *args):
            written.append(args)

    class State:
        step = 7

    means = Means({"loss": 2.0, "accuracy": 1.0}, 3.0, True)
    assert means.to_log_message() == "loss 0.666667, accuracy 0.333333"
    means.write_to_tensorboard(State(), Writer())
    assert written == [("loss", 2 / 3, 7), ("accuracy", 1 / 3, 7)]
    assert (
        parse_pytree_json(dump_pytree_json(means), Means({"loss": 0.0, "accuracy": 0.0})) == means
    )
    assert Means({"loss": 0.0}).to_log_message() == "loss nan"


def test_there_must_be_something_to_measure():
    with pytest.raises(ValueError, match=r"measure.*\{'loss': torch"):
        MetricsEval({})


@pytest.mark.slow
def test_the_best_of_a_fit_is_kept(tmp_path):
    x = np.random.default_rng(0).normal(size=(2, 9, 20)).astype("f4")
    dev = [(torch.randn(20, 4, 2), torch.randn(20, 4, 1))]
    keep = (
        MetricsEval({"mse": nn.MSELoss()})
        .make_cron_action({"dev": dev})
        .keep_best_checkpoint("dev", tmp_path)
    )
    found = []

    def note(results, loop):
        found.append(results["dev"].means["mse"])
        if len(found) == 9:
            raise StopTraining

    keep.add_result_processor(note)
    est = Estimator(
        nn.Sequential(LSTM(2, 3), nn.Linear(3, 1)),
        spec=Spec(5, 4, 5),
        random_state=0,
        callbacks=[keep],
    )
    est.fit(x, x.mean(0, keepdims=True))
    best = keep.load_best(est.model_)
    with torch.no_grad():
        assert nn.functional.mse_loss(best(dev[0][0]), dev[0][1]).item() == pytest.approx(
            min(found)
        )
    assert len(found) == 9
