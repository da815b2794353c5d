"""What is written is what TensorBoard reads, as of the call, in order, and nothing is lost without
a word.
"""

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch

from fluxutils_py.bobbin import (
    ImageSummary,
    NullSummaryWriter,
    PublishTrainingProgress,
    SummaryWriter,
    ThreadedSummaryWriter,
    publish_trainer_env_info,
)
from fluxutils_py.training import StepInfo, TrainState

ROOT = Path(__file__).resolve().parents[2]
KINDS = {
    "plain": SummaryWriter,
    "threaded": ThreadedSummaryWriter.open,
}


@pytest.fixture(params=KINDS)
def opened(request):
    return KINDS[request.param]


def everything(writer, rng):
    """Each method once; what was written."""
    grey, coloured = rng.random((5, 7)), rng.random((5, 7, 3))
    values = rng.normal(size=(11, 3))
    sound = rng.uniform(-1, 1, 50)
    writer.scalar("scalar", torch.tensor(0.1, dtype=torch.float64, requires_grad=True), 1)
    writer.scalar("scalar", np.float32(0.2), 2)
    writer.image("grey", grey, 3)
    writer.image("coloured", torch.tensor(coloured), 3)
    writer.image("batch", np.stack([coloured] * 4), 3, max_outputs=2)
    writer.audio("audio", torch.tensor(sound), 7, sample_rate=8000)
    writer.histogram("histogram", torch.tensor(values), 6)
    writer.histogram("coarse", np.arange(10.0), 3, bins=np.array([0.0, 5, 10]))
    writer.text("text", "*one*", 8)
    writer.write("tensor", torch.arange(6.0).reshape(2, 3), 9)
    writer.hparams({"lr": 0.1})
    return grey, coloured, values, sound


def test_everything_written_is_read_back(opened, tmp_path, rng, accumulated):
    with opened(tmp_path) as writer:
        grey, coloured, values, sound = everything(writer, rng)
    found = accumulated(tmp_path)
    assert [(e.step, e.value) for e in found.Scalars("scalar")] == [
        (1, np.float32(0.1)),
        (2, np.float32(0.2)),
    ]
    assert abs(found.Scalars("scalar")[0].wall_time - time.time()) < 600
    for name, expected in {"grey": np.stack([grey] * 3, 2), "coloured": coloured}.items():
        shown = matplotlib.image.imread(io.BytesIO(found.Images(name)[0].encoded_image_string))
        np.testing.assert_allclose(shown, expected, atol=1 / 255)
    assert found.Images("batch")[0].width == 14
    histogram = found.Histograms("histogram")[0].histogram_value
    assert (histogram.min, histogram.max, histogram.num) == (values.min(), values.max(), 33)
    assert histogram.sum == pytest.approx(values.sum(), rel=1e-12)
    assert found.Histograms("coarse")[0].histogram_value.bucket == [0, 5, 5]
    audio = found.Audio("audio")[0]
    assert (audio.sample_rate, audio.length_frames) == (8000, 50)
    frames = np.frombuffer(audio.encoded_audio_string[-100:], "<i2")
    np.testing.assert_allclose(frames / 32767, sound, atol=1 / 32767)
    assert found.Tensors("text/text_summary")[0].tensor_proto.string_val == [b"*one*"]
    assert list(found.Tensors("tensor")[0].tensor_proto.float_val) == [0, 1, 2, 3, 4, 5]
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]  # hyper-parameters: here


def test_sounds_and_arrays_as_flax_takes_them(tmp_path, rng, accumulated):
    with SummaryWriter(tmp_path) as writer:
        writer.audio(
            "audio", rng.uniform(-1, 1, size=(4, 50, 1)), 3, sample_rate=100, max_outputs=2
        )
        writer.write("tensor", np.arange(6.0).reshape(2, 3), 3, metadata=None)
    found = accumulated(tmp_path)
    assert [found.Audio(f"audio/{n}")[0].length_frames for n in range(2)] == [50, 50]
    assert len(found.Tags()["audio"]) == 2
    assert list(found.Tensors("tensor")[0].tensor_proto.double_val) == [0, 1, 2, 3, 4, 5]


def test_a_writer_that_flushes_by_itself(tmp_path, scalars):
    writer = SummaryWriter(tmp_path, auto_flush=True)
    writer.scalar("a", 0.5, 1)
    assert scalars(tmp_path) == {"a": [(1, 0.5)]}
    writer.close()


# -- errors ----------------------------------------------------------------------------------------------------------


