"""Leave parameters out of checkpoints, with what optimizers keep about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn


class ExcludedParts:
    """What patterns leave out of the state of tracked objects.

    Parameters
    ----------
    patterns : sequence of str
        For the tracked name of a module, then the name in its ``state_dict()``, with the wildcards
        of ``fnmatch``.
    tracked : mapping
        The objects, by name.

    Raises
    ------
    ValueError
        If a pattern fits no parameter or buffer of the modules among them.
    """

    def __init__(self, patterns: Sequence[str], tracked: Mapping[str, Any]) -> None:
        self.patterns = tuple(patterns)
        self.tracked = tracked
        modules = {}
        if patterns:
            modules = {name: m for name, m in tracked.items() if isinstance(m, nn.Module)}
        self._require_fits(modules)
        self.parameters = {
            id(p)
            for name, module in modules.items()
            for key, p in module.named_parameters(remove_duplicate=False)
            if self.fits(name, key)
        }

    def _require_fits(self, modules: Mapping[str, nn.Module]) -> None:
        known = [f"{name}.{key}" for name, module in modules.items() for key in module.state_dict()]
        for pattern in self.patterns:
            if not any(fnmatchcase(full_name, pattern) for full_name in known):
                shown = ", ".join(known[:4]) + ", ..." * (len(known) > 4)
                raise ValueError(
                    f"exclude={pattern!r} fits no parameter or buffer of what is tracked: "
                    f"{shown or 'no module'}; the name begins with that of the module in track(...)"
                )

    def fits(self, name: str, key: str) -> bool:
        """Return whether a part of the module that is tracked as ``name`` is left out."""
        return any(fnmatchcase(f"{name}.{key}", pattern) for pattern in self.patterns)

    def remove(self, name: str, state: Mapping[str, Any]) -> Any:
        """Return the state of a tracked object without what is left out; the state itself does not
        change.
        """
        thing = self.tracked[name]
        if not self.patterns:
            return state
        if isinstance(thing, nn.Module):
            return {key: value for key, value in state.items() if not self.fits(name, key)}
        if isinstance(thing, torch.optim.Optimizer):
            left_out = self._keys(thing, state)
            kept = {key: value for key, value in state["state"].items() if key not in left_out}
            return {**state, "state": kept}
        return state

    def keep(self, name: str, state: Mapping[str, Any], present: Mapping[str, Any]) -> Any:
        """Return a stored state in which what is left out is as it is now, in the state
        ``present``.
        """
        thing = self.tracked[name]
        if not self.patterns or not isinstance(thing, nn.Module | torch.optim.Optimizer):
            return state
        stored = self.remove(name, state)
        if isinstance(thing, nn.Module):
            excluded = {key: value for key, value in present.items() if self.fits(name, key)}
            return {**stored, **excluded}
        # Optimizers number their parameters: the numbers may differ from those of the stored state.
        now = _parameter_keys(present)
        then = _parameter_keys(state)
        left_out = self._keys(thing, present)
        same = {
            then[i]: present["state"][key]
            for i, key in enumerate(now)
            if key in left_out and key in present["state"]
        }
        return {**stored, "state": {**stored["state"], **same}}

    def _keys(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> set[Any]:
        """Return the keys, in the state of an optimizer, of parameters that are left out."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # If the numbers differ, torch says so when it loads the state.
        pairs = zip(parameters, _parameter_keys(state), strict=False)
        return {key for p, key in pairs if id(p) in self.parameters}


def _parameter_keys(state: Mapping[str, Any]) -> list[Any]:
    return [key for group in state["param_groups"] for key in group["params"]]
