"""Event files as TensorBoard reads them."""

import pytest


@pytest.fixture(scope="session")
def accumulated():
    """``accumulated(folder)``: TensorBoard's own reader, with all that it found."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    everything = dict.fromkeys(accumulator.DEFAULT_SIZE_GUIDANCE, 0)
    return lambda folder: accumulator.EventAccumulator(
        str(folder), size_guidance=everything
    ).Reload()


@pytest.fixture(scope="session")
def scalars(accumulated):
    """``scalars(folder)``: the steps and values of each tag."""

    def read(folder):
        found = accumulated(folder)
        return {
            tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]
        }

    return read
