"""A call does not wait, what is written is as of the call, in order, and no error is lost."""

import io
import threading
import time

import matplotlib.image
import numpy as np
import pytest
import torch

from fluxutils_py.bobbin import NullSummaryWriter, SummaryWriter, ThreadedSummaryWriter


def test_values_are_as_of_the_call(tmp_path, accumulated):
    gate = threading.Event()

    class Slow(SummaryWriter):
        def _call(self, *args, **options):
            gate.wait(60)
            super()._call(*args, **options)

    scalar, values, image = torch.tensor(1.0), np.zeros(3), torch.zeros(2, 2, 1, dtype=torch.uint8)
    with ThreadedSummaryWriter(Slow(tmp_path)) as writer:
        writer.scalar("scalar", scalar, 1)
        writer.histogram("histogram", values, 1)
        writer.image("image", image, 1)
        scalar += 1
        values += 1
        image += 255
        gate.set()
    found = accumulated(tmp_path)
    (event,) = found.Scalars("scalar")
    assert event.value == 1
    assert found.Histograms("histogram")[0].histogram_value.max == 0
    shown = matplotlib.image.imread(io.BytesIO(found.Images("image")[0].encoded_image_string))
    assert (shown == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("max_workers", [1, 3])
def test_each_tag_is_written_in_order(tmp_path, scalars, max_workers):
    class Uneven(SummaryWriter):
        def _call(self, method, tag, value, step, **options):
            time.sleep(1e-3 * (step % 11 == 0))  # others could overtake it
            super()._call(method, tag, value, step, **options)

    with ThreadedSummaryWriter(Uneven(tmp_path), max_workers) as writer:
        for step in range(100):
            for tag in "abcdefg":
                writer.scalar(tag, step + ord(tag), step)
    expected = {tag: [(step, step + ord(tag)) for step in range(100)] for tag in "abcdefg"}
    assert scalars(tmp_path) == expected


@pytest.mark.parametrize("max_workers", [1, 3])
def test_flush_has_all_on_disk_if_it_waits(tmp_path, scalars, max_workers):
    writer = ThreadedSummaryWriter.open(tmp_path, max_workers, wait_on_flush=True)
    for step in range(50):
        writer.scalar(f"tag {step % 4}", step, step)
    writer.flush()
    assert sum(len(found) for found in scalars(tmp_path).values()) == 50
    writer.close()


def test_flush_does_not_wait_otherwise(tmp_path, scalars):
    gate = threading.Event()

    class Slow(SummaryWriter):
        def flush(self):
            gate.wait(60)
            super().flush()

    writer = ThreadedSummaryWriter(Slow(tmp_path))
    writer.scalar("a", 1, 1)
    writer.flush()
    gate.set()
    writer.close()
    assert scalars(tmp_path) == {"a": [(1, 1.0)]}


@pytest.mark.parametrize("ending", ["flush", "close"])
def test_an_error_of_a_thread_is_raised_by_the_next_flush_or_close(tmp_path, scalars, ending):
    writer = ThreadedSummaryWriter.open(tmp_path, wait_on_flush=True)
    writer.scalar("good", 1, 1)
    writer.histogram("dev/empty", torch.zeros(0), 2)
    writer.histogram("none at all", np.zeros(0), 3)
    writer.scalar("good", 2, 4)
    with pytest.raises(RuntimeError) as caught:
        getattr(writer, ending)()
    assert str(caught.value) == (
        f"summary 'dev/empty' was not written to {tmp_path} (and 1 more): ValueError: The input "
        "has no element."
    )
    assert isinstance(caught.value.__cause__, ValueError)
    writer.close()  # told once
    assert scalars(tmp_path) == {"good": [(1, 1.0), (4, 2.0)]}


def test_an_error_of_closing_is_raised_and_threads_end(tmp_path, no_thread_stays):
    class Broken:
        log_dir = "nowhere"

        def close(self):
            raise OSError("disk full")

    writer = ThreadedSummaryWriter(Broken(), max_workers=2)
    with pytest.raises(RuntimeError) as caught:
        writer.close()
    assert str(caught.value) == "summary close was not written to nowhere: OSError: disk full"
    writer.close()


@pytest.mark.parametrize("max_workers", [0, -1, True])
def test_threads_are_at_least_one(max_workers):
    with pytest.raises(
        (TypeError, ValueError),
        match=f"^max_workers .*positive integer, got {max_workers}$",
    ):
        ThreadedSummaryWriter(NullSummaryWriter(), max_workers)


def test_torchs_own_writer_may_be_the_base(tmp_path, scalars):
    from torch.utils.tensorboard import SummaryWriter as TorchWriter

    with ThreadedSummaryWriter(TorchWriter(str(tmp_path))) as writer:
        writer.scalar("a", 0.5, 1)
        writer.flush()
    assert scalars(tmp_path) == {"a": [(1, 0.5)]}
