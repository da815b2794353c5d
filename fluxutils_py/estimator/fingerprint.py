"""What a fit is of: its settings and its data, by name, for ranks and checkpoints to compare."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fluxutils_py.data import SequenceWindows, SeriesArray
from fluxutils_py.data.digest import digest_arrays, digest_sample, digest_series, digest_weight
from fluxutils_py.estimator.building import build_optimizer
from fluxutils_py.estimator.describing import describe, describe_modules, text
from fluxutils_py.estimator.fit_data import FitData
from fluxutils_py.optim import ChainedOptimizer

NOT_COMPARED = ("params", "initial_lr", "fused", "foreach", "capturable")  # in a group: as device and schedule have it
DETAILS = ("loss.", "model", "the code of")
LISTED = 5  # differences that a message lists


def shared_identity(training: Any) -> dict[str, str]:
    """What ranks that fit together must have in common, as texts by name: all but the details of :func:`identity`.

    What is within a loss or a module may be a rank's own, such as its device or its log.
    """
    return {name: found for name, found in identity(training).items() if not name.startswith(DETAILS)}


def identity(training: Any) -> dict[str, str]:
    """The settings of a fit and the sizes of its data, as texts by name; see :func:`describe`.

    Not of its own: epochs, device, threads, callbacks, verbosity, the weights that the model starts from.
    """
    data, model = training.data, training.step.model
    classes, scale = data.codec.classes, data.codec.scale
    spec = {f.name: getattr(data.spec, f.name) for f in dataclasses.fields(data.spec) if f.name != "epochs"}
    return {
        **{key: found for name, value in spec.items() for key, found in describe(f"spec.{name}", value).items()},
        **describe("loss", data.loss),
        **_sizes(data),
        "scale_target": str(scale is not None),
        "the classes": "none" if classes is None else str(classes.tolist()),
        **describe_modules("model", model),
        **_parameters(model),
        **_describe_optimizer(training.optimizer, training.groups, model),
    }


def requested_identity(training: Any) -> dict[str, str]:
    """As :func:`identity`, with the optimizer as the estimator's arguments say; schedules and hooks change it later."""
    settings, model = training.data.settings, training.step.model
    found = {**identity(training), "random_state": _describe_seed(settings.random_state)}
    if training.resume:
        try:
            asked = build_optimizer(settings.opt, settings.model, model)
        except (TypeError, ValueError):  # it was loaded from a file that does not hold what makes it
            return found
        for name in _describe_optimizer(training.optimizer, training.groups, model):
            del found[name]
        found.update(_describe_optimizer(asked, asked.param_groups, model))
    return found


def sample_digests(data: FitData) -> dict[str, str]:
    """Digests of the corners of the data: enough to see that ranks were each given data of their own."""
    return {
        f"the values of {name} (digest of some)": digest_sample(s, w.segments, places=2) for name, s, w in _arrays(data)
    }


def data_digests(data: FitData) -> dict[str, tuple[str | None, str]]:
    """Digests of the data of a fit: of all values, if they are in memory or in a small file, and of some."""
    found: dict[str, tuple[str | None, str]] = {
        f"the values of {name}": (digest_series(s, w.segments), digest_sample(s, w.segments))
        for name, s, w in _arrays(data)
    }
    for what, windows in _windows(data):
        weight = digest_weight(windows.weight, windows.segments)
        found[f"the values of {what}sample_weight"] = weight, weight or "none"
    scale = None if data.codec.scale is None else digest_arrays(data.codec.scale.mean, data.codec.scale.scale)
    found["the scale of the targets"] = scale, scale or "none"
    return found


def changed_settings(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs between two identities, each as ``name: before -> now``."""
    pairs = {name: (before.get(name, "none"), now.get(name, "none")) for name in {**now, **before}}
    return [f"{name}: {there} -> {here}" for name, (there, here) in pairs.items() if there != here]


def changed_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two digests of data; of data that one did not read whole, in the sample that both took."""
    changed = []
    for name in {**now, **before}:
        (whole, there), (other, here) = before.get(name, (None, "none")), now.get(name, (None, "none"))
        if whole is not None and other is not None:
            there, here = whole, other
        if there != here:
            changed.append(f"{name} (digest): {there} -> {here}")
    return changed


def join_differences(changed: list[str]) -> str:
    """Differences as a list in a sentence, the first few."""
    rest = len(changed) - LISTED
    return ", ".join(changed[:LISTED]) + (f", and {rest} more" if rest > 0 else "")


def _describe_optimizer(optimizer: Any, groups: list[dict[str, Any]], model: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    if isinstance(optimizer, ChainedOptimizer):
        for what, links in (("before", optimizer.before), ("after", optimizer.after)):
            found.update(describe(f"what is chained {what} the optimizer", links))
        optimizer = optimizer.inner
    found["the optimizer"] = type(optimizer).__name__
    at = {id(p): i for i, p in enumerate(model.parameters())}
    for i, group in enumerate(groups):
        where = f" of the optimizer's group {i}" if len(groups) > 1 else ""
        if where:
            found[f"parameters{where}"] = str([at[id(p)] for p in group["params"]])
        for name, value in group.items():
            if name not in NOT_COMPARED:
                found.update(describe(f"{name}{where}", value))
    return found


def _describe_seed(random_state: Any) -> str:
    """A generator has moved on when a fit is tried again: of these, the kind only."""
    plain = random_state is None or isinstance(random_state, numbers.Number)
    return text(random_state) if plain else type(random_state).__name__


def _parameters(model: torch.nn.Module) -> dict[str, str]:
    found = {
        f"parameter {i}": f"{name} {tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' (frozen)'}"
        for i, (name, p) in enumerate(model.named_parameters())
    }
    buffers = {f"buffer {i}": f"{name} {tuple(b.shape)} {b.dtype}" for i, (name, b) in enumerate(model.named_buffers())}
    return {**found, **buffers}


def _windows(data: FitData) -> list[tuple[str, SequenceWindows]]:
    return [("", data.windows), *([] if data.validation is None else [("validation ", data.validation)])]


def _arrays(data: FitData) -> Iterator[tuple[str, SeriesArray, SequenceWindows]]:
    for what, windows in _windows(data):
        for kind, arrays in (("x", windows.x), ("y", windows.y)):
            for i, s in enumerate(arrays):
                yield f"{what}{kind}" + (f"[{i}]" if len(arrays) > 1 else ""), s, windows


def _sizes(data: FitData) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, s, _ in _arrays(data):
        found[f"the shape of {name}"] = str((s.F, s.N, s.T))
        found[f"the dtype of {name}"] = str(s.dtype.newbyteorder("="))
    for what, windows in _windows(data):
        found[f"the starts and lengths of {what}series"] = digest_arrays(
            windows.segments.series, windows.segments.start, windows.segments.length
        )
        found[f"the {what}weights"] = "none" if windows.weight is None else text(windows.weight.scale)
    return found
