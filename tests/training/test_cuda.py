"""Training and predicting on a GPU, against the same on the CPU. Skipped where there is none."""

import os
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import Estimator, Spec, net2vec
from fluxutils_py.data import SequenceWindows, SeriesArray
from fluxutils_py.data.segments import Segments
from fluxutils_py.nn import LSTM
from fluxutils_py.nn.model_windows import takes_windows
from fluxutils_py.training import Checkpointer, EveryNSteps
from fluxutils_py.training.minibatch import TensorBatches, to_tensor

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


@pytest.mark.parametrize(
    "spec", [{}, {"shuffle": True, "clip": 0.1}, {"overlap": 3, "accumulate": 2}]
)
def test_a_fit_on_a_gpu_learns_what_one_on_the_cpu_learns(spec):
    there, here = fitted("cuda", **spec), fitted("cpu", **spec)
    assert all(p.is_cuda for p in there.model_.parameters())
    assert (net2vec(there).cpu() - net2vec(here)).abs().max() < 1e-9
    assert there.loss_ == pytest.approx(here.loss_, rel=1e-9)
    x, _ = data()
    assert np.abs(there.predict(x) - here.predict(x)).max() < 1e-9


def test_windows_come_to_a_gpu_as_they_are_whatever_is_cut_behind_them():
    x, _ = data()
    windows = SequenceWindows(
        [SeriesArray(x, "x")], batchsize=2, seqsize=3, segments=Segments.from_lengths(N, T)
    )
    # pinned memory is used anew meanwhile
    batches = list(TensorBatches(windows, torch.float64, torch.device("cuda")))
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
    assert takes_windows(
        model, [to_tensor(data()[0].transpose(2, 1, 0), torch.float32, torch.device("cuda"))]
    )


# -- reading, memory, precision, resuming, ranks --------------------------------------------------------


def single(n_steps=T, precision="float32", callbacks=None, **spec):
    """An estimator on float32 data, with dropout, and its data."""
    x = np.random.default_rng(0).normal(size=(F, N, n_steps)).astype("float32")
    torch.manual_seed(0)
    model = nn.Sequential(LSTM(F, 5), nn.Dropout(0.2), nn.Linear(5, 1))
    spec = Spec(**{"epochs": 2, "batchsize": 5, "seqsize": 10, "precision": precision, **spec})
    opt = partial(torch.optim.AdamW, lr=0.01, fused=True)
    return Estimator(model, None, opt, spec, device="cuda", callbacks=callbacks, random_state=0), (
        x,
        x[:1],
    )


def synchronizations(n_steps, **spec):
    """Where and how often a fit with validation waits for the GPU."""
    est, data = single(n_steps, **spec)
    est.fit(*data)  # everything is loaded
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            est.fit(*data, validation_data=data)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = [f"{w.filename}:{w.lineno}" for w in caught if "called a synchroniz" in str(w.message)]
    return Counter(places)


SCHEDULER = partial(torch.optim.lr_scheduler.StepLR, step_size=4, gamma=0.5)


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"clip": 0.1, "accumulate": 3, "lr_schedule": ("step", SCHEDULER)},
        {"overlap": 3, "burn_in": 2},
        {"precision": "bfloat16"},
    ],
)
def test_more_windows_need_no_more_synchronizations(spec):
    assert synchronizations(430, **spec) == synchronizations(43, **spec)


def test_low_precision_learns_near_what_float32_learns():
    (low, data), (exact, _) = single(precision="bfloat16", epochs=5), single(epochs=5)
    low.fit(*data), exact.fit(*data)
    assert {p.dtype for p in low.model_.parameters()} == {torch.float32}
    assert low.loss_ == pytest.approx(exact.loss_, rel=0.05)
    assert low.predict(data[0]).dtype == np.float32
    assert np.abs(low.predict(data[0]) - exact.predict(data[0])).max() < 0.1


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_resuming_ends_with_the_bits_of_an_uninterrupted_fit(tmp_path, precision):
    def kill(loop):
        if loop.step == 17:
            raise KeyboardInterrupt

    settings = {"precision": precision, "shuffle": True, "accumulate": 2}
    est, data = single(**settings)
    whole = est.fit(*data)
    saves = Checkpointer(tmp_path, trigger=EveryNSteps(5))
    with pytest.raises(KeyboardInterrupt):
        single(callbacks=[saves, kill], **settings)[0].fit(*data)
    again = single(callbacks=[saves, lambda loop: None], **settings)[0].fit(*data)
    assert torch.equal(net2vec(again), net2vec(whole))
    assert again.loss_curve_ == whole.loss_curve_


def test_arrays_may_be_larger_than_the_memory_of_the_gpu():
    x = np.random.default_rng(0).standard_normal((4, 64, 400_000), dtype=np.float32)  # 390 MiB
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((300 << 20) / total)
    try:
        spec = Spec(epochs=1, batchsize=64, seqsize=4000)
        est = Estimator(
            nn.Sequential(LSTM(4, 3), nn.Linear(3, 1)), None, None, spec, device="cuda"
        ).fit(x, x[:1])
        assert est.predict(x).shape == (1, 64, 400_000)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


TWO_RANKS = """
import sys, numpy as np, torch
from torch import nn
from fluxutils_py import Estimator, Spec, net2vec
from fluxutils_py.nn import LSTM
from fluxutils_py.parallel import get_communicator
comm = get_communicator("auto")
x = np.random.default_rng(0).normal(size=(3, 13, 43))
torch.manual_seed(0)
model = nn.Sequential(LSTM(3, 5), nn.Linear(5, 1))
spec = Spec(epochs=2, batchsize=6 // comm.size, seqsize=10, accumulate=2)
est = Estimator(model, None, None, spec, device="cuda", random_state=0).fit(x, x[:1])
if comm.rank == 0:
    np.save(sys.argv[1], net2vec(est).cpu().numpy())
"""


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun")
def test_two_ranks_on_one_gpu_are_one_process(tmp_path):
    pytest.importorskip("mpi4py")
    found, programs = (
        [],
        ([], [shutil.which("mpirun"), "--allow-run-as-root", "--oversubscribe", "-n", "2"]),
    )
    for k, launcher in enumerate(programs):
        command = [*launcher, sys.executable, "-c", TWO_RANKS, str(tmp_path / f"{k}.npy")]
        subprocess.run(command, check=True, timeout=300, env=dict(os.environ))
        found.append(np.load(tmp_path / f"{k}.npy"))
    assert np.abs(found[0] - found[1]).max() < 1e-9
