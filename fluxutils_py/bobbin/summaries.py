"""Collect summaries that a model records in its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from fluxutils_py.tree import named_leaves


class Summary:
    """A value, and the method of a writer that writes it: "scalar", "image" and so on.

    Tensors are detached and copied on their device, arrays are copied: later changes do not show.
    """

    def __init__(self, method: str, value: Any) -> None:
        if isinstance(value, Tensor):
            value = value.detach().clone()
        elif isinstance(value, np.ndarray):
            value = value.copy()
        self.method = method
        self.value = value

    def publish(self, writer: object, tag: str, step: int) -> None:
        """Write the value with a writer that has flax's methods."""
        getattr(writer, self.method)(tag, self.value, step)


def ScalarSummary(value: object) -> Summary:
    """Return the summary of a number: a tensor or array of one element, or a Python number.

    >>> ScalarSummary(torch.ones(3, requires_grad=True).mean()).value
    tensor(1.)
    """
    return Summary("scalar", value)


def ImageSummary(image: object) -> Summary:
    """Return the summary of an image of floats in 0..1, or uint8, with axes (H, W) or (H, W, C)."""
    return Summary("image", image)


def MplImageSummary(
    image: Any,
    h_paddings: ArrayLike | None = None,
    v_paddings: ArrayLike | None = None,
    *,
    with_colorbar: bool = False,
    **options: Any,
) -> Summary:
    """Return the summary of an image that ``imshow`` of matplotlib draws at once, without pyplot or
    a display.

    For a figure of your own, with a canvas of matplotlib's Agg, call ``figure.canvas.draw()``, and
    take ``ImageSummary(np.asarray(figure.canvas.buffer_rgba())[..., :3])``.

    Parameters
    ----------
    image : array of shape (H, W) or (H, W, C)
    h_paddings, v_paddings : array of shape (W,) and (H,), optional
        Leave out the columns (``h_paddings``) or rows where these are above 0.5.
    with_colorbar : bool
    **options
        Arguments of ``imshow``, such as ``cmap``, ``interpolation``, ``aspect``, ``origin``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    pixels = np.asarray(image)
    # h_paddings has an entry per column
    for axis, paddings in enumerate((v_paddings, h_paddings)):
        if paddings is not None:
            pixels = np.compress(np.asarray(paddings) <= 0.5, pixels, axis)
    figure = Figure()  # not of pyplot, which would keep it
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    drawn = axes.imshow(pixels, **options)
    if with_colorbar:
        figure.colorbar(drawn)
    canvas.draw()
    return ImageSummary(np.asarray(canvas.buffer_rgba())[..., :3])


class SummaryCollector:
    """Keep the summaries sown since the last ``take``, the latest for each module and name."""

    def __init__(self) -> None:
        self.sown: dict[tuple[nn.Module, str], Summary] = {}

    def take(self, model: nn.Module) -> dict[str, Summary]:
        """Remove and return the summaries of a model's modules, by path, such as
        ``"layers/0/mean_output"``.
        """
        taken = {}
        for path, module in model.named_modules():
            for key in [key for key in self.sown if key[0] is module]:
                # the model itself has no path
                taken[f"{path}.".lstrip(".").replace(".", "/") + key[1]] = self.sown.pop(key)
        return taken


# of the innermost block of collected_summaries
active_collector: ContextVar[SummaryCollector | None] = ContextVar("collector", default=None)


@contextmanager
def collected_summaries() -> Iterator[SummaryCollector]:
    """Collect the summaries that models in training mode :func:`sow`, within ``with
    collected_summaries() as found:``.

    ``found.take(model)`` returns the summaries by path. If blocks are nested, the innermost
    collects.
    """
    collector = SummaryCollector()
    token = active_collector.set(collector)
    try:
        yield collector
    finally:
        active_collector.reset(token)


def sow(module: nn.Module, name: str, summary: Summary | Callable[[], Summary]) -> None:
    """Record a summary in ``forward``, for :func:`collected_summaries`; without a collector, or in
    evaluation mode, do nothing.

    A later summary under the same name replaces an earlier one.

    Parameters
    ----------
    module : nn.Module
        The module that records; its path in the model becomes part of the tag.
    name : str
    summary : Summary, or a callable that returns one
        A callable is called, without gradients, only if there is a collector.

    Notes
    -----
    Source: ``Module.sow`` of flax, with which bobbin records summaries.

    Examples
    --------
    >>> class Loud(nn.Linear):
    ...     def forward(self, x):
    ...         y = super().forward(x)
    ...         sow(self, "mean_output", lambda: ScalarSummary(y.mean()))
    ...         return y
    >>> model = nn.Sequential(nn.ReLU(), Loud(3, 2))
    >>> with collected_summaries() as found:
    ...     y = model(torch.randn(5, 3))
    >>> list(found.take(model))
    ['1/mean_output']
    """
    collector = active_collector.get()
    if collector is None or not module.training:
        return
    if not isinstance(summary, Summary):
        with torch.no_grad():
            summary = summary()
    collector.sown[module, name] = summary


def publish_train_intermediates(
    writer: object, tree: object, step: int, *, prefix: str = "summary/"
) -> None:
    """Write each summary in a tree under its path, and ignore other leaves.

    Parameters
    ----------
    writer : writer with flax's methods
    tree : nested dict, list or tuple
        For instance the result of ``SummaryCollector.take``.
    step : int
    prefix : str
        Prefix of the tags.

    Notes
    -----
    Source: bobbin.

    Examples
    --------
    >>> class Printer:
    ...     def scalar(self, *args):
    ...         print(args)
    >>> publish_train_intermediates(Printer(), {"layers": [{"mean_output": ScalarSummary(0.5)}]}, 7)
    ('summary/layers/0/mean_output', 0.5, 7)
    """
    for path, leaf in named_leaves(tree):
        if isinstance(leaf, Summary):
            leaf.publish(writer, prefix + path, step)
