"""Describe the settings and data of a fit as texts that ranks and checkpoints compare."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fluxutils_py.data import SequenceWindows, SeriesArray
from fluxutils_py.data.digest import (
    digest_arrays,
    digest_sample,
    digest_series,
    digest_weight,
)
from fluxutils_py.estimator.building import build_optimizer
from fluxutils_py.estimator.fit_data import FitData
from fluxutils_py.optim import ChainedOptimizer
from fluxutils_py.training.descriptions import (
    describe,
    describe_modules,
    text,
)

# These depend on the device or the schedule.
NOT_COMPARED = (
    "params",
    "initial_lr",
    "fused",
    "foreach",
    "capturable",
)
DETAILS = ("loss.", "model", "the code of")
SHARDS = "the {}series of each rank (sharded=True)"
LISTED = 5  # number of differences in a message


def shared_identity(training: Any) -> dict[str, str]:
    """Return the part of :func:`identity`, texts by name, that must agree on all ranks of a fit.

    Attributes of a loss or a module may differ between ranks, such as a device or a log.
    """
    return {
        name: texts for name, texts in identity(training).items() if not name.startswith(DETAILS)
    }


def identity(training: Any) -> dict[str, str]:
    """Return the settings of a fit and the sizes of its data as texts by name; see
    :func:`describe`.

    Leaves out epochs, device, threads, callbacks, verbosity, and the initial weights of the model.
    """
    data = training.data
    model = training.step.model
    classes = data.codec.classes
    scale = data.codec.scale
    spec_texts: dict[str, str] = {}
    for field in dataclasses.fields(data.spec):
        if field.name != "epochs":  # a fit may continue for more of them
            spec_texts |= describe(f"spec.{field.name}", getattr(data.spec, field.name))
    return {
        **spec_texts,
        **describe("loss", data.loss),
        **_describe_sizes(data),
        "scale_target": str(scale is not None),
        "the classes": "none" if classes is None else str(classes.tolist()),
        **describe_modules("model", model),
        **_describe_parameters(model),
        **_describe_optimizer(training.optimizer, training.groups, model),
    }


def requested_identity(training: Any) -> dict[str, str]:
    """Return :func:`identity`, which does not depend on the number of ranks.

    The optimizer is as in the arguments, before schedules and hooks change it, and ``batchsize``
    that of all ranks.
    """
    settings = training.data.settings
    model = training.step.model
    texts = {
        **identity(training),
        "random_state": _describe_seed(settings.random_state),
    }
    texts["spec.batchsize"] = text(training.size.whole)
    if training.resume:
        try:
            requested = build_optimizer(settings.opt, settings.model, model)
        except (
            TypeError,
            ValueError,
        ):  # loaded from a file without the user code of opt or model
            return texts
        for name in _describe_optimizer(training.optimizer, training.groups, model):
            del texts[name]
        texts.update(_describe_optimizer(requested, requested.param_groups, model))
    return texts


def sample_digests(data: FitData) -> dict[str, str]:
    """Return digests of the corners of the data that ranks share.

    They are enough to detect that a rank was given other data.
    """
    shared = [(name, s, w) for name, s, w in _named_arrays(data) if w.shards is None]
    return {
        f"the values of {name} (digest of some)": digest_sample(s, w.segments, places=2)
        for name, s, w in shared
    }


def data_digests(data: FitData) -> dict[str, tuple[str | None, str]]:
    """Return two digests per array: of all values, None if in a large file, and of a sample."""
    texts: dict[str, tuple[str | None, str]] = {
        f"the values of {name}": (
            digest_series(s, w.own(w.segments)),
            digest_sample(s, w.own(w.segments)),
        )
        for name, s, w in _named_arrays(data)
    }
    for what, windows in _named_windows(data):
        weight = digest_weight(windows.weight, windows.own(windows.segments))
        texts[f"the values of {what}sample_weight"] = (
            weight,
            weight or "none",
        )
    scale = (
        None
        if data.codec.scale is None
        else digest_arrays(data.codec.scale.mean, data.codec.scale.scale)
    )
    texts["the scale of the targets"] = scale, scale or "none"
    return texts


def changed_settings(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """List the differences between two identities as ``name: before -> now``."""
    pairs = {name: (before.get(name, "none"), now.get(name, "none")) for name in {**now, **before}}
    return [f"{name}: {there} -> {here}" for name, (there, here) in pairs.items() if there != here]


def changed_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the differences between digests of data.

    Samples are compared where one side did not read all values.
    """
    changed = []
    for name in {**now, **before}:
        whole_before, there = before.get(name, (None, "none"))
        whole_now, here = now.get(name, (None, "none"))
        if whole_before is not None and whole_now is not None:
            there, here = whole_before, whole_now
        if there != here:
            changed.append(f"{name} (digest): {there} -> {here}")
    return changed


