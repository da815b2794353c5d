"""Metrics over steps, and how often predictions are right."""

import numpy as np
import pytest
import torch

from fluxutils_py.errors import DataError
from fluxutils_py.gomlx.running_metrics import (
    EMAMetric,
    MeanMetric,
    binary_accuracy,
    binary_logits_accuracy,
    sparse_categorical_accuracy,
)


def test_a_mean_weighs_short_batches_less():
    metric = MeanMetric(name="m")
    for value, n in ((1.0, 100), (2.0, 100), (9.0, 3)):
        metric.update(value, weight=n)
    assert metric.compute() == pytest.approx(
        np.average([1, 2, 9], weights=[100, 100, 3]), rel=1e-15
    )
    assert metric.compute() == pytest.approx(1.6108, abs=1e-4)  # not 4
    metric.reset()
    assert metric.compute() is None
    metric.reset()


def test_a_step_of_no_data_leaves_no_trace():
    for metric in (MeanMetric(), EMAMetric()):
        metric.update(float("nan"), weight=0)
        assert metric.compute() is None
        metric.update(2.0)
        metric.update(float("inf"), weight=0)
        assert metric.compute() == 2.0


@pytest.mark.parametrize("weight", [0.01, 0.3, 1.0])
def test_a_moving_average_is_the_mean_until_that_counts_less(weight):
    values = np.random.default_rng(0).uniform(size=120)
    metric, expected = EMAMetric(new_example_weight=weight), None
    for n, value in enumerate(values, 1):
        metric.update(float(value))
        new = max(weight, 1 / n)
        expected = value if expected is None else expected * (1 - new) + value * new
        assert metric.compute() == pytest.approx(expected, rel=1e-13)
        if n <= 1 / weight:
            assert metric.compute() == pytest.approx(values[:n].mean(), rel=1e-13)
    metric.reset()
    assert metric.compute() is None


def test_a_measure_is_taken_of_prediction_and_target_without_gradients():
    def distance(prediction, target):
        assert not torch.is_grad_enabled()
        return (prediction - target).abs()

    metric = MeanMetric(distance)
    a, b = torch.randn(5, 2, requires_grad=True), torch.randn(5, 2)
    metric.update(a, b, weight=5)
    assert metric.compute() == pytest.approx((a - b).abs().mean().item(), rel=1e-6)
    assert isinstance(metric.compute(), float)
    assert (metric.name, metric.short_name) == ("distance", "distance")
    assert MeanMetric(distance, "mean absolute error", "mae").short_name == "mae"


@pytest.mark.parametrize("kind", [MeanMetric, EMAMetric])
def test_a_metric_goes_on(kind):
    values = np.random.default_rng(1).uniform(size=20).tolist()
    whole, first, second = kind(), kind(), kind()
    for value in values:
        whole.update(value, weight=2)
    for value in values[:7]:
        first.update(value, weight=2)
    second.load_state_dict(first.state_dict())
    for value in values[7:]:
        second.update(value, weight=2)
    assert second.compute() == whole.compute()


@pytest.mark.parametrize("weight", [0, -1, 1.5, float("nan")])
def test_a_weight_that_makes_no_sense_is_refused(weight):
    with pytest.raises(ValueError, match=f"^new_example_weight .*got {weight}$"):
        EMAMetric(new_example_weight=weight)


def test_what_is_on_the_border_is_a_miss():
    labels = torch.tensor([0, 1, 0, 1, 0, 1])
    assert binary_accuracy(torch.tensor([0.5, 0.5, 0.1, 0.9, 0.6, 0.4]), labels).item() == 2 / 6
    assert (
        binary_logits_accuracy(torch.tensor([0.0, 0.0, -3, 7, 0.1, -0.1]), labels).item() == 2 / 6
    )
    assert (
        sparse_categorical_accuracy(
            torch.tensor([[1.0, 1.0], [0.0, 2.0], [3.0, 0.0]]), torch.tensor([0, 1, 1])
        )
        == 1 / 3
    )


