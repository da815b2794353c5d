"""A call does not wait, what is written is as of the call, in order, and no error is lost."""

import io
import threading
import time

import matplotlib.image
import numpy as np
import pytest
import torch

from fluxutils_py.bobbin import SummaryWriter, ThreadedSummaryWriter


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
def test_each_tag_is_written_in_order(tmp_path, scalars):
    class Uneven(SummaryWriter):
        def _call(self, method, tag, value, step, **options):
            time.sleep(1e-3 * (step % 11 == 0))  # others could overtake it
            super()._call(method, tag, value, step, **options)

    with ThreadedSummaryWriter(Uneven(tmp_path), 3) as writer:
        for step in range(100):
            for tag in "abcdefg":
                writer.scalar(tag, step + ord(tag), step)
    expected = {tag: [(step, step + ord(tag)) for step in range(100)] for tag in "abcdefg"}
    assert scalars(tmp_path) == expected


def test_flush_has_all_on_disk(tmp_path, scalars):
    writer = ThreadedSummaryWriter.open(tmp_path, 3, wait_on_flush=True)
    for step in range(50):
        writer.scalar(f"tag {step % 4}", step, step)
    writer.flush()
    assert sum(len(found) for found in scalars(tmp_path).values()) == 50
    writer.close()


@pytest.mark.parametrize("ending", ["flush", "close"])
def test_the_first_error_of_the_thread_is_raised_once(tmp_path, scalars, no_thread_stays, ending):
    writer = ThreadedSummaryWriter.open(tmp_path)
    writer.scalar("good", 1, 1)
    writer.histogram("dev/empty", torch.zeros(0), 2)
    writer.scalar("good", 2, 4)
    with pytest.raises(ValueError, match="The input has no element"):
        getattr(writer, ending)()
    writer.close()
    assert scalars(tmp_path) == {"good": [(1, 1.0), (4, 2.0)]}
