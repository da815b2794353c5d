"""Collect summaries that a model records in its forward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Self
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from fluxutils_py.reporting.writers import render_figure, with_torch_names
from fluxutils_py.tree import named_leaves


class Summary:
    """Base class of values that a writer can publish.

    Tensors are detached and copied on their device, arrays are copied: later changes do not show.
    """

    def __init__(self, value: object) -> None:
        if isinstance(value, Tensor):
            value = value.detach().clone()
        elif isinstance(value, np.ndarray):
            value = value.copy()
        self.value = value

    def publish(self, writer: object, tag: str, step: int) -> None:
        """Write the value with a writer of this package or of torch."""
        raise NotImplementedError(
            f"{type(self).__name__} does not define publish(writer, tag, step)"
        )


class ScalarSummary(Summary):
    """A number: a tensor or array of one element, or a Python number.

    >>> ScalarSummary(torch.ones(3, requires_grad=True).mean()).value
    tensor(1.)
    """

    def publish(self, writer: object, tag: str, step: int) -> None:
        with_torch_names(writer).add_scalar(tag, self.value, step)


class ImageSummary(Summary):
    """An image of floats in 0..1, or uint8, with axes (H, W) or (H, W, C), or as in
    ``dataformats``.
    """

    def __init__(self, image: Any, dataformats: str | None = None) -> None:
        super().__init__(image)
        # an image without an axis of colours is grey
        self.dataformats = "HWC"[: image.ndim] if dataformats is None else dataformats

    def publish(self, writer: object, tag: str, step: int) -> None:
        torch_writer = with_torch_names(writer)
        torch_writer.add_image(tag, self.value, step, dataformats=self.dataformats)


class MplImageSummary(ImageSummary):
    """An image that matplotlib draws at once, without pyplot or a display.

    Parameters
    ----------
    image : matplotlib Figure, or array of shape (H, W) or (H, W, C)
        ``imshow`` draws an array.
    h_paddings, v_paddings : array of shape (W,) and (H,), optional
        Leave out the columns (``h_paddings``) or rows where these are above 0.5.
    with_colorbar : bool
    **options
        Arguments of ``imshow``, such as ``cmap``, ``interpolation``, ``aspect``, ``origin``.
    """

    def __init__(
        self,
        image: Any,
        h_paddings: ArrayLike | None = None,
        v_paddings: ArrayLike | None = None,
        *,
        with_colorbar: bool = False,
        **options: Any,
    ) -> None:
        if not hasattr(image, "savefig"):
            from matplotlib.figure import Figure

            pixels = np.asarray(image)
            # h_paddings has an entry per column
            for axis, paddings in enumerate((v_paddings, h_paddings)):
                if paddings is not None:
                    pixels = np.compress(np.asarray(paddings) <= 0.5, pixels, axis)
            image = Figure()  # not of pyplot, which would keep it
            axes = image.add_subplot()
            drawn = axes.imshow(pixels, **options)
            if with_colorbar:
                image.colorbar(drawn)
        super().__init__(render_figure(image))


class SummaryCollector:
    """Keep the summaries sown since the last ``take``, the latest for each module and name."""

    def __init__(self, evaluation: bool) -> None:
        self.evaluation = evaluation
        self._summaries: dict[tuple[nn.Module, str], Summary] = {}
        # for each summary, the number of summaries before it; for each reader, of those it has seen
        self._order: dict[tuple[nn.Module, str], int] = {}
        self._seen: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._n = 0

    def add(self, module: nn.Module, name: str, summary: Summary | Callable[[], Summary]) -> None:
        if not (module.training or self.evaluation):
            return
        # called only here: a summary may be expensive to compute
        if not isinstance(summary, Summary):
            with torch.no_grad():
                summary = summary()
        self._summaries[module, name] = summary
        self._n += 1
        self._order[module, name] = self._n

    def take(self, model: nn.Module, reader: object = None) -> dict[str, Summary]:
        """Remove and return the summaries of a model's modules, by path, such as
        ``"layers/0/mean_output"``.

        With a ``reader``, return those that it has not got yet, and keep them for other readers.
        """
        seen = 0 if reader is None else self._seen.get(reader, 0)
        taken = {}
        for path, module in model.named_modules():
            folder = path.replace(".", "/") + "/" if path else ""  # the model itself has no path
            for key in [k for k in self._summaries if k[0] is module and self._order[k] > seen]:
                taken[folder + key[1]] = self._summaries[key]
                if reader is None:
                    del self._summaries[key]
        if reader is not None:
            self._seen[reader] = self._n
        return taken

    def __enter__(self) -> Self:
        self._token = _active.set(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _active.reset(self._token)


_active: ContextVar[SummaryCollector | None] = ContextVar("who collects summaries", default=None)


def active_collector() -> SummaryCollector | None:
    """Return the collector of the innermost :func:`collected_summaries` block, or None outside of
    one.
    """
    return _active.get()


# modules that sowed a summary while there was no collector; a model may still be freed
_missed: WeakSet[nn.Module] = WeakSet()


def nobody_collected(model: nn.Module | None) -> bool:
    """Return whether a model sowed summaries that nobody collected since the last call."""
    if model is None:
        return False
    missed = {m for m in model.modules() if m in _missed}
    _missed.difference_update(missed)
    return bool(missed)


def collected_summaries(*, evaluation: bool = False) -> SummaryCollector:
    """Collect the summaries that models :func:`sow`, within ``with collected_summaries() as
    found:``.

    ``found.take(model)`` returns the summaries by path. If blocks are nested, the innermost
    collects.

    Parameters
    ----------
    evaluation : bool
        Whether to collect from modules in evaluation mode, too. False: a validation in between
        leaves no summaries.
    """
    return SummaryCollector(evaluation)


def sow(module: nn.Module, name: str, summary: Summary | Callable[[], Summary]) -> None:
    """Record a summary in ``forward``, for :func:`collected_summaries`; without a collector, do
    nothing.

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
    collector = _active.get()
    if collector is not None:
        collector.add(module, name, summary)
    elif module.training:  # a prediction outside a training loop is no mistake
        _missed.add(module)


def publish_train_intermediates(
    writer: object, tree: object, step: int, *, prefix: str = "summary/"
) -> None:
    """Write each summary in a tree under its path, and ignore other leaves.

    Parameters
    ----------
    writer : Writer
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
    ...     def add_scalar(self, *args):
    ...         print(args)
    >>> publish_train_intermediates(Printer(), {"layers": [{"mean_output": ScalarSummary(0.5)}]}, 7)
    ('summary/layers/0/mean_output', 0.5, 7)
    """
    for path, leaf in named_leaves(tree):
        if isinstance(leaf, Summary):
            leaf.publish(writer, prefix + path, step)
