"""What is a run of a tracker, and what trackers are sent."""

import re

import mlflow
import numpy as np
import pytest

from fluxutils_py.reporting.track import TrackerWriter
from fluxutils_py.reporting.trackers import as_tracker


class Kept:
    """A tracker that remembers."""

    def __init__(self):
        self.images = {}
        self.numbers = []

    def image(self, tag, image, step):
        self.images[tag] = image

    def scalars(self, values, step, seconds):
        self.numbers.append((step, values))


def test_images_of_any_form_are_bytes_with_channels_last():
    kept = Kept()
    writer = TrackerWriter(kept)
    picture = np.random.default_rng(0).random((3, 4, 5)).astype("f4")  # (C, H, W)
    writer.add_image("first", picture, 1)
    expected = (picture.transpose(1, 2, 0) * 255).astype("u1")
    np.testing.assert_array_equal(kept.images["first"], expected)
    writer.image("grey", picture[0], 1)
    np.testing.assert_array_equal(kept.images["grey"], expected[..., :1].repeat(3, 2))
    writer.add_images("both", np.stack([picture, picture]), 1)
    np.testing.assert_array_equal(kept.images["both"], np.concatenate([expected, expected], 1))


def test_numbers_of_a_step_go_together_and_what_is_there_is_left_out():
    kept = Kept()
    with TrackerWriter(kept, offset=10, written={"a": 12}) as writer:
        writer.add_scalar("a", 1.0, 2)
        writer.add_scalar("b", np.float32(2.0), 2)
        writer.add_scalars("c", {"x": 3, "y": "no number"}, 2)
        writer.add_scalar("a", 4.0, 3)
        with pytest.warns(UserWarning, match="add_histogram"):
            writer.add_histogram("h", [1, 2], 3)
        writer.add_histogram("h", [1, 2], 4)
    assert kept.numbers == [(12, {"b": 2.0, "c/x": 3.0}), (13, {"a": 4.0})]


@pytest.mark.slow
def test_names_that_mlflow_refuses_are_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient((tmp_path / "runs").as_uri())
    run_id = client.create_run("0").info.run_id
    tracker = as_tracker(client, run_id)
    tracker.parameters({f"p({i})": i for i in range(150)})
    tracker.scalars({f"a/b[{i}]": i for i in range(1200)}, 3, 0.0)
    data = client.get_run(run_id).data
    assert data.params["p_149_"] == "149"
    assert len(data.params) == 150
    assert len(data.metrics) == 1200
    assert all(re.fullmatch(r"a/b_\d+_", name) for name in data.metrics)
    assert tracker.last_step() == 3
