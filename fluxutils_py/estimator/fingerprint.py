"""Describe the settings and data of a fit as texts that ranks and checkpoints compare."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fluxutils_py.data.digest import (
    digest_arrays,
    digest_sample,
    digest_series,
    digest_weight,
    named_arrays,
    named_windows,
)
from fluxutils_py.estimator.building import build_optimizer, parameter_places
from fluxutils_py.estimator.fit_data import FitData
from fluxutils_py.estimator.fit_loop import FitLoop
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
# beginnings of the names of what may differ between ranks, such as a device or a log
DETAILS = ("loss.", "model", "the code of")
SHARDS = "the {}series of each rank (sharded=True)"
# left out at these values, as in checkpoints of 0.2.0
NEW_FIELDS = {"max_updates": None, "lr_schedule": None, "gradient": "truncated"}
LISTED = 5  # number of differences in a message


def shared_identity(loop: FitLoop) -> dict[str, str]:
    """Return the part of :func:`identity`, texts by name, that must agree on all ranks of a fit.

    Attributes of a loss or a module may differ between ranks, such as a device or a log.
    """
    return {name: texts for name, texts in identity(loop).items() if not name.startswith(DETAILS)}


def identity(loop: FitLoop) -> dict[str, str]:
    """Return the settings of a fit and the sizes of its data as texts by name; see
    :func:`describe`.

    Leaves out epochs, device, threads, callbacks, verbosity, and the initial weights of the model.
    """
    data = loop.data
    model = loop.model
    classes = data.codec.classes
    scale = data.codec.scale
    spec_texts: dict[str, str] = {}
    for field in fields(data.spec):
        value = getattr(data.spec, field.name)
        is_new = field.name in NEW_FIELDS and value == NEW_FIELDS[field.name]
        if field.name == "lr_schedule" and isinstance(value, tuple):
            spec_texts["spec.lr_schedule.every"], value = str(value[0]), value[1]
        if field.name != "epochs" and not is_new:  # a fit may continue for more epochs
            spec_texts |= describe(f"spec.{field.name}", value)
    return {
        **spec_texts,
        **describe("loss", data.loss),
        **_describe_sizes(data),
        "scale_target": str(scale is not None),
        "the classes": "none" if classes is None else str(classes.tolist()),
        **describe_modules("model", model),
        **_describe_parameters(model),
        **_describe_optimizer(loop.optimizer, loop.groups, model),
    }


def requested_identity(loop: FitLoop) -> dict[str, str]:
    """Return :func:`identity`, which does not depend on the number of ranks.

    The optimizer is as in the arguments, before schedules and hooks change it, and ``batchsize``
    that of all ranks.
    """
    settings = loop.data.settings
    model = loop.model
    seed = settings.random_state
    # of a generator only the type, since a retried fit finds another state
    is_number = seed is None or isinstance(seed, numbers.Number)
    texts = {
        **identity(loop),
        "random_state": text(seed) if is_number else type(seed).__name__,
        "spec.batchsize": text(loop.data.windows.batchsize),
    }
    if loop.resume:
        try:
            requested = build_optimizer(settings.opt, settings.model, model)
        except (TypeError, ValueError):  # loaded from a file without the user's code
            return texts
        for name in _describe_optimizer(loop.optimizer, loop.groups, model):
            # as it is now: a schedule may have changed its rates
            del texts[name]
        texts.update(_describe_optimizer(requested, requested.param_groups, model))
    return texts


def sample_digests(data: FitData) -> dict[str, str]:
    """Return digests of the corners of the data that ranks share.

    They are enough to detect that a rank was given other data.
    """
    return {
        f"the values of {name} (digest of some)": digest_sample(s, w.segments, places=2)
        for name, s, w in named_arrays(data.windows, data.validation)
        if w.shards is None  # with shards, each rank has other data on purpose
    }


def data_digests(data: FitData) -> dict[str, tuple[str | None, str]]:
    """Return two digests per array: of all values, None if in a large file, and of a sample."""
    texts: dict[str, tuple[str | None, str]] = {}
    for name, s, w in named_arrays(data.windows, data.validation):
        rows = w.of_rank(w.segments)
        # of a large file only the sample is read
        texts[f"the values of {name}"] = (digest_series(s, rows), digest_sample(s, rows))
    for part, windows in named_windows(data.windows, data.validation):
        weight = digest_weight(windows.weight, windows.of_rank(windows.segments))
        texts[f"the values of {part}sample_weight"] = (weight, weight or "none")
    scale = data.codec.scale
    digest = None if scale is None else digest_arrays(scale.mean, scale.scale)
    texts["the scale of the targets"] = (digest, digest or "none")
    return texts


def changed_settings(
    before: Mapping[str, str],
    now: Mapping[str, str],
) -> list[str]:
    """List the differences between two identities as ``name: before -> now``."""
    if "spec.schedule_every" in before:
        before = _of_0_2(before)
    # in the order of now, then what only the other has
    pairs = {name: (before.get(name, "none"), now.get(name, "none")) for name in {**now, **before}}
    return [f"{name}: {there} -> {here}" for name, (there, here) in pairs.items() if there != here]


def _of_0_2(texts: Mapping[str, str]) -> dict[str, str]:
    """Return the identity in a checkpoint of 0.2.0 with the names of today."""
    renamed = {
        name.replace("spec.scheduler", "spec.lr_schedule"): value
        for name, value in texts.items()
        if (name, value) != ("spec.scheduler", "None")
    }
    every = renamed.pop("spec.schedule_every")
    if every == "'step'" and "spec.lr_schedule" in renamed:
        renamed["spec.lr_schedule.every"] = "step"
    return renamed


def changed_data(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
) -> list[str]:
    """List the differences between digests of data.

    Samples are compared where one side did not read all values.
    """
    changed = []
    for name in {**now, **before}:
        whole_before, there = before.get(name, (None, "none"))
        whole_now, here = now.get(name, (None, "none"))
        if whole_before is not None and whole_now is not None:
            there = whole_before
            here = whole_now
        if there != here:
            changed.append(f"{name} (digest): {there} -> {here}")
    return changed


def join_differences(changed: list[str]) -> str:
    """Join the first few differences for a message."""
    shown = list(changed[:LISTED])
    rest = len(changed) - LISTED
    if rest > 0:
        shown.append(f"and {rest} more")
    return ", ".join(shown)


def _describe_optimizer(
    optimizer: Optimizer,
    groups: list[dict[str, Any]],
    model: nn.Module,
) -> dict[str, str]:
    texts: dict[str, str] = {}
    if isinstance(optimizer, ChainedOptimizer):
        for place, links in (("before", optimizer.before), ("after", optimizer.after)):
            texts.update(describe(f"what is chained {place} the optimizer", links))
        optimizer = optimizer.inner
    texts["the optimizer"] = type(optimizer).__name__
    # by place, as optimizers do not know the names of parameters
    at = parameter_places(model)
    for i, group in enumerate(groups):
        where = f" of the optimizer's group {i}" if len(groups) > 1 else ""
        if where:
            texts[f"parameters{where}"] = str([at[id(p)] for p in group["params"]])
        for name, value in group.items():
            if name not in NOT_COMPARED:
                texts.update(describe(f"{name}{where}", value))
    return texts


def _describe_parameters(model: nn.Module) -> dict[str, str]:
    texts: dict[str, str] = {}
    for i, (name, p) in enumerate(model.named_parameters()):
        frozen = "" if p.requires_grad else " (frozen)"
        texts[f"parameter {i}"] = f"{name} {tuple(p.shape)} {p.dtype}{frozen}"
    for i, (name, b) in enumerate(model.named_buffers()):
        texts[f"buffer {i}"] = f"{name} {tuple(b.shape)} {b.dtype}"
    return texts


def _describe_sizes(data: FitData) -> dict[str, str]:
    texts: dict[str, str] = {}
    for name, s, w in named_arrays(data.windows, data.validation):
        n = s.N
        t = s.T
        if w.shards is not None:  # the sizes of all ranks together
            n = len(w.shards.all_series)
            t = w.shards.n_steps
        texts[f"the shape of {name}"] = str((s.F, n, t))
        texts[f"the dtype of {name}"] = str(s.dtype.newbyteorder("="))
    for part, windows in named_windows(data.windows, data.validation):
        if windows.shards is not None:
            texts[SHARDS.format(part)] = ", ".join(map(str, windows.shards.counts))
        rows = windows.segments
        texts[f"the starts and lengths of {part}series"] = digest_arrays(
            rows.series, rows.start, rows.length
        )
        weight = windows.weight
        texts[f"the {part}weights"] = "none" if weight is None else text(weight.scale)
    return texts