def join_differences(changed: list[str]) -> str:
    """Join the first few differences for a message."""
    rest = len(changed) - LISTED
    return ", ".join(changed[:LISTED]) + (f", and {rest} more" if rest > 0 else "")


def _describe_optimizer(optimizer: Any, groups: list[dict[str, Any]], model: Any) -> dict[str, str]:
    texts: dict[str, str] = {}
    if isinstance(optimizer, ChainedOptimizer):
        for what, links in (
            ("before", optimizer.before),
            ("after", optimizer.after),
        ):
            texts.update(describe(f"what is chained {what} the optimizer", links))
        optimizer = optimizer.inner
    texts["the optimizer"] = type(optimizer).__name__
    at = {id(p): i for i, p in enumerate(model.parameters())}
    for i, group in enumerate(groups):
        where = f" of the optimizer's group {i}" if len(groups) > 1 else ""
        if where:
            texts[f"parameters{where}"] = str([at[id(p)] for p in group["params"]])
        for name, value in group.items():
            if name not in NOT_COMPARED:
                texts.update(describe(f"{name}{where}", value))
    return texts


def _describe_seed(random_state: Any) -> str:
    """Describe a seed; of a generator only the type, since a retried fit finds another state."""
    plain = random_state is None or isinstance(random_state, numbers.Number)
    return text(random_state) if plain else type(random_state).__name__


def _describe_parameters(model: torch.nn.Module) -> dict[str, str]:
    texts = {
        f"parameter {i}": f"{name} {tuple(p.shape)} {p.dtype}"
        + ("" if p.requires_grad else " (frozen)")
        for i, (name, p) in enumerate(model.named_parameters())
    }
    buffers = {
        f"buffer {i}": f"{name} {tuple(b.shape)} {b.dtype}"
        for i, (name, b) in enumerate(model.named_buffers())
    }
    return {**texts, **buffers}


def _named_windows(data: FitData) -> list[tuple[str, SequenceWindows]]:
    return [
        ("", data.windows),
        *([] if data.validation is None else [("validation ", data.validation)]),
    ]


def _named_arrays(
    data: FitData,
) -> Iterator[tuple[str, SeriesArray, SequenceWindows]]:
    for what, windows in _named_windows(data):
        for kind, arrays in (("x", windows.x), ("y", windows.y)):
            for i, s in enumerate(arrays):
                yield (
                    f"{what}{kind}" + (f"[{i}]" if len(arrays) > 1 else ""),
                    s,
                    windows,
                )


def _describe_sizes(data: FitData) -> dict[str, str]:
    texts: dict[str, str] = {}
    for name, s, w in _named_arrays(data):
        n, t = (s.N, s.T) if w.shards is None else (len(w.shards.whole), w.shards.n_steps)
        texts[f"the shape of {name}"] = str((s.F, n, t))
        texts[f"the dtype of {name}"] = str(s.dtype.newbyteorder("="))
    for what, windows in _named_windows(data):
        if windows.shards is not None:
            texts[SHARDS.format(what)] = ", ".join(map(str, windows.shards.counts))
        texts[f"the starts and lengths of {what}series"] = digest_arrays(
            windows.segments.series,
            windows.segments.start,
            windows.segments.length,
        )
        texts[f"the {what}weights"] = (
            "none" if windows.weight is None else text(windows.weight.scale)
        )
    return texts