def test_nothing_is_written_after_close(opened, tmp_path, scalars, no_thread_stays):
    writer = opened(tmp_path)
    writer.scalar("a", 1, 1)
    writer.close()
    writer.close()
    with pytest.raises((ValueError, RuntimeError), match=r"is closed; open another|after shutdown"):
        writer.scalar("a", 2, 2)
    assert scalars(tmp_path) == {"a": [(1, 1.0)]}
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_nothing_is_lost_when_a_program_ends_without_close(finalized_python, tmp_path, scalars):
    program = f"""
from fluxutils_py.bobbin import SummaryWriter, ThreadedSummaryWriter
plain, threaded = SummaryWriter({str(tmp_path / "plain")!r}), ThreadedSummaryWriter.open({str(tmp_path / "threaded")!r})
for step in range(500):
    for writer in (plain, threaded):
        writer.scalar("a", step, step)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [finalized_python, "-c", program], capture_output=True, text=True, env=env, timeout=300
    )
    assert not done.stderr
    for kind in ("plain", "threaded"):
        assert scalars(tmp_path / kind) == {"a": [(step, float(step)) for step in range(500)]}


def test_without_tensorboard_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError) as caught:
        SummaryWriter(tmp_path / "new")
    assert str(caught.value) == (
        "writing for TensorBoard needs the package tensorboard: pip install tensorboard"
    )
    assert list(tmp_path.iterdir()) == []


# -- several files in one directory ----------------------------------------------------------------------------------


def test_writers_one_after_another_are_read_in_their_order(tmp_path, scalars):
    # within a second or two: numbers of files pass from one digit to two, or two to three
    for step in range(13):
        with SummaryWriter(tmp_path) as writer:
            writer.scalar("a", step, step)
    assert scalars(tmp_path) == {"a": [(step, float(step)) for step in range(13)]}


# -- the others ------------------------------------------------------------------------------------------------------


def test_the_null_writer_does_nothing(tmp_path, monkeypatch, rng):
    monkeypatch.chdir(tmp_path)
    with NullSummaryWriter() as writer:
        everything(writer, rng)
        writer.flush()
    assert list(tmp_path.iterdir()) == []


def test_a_relative_directory_is_that_of_the_time_when_the_writer_was_opened(
    tmp_path, monkeypatch, opened, scalars
):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    monkeypatch.chdir(first)
    with opened("runs") as writer:
        monkeypatch.chdir(second)
        writer.scalar("loss", 0.5, 1)
    assert not list(second.iterdir())
    assert scalars(first / "runs") == {"loss": [(1, 0.5)]}


class FlaxOnly:
    """A writer with flax's names alone, which records its calls."""

    def __init__(self):
        self.calls = []

    def scalar(self, tag, value, step):
        self.calls.append((tag, float(value), step))

    def text(self, tag, textdata, step):
        self.calls.append((tag, textdata.strip(), step))

    def image(self, tag, image, step, max_outputs=3):
        self.calls.append((tag, image.tolist(), step))

    def audio(self, tag, audiodata, step, sample_rate=44100, max_outputs=3):
        self.calls.append((tag, audiodata.tolist(), step, sample_rate))

    def histogram(self, tag, values, step, bins=None):
        self.calls.append((tag, values.tolist(), step))

    def write(self, tag, tensor, step, metadata=None):
        self.calls.append((tag, tensor.tolist(), step))

    def hparams(self, hparams):
        self.calls.append(hparams)

    def flush(self):
        self.calls.append("flush")

    def close(self):
        self.calls.append("close")


def test_a_writer_with_flax_names_alone_gets_numbers_texts_and_images():
    writer, model = FlaxOnly(), torch.nn.Linear(3, 2)
    state = TrainState(5, model, torch.optim.SGD(model.parameters()))
    PublishTrainingProgress(writer)(state, step_info=StepInfo(0.25, metrics={"hits": 3}))
    publish_trainer_env_info(writer, state, also_do_logging=False)
    pixels = torch.arange(6.0).reshape(1, 2, 3)
    ImageSummary(pixels).publish(writer, "image", 7)
    assert ("train/batch_loss", 0.25, 5) in writer.calls
    assert ("train/hits", 3.0, 5) in writer.calls
    numbers = "Number of parameters = 8, number of extra variables = 0"
    assert ("trainer/diagnosis/total_num_params", numbers, 5) in writer.calls
    assert writer.calls[-1] == ("image", pixels.tolist(), 7)


def test_a_writer_with_flax_names_alone_may_be_written_to_by_a_thread():
    """As ``bobbin.ThreadedSummaryWriter(flax_writer)``, with all of flax's names."""
    base = FlaxOnly()
    with ThreadedSummaryWriter(base, wait_on_flush=True) as writer:
        writer.scalar("loss", torch.tensor(0.5), 1)
        writer.text("note", "hello", 2)
        writer.image("grey", np.zeros((1, 2)), 3)
        writer.audio("sound", np.array([0.0, 1.0]), 5, sample_rate=8000)
        writer.histogram("weights", np.array([1.0, 2.0]), 6)
        writer.write("tensor", np.array([3.0]), 7)
        writer.hparams({"lr": 0.1})
        writer.flush()
    assert base.calls == [
        ("loss", 0.5, 1),
        ("note", "hello", 2),
        ("grey", [[0.0, 0.0]], 3),
        ("sound", [0.0, 1.0], 5, 8000),
        ("weights", [1.0, 2.0], 6),
        ("tensor", [3.0], 7),
        {"lr": 0.1},
        "flush",
        "close",
    ]


def test_a_writer_of_torch_gets_what_is_written(tmp_path, scalars):
    from torch.utils.tensorboard import SummaryWriter as TorchWriter

    model = torch.nn.Linear(3, 2)
    state = TrainState(5, model, torch.optim.SGD(model.parameters()))
    writer = SummaryWriter(TorchWriter(str(tmp_path)))
    PublishTrainingProgress(writer)(state, step_info=StepInfo(0.25))
    writer.close()
    assert scalars(tmp_path) == {"train/batch_loss": [(5, 0.25)]}
