"""Call a function for several devices or threads at once, on parts of its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluxutils_py.tree import named_leaves, tree_map

ARGTYPES = ("static", "thru", "broadcast", "shard", "rng")


def tpmap(
    f: Callable[..., Any],
    axis_name: str | Sequence[str],
    argtypes: Sequence[str] | None = None,
    kwargtypes: Mapping[str, str] | None = None,
    *,
    devices: int | Sequence[Any] | None = None,
    wrap_return: Callable[[Any], Any] | None = None,
) -> Callable[..., Any]:
    """Wrap a function so that it runs once per device, each in a separate thread, on a part of the
    arguments.

    Parameters
    ----------
    f : callable
        Returns a tensor, array or number, or nested lists, tuples and dicts of them. It runs in
        several threads at the same time.
    axis_name : str
        Name of the axis of devices. It has no effect, and you can leave it out.
    argtypes : sequence of str
        How to pass each positional argument to device ``i``. ``"static"``: the argument itself.
        ``"broadcast"``: a copy on the device. ``"shard"``: an equal part of its leading axis.
        ``"thru"``: entry ``i`` of its leading axis, whose length is the number of devices.
        ``"rng"``: a generator seeded from the given ``torch.Generator``.
    kwargtypes : mapping of str to str, optional
        The same for keyword arguments, by name.
    devices : int or sequence of devices, optional
        The number of threads on the CPU, or torch devices to move tensors to. None: all GPUs of
        this machine, else the CPU as one device.
    wrap_return : callable, optional
        Applied to the result, whose leading axis is the axis of devices.

    Returns
    -------
    callable
        Takes the arguments of ``f``; results are stacked along a new leading axis.

    Raises
    ------
    TypeError
        When called with arguments that do not match the types.
    ValueError
        If a type is unknown, or the number of devices does not divide a leading axis.

    Notes
    -----
    The calls cannot use collectives among themselves. Source: ``tpmap`` of bobbin, built on
    ``jax.pmap``.

    Examples
    --------
    >>> double = tpmap(lambda w, x: w * x, ["broadcast", "shard"], devices=2)
    >>> double(torch.tensor(2.0), torch.arange(4.0))
    tensor([[0., 2.],
            [4., 6.]])
    """
    if not isinstance(axis_name, str):  # left out: the arguments after it move up
        if argtypes is not None:
            kwargtypes = argtypes  # type: ignore[assignment]
        argtypes = axis_name
    if argtypes is None:
        raise TypeError("tpmap needs argtypes, one for each positional argument")
    if devices is None:
        devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] or ["cpu"]
    if isinstance(devices, int):
        devices = ["cpu"] * devices
    devices = [torch.device(device) for device in devices]
    mapped = _MappedFunction(f, argtypes, dict(kwargtypes or {}), devices, wrap_return)

    def call(*args: Any, **kwargs: Any) -> Any:
        return mapped(*args, **kwargs)

    # a function, not the object itself: it has a name and a docstring, like that of jax.pmap
    call.__name__ = getattr(f, "__name__", "mapped")
    call.__doc__ = inspect.getdoc(f)
    return call


@dataclass(frozen=True)
class _MappedFunction:
    """Calls a function on each device, with its part of the arguments."""

    f: Callable[..., Any]
    argtypes: Sequence[str]
    kwargtypes: Mapping[str, str]
    devices: Sequence[torch.device]
    wrap_return: Callable[[Any], Any] | None

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError("tpmap needs at least one device")
        for argtype in (*self.argtypes, *self.kwargtypes.values()):
            if argtype not in ARGTYPES:
                raise ValueError(
                    f"argument type must be one of {', '.join(ARGTYPES)}; got {argtype!r}"
                )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls = self._calls_of_devices(args, kwargs)
        with ThreadPoolExecutor(len(self.devices)) as pool:
            # all are submitted before the first result is waited for
            futures = [pool.submit(call) for call in calls]
            results = [future.result() for future in futures]
        stacked = tree_map(_stack_results, *results)
        return stacked if self.wrap_return is None else self.wrap_return(stacked)

    def _calls_of_devices(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Callable[[], Any]]:
        """Return a function without arguments for each device."""
        if len(args) != len(self.argtypes):
            raise TypeError(
                f"expected {len(self.argtypes)} positional arguments, one per argtype; got "
                f"{len(args)}"
            )
        if set(kwargs) != set(self.kwargtypes):
            raise TypeError(
                f"expected keywords {sorted(self.kwargtypes)}, one per kwargtype; got "
                f"{sorted(kwargs)}"
            )
        given = [
            _divide_argument(argtype, value, self.devices)
            for argtype, value in zip(self.argtypes, args, strict=True)
        ]
        named = {
            name: _divide_argument(argtype, kwargs[name], self.devices)
            for name, argtype in self.kwargtypes.items()
        }
        calls: list[Callable[[], Any]] = []
        for i in range(len(self.devices)):
            named_parts = {name: parts[i] for name, parts in named.items()}
            calls.append(partial(self.f, *(parts[i] for parts in given), **named_parts))
        return calls


def _divide_argument(argtype: str, value: Any, devices: Sequence[torch.device]) -> list[Any]:
    """Return the part of an argument for each device."""
    n = len(devices)
    if argtype == "static":  # not copied, so it may be anything
        return [value] * n
    if argtype == "rng":
        # one draw from the caller's generator, so that the parts do not depend on thread timing
        seeds = torch.randint(2**63 - 1, (n,), generator=value).tolist()
        seeds_of_devices = zip(devices, seeds, strict=True)
        return [torch.Generator(device).manual_seed(seed) for device, seed in seeds_of_devices]
    if argtype != "broadcast":
        _require_divisible(argtype, value, n)
    return [
        tree_map(partial(_part_of_leaf, argtype, i, n, device), value)
        for i, device in enumerate(devices)
    ]


def _require_divisible(argtype: str, value: object, n: int) -> None:
    """Raise ValueError if a leaf has no part for each of ``n`` devices."""
    # here, because an error in a thread would not name the argument
    for path, leaf in named_leaves(value):
        shape = tuple(np.shape(leaf))
        if argtype == "thru":
            fits = shape[:1] == (n,)
            needed = f"{n} long"
        else:
            fits = bool(shape) and shape[0] % n == 0
            needed = f"divisible by the {n} devices"
        if not fits:
            raise ValueError(
                f"{path or 'argument'} has shape {shape}; to {argtype} it, its leading axis must "
                f"be {needed}"
            )


def _part_of_leaf(argtype: str, i: int, n: int, device: torch.device, leaf: Any) -> Any:
    if argtype == "thru":
        leaf = leaf[i]
    elif argtype == "shard":
        size = len(leaf) // n
        leaf = leaf[i * size : (i + 1) * size]
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf


def _stack_results(*values: Any) -> Any:
    if isinstance(values[0], Tensor):
        # a stacked tensor has one device: that of the first
        return torch.stack([v.to(values[0].device) for v in values])
    return np.stack(values)