def test_shapes_of_binary_labels_must_fit():
    with pytest.raises(ValueError, match=r"\(4, 1\) .*\(3,\) differ in shape$"):
        binary_accuracy(torch.zeros(4, 1), torch.zeros(3))
    # (B, 1) with (B,)
    hits = binary_accuracy(torch.tensor([[0.9], [0.1], [0.2], [0.7]]), torch.tensor([1, 0, 1, 0]))
    assert hits == 0.5


def test_accuracy_over_classes_with_weights_and_mask():
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=(4, 7, 3)), rng.integers(3, size=(4, 7))
    weights, mask = rng.uniform(size=(4, 7)), rng.uniform(size=(4, 7)) < 0.6
    right = scores.argmax(-1) == labels
    tensors = [torch.from_numpy(a) for a in (scores, labels, weights, mask)]
    assert sparse_categorical_accuracy(*tensors[:2]).item() == pytest.approx(right.mean())
    assert sparse_categorical_accuracy(tensors[0], tensors[1][..., None]).item() == pytest.approx(
        right.mean()
    )
    expected = np.average(right, weights=weights * mask)
    assert sparse_categorical_accuracy(*tensors).item() == pytest.approx(expected)


# -- weights of the elements ---------------------------------------------------------------------------

# prediction, target, weight
ROWS = [
    (0, 9.0, 0.5),
    (4, 1.0, 2.0),
    (7, -3.0, 0.0),
    (2, 5.0, 1.5),
    (1, 1.0, 0.25),
]


def columns(dtype=torch.float64):
    return [torch.tensor(c, dtype=dtype).unsqueeze(1) for c in zip(*ROWS, strict=True)]


@pytest.mark.parametrize("cls", [MeanMetric, EMAMetric])
def test_a_metric_of_elements_is_their_weighted_mean_and_weight_0_may_be_nan(cls):
    prediction, target, weight = columns()
    each = ((prediction - target) ** 2).numpy()
    target[2] = torch.nan
    metric = cls(torch.nn.MSELoss(reduction="none"), "mse")
    metric.update(prediction, target, weight=weight)
    assert metric.compute() == pytest.approx(np.average(each, weights=weight.numpy()))


def test_batches_of_a_weighted_metric_add_up_to_the_weighted_mean_of_all():
    prediction, target, weight = columns()
    metric = MeanMetric(torch.nn.L1Loss(reduction="none"), "mae")
    for part in slice(0, 2), slice(2, 3), slice(3, 5):
        metric.update(prediction[part], target[part], weight=weight[part])
    assert metric.compute() == pytest.approx(np.average(abs(prediction - target), weights=weight))


def test_a_mean_with_different_weights_is_an_error_with_equal_ones_a_mean():
    prediction, target, weight = columns()
    metric = MeanMetric(torch.nn.MSELoss(), "mse")
    with pytest.raises(DataError, match=r"mse.*mean already"):
        metric.update(prediction, target, weight=weight)
    metric.update(prediction, target, weight=torch.full_like(weight, 0.3))
    assert metric.compute() == pytest.approx(float(((prediction - target) ** 2).mean()))


@pytest.mark.parametrize("measure", [binary_accuracy, binary_logits_accuracy])
def test_accuracies_take_weights_and_mask_as_arguments_or_among_the_labels(measure):
    prediction = torch.tensor([0.9, 0.8, 0.2, -0.3])
    target, weights = torch.tensor([1.0, 0.0, 1.0, torch.nan]), torch.tensor([3.0, 2.0, 4.0, 5.0])
    mask = torch.tensor([True, True, True, False])
    right = [1, 0, measure is binary_logits_accuracy, 0]
    expected = np.average(right, weights=[3, 2, 4, 0])
    assert measure(prediction, target, weights, mask).item() == pytest.approx(expected)
    metric = MeanMetric(measure, "accuracy")
    metric.update(prediction, (target, weights, mask))
    assert metric.compute() == pytest.approx(expected)


def test_nan_labels_that_do_not_count_leave_the_accuracy_of_classes_alone():
    scores, labels = (
        torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]]),
        torch.tensor([1.0, 1.0, torch.nan]),
    )
    assert (
        sparse_categorical_accuracy(scores, labels, mask=torch.tensor([True, True, False])).item()
        == 0.5
    )
