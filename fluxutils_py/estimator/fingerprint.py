"""Describe the settings and data of a fit as texts that ranks and checkpoints compare."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fluxutils_py.data import SequenceWindows, SeriesArray
from fluxutils_py.data.digest import digest_arrays, digest_sample, digest_series, digest_weight
from fluxutils_py.estimator.building import build_optimizer
from fluxutils_py.estimator.fit_data import FitData
from fluxutils_py.nn import Recur
from fluxutils_py.nn.losses import SeqLoss
from fluxutils_py.optim import ChainedOptimizer

NOT_COMPARED = ("params", "initial_lr", "fused", "foreach", "capturable")  # depend on device or schedule
DETAILS = ("loss.", "model", "the code of")
SHARDS = "the {}series of each rank (sharded=True)"
LISTED = 5  # number of differences in a message


def shared_identity(training: Any) -> dict[str, str]:
    """Return the part of :func:`identity`, texts by name, that must agree on all ranks of a fit.

    Attributes of a loss or a module may differ between ranks, such as a device or a log.
    """
    return {name: texts for name, texts in identity(training).items() if not name.startswith(DETAILS)}


def identity(training: Any) -> dict[str, str]:
    """Return the settings of a fit and the sizes of its data as texts by name; see :func:`describe`.

    Leaves out epochs, device, threads, callbacks, verbosity, and the initial weights of the model.
    """
    data, model = training.data, training.step.model
    classes, scale = data.codec.classes, data.codec.scale
    spec = {f.name: getattr(data.spec, f.name) for f in dataclasses.fields(data.spec) if f.name != "epochs"}
    return {
        **{key: texts for name, value in spec.items() for key, texts in describe(f"spec.{name}", value).items()},
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

    The optimizer is as in the arguments, before schedules and hooks change it, and ``batchsize`` that of all ranks.
    """
    settings, model = training.data.settings, training.step.model
    texts = {**identity(training), "random_state": _describe_seed(settings.random_state)}
    texts["spec.batchsize"] = text(training.size.whole)
    if training.resume:
        try:
            requested = build_optimizer(settings.opt, settings.model, model)
        except (TypeError, ValueError):  # loaded from a file without the user code of opt or model
            return texts
        for name in _describe_optimizer(training.optimizer, training.groups, model):
            del texts[name]
        texts.update(_describe_optimizer(requested, requested.param_groups, model))
    return texts


def sample_digests(data: FitData) -> dict[str, str]:
    """Return digests of the corners of the data that ranks share, enough to detect that they were given others."""
    shared = [(name, s, w) for name, s, w in _named_arrays(data) if w.shards is None]
    return {f"the values of {name} (digest of some)": digest_sample(s, w.segments, places=2) for name, s, w in shared}


def data_digests(data: FitData) -> dict[str, tuple[str | None, str]]:
    """Return two digests per array: of all values, None if they lie in a large file, and of a sample."""
    texts: dict[str, tuple[str | None, str]] = {
        f"the values of {name}": (digest_series(s, w.own(w.segments)), digest_sample(s, w.own(w.segments)))
        for name, s, w in _named_arrays(data)
    }
    for what, windows in _named_windows(data):
        weight = digest_weight(windows.weight, windows.own(windows.segments))
        texts[f"the values of {what}sample_weight"] = weight, weight or "none"
    scale = None if data.codec.scale is None else digest_arrays(data.codec.scale.mean, data.codec.scale.scale)
    texts["the scale of the targets"] = scale, scale or "none"
    return texts


