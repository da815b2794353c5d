"""Training and predicting on a GPU, against the same on the CPU. Skipped where there is none."""

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import Estimator, Spec, net2vec
from fluxutils_py.data import SequenceWindows, SeriesArray
from fluxutils_py.data.segments import Segments
from fluxutils_py.nn import LSTM
from fluxutils_py.nn.model_windows import takes_windows
from fluxutils_py.training.tensor_batches import TensorBatches
from fluxutils_py.training.tensors import to_tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
F, N, T = 3, 13, 43


def data():
    x = np.random.default_rng(0).normal(size=(F, N, T))
    return x, 0.5 * x.mean(0, keepdims=True)


def fitted(device, **spec):
    torch.manual_seed(0)
    model = nn.Sequential(LSTM(F, 5), nn.Linear(5, 1))
    spec = Spec(epochs=3, batchsize=5, seqsize=10, **spec)
    return Estimator(model, None, None, spec, device=device, random_state=0).fit(*data())


@pytest.mark.parametrize("spec", [{}, {"shuffle": True, "clip": 0.1}, {"overlap": 3, "accumulate": 2}])
def test_a_fit_on_a_gpu_learns_what_one_on_the_cpu_learns(spec):
    there, here = fitted("cuda", **spec), fitted("cpu", **spec)
    assert all(p.is_cuda for p in there.model_.parameters())
    assert (net2vec(there).cpu() - net2vec(here)).abs().max() < 1e-9
    assert there.loss_ == pytest.approx(here.loss_, rel=1e-9)
    x, _ = data()
    assert np.abs(there.predict(x) - here.predict(x)).max() < 1e-9


def test_windows_come_to_a_gpu_as_they_are_whatever_is_cut_behind_them():
    x, _ = data()
    windows = SequenceWindows([SeriesArray(x, "x")], batchsize=2, seqsize=3, segments=Segments.from_lengths(N, T))
    batches = list(TensorBatches(windows, torch.float64, torch.device("cuda")))  # pinned memory is used anew meanwhile
    for batch, w in zip(batches, windows, strict=True):
        assert batch.x.is_cuda
        assert np.array_equal(batch.x.cpu().numpy(), w.x[0])


def test_windows_are_copied_on_the_stream_of_the_training():
    x, _ = data()
    windows = SequenceWindows([SeriesArray(x, "x")], batchsize=13, seqsize=43)
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(50):
            (batch,) = TensorBatches(windows, torch.float64, torch.device("cuda"))
            assert float(batch.x.sum()) == pytest.approx(x.sum())


def test_a_model_is_tried_out_without_a_warning_of_cudnn():
    model = nn.Sequential(LSTM(F, 5), nn.Linear(5, 1)).cuda()
    assert takes_windows(model, [to_tensor(data()[0].transpose(2, 1, 0), torch.float32, torch.device("cuda"))])
