"""The public names and the defaults of their arguments are those that are noted in
``tests/golden/surface.txt``; after a change that is meant, ``python -m tests.test_surface`` notes
them anew.
"""

import importlib
import inspect
import pkgutil
from pathlib import Path

import fluxutils_py

FILE = Path(__file__).parent / "golden" / "surface.txt"


def describe(value):
    """Names and defaults of the arguments of a function or class."""
    if inspect.isclass(value) and getattr(value.__init__, "__module__", "").startswith("torch."):
        return ""  # torch's own
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parts = []
    for p in signature.parameters.values():
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        default = ""
        if p.default is not p.empty:
            known = p.default is None or isinstance(p.default, bool | int | float | str | tuple)
            default = "=" + (repr(p.default) if known else "...")
        parts.append(star + p.name + default)
    return f"({', '.join(parts)})"


def surface():
    """Each public name of each room, and of the modules beside them, with its arguments."""
    found = []
    modules = [m.name for m in pkgutil.iter_modules(fluxutils_py.__path__, "fluxutils_py.")]
    for module in [fluxutils_py.__name__, *modules]:
        if module.endswith("__main__"):
            continue
        names = getattr(importlib.import_module(module), "__all__", ())
        of_module = importlib.import_module(module)
        for name in sorted(names):
            value = getattr(of_module, name)
            if inspect.ismodule(value) or not callable(value):
                found.append(f"{module}.{name}")
                continue
            found.append(f"{module}.{name}{describe(value)}")
            if inspect.isclass(value):
                for method in sorted(vars(value)):
                    if not method.startswith("_") and inspect.isfunction(vars(value)[method]):
                        of_method = describe(vars(value)[method])
                        found.append(f"{module}.{name}.{method}{of_method}")
    return found


def test_names_and_defaults_are_those_that_are_noted():
    noted = FILE.read_text().splitlines()
    now = surface()
    missing = [line for line in noted if line not in set(now)]
    new = [line for line in now if line not in set(noted)]
    assert not missing, "gone, or other than noted:\n" + "\n".join(missing)
    assert not new, "not noted:\n" + "\n".join(new)


if __name__ == "__main__":
    FILE.write_text("\n".join(surface()) + "\n")
