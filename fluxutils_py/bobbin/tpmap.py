"""Call a function for several devices or threads at once, on parts of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluxutils_py.tree import split_leading_axis, tree_map, unshard


def tpmap(
    f: Callable[..., Any],
    axis_name: str,
    argtypes: Sequence[str],
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
        Name of the axis of devices. It has no effect.
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
    TypeError, ValueError
        When called with arguments that do not match the types, an unknown type, or a leading axis
        that does not fit the number of devices.

    Notes
    -----
    The calls cannot use collectives among themselves. Source: ``tpmap`` of bobbin, built on
    ``jax.pmap``.

    Examples
    --------
    >>> double = tpmap(lambda w, x: w * x, "batch", ["broadcast", "shard"], devices=2)
    >>> double(torch.tensor(2.0), torch.arange(4.0))
    tensor([[0., 2.],
            [4., 6.]])
    """
    named_types = dict(kwargtypes or {})
    if devices is None:
        devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] or ["cpu"]
    on = ["cpu"] * devices if isinstance(devices, int) else devices

    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) != len(argtypes) or kwargs.keys() != named_types.keys():
            raise TypeError(
                f"expected {len(argtypes)} positional arguments and the keywords {[*named_types]}, "
                f"got {len(args)} and {[*kwargs]}"
            )
        types = [*argtypes, *(named_types[name] for name in kwargs)]
        values = [*args, *kwargs.values()]
        parts = [_divide(kind, value, on) for kind, value in zip(types, values, strict=True)]

        def call_one(*own: Any) -> Any:
            return f(*own[: len(args)], **dict(zip(kwargs, own[len(args) :], strict=True)))

        with ThreadPoolExecutor(len(on)) as pool:
            stacked = tree_map(_stack_results, *pool.map(call_one, *parts))
        return stacked if wrap_return is None else wrap_return(stacked)

    return call


def _divide(argtype: str, value: Any, devices: Sequence[Any]) -> list[Any]:
    """Return the part of an argument for each device."""
    n = len(devices)
    if argtype == "static":  # not copied, so it may be anything
        return [value] * n
    if argtype == "rng":
        # drawn from the caller's generator, so that the parts do not depend on thread timing
        seeds = torch.randint(2**63 - 1, (n,), generator=value).tolist()
        pairs = zip(devices, seeds, strict=True)
        return [torch.Generator(device).manual_seed(seed) for device, seed in pairs]
    if argtype == "broadcast":
        parts = [value] * n
    elif argtype == "shard":
        parts = unshard(split_leading_axis(n, value, split_group_name="devices"))
    elif argtype == "thru":
        parts = unshard(value)
    else:
        raise ValueError(f"an argument is static, broadcast, shard, thru or rng, not {argtype!r}")
    if len(parts) != n:
        raise ValueError(f"an argument of {len(parts)} rows does not go thru {n} devices")
    return [
        tree_map(partial(_move, device), part) for device, part in zip(devices, parts, strict=True)
    ]


def _move(device: Any, leaf: Any) -> Any:
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf


def _stack_results(*values: Any) -> Any:
    if isinstance(values[0], Tensor):
        # a stacked tensor has one device: that of the first
        return torch.stack([v.to(values[0].device) for v in values])
    return np.stack(values)
