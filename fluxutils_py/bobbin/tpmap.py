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
    devices: int | Sequence[Any] = 1,
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
    devices : int or sequence of devices
        The number of threads on the CPU, or torch devices to move tensors to.
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
    if not isinstance(axis_name, str):  # left out
        argtypes, kwargtypes = axis_name, kwargtypes if argtypes is None else argtypes  # type: ignore[assignment]
    if argtypes is None:
        raise TypeError("tpmap needs argtypes, one for each positional argument")
    where = (
        [torch.device("cpu")] * devices
        if isinstance(devices, int)
        else [torch.device(d) for d in devices]
    )
    kwargtypes = dict(kwargtypes or {})
    if not where:
        raise ValueError("tpmap needs at least one device")
    for kind in (*argtypes, *kwargtypes.values()):
        if kind not in ARGTYPES:
            raise ValueError(f"argument type must be one of {', '.join(ARGTYPES)}; got {kind!r}")

    def mapped(*args: Any, **kwargs: Any) -> Any:
        if len(args) != len(argtypes):
            raise TypeError(
                f"expected {len(argtypes)} positional arguments, one per argtype; got {len(args)}"
            )
        if set(kwargs) != set(kwargtypes):
            raise TypeError(
                f"expected keywords {sorted(kwargtypes)}, one per kwargtype; got {sorted(kwargs)}"
            )
        given = [
            _divide_argument(kind, value, where) for kind, value in zip(argtypes, args, strict=True)
        ]
        named = {
            name: _divide_argument(kind, kwargs[name], where) for name, kind in kwargtypes.items()
        }
        with ThreadPoolExecutor(len(where)) as pool:
            calls = [
                pool.submit(
                    f,
                    *(parts[i] for parts in given),
                    **{name: parts[i] for name, parts in named.items()},
                )
                for i in range(len(where))
            ]
            results = [call.result() for call in calls]
        stacked = tree_map(_stack_results, *results)
        return stacked if wrap_return is None else wrap_return(stacked)

    mapped.__name__, mapped.__doc__ = getattr(f, "__name__", "mapped"), inspect.getdoc(f)
    return mapped


def _divide_argument(kind: str, value: Any, where: list[torch.device]) -> list[Any]:
    """Return the part of an argument for each device."""
    n = len(where)
    if kind == "static":
        return [value] * n
    if kind == "rng":
        seeds = torch.randint(2**63 - 1, (n,), generator=value).tolist()
        return [
            torch.Generator(device).manual_seed(seed)
            for device, seed in zip(where, seeds, strict=True)
        ]
    if kind != "broadcast":
        for path, leaf in named_leaves(value):
            shape = tuple(np.shape(leaf))
            if not shape or shape[0] % n or (kind == "thru" and shape[0] != n):
                needed = f"{n} long" if kind == "thru" else f"divisible by the {n} devices"
                raise ValueError(
                    f"{path or 'argument'} has shape {shape}; to {kind} it, its leading axis must "
                    f"be {needed}"
                )
    return [
        tree_map(partial(_part_of_leaf, kind, i, n, device), value)
        for i, device in enumerate(where)
    ]


def _part_of_leaf(kind: str, i: int, n: int, device: torch.device, leaf: Any) -> Any:
    if kind == "thru":
        leaf = leaf[i]
    elif kind == "shard":
        size = len(leaf) // n
        leaf = leaf[i * size : (i + 1) * size]
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf


def _stack_results(*values: Any) -> Any:
    if isinstance(values[0], Tensor):
        return torch.stack([v.to(values[0].device) for v in values])
    return np.stack(values)
