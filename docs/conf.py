"""How the documentation is built: ``python -m sphinx -W --keep-going docs build/docs``.

The reference is made from the package as it stands. Each public module (the package, its folders, and its files that
list ``__all__``) gets a page in ``api/``, each public name a page of its own, found when the documentation is built; a
name without its entry fails the build.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from sphinx.util import logging

import fluxutils_py

project = "fluxutils_py"
author = copyright = "The fluxutils_py developers"
version = release = fluxutils_py.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "numpydoc"]
templates_path = ["_templates"]
html_theme = "furo"
html_title = "fluxutils_py"
html_show_sourcelink = False
html_copy_source = False
html_static_path: list[str] = []
nitpicky = True
# Raises sections link every class they name; those of other packages have no page here
nitpick_ignore_regex = [("py:.*", r"(?!fluxutils_py).*Error|KeyboardInterrupt|(sklearn|torch|numpy|h5py|enum)\..*")]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autosummary_generate = True
autosummary_ignore_module_all = False
autodoc_typehints = "none"  # docstrings say more: shapes and meanings
autodoc_member_order = "bysource"
numpydoc_show_class_members = False  # autodoc does

# Files that are public only through a folder which re-exports from them
_INTERNAL = {"audience"}


def public_modules() -> Iterator[ModuleType]:
    """The package, its folders, and its files that list what is public."""
    yield fluxutils_py
    for info in pkgutil.iter_modules(fluxutils_py.__path__):
        if info.name.startswith("_") or info.name in _INTERNAL:
            continue
        module = importlib.import_module(f"fluxutils_py.{info.name}")
        if info.ispkg or hasattr(module, "__all__"):
            yield module


def public_names() -> dict[ModuleType, dict[str, str]]:
    """For each public module, its names and where each has its entry: in the first module that offers the object."""
    entries: dict[tuple[str, int], str] = {}
    return {
        module: {
            name: entries.setdefault((name, id(getattr(module, name))), f"{module.__name__}.{name}")
            for name in module.__all__
        }
        for module in public_modules()
    }


NAMES = public_names()
ENTRIES = {entry for names in NAMES.values() for entry in names.values()}


def page(module: ModuleType, names: dict[str, str]) -> str:
    """The page of one public module: what it is, tables of what has its entry here, and links to what has not."""
    here = module.__name__
    lines = [here, "=" * len(here), "", f".. automodule:: {here}", "   :no-members:", "", f".. currentmodule:: {here}"]
    own = [name for name, entry in names.items() if entry == f"{here}.{name}"]
    kinds = {
        "Classes": [name for name in own if inspect.isclass(getattr(module, name))],
        "Functions": [name for name in own if not inspect.isclass(getattr(module, name))],
    }
    for title, members in kinds.items():
        if members:
            lines += ["", f".. rubric:: {title}", "", ".. autosummary::", "   :toctree: names", "   :nosignatures:", ""]
            lines += [f"   {name}" for name in sorted(members, key=str.lower)]
    others = [entry for name, entry in sorted(names.items()) if name not in own]
    if others:
        lines += ["", ".. rubric:: Also here", "", ", ".join(f":py:obj:`~{entry}`" for entry in others)]
    return "\n".join([*lines, ""])


def write(path: Path, text: str) -> None:
    """Leave a file alone that says so already: Sphinx reads again what is newer than its last build."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


API = Path(__file__).parent / "api"
for _module, _names in NAMES.items():
    write(API / f"{_module.__name__}.rst", page(_module, _names))
_expected = {module.__name__ for module in NAMES} | ENTRIES
for _path in API.rglob("*.rst"):
    if _path.stem not in _expected:
        _path.unlink()  # of a name that is gone, from an earlier build


def entry_of(target: str) -> str | None:
    """The entry that a reference means: a path by which a public name is offered, or the bare name."""
    for module, names in NAMES.items():
        for name, entry in names.items():
            for spelling in (f"{module.__name__}.{name}", name):
                if target == spelling or target.startswith(f"{spelling}."):
                    return entry + target.removeprefix(spelling)
    return None


def link(app, env, node, contnode):
    """Follow a reference to a public name from wherever it stands."""
    entry = entry_of(node["reftarget"]) if node.get("refdomain") == "py" else None
    if entry is None:
        return None
    domain = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", entry, node, contnode)


def public_bases(app, name, obj, options, bases):
    """Base classes that a reader can look up: of this package, only those in the reference."""
    ids = {id(getattr(module, name)) for module, names in NAMES.items() for name in names}
    bases[:] = [b for b in bases if not b.__module__.startswith(("fluxutils_py", "typing")) or id(b) in ids] or [object]


def skip(app, kind, name, obj, skip, options):
    """Leave out what scikit-learn and torch alone describe: their text refers to pages that are not here."""
    is_theirs = str(getattr(obj, "__module__", "")).startswith(("sklearn.", "torch."))
    is_bare_forward = name == "forward" and not obj.__doc__  # would be shown with torch's text
    return True if is_theirs or is_bare_forward else None


def complain_of_missing_names(app, env):
    """A public name that has no entry is a warning, which fails the build."""
    for entry in sorted(ENTRIES - set(env.domaindata["py"]["objects"])):
        logging.getLogger(__name__).warning("public name without an entry in the reference: %s", entry)


def setup(app):
    app.connect("autodoc-process-bases", public_bases)
    app.connect("autodoc-skip-member", skip)
    app.connect("missing-reference", link)
    app.connect("env-check-consistency", complain_of_missing_names)
