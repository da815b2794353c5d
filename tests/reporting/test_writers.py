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
from matplotlib.figure import Figure

from fluxutils_py.reporting import (
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
    "threads": lambda folder: ThreadedSummaryWriter.open(folder, max_workers=3),
}


@pytest.fixture(params=KINDS)
def opened(request):
    return KINDS[request.param]


def everything(writer, rng):
    """Each method once; what was written."""
    image, values, sound = rng.random((3, 5, 7)), rng.normal(size=(11, 3)), rng.uniform(-1, 1, 50)
    figure = Figure(figsize=(2, 1), dpi=50)
    figure.subplots().plot([1, 3, 2])
    writer.add_scalar("scalar", torch.tensor(0.1, dtype=torch.float64, requires_grad=True), 1)
    writer.add_scalar("scalar", np.float32(0.2), 2, walltime=12.5)
    writer.add_scalars("both", {"a": 1, "b": torch.tensor([2.0])}, 3)
    writer.add_image("image", image, 4)
    writer.add_images("images", torch.tensor(image)[None].expand(4, -1, -1, -1), 4)
    writer.add_figure("figure", figure, 5)
    writer.add_histogram("histogram", torch.tensor(values), 6)
    writer.add_audio("audio", torch.tensor(sound), 7, sample_rate=8000)
    writer.add_text("text", "*one*", 8)
    writer.add_tensor("tensor", torch.arange(6.0).reshape(2, 3), 9)
    writer.add_hparams({"lr": 0.1, "cell": "lstm"}, {"hparam/loss": 0.25}, run_name="hp")
    return image, values, sound


def test_everything_written_is_read_back(opened, tmp_path, rng, accumulated, scalars):
    with opened(tmp_path) as writer:
        image, values, sound = everything(writer, rng)
    found = accumulated(tmp_path)
    assert [(e.step, e.value) for e in found.Scalars("scalar")] == [
        (1, np.float32(0.1)),
        (2, np.float32(0.2)),
    ]
    assert found.Scalars("scalar")[1].wall_time == 12.5
    assert abs(found.Scalars("scalar")[0].wall_time - time.time()) < 600
    assert [scalars(tmp_path / f"both_{name}")["both"] for name in "ab"] == [[(3, 1.0)], [(3, 2.0)]]
    shown = matplotlib.image.imread(io.BytesIO(found.Images("image")[0].encoded_image_string))
    np.testing.assert_allclose(shown, image.transpose(1, 2, 0), atol=1 / 255)
    assert (found.Images("images")[0].height, found.Images("images")[0].width) == (5, 28)
    assert (found.Images("figure")[0].height, found.Images("figure")[0].width) == (50, 100)
    histogram = found.Histograms("histogram")[0].histogram_value
    assert (histogram.min, histogram.max, histogram.num) == (values.min(), values.max(), 33)
    assert histogram.sum == pytest.approx(values.sum(), rel=1e-12)
    audio = found.Audio("audio")[0]
    assert (audio.sample_rate, audio.length_frames) == (8000, 50)
    frames = np.frombuffer(audio.encoded_audio_string[-100:], "<i2")
    np.testing.assert_allclose(frames / 32767, sound, atol=1 / 32767)
    assert found.Tensors("text/text_summary")[0].tensor_proto.string_val == [b"*one*"]
    assert list(found.Tensors("tensor")[0].tensor_proto.float_val) == [0, 1, 2, 3, 4, 5]
    assert scalars(tmp_path / "hp")["hparam/loss"] == [(0, 0.25)]


