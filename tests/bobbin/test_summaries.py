"""What modules sow is found under their paths, as it was, and only by those who collect."""

import io
import threading

import matplotlib.image
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import nn

from fluxutils_py.bobbin import (
    ImageSummary,
    MplImageSummary,
    ScalarSummary,
    SummaryWriter,
    collected_summaries,
    publish_train_intermediates,
    sow,
)


class Layer(nn.Module):
    """A linear layer that sows; calls of its summary are counted."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.linear, self.made = nn.Linear(n_in, n_out), 0

    def summary(self, y):
        self.made += 1
        return ScalarSummary(y.mean())

    def forward(self, x):
        y = self.linear(x)
        sow(self, "mean_output", lambda: self.summary(y))
        sow(self, "largest", ScalarSummary(y.max()))
        return y


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(3, 5), nn.Tanh(), Layer(5, 2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        sow(self, "output", ScalarSummary(x.sum()))
        return x


def test_summaries_are_found_under_the_paths_of_their_modules():
    model, x = Model(), torch.randn(7, 3)
    with collected_summaries() as found:
        output = model(x)
        taken = found.take(model)
        assert found.take(model) == {}
    first = model.layers[0].linear(x)
    expected = {
        "output": output.sum(),
        "layers/0/mean_output": first.mean(),
        "layers/0/largest": first.max(),
        "layers/2/mean_output": output.mean(),
        "layers/2/largest": output.max(),
    }
    assert {path: summary.value for path, summary in taken.items()} == expected
    assert not any(summary.value.requires_grad for summary in taken.values())


def test_a_value_is_as_it_was_when_it_was_sown():
    tensor, array = torch.ones(1, requires_grad=True) * 2, np.ones(1)
    kept = ScalarSummary(tensor), ScalarSummary(array)
    tensor.detach().add_(5)
    array += 5
    assert [float(summary.value.item()) for summary in kept] == [2, 1]
    assert not kept[0].value.requires_grad


def test_nothing_is_made_or_kept_if_nobody_collects():
    model = Model()
    model(torch.randn(7, 3))
    assert model.layers[0].made == 0
    with collected_summaries() as found:
        pass
    model(torch.randn(7, 3))
    assert found.take(model) == {}
    assert model.layers[0].made == 0


def test_the_last_of_a_name_stays():
    model, x = Model(), torch.randn(7, 3)
    with collected_summaries() as found:
        model(x)
        model(2 * x)
    assert found.take(model)["layers/0/mean_output"].value == model.layers[0].linear(2 * x).mean()


def test_the_innermost_collects_and_a_failure_ends_it():
    model, x = Model(), torch.randn(7, 3)
    with collected_summaries() as outer:
        with pytest.raises(TypeError), collected_summaries() as inner:
            model(x) + "1"
        assert outer.take(model) == {}
        assert len(inner.take(model)) == 5
        model(x)
    assert len(outer.take(model)) == 5


def test_each_model_is_given_its_own():
    one, two, x = Model(), Model(), torch.randn(7, 3)
    with collected_summaries() as found:
        one(x)
        two(x)
    assert found.take(one)["output"].value == one(x).sum()
    assert found.take(two)["output"].value == two(x).sum()


def test_other_threads_are_not_listened_to():
    model = Model()
    with collected_summaries() as found:
        thread = threading.Thread(target=model, args=(torch.randn(7, 3),))
        thread.start()
        thread.join()
    assert found.take(model) == {}


def test_summaries_of_a_tree_are_published_under_their_paths(tmp_path, rng, accumulated, scalars):
    grey, coloured = torch.rand(5, 7), rng.random((5, 7, 3))
    tree = {
        "layers": [
            {"mean_output": ScalarSummary(torch.tensor(0.5))},
            (ScalarSummary(np.float64(0.25)), 7),
        ],
        "images": {"grey": ImageSummary(grey), "coloured": ImageSummary(coloured)},
        "figure": MplImageSummary(coloured),
        "params": {"weight": torch.ones(3), "none": None},
    }
    with SummaryWriter(tmp_path) as writer:
        publish_train_intermediates(writer, tree, 9)
        publish_train_intermediates(writer, tree["layers"], 10, prefix="")
    assert scalars(tmp_path) == {
        "summary/layers/0/mean_output": [(9, 0.5)],
        "summary/layers/1/0": [(9, 0.25)],
        "0/mean_output": [(10, 0.5)],
        "1/0": [(10, 0.25)],
    }
    found = accumulated(tmp_path)
    assert set(found.Tags()["images"]) == {
        "summary/images/grey",
        "summary/images/coloured",
        "summary/figure",
    }

    def image(tag):
        return matplotlib.image.imread(io.BytesIO(found.Images(tag)[0].encoded_image_string))

    np.testing.assert_allclose(
        image("summary/images/grey"), grey[..., None].expand(-1, -1, 3), atol=1 / 255
    )
    np.testing.assert_allclose(image("summary/images/coloured"), coloured, atol=1 / 255)
    assert image("summary/figure").shape == (480, 640, 3)


@pytest.mark.slow
def test_an_array_is_drawn_without_its_paddings():
    """As in bobbin's tensorboard_test.py."""
    data = np.random.default_rng(0).uniform(size=(17, 11))
    image = MplImageSummary(
        image=data,
        h_paddings=(np.arange(11) >= 7).astype("f4"),
        v_paddings=np.arange(17) >= 11,
        with_colorbar=True,
    )
    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    figure.colorbar(axes.imshow(data[:11, :7]))
    figure.canvas.draw()
    np.testing.assert_array_equal(image.value, np.asarray(figure.canvas.buffer_rgba())[..., :3])
    assert not np.array_equal(image.value, MplImageSummary(data).value)
