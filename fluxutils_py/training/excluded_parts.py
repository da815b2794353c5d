"""Leave parameters out of checkpoints, with what optimizers keep about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.optim import Optimizer

State = Mapping[str, Any]


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

    def __init__(
        self,
        patterns: Sequence[str],
        tracked: Mapping[str, object],
    ) -> None:
        self.patterns = tuple(patterns)
        self.tracked = tracked
        modules: dict[str, nn.Module] = {}
        if patterns:  # else spare the walk over all parameters
            for name, thing in tracked.items():
                if isinstance(thing, nn.Module):
                    modules[name] = thing
        self._require_fits(modules)
        # By identity: an optimizer knows its parameters, but not their names.
        self.parameters = {
            id(p)
            for name, module in modules.items()
            for key, p in module.named_parameters(remove_duplicate=False)
            if self.fits(name, key)
        }

    def _require_fits(self, modules: Mapping[str, nn.Module]) -> None:
        known: list[str] = []
        for name, module in modules.items():
            known += [f"{name}.{key}" for key in module.state_dict()]
        for pattern in self.patterns:
            if not any(fnmatchcase(full_name, pattern) for full_name in known):
                # a large model has hundreds of names
                shown = ", ".join(known[:4])
                if len(known) > 4:
                    shown += ", ..."
                raise ValueError(
                    f"exclude={pattern!r} fits no parameter or buffer of what is tracked: "
                    f"{shown or 'no module'}; the name begins with that of the module in track(...)"
                )

    def fits(self, name: str, key: str) -> bool:
        """Return whether a part of the module that is tracked as ``name`` is left out."""
        return any(fnmatchcase(f"{name}.{key}", pattern) for pattern in self.patterns)

    def remove(self, name: str, state: State) -> Any:
        """Return the state of a tracked object without what is left out; the state itself does not
        change.
        """
        thing = self.tracked[name]
        if not self.patterns:
            return state
        if isinstance(thing, nn.Module):
            left_out = {key for key in state if self.fits(name, key)}
            return _without(state, left_out)
        if isinstance(thing, Optimizer):
            left_out = self._keys(thing, state)
            return {**state, "state": _without(state["state"], left_out)}
        return state

    def keep(
        self,
        name: str,
        state: State,
        present: State,
    ) -> Any:
        """Return a stored state in which what is left out is as it is now, in the state
        ``present``.
        """
        thing = self.tracked[name]
        if not self.patterns:
            return state
        if not isinstance(thing, nn.Module | Optimizer):
            return state
        # the file may be older than the pattern, and hold what it leaves out
        stored = self.remove(name, state)
        if isinstance(thing, nn.Module):
            excluded = {key: value for key, value in present.items() if self.fits(name, key)}
            return {**stored, **excluded}
        # Optimizers number their parameters: the numbers may differ from those of the stored state.
        now = _parameter_keys(present)
        then = _parameter_keys(state)
        left_out = self._keys(thing, present)
        of_parameters = dict(stored["state"])
        for i, key in enumerate(now):
            if key in left_out and key in present["state"]:
                of_parameters[then[i]] = present["state"][key]
        return {**stored, "state": of_parameters}

    def _keys(self, optimizer: Optimizer, state: State) -> set[Any]:
        """Return the keys, in the state of an optimizer, of parameters that are left out."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # If the numbers differ, torch says so when it loads the state.
        pairs = zip(parameters, _parameter_keys(state), strict=False)
        return {key for p, key in pairs if id(p) in self.parameters}


def _parameter_keys(state: State) -> list[Any]:
    return [key for group in state["param_groups"] for key in group["params"]]


def _without(mapping: State, keys: set[Any]) -> dict[Any, Any]:
    return {key: value for key, value in mapping.items() if key not in keys}