def test_bobbins_names_are_the_same_methods(opened, tmp_path, rng, accumulated):
    grey, coloured = rng.random((5, 7)), rng.random((5, 7, 3))
    with opened(tmp_path) as writer:
        writer.scalar("scalar", 0.5, 3)
        writer.image("grey", grey, 3)
        writer.image("coloured", torch.tensor(coloured), 3)
        writer.image("batch", np.stack([coloured] * 4), 3, max_outputs=2)
        writer.audio("audio", np.zeros((1, 9)), 3, sample_rate=100)
        writer.histogram("histogram", np.arange(10), 3)
        writer.histogram("coarse", np.arange(10.0), 3, bins=np.array([0.0, 5, 10]))
        writer.text("text", "hello", 3)
        writer.write("tensor", torch.ones(2), 3)
        writer.hparams({"lr": 0.1})
    found = accumulated(tmp_path)
    assert [(e.step, e.value) for e in found.Scalars("scalar")] == [(3, 0.5)]
    for name, expected in {"grey": np.stack([grey] * 3, 2), "coloured": coloured}.items():
        shown = matplotlib.image.imread(io.BytesIO(found.Images(name)[0].encoded_image_string))
        np.testing.assert_allclose(shown, expected, atol=1 / 255)
    assert found.Images("batch")[0].width == 14
    assert found.Audio("audio")[0].sample_rate == 100
    assert found.Histograms("histogram")[0].histogram_value.num == 10
    assert found.Histograms("coarse")[0].histogram_value.bucket == [0, 5, 5]
    assert {"text/text_summary", "tensor"} <= set(found.Tags()["tensors"])
    assert [
        path.name for path in tmp_path.iterdir() if path.is_dir()
    ] == []  # hyper-parameters: here


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
    writer.add_scalar("a", 0.5, 1)
    assert scalars(tmp_path) == {"a": [(1, 0.5)]}
    writer.close()


# -- errors ----------------------------------------------------------------------------------------------------------