def changed_settings(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """List the differences between two identities as ``name: before -> now``."""
    pairs = {name: (before.get(name, "none"), now.get(name, "none")) for name in {**now, **before}}
    return [f"{name}: {there} -> {here}" for name, (there, here) in pairs.items() if there != here]


def changed_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the differences between digests of data; compare samples where one side did not read all values."""
    changed = []
    for name in {**now, **before}:
        (whole, there), (other, here) = before.get(name, (None, "none")), now.get(name, (None, "none"))
        if whole is not None and other is not None:
            there, here = whole, other
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
        for what, links in (("before", optimizer.before), ("after", optimizer.after)):
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
    """Describe a seed; for a generator, which a retried fit finds in another state, only the type."""
    plain = random_state is None or isinstance(random_state, numbers.Number)
    return text(random_state) if plain else type(random_state).__name__


def _describe_parameters(model: torch.nn.Module) -> dict[str, str]:
    texts = {
        f"parameter {i}": f"{name} {tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' (frozen)'}"
        for i, (name, p) in enumerate(model.named_parameters())
    }
    buffers = {f"buffer {i}": f"{name} {tuple(b.shape)} {b.dtype}" for i, (name, b) in enumerate(model.named_buffers())}
    return {**texts, **buffers}


def _named_windows(data: FitData) -> list[tuple[str, SequenceWindows]]:
    return [("", data.windows), *([] if data.validation is None else [("validation ", data.validation)])]


def _named_arrays(data: FitData) -> Iterator[tuple[str, SeriesArray, SequenceWindows]]:
    for what, windows in _named_windows(data):
        for kind, arrays in (("x", windows.x), ("y", windows.y)):
            for i, s in enumerate(arrays):
                yield f"{what}{kind}" + (f"[{i}]" if len(arrays) > 1 else ""), s, windows


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
            windows.segments.series, windows.segments.start, windows.segments.length
        )
        texts[f"the {what}weights"] = "none" if windows.weight is None else text(windows.weight.scale)
    return texts


LIBRARIES = ("torch", "numpy", "fluxutils_py")  # their functions and modules are described by name
PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, torch.dtype, torch.Size)
OF_MODULES = frozenset(vars(nn.Module()))
OF_RECUR = frozenset(("state", "form", "_mark", "_marked"))  # attributes that hold its state


def describe(name: str, value: Any) -> dict[str, str]:
    """Describe a setting and the settings nested in it as texts by name.

    Numbers, strings and containers of them are described by value; tensors and arrays by a digest; user functions by a
    digest of their compiled code, and by their defaults and closures; modules by their class, the code of their
    ``forward``, and the attributes that are settings; other objects by their class and plain attributes.

    Leaves out global variables that a function reads, and possible working memory: lists, mappings and objects in
    closures and in attributes of objects, and tensors in attributes of modules.
    """
    description = _Description()
    description.add(name, value)
    return description.texts


def describe_modules(name: str, module: nn.Module) -> dict[str, str]:
    """Describe a module like :func:`describe`, without the values of parameters and buffers."""
    description = _Description()
    description.add_modules(name, module)
    return description.texts


class _Description:
    """Collects texts by name; ``memory`` says that a container or an object may be working memory."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self._within: list[int] = []  # functions in progress, which may refer to each other

    def add(self, name: str, value: Any, memory: bool = False) -> None:
        if id(value) in self._within:
            return
        self._within.append(id(value))
        try:
            self._add_value(name, value, memory)
        finally:
            self._within.pop()

    def add_modules(self, name: str, module: nn.Module) -> None:
        for path, m in module.named_modules():
            where = f"{name}.{path}" if path else name
            self.texts[where] = type(m).__qualname__
            is_library = _of_library(type(m))
            if not is_library:
                self._add_code(f"{where}.forward", type(m).forward)
            skipped = OF_MODULES | OF_RECUR if isinstance(m, Recur) else OF_MODULES
            for key, value in vars(m).items():
                cache = is_library and key.startswith("_")
                if key not in skipped and not cache and not isinstance(value, Tensor | nn.Module):
                    self.add(f"{where}.{key}", value, memory=not _is_setting(value))

    def _add_value(self, name: str, value: Any, memory: bool) -> None:
        if isinstance(value, PLAIN):
            self.texts[name] = text(value)
        elif isinstance(value, Tensor | np.ndarray):
            array = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
            self.texts[name] = f"{tuple(array.shape)} {array.dtype.newbyteorder('=')} {digest_arrays(array)}"
        elif isinstance(value, functools.partial):
            self.add(name, value.func, memory)
            self._add_each(name, {**dict(enumerate(value.args)), **value.keywords}, memory)
        elif isinstance(value, SeqLoss):
            self.add(name, value.criterion)
        elif isinstance(value, types.MethodType):
            self.add(name, value.__func__, memory)
            self.add(f"{name}.__self__", value.__self__, memory)
        elif isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | np.ufunc):
            self.texts[name] = getattr(value, "__qualname__", repr(value))
            if isinstance(value, types.FunctionType) and not _of_library(value):
                self._add_code(name, value)
        elif isinstance(value, nn.Module):
            self.add_modules(name, value)
            self._add_each(name, dict(value.named_buffers()) | dict(value.named_parameters()), memory)
        elif isinstance(value, tuple):
            self._add_sequence(name, value, memory)
        elif dataclasses.is_dataclass(value):
            self.texts[name] = type(value).__qualname__
            self._add_each(name, {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, True)
        elif not memory:
            self._add_container(name, value)

    def _add_container(self, name: str, value: Any) -> None:
        if isinstance(value, list):
            self._add_sequence(name, value, False)
        elif isinstance(value, set | frozenset):
            self._add_sequence(name, sorted(value, key=repr), False)
        else:
            self.texts[name] = type(value).__qualname__
            self._add_each(name, value if isinstance(value, Mapping) else getattr(value, "__dict__", {}), True)

    def _add_each(self, name: str, values: Mapping[Any, Any], memory: bool) -> None:
        for key, value in values.items():
            self.add(f"{name}.{key}", value, memory)

    def _add_sequence(self, name: str, values: Any, memory: bool) -> None:
        if _all_plain(values):
            self.texts[name] = f"({', '.join(map(text, values))})"
            return
        self.texts[name] = f"{len(values)} things"
        self._add_each(name, dict(enumerate(values)), memory)

    def _add_code(self, name: str, f: Any) -> None:
        code = getattr(f, "__code__", None)
        if code is None:
            return
        self.texts[f"the code of {name}"] = digest_arrays(np.frombuffer(repr(_code_content(code)).encode(), np.uint8))
        self._add_each(name, {**dict(enumerate(f.__defaults__ or ())), **(f.__kwdefaults__ or {})}, True)
        for variable, cell in zip(code.co_freevars, f.__closure__ or (), strict=True):
            try:
                self.add(f"{name}.{variable}", cell.cell_contents, True)
            except ValueError:  # an empty closure cell
                continue


def text(value: Any) -> str:
    """Return a number or string as text, the same for equal values of different types."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return repr(value)


def _code_content(code: types.CodeType) -> tuple[Any, ...]:
    """Return what a function does, without its location or the names of its variables."""
    constants = [_code_content(c) if isinstance(c, types.CodeType) else _sorted_constant(c) for c in code.co_consts]
    return code.co_code, code.co_names, constants, code.co_argcount, code.co_kwonlyargcount


def _sorted_constant(constant: Any) -> Any:
    return sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant


def _of_library(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] in LIBRARIES


def _is_setting(value: Any) -> bool:
    """Whether an attribute of a module is a container of plain values."""
    if not isinstance(value, Mapping | list | set | frozenset):
        return False
    return _all_plain(value.values() if isinstance(value, Mapping) else value)


def _all_plain(values: Iterable[Any]) -> bool:
    return all(isinstance(v, PLAIN) for v in values)
