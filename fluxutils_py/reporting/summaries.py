"""Summaries that a model leaves behind as it computes."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Self
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from fluxutils_py.reporting.writers import render_figure
from fluxutils_py.tree import named_leaves


class Summary:
    """A value that knows how it is published.

    Tensors, detached from the gradient and on their device, and arrays are copied: later changes do not show.
    """

    def __init__(self, value: Any) -> None:
        if isinstance(value, Tensor):
            value = value.detach().clone()
        self.value = value.copy() if isinstance(value, np.ndarray) else value

    def publish(self, writer: Any, tag: str, step: int) -> None:
        """Write it with a writer of this package or of torch."""
        raise NotImplementedError(f"{type(self).__name__} does not define publish(writer, tag, step)")


class ScalarSummary(Summary):
    """A number: a tensor or array of one element, or a Python number.

    >>> ScalarSummary(torch.ones(3, requires_grad=True).mean()).value
    tensor(1.)
    """

    def publish(self, writer: Any, tag: str, step: int) -> None:
        writer.add_scalar(tag, self.value, step)


class ImageSummary(Summary):
    """An image: floats from 0 to 1, or uint8. Its axes are (H, W) or (H, W, C), or as ``dataformats`` says."""

    def __init__(self, image: Any, dataformats: str | None = None) -> None:
        super().__init__(image)
        self.dataformats = "HWC"[: image.ndim] if dataformats is None else dataformats

    def publish(self, writer: Any, tag: str, step: int) -> None:
        writer.add_image(tag, self.value, step, dataformats=self.dataformats)


class MplImageSummary(ImageSummary):
    """A picture by matplotlib, drawn at once, without pyplot or a display.

    Parameters
    ----------
    image : matplotlib Figure, or array of shape (H, W) or (H, W, C)
        An array is drawn with ``imshow``.
    h_paddings, v_paddings : array of shape (W,) and (H,), optional
        Leave out the columns, or rows, at which these are above 0.5.
    with_colorbar : bool
    **options
        For ``imshow``, such as ``cmap``, ``interpolation``, ``aspect``, ``origin``.
    """

    def __init__(
        self, image: Any, h_paddings: Any = None, v_paddings: Any = None, *, with_colorbar: bool = False, **options: Any
    ) -> None:
        if not hasattr(image, "savefig"):
            from matplotlib.figure import Figure

            pixels, image = np.asarray(image), Figure()
            for axis, paddings in ((0, v_paddings), (1, h_paddings)):
                if paddings is not None:
                    pixels = np.compress(np.asarray(paddings) <= 0.5, pixels, axis)
            axes = image.add_subplot()
            drawn = axes.imshow(pixels, **options)
            if with_colorbar:
                image.colorbar(drawn)
        super().__init__(render_figure(image))


class SummaryCollector:
    """What modules have sown since it was last taken, the last of each name."""

    def __init__(self, evaluation: bool) -> None:
        self.evaluation = evaluation
        self._found: dict[tuple[nn.Module, str], Summary] = {}

    def add(self, module: nn.Module, name: str, summary: Summary | Callable[[], Summary]) -> None:
        if not (module.training or self.evaluation):
            return
        if not isinstance(summary, Summary):
            with torch.no_grad():
                summary = summary()
        self._found[module, name] = summary

    def take(self, model: nn.Module) -> dict[str, Summary]:
        """Those of the modules of a model, by path, such as ``"layers/0/mean_output"``. They are kept no longer."""
        found = {}
        for path, module in model.named_modules():
            for key in [k for k in self._found if k[0] is module]:
                found["/".join([*(path.split(".") if path else []), key[1]])] = self._found.pop(key)
        return found

    def __enter__(self) -> Self:
        self._token = _active.set(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        _active.reset(self._token)


_active: ContextVar[SummaryCollector | None] = ContextVar("who collects summaries", default=None)


def active_collector() -> SummaryCollector | None:
    """The innermost :func:`collected_summaries` under way, if there is one."""
    return _active.get()


_missed: WeakSet[nn.Module] = WeakSet()  # which have sown something that nobody collected


def nobody_collected(model: nn.Module | None) -> bool:
    """Whether a model in training has sown summaries that nobody collected; said once."""
    missed = set() if model is None else {m for m in model.modules() if m in _missed}
    _missed.difference_update(missed)
    return bool(missed)


def collected_summaries(*, evaluation: bool = False) -> SummaryCollector:
    """Collect what models :func:`sow`, within ``with collected_summaries() as found:``.

    ``found.take(model)`` gives the summaries by path. Of several that are nested the innermost collects.

    Parameters
    ----------
    evaluation : bool
        Whether modules in evaluation mode are listened to as well: else a validation in between would leave its own.
    """
    return SummaryCollector(evaluation)


def sow(module: nn.Module, name: str, summary: Summary | Callable[[], Summary]) -> None:
    """Leave a summary for whoever collects them; if nobody does, nothing happens.

    Called in ``forward``. Under one name the last one of a step stays.

    Parameters
    ----------
    module : nn.Module
        Which leaves it: its path in the model becomes part of the tag.
    name : str
    summary : Summary, or a callable that makes one
        A callable is called only if somebody collects, without gradients.

    Notes
    -----
    Threads have nobody who collects, so nothing comes of it with ``n_jobs`` above 1.

    Source: ``Module.sow`` of flax, with which bobbin's summaries are recorded.

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
    elif module.training:
        _missed.add(module)


def publish_train_intermediates(writer: Any, tree: Any, step: int, *, prefix: str = "summary/") -> None:
    """Write each summary in a tree, under its path; other leaves are left alone.

    Parameters
    ----------
    writer : Writer
    tree : nested dict, list or tuple
        Such as what ``SummaryCollector.take`` gives.
    step : int
    prefix : str
        Of the tags.

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
