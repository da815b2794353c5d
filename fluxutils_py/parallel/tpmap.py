"""A function of one device's data, called for all devices at once."""

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
    argtypes: Sequence[str],
    kwargtypes: Mapping[str, str] | None = None,
    *,
    devices: int | Sequence[Any] = 1,
    wrap_return: Callable[[Any], Any] | None = None,
) -> Callable[..., Any]:
    """Have a function called once per device, each in a thread of its own, on a part of the arguments.

    Parameters
    ----------
    f : callable
        Returns a tensor, array or number, or nested lists, tuples and dicts of such. It runs in several threads at a
        time.
    argtypes : sequence of str
        How each positional argument is given to the devices: ``"static"`` as it is; ``"broadcast"`` to each, moved
        there; ``"shard"`` in equal parts of its leading axis; ``"thru"`` entry ``i`` of its leading axis, which is as
        long as there are devices; ``"rng"``, a ``torch.Generator``, as a generator of each device's own, drawn from it.
    kwargtypes : mapping of str to str, optional
        The same for keyword arguments.
    devices : int or sequence of devices
        How many threads on the CPU, or the devices of torch to move tensors to.
    wrap_return : callable, optional
        Of the result, which has a leading axis of devices.

    Returns
    -------
    callable
        Takes the arguments of ``f``; results are stacked along a new leading axis.

    Raises
    ------
    TypeError
        When called with another number of positional arguments, or other keywords, than there are types for.
    ValueError
        If a type is none of these, or a leading axis cannot be divided by the number of devices.

    Notes
    -----
    There are no collectives between the calls. Source: ``tpmap`` of bobbin, over ``jax.pmap``.

    Examples
    --------
    >>> double = tpmap(lambda w, x: w * x, ["broadcast", "shard"], devices=2)
    >>> double(torch.tensor(2.0), torch.arange(4.0))
    tensor([[0., 2.],
            [4., 6.]])
    """
    where = [torch.device("cpu")] * devices if isinstance(devices, int) else [torch.device(d) for d in devices]
    kwargtypes = dict(kwargtypes or {})
    if not where:
        raise ValueError("tpmap needs at least one device")
    for kind in (*argtypes, *kwargtypes.values()):
        if kind not in ARGTYPES:
            raise ValueError(f"argument type must be one of {', '.join(ARGTYPES)}; got {kind!r}")

    def mapped(*args: Any, **kwargs: Any) -> Any:
        if len(args) != len(argtypes):
            raise TypeError(f"expected {len(argtypes)} positional arguments, one per argtype; got {len(args)}")
        if set(kwargs) != set(kwargtypes):
            raise TypeError(f"expected keywords {sorted(kwargtypes)}, one per kwargtype; got {sorted(kwargs)}")
        given = [_divide(kind, value, where) for kind, value in zip(argtypes, args, strict=True)]
        named = {name: _divide(kind, kwargs[name], where) for name, kind in kwargtypes.items()}
        with ThreadPoolExecutor(len(where)) as pool:
            calls = [
                pool.submit(f, *(parts[i] for parts in given), **{name: parts[i] for name, parts in named.items()})
                for i in range(len(where))
            ]
            results = [call.result() for call in calls]
        stacked = tree_map(_stack, *results)
        return stacked if wrap_return is None else wrap_return(stacked)

    mapped.__name__, mapped.__doc__ = getattr(f, "__name__", "mapped"), inspect.getdoc(f)
    return mapped


def _divide(kind: str, value: Any, where: list[torch.device]) -> list[Any]:
    """What each device gets."""
    n = len(where)
    if kind == "static":
        return [value] * n
    if kind == "rng":
        seeds = torch.randint(2**63 - 1, (n,), generator=value).tolist()
        return [torch.Generator(device).manual_seed(seed) for device, seed in zip(where, seeds, strict=True)]
    if kind != "broadcast":
        for path, leaf in named_leaves(value):
            shape = tuple(np.shape(leaf))
            if not shape or shape[0] % n or (kind == "thru" and shape[0] != n):
                needed = f"{n} long" if kind == "thru" else f"divisible by the {n} devices"
                raise ValueError(
                    f"{path or 'argument'} has shape {shape}; to {kind} it, its leading axis must be {needed}"
                )
    return [tree_map(partial(_part, kind, i, n, device), value) for i, device in enumerate(where)]


def _part(kind: str, i: int, n: int, device: torch.device, leaf: Any) -> Any:
    if kind == "thru":
        leaf = leaf[i]
    elif kind == "shard":
        size = len(leaf) // n
        leaf = leaf[i * size : (i + 1) * size]
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf


def _stack(*values: Any) -> Any:
    if isinstance(values[0], Tensor):
        return torch.stack([v.to(values[0].device) for v in values])
    return np.stack(values)
