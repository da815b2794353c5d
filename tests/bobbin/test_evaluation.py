"""Tasks over batches and datasets: what they come to, and that the model does not notice."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fluxutils_py import Estimator, Spec
from fluxutils_py.bobbin import EvalResults, EvalTask, eval_batches, eval_datasets
from fluxutils_py.data import SequenceWindows, SeriesArray
from fluxutils_py.nn import LSTM
from fluxutils_py.nn.states import reset, states
from fluxutils_py.training.minibatch import TensorBatches


@dataclass(frozen=True)
class Accuracy(EvalResults):
    dataset: str = ""
    right: int = 0
    n: int = 0

    def reduce(self, other):
        return Accuracy(self.dataset, self.right + other.right, self.n + other.n)


class Accuracies(EvalTask):
    def create_eval_results(self, dataset_name):
        return Accuracy(dataset_name)

    def evaluate(self, batch, model, scale=1):
        x, y = batch
        return Accuracy("", int((scale * model(x).argmax(1) == y).sum()), len(y))


@dataclass(frozen=True)
class Found(EvalResults):
    values: tuple = ()

    def reduce(self, other):
        return Found(self.values + other.values)


class Calls(EvalTask):
    """What ``evaluate`` returns of each batch, in order."""

    def __init__(self, evaluate):
        self._evaluate = evaluate

    def create_eval_results(self, dataset_name):
        return Found()

    def evaluate(self, batch, *args, **kwargs):
        return Found((self._evaluate(batch, *args, **kwargs),))


def uneven(n=23):
    x, y = torch.randn(n, 5), torch.randint(3, (n,))
    return x, y, [(x[:7], y[:7]), (x[7:8], y[7:8]), (x[8:], y[8:])]


def test_the_accuracy_over_uneven_batches_is_that_over_all_data():
    x, y, batches = uneven()
    model = nn.Linear(5, 3)
    expected = int((model(x).argmax(1) == y).sum())
    assert eval_batches(Accuracies(), "dev", batches, model) == Accuracy("dev", expected, 23)


def test_datasets_are_lists_iterables_and_functions():
    x, y, batches = uneven()
    model = nn.Linear(5, 3)
    expected = int((model(x).argmax(1) == y).sum())
    datasets = {
        "list": batches,
        "function": lambda: iter(batches),
        "loader": DataLoader(TensorDataset(x, y), batch_size=6),
        "nothing": [],
    }
    found = eval_datasets(Accuracies(), datasets, model)
    assert list(found) == list(datasets)
    assert found["nothing"] == Accuracy("nothing", 0, 0)
    for name in ("list", "function", "loader"):
        assert found[name] == Accuracy(name, expected, 23)


def test_a_dataset_begins_anew():
    class Datum:
        left = 0

        def reset(self):
            self.left = 3

        def __iter__(self):
            while self.left:
                self.left -= 1
                yield self.left

    data = Datum()
    for _ in range(2):
        assert eval_batches(Calls(lambda batch: batch), "data", data).values == (2, 1, 0)


def test_other_arguments_are_handed_on():
    _, _, batches = uneven()
    assert eval_batches(Accuracies(), "dev", batches, nn.Linear(5, 3), scale=5).right < 23
    found = eval_batches(
        Calls(lambda batch, *args, **kwargs: (batch, args, kwargs)), "dev", [1], 2, 3, four=4
    )
    assert found.values == ((1, (2, 3), {"four": 4}),)


def test_results_are_finalized_at_the_end():
    class Finalized(Calls):
        def finalize_eval_results(self, results):
            return Found((sum(results.values),))

    assert eval_batches(Finalized(lambda batch: batch), "dev", [1, 2, 4]) == Found((7,))


def test_a_wrong_type_is_named():
    class Wrong(Calls):
        def evaluate(self, batch):
            return {}

    with pytest.raises(TypeError, match=r"^evaluate returned dict; it must return Found"):
        eval_batches(Wrong(None), "dev", [1])


@pytest.mark.parametrize(
    ("call", "missing"),
    [
        (
            lambda t: t.create_eval_results("dev"),
            "create_eval_results(dataset_name)",
        ),
        (lambda t: t.evaluate(1), "evaluate(batch, ...)"),
    ],
)
def test_what_a_task_lacks_is_named(call, missing):
    class Empty(EvalTask):
        pass

    with pytest.raises(NotImplementedError) as caught:
        call(Empty())
    assert str(caught.value) == f"Empty does not define {missing}"


# -- the model does not notice -------------------------------------------------------------------------


def noisy():
    return nn.Sequential(LSTM(2, 3), nn.Dropout(0.5), nn.BatchNorm1d(3).eval(), nn.Linear(3, 1))


class Holder:
    """Such as a loop, or a state."""

    def __init__(self, model):
        self.model, self.step = model, 3


@pytest.mark.parametrize("given", [lambda m: m, Holder])
@pytest.mark.parametrize("fails", [False, True])
def test_modes_states_gradients_and_generators_are_as_before(given, fails):
    model = noisy()
    model(torch.randn(5, 2)).sum().backward()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    modes, kept = [m.training for m in model.modules()], states(model)
    grads, during = [p.grad.clone() for p in model.parameters()], []

    def look(batch, state):
        during.append((torch.is_grad_enabled(), [m.training for m in model.modules()]))
        torch.rand(3)
        model(batch[0])
        if fails:
            raise OSError("disk on fire")
        return model(batch[0]).requires_grad

    # draws a seed
    loader = DataLoader(TensorDataset(torch.randn(7, 2)), batch_size=4, shuffle=True)
    generator = torch.get_rng_state()
    if fails:
        with pytest.raises(OSError, match=r"^disk on fire$"):
            eval_batches(Calls(look), "dev", loader, given(model))
    else:
        assert eval_batches(Calls(look), "dev", loader, given(model)).values == (False, False)
    assert during == [(False, [False] * 6)] * (1 if fails else 2)
    assert modes == [m.training for m in model.modules()]
    assert torch.is_grad_enabled()
    assert torch.equal(generator, torch.get_rng_state())
    for one, other in zip(
        (*kept, *grads), (*states(model), *(p.grad for p in model.parameters())), strict=True
    ):
        assert torch.equal(one, other)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_without_a_model_there_are_no_gradients_either():
    generator = torch.get_rng_state()
    found = eval_batches(
        Calls(lambda batch: (torch.is_grad_enabled(), torch.rand(1).item())), "dev", [1, 2]
    )
    assert [grad for grad, _ in found.values] == [False, False]
    assert torch.equal(generator, torch.get_rng_state())


def test_recurrent_layers_forget_before_each_batch():
    model = nn.Sequential(LSTM(2, 3), nn.Linear(3, 1))
    batches = [torch.randn(4, n, 2) for n in (5, 3, 3)]
    expected = []
    for batch in batches:
        expected.append(reset(model)(batch).sum().item())
    reset(model)(torch.randn(7, 2))
    found = eval_batches(
        Calls(lambda batch, model: model(batch).sum().item()), "dev", batches, model
    )
    assert list(found.values) == expected


def test_windows_carry_the_state_over_time():
    x = np.random.default_rng(0).normal(size=(2, 5, 7))
    windows = SequenceWindows(
        [SeriesArray(x, "x")], [SeriesArray(x[:1], "y")], batchsize=3, seqsize=4
    )
    batches = TensorBatches(windows, torch.float64, torch.device("cpu"))
    model = nn.Sequential(LSTM(2, 3), nn.Linear(3, 1)).double()
    est = Estimator(model, spec=Spec(1, 3, 4), random_state=0).fit(x, x[:1])
    expected = est.predict(x)  # (1, 5, 7), each series as a whole
    found = eval_batches(Calls(lambda batch, est: est.model_(batch.x)), "dev", batches, est)
    # two windows of each of two groups of series
    got = [torch.cat(found.values[i : i + 2]) for i in (0, 2)]
    got = torch.cat(got, 1).permute(2, 1, 0).numpy()
    np.testing.assert_allclose(got, expected, atol=1e-12)


def test_tensors_of_results_are_in_main_memory_and_know_no_gradients():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = eval_batches(
        Calls(lambda batch: {"p": [nn.Parameter(torch.ones(2, device=device))]}), "dev", [1]
    )
    p = found.values[0]["p"][0]
    assert (p.device, p.requires_grad) == (torch.device("cpu"), False)
