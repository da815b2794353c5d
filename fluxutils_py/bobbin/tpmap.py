"""Call a function for several devices or threads at once, on parts of its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    on = _torch_devices(devices)
    types: tuple[Any, dict[str, str]] = tuple(argtypes), dict(kwargtypes or {})
    _check_types(types, on)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = _divide_arguments(types, args, kwargs, on)
        with ThreadPoolExecutor(len(on)) as pool:
            # all are submitted before the first result is waited for
            futures = [pool.submit(f, *positional, **named) for positional, named in given]
            results = [future.result() for future in futures]
        stacked = tree_map(_stack_results, *results)
        return stacked if wrap_return is None else wrap_return(stacked)

    call.__name__ = getattr(f, "__name__", "mapped")
    call.__doc__ = inspect.getdoc(f)
    return call


def _torch_devices(devices: int | Sequence[Any] | None) -> list[torch.device]:
    """Return the device of each thread; None: all GPUs, else the CPU."""
    if devices is None:
        devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] or ["cpu"]
    if isinstance(devices, int):
        devices = ["cpu"] * devices
    return [torch.device(device) for device in devices]


def _check_types(types: tuple[Any, dict[str, str]], devices: Sequence[torch.device]) -> None:
    if not devices:
        raise ValueError("tpmap needs at least one device")
    for argtype in (*types[0], *types[1].values()):
        if argtype not in ARGTYPES:
            raise ValueError(f"argument type must be one of {', '.join(ARGTYPES)}; got {argtype!r}")


def _divide_arguments(
    types: tuple[Any, dict[str, str]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    devices: Sequence[torch.device],
) -> list[tuple[list[Any], dict[str, Any]]]:
    """Return positional and keyword arguments for each device."""
    argtypes, kwargtypes = types
    if len(args) != len(argtypes):
        raise TypeError(
            f"expected {len(argtypes)} positional arguments, one per argtype; got {len(args)}"
        )
    if set(kwargs) != set(kwargtypes):
        raise TypeError(
            f"expected keywords {sorted(kwargtypes)}, one per kwargtype; got {sorted(kwargs)}"
        )
    pairs = zip(argtypes, args, strict=True)
    given = [_divide_argument(argtype, value, devices) for argtype, value in pairs]
    named = {k: _divide_argument(kwargtypes[k], value, devices) for k, value in kwargs.items()}
    return [
        ([parts[i] for parts in given], {k: parts[i] for k, parts in named.items()})
        for i in range(len(devices))
    ]


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