def test_nothing_is_written_after_close(opened, tmp_path, scalars, no_thread_stays):
    writer = opened(tmp_path)
    writer.add_scalar("a", 1, 1)
    writer.close()
    writer.close()
    writer.flush()
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the whole message is compared
        writer.add_scalar("a", 2, 2)
    assert str(caught.value) == f"the writer of {tmp_path} is closed; open another to write more"
    assert scalars(tmp_path) == {"a": [(1, 1.0)]}
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.few
def test_a_forked_process_is_told_that_the_writer_is_not_its_own(opened, tmp_path, scalars):
    writer = opened(tmp_path)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        told = "nothing"
        try:
            writer.add_scalar("child", 1, 1)
        except RuntimeError as error:
            told = str(error)
        writer.flush()
        writer.close()
        os.write(writing, told.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    told = os.read(reading, 10000).decode()
    assert told == (
        f"the writer of {tmp_path} belongs to process {os.getpid()}, from which this one was "
        "forked; open another in the process that is to write"
    )
    writer.add_scalar("parent", 1, 1)
    writer.close()
    assert scalars(tmp_path) == {"parent": [(1, 1.0)]}


@pytest.mark.slow
def test_nothing_is_lost_when_a_program_ends_without_close(finalized_python, tmp_path, scalars):
    program = f"""
import numpy as np
from fluxutils_py.reporting import SummaryWriter, ThreadedSummaryWriter
plain, threaded = SummaryWriter({str(tmp_path / "plain")!r}), ThreadedSummaryWriter.open({str(tmp_path / "threaded")!r})
for step in range(500):
    for writer in (plain, threaded):
        writer.add_scalar("a", step, step)
threaded.add_histogram("empty", np.zeros(0), 1)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [finalized_python, "-c", program], capture_output=True, text=True, env=env, timeout=300
    )
    told = f"RuntimeError: summary 'empty' was not written to {tmp_path}/threaded: ValueError: The input has no element."
    assert told in done.stderr
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
            writer.add_scalar("a", step, step)
    assert scalars(tmp_path) == {"a": [(step, float(step)) for step in range(13)]}


class Clock:
    """In place of the module ``time``: it stands still but for sleep."""

    def __init__(self):
        self.now, self.slept = 1000.25, []

    def time(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def test_a_name_that_would_sort_before_the_others_is_not_used(tmp_path, monkeypatch):
    clock, numbers = Clock(), iter([9, 10, 11])
    monkeypatch.setattr(
        "tensorboard.summary.writer.event_file_writer._global_uid.get", lambda: next(numbers)
    )
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time.time", clock.time)
    monkeypatch.setattr("fluxutils_py.reporting.writers.time", clock)
    for _ in range(2):
        SummaryWriter(tmp_path).close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name.split(".")[3] + " " + name.split(".")[-1] for name in names] == [
        "0000001000 9",
        "0000001001 11",
    ]
    assert clock.slept == [0.75]


def test_earlier_events_from_a_step_on_are_hidden(tmp_path, scalars):
    with SummaryWriter(tmp_path) as writer:
        for step in range(5):
            writer.add_scalar("a", step, step)
            writer.add_scalar("b", step, step)
    with SummaryWriter(tmp_path, purge_step=3) as writer:
        writer.add_scalar("a", 30, 3)
    assert scalars(tmp_path) == {
        "a": [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)],
        "b": [(0, 0.0), (1, 1.0), (2, 2.0)],
    }


# -- the others ------------------------------------------------------------------------------------------------------


def test_the_null_writer_does_nothing(tmp_path, monkeypatch, rng):
    monkeypatch.chdir(tmp_path)
    with NullSummaryWriter() as writer:
        everything(writer, rng)
        writer.add_figure("no figure", None, 1)
        writer.flush()
    assert list(tmp_path.iterdir()) == []


def test_a_figure_of_pyplot_is_closed_unless_asked_not_to(tmp_path):
    from matplotlib import pyplot

    backend = pyplot.get_backend()
    with SummaryWriter(tmp_path) as writer:
        for close in (True, False):
            figure = pyplot.figure(figsize=(1, 1))
            canvas = figure.canvas
            writer.add_figure("figure", figure, 1, close=close)
            assert pyplot.fignum_exists(figure.number) is not close
            assert close or figure.canvas is canvas
            pyplot.close(figure)
    assert pyplot.get_backend() == backend


def test_a_relative_directory_is_that_of_the_time_when_the_writer_was_opened(
    tmp_path, monkeypatch, opened, scalars
):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    monkeypatch.chdir(first)
    with opened("runs") as writer:
        monkeypatch.chdir(second)
        writer.add_scalar("loss", 0.5, 1)
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
    ImageSummary(pixels, "CHW").publish(writer, "image", 7)
    assert ("train/batch_loss", 0.25, 5) in writer.calls
    assert ("train/hits", 3.0, 5) in writer.calls
    numbers = "Number of parameters = 8, number of extra variables = 0"
    assert ("trainer/diagnosis/total_num_params", numbers, 5) in writer.calls
    assert writer.calls[-1] == ("image", pixels.numpy().transpose(1, 2, 0).tolist(), 7)


def test_a_writer_with_flax_names_alone_may_be_written_to_by_a_thread():
    """As ``bobbin.ThreadedSummaryWriter(flax_writer)``, with all of flax's names."""
    base = FlaxOnly()
    with ThreadedSummaryWriter(base, wait_on_flush=True) as writer:
        writer.scalar("loss", torch.tensor(0.5), 1)
        writer.text("note", "hello", 2)
        writer.image("grey", np.zeros((1, 2)), 3)
        writer.image("several", np.arange(24.0).reshape(2, 2, 2, 3), 4, max_outputs=1)
        writer.audio("sound", np.array([0.0, 1.0]), 5, sample_rate=8000)
        writer.histogram("weights", np.array([1.0, 2.0]), 6)
        writer.write("tensor", np.array([3.0]), 7)
        writer.hparams({"lr": 0.1})
        writer.flush()
    assert base.calls == [
        ("loss", 0.5, 1),
        ("note", "hello", 2),
        ("grey", [[[0.0], [0.0]]], 3),
        ("several", np.arange(12.0).reshape(1, 2, 2, 3).tolist(), 4),
        ("sound", [[[0.0], [1.0]]], 5, 8000),
        ("weights", [1.0, 2.0], 6),
        ("tensor", [3.0], 7),
        {"lr": 0.1},
        "flush",
        "close",
    ]
