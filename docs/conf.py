"""How the documentation is built: ``python -m sphinx -W --keep-going docs build/docs``.

The reference is made from the package as it stands. Each public module (the package, its folders,
and its files that list ``__all__``) gets a page in ``api/``, each public name a page of its own,
found when the documentation is built; a name without its entry fails the build.
"""

import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from docutils import nodes
from sphinx import addnodes
from sphinx.util import logging

import fluxutils_py

sys.path.insert(0, str(Path(__file__).parent))  # Sphinx does not
import code_links

project = "fluxutils_py"
author = copyright = "The fluxutils_py developers"
version = release = fluxutils_py.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "numpydoc"]
html_theme = "furo"
html_title = "fluxutils_py"
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
nitpicky = True
# Raises sections link every class they name; those of other packages have no page here
nitpick_ignore_regex = [
    ("py:.*", r"(?!fluxutils_py).*Error|KeyboardInterrupt|(sklearn|torch|numpy|h5py|enum)\..*"),
    # what a name of bobbin is an alias of
    ("py:class", r"fluxutils_py\.training\.triggers\.AtSteps"),
]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autosummary_generate = False
autodoc_typehints = "none"  # docstrings say more: shapes and meanings
autodoc_member_order = "bysource"
numpydoc_show_class_members = False  # autodoc does

# Files that are public only through a folder which re-exports from them
_INTERNAL = {"fluxutils_py.terminal"}


def public_modules() -> Iterator[ModuleType]:
    """The package, its folders, and its files that list what is public."""
    yield fluxutils_py
    for info in pkgutil.walk_packages(fluxutils_py.__path__, "fluxutils_py."):
        if "._" not in info.name:
            module = importlib.import_module(info.name)
            if hasattr(module, "__all__") and info.name not in _INTERNAL:
                yield module


def public_names() -> dict[ModuleType, dict[str, str]]:
    """For each public module, its names and where each has its entry: in the first module that
    offers the object.
    """
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


# What stands in a class for its users although another class wrote it; not what these base classes
# bring
FOREIGN = "BaseEstimator BaseException ClassifierMixin Enum Module Optimizer RegressorMixin TransformerMixin ndarray tuple"


def module_page(module: ModuleType, names: dict[str, str]) -> str:
    """What a module is, tables of what has its entry there, and links to what has not."""
    here = module.__name__
    own = sorted(
        (name for name, entry in names.items() if entry == f"{here}.{name}"), key=str.lower
    )
    classes = [name for name in own if inspect.isclass(getattr(module, name))]
    lines = [
        here,
        "=" * len(here),
        "",
        f".. automodule:: {here}",
        "   :no-members:",
        "",
        f".. currentmodule:: {here}",
    ]
    for title, members in {
        "Classes": classes,
        "Functions": [n for n in own if n not in classes],
    }.items():
        if members:
            lines += ["", f".. rubric:: {title}", "", ".. autosummary::", "   :nosignatures:", ""]
            lines += [f"   {name}" for name in members]
    others = [entry for name, entry in sorted(names.items()) if name not in own]
    if others:
        lines += [
            "",
            ".. rubric:: Also here",
            "",
            ", ".join(f":py:obj:`~{entry}`" for entry in others),
        ]
    return "\n".join([*lines, ""])


def shown_bases(cls: type) -> list[type]:
    """Base classes that a reader can look up: of this package, only those in the reference."""
    public = {id(getattr(module, name)) for module, names in NAMES.items() for name in names}
    within = ("fluxutils_py", "typing", "collections")
    found = [b for b in cls.__bases__ if b is not object]
    return [b for b in found if id(b) in public or not b.__module__.startswith(within)]


def name_page(entry: str) -> str:
    """The entry of a class or function; not in the navigation, which would be as long on every
    page.
    """
    module, _, name = entry.rpartition(".")
    thing = getattr(importlib.import_module(module), name)
    lines = [":orphan:", "", name, "=" * len(name), "", f"Of :py:mod:`{module}`.", ""]
    lines += [f".. currentmodule:: {module}", ""]
    if inspect.isclass(thing):
        lines += [
            f".. autoclass:: {name}",
            "   :members:",
            f"   :inherited-members: {', '.join(FOREIGN.split())}",
        ]
        lines += ["   :show-inheritance:"] * bool(shown_bases(thing))
    else:
        lines += [f".. autofunction:: {name}"]
    return "\n".join([*lines, ""])


def write_reference(folder: Path) -> None:
    """Write pages that have changed, since Sphinx reads those again, and remove those of names that
    are gone.
    """
    pages = {
        folder / f"{module.__name__}.rst": module_page(module, names)
        for module, names in NAMES.items()
    }
    pages |= {folder / "names" / f"{entry}.rst": name_page(entry) for entry in ENTRIES}
    (folder / "names").mkdir(parents=True, exist_ok=True)
    for path in set(folder.rglob("*.rst")) - set(pages):
        path.unlink()
    for path, text in pages.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


write_reference(Path(__file__).parent / "api")


# What a reference may say, and where it leads: the path of a public name in any module that offers
# it, or its bare name
MEANT: dict[str, str] = {}
for _module, _names in NAMES.items():
    for _name, _entry in _names.items():
        MEANT.setdefault(f"{_module.__name__}.{_name}", _entry)
        MEANT.setdefault(_name, _entry)


def entry_of(target: str) -> str | None:
    """The entry that a reference means, a class's member by way of the class; None for other
    things.
    """
    if target in MEANT:
        return MEANT[target]
    owner, _, member = target.rpartition(".")
    return f"{MEANT[owner]}.{member}" if owner in MEANT else None


def link(app, env, node, contnode):
    """Follow a reference to a public name from wherever it stands."""
    entry = entry_of(node["reftarget"]) if node.get("refdomain") == "py" else None
    if entry is None:
        return None

    def to(target):
        return env.get_domain("py").resolve_xref(
            env, node["refdoc"], app.builder, "obj", target, node, contnode
        )

    found = to(entry)
    if found is None and not node["refdoc"].startswith(
        "api/"
    ):  # a field of a dataclass, say, which has no entry
        found = to(entry.rpartition(".")[0])
    return found


def link_names(app, doctree):
    """Have code in the pages that is a public name, ``Estimator.fit`` or ``reset(model)``, lead to
    its entry.

    Left alone is code that is a link already, and where names are of other systems: in the first
    column of tables, and after such a system's name.
    """
    if app.env.docname.startswith("api/"):
        return
    for code in list(doctree.findall(nodes.literal)):
        target = code_links.named_target(code.astext(), _text_before(code))
        first = nodes.entry in map(type, _parents(code)) and _column(code) == 0
        if (
            target
            and not first
            and not isinstance(code.parent, nodes.reference)
            and entry_of(target)
        ):
            options = {
                "refdomain": "py",
                "reftype": "obj",
                "reftarget": target,
                "refdoc": app.env.docname,
            }
            code.replace_self(addnodes.pending_xref("", code.deepcopy(), **options))


def _text_before(code):
    """The text right before code in its paragraph."""
    before = code.parent[: code.parent.index(code)]
    return before[-1].astext() if before and isinstance(before[-1], nodes.Text) else ""


def _parents(node):
    while node.parent is not None:
        node = node.parent
        yield node


def _column(node):
    cell = next(p for p in _parents(node) if isinstance(p, nodes.entry))
    return cell.parent.index(cell)


def offer_files(app, doctree):
    """Have links to Markdown files outside of this folder offer them, as links to other files do."""
    for link in list(doctree.findall(addnodes.pending_xref)):
        if (
            link["reftype"] == "myst"
            and link["refdomain"] == "doc"
            and link["reftarget"] not in app.env.found_docs
        ):
            path = os.path.relpath(Path(app.srcdir, link["reftarget"] + ".md"), app.srcdir)
            link.replace_self(
                addnodes.download_reference("", "", *link.children, reftarget=f"/{path}")
            )


def keep_shown_bases(app, name, obj, options, bases):
    """What stands behind "Bases:"."""
    bases[:] = shown_bases(obj)


def skip(app, kind, name, obj, skip, options):
    """Leave out what scikit-learn and torch alone describe: their text refers to pages that are not
    here.
    """
    is_theirs = str(getattr(obj, "__module__", "")).startswith(("sklearn.", "torch."))
    is_bare_forward = name == "forward" and not obj.__doc__  # would be shown with torch's text
    return True if is_theirs or is_bare_forward else None


def complain_of_missing_names(app, env):
    """A public name that has no entry is a warning, which fails the build."""
    for entry in sorted(ENTRIES - set(env.domaindata["py"]["objects"])):
        logging.getLogger(__name__).warning(
            "public name without an entry in the reference: %s", entry
        )


def setup(app):
    app.connect("autodoc-process-bases", keep_shown_bases)
    app.connect("autodoc-skip-member", skip)
    app.connect("doctree-read", link_names)
    app.connect("doctree-read", offer_files, priority=400)  # before what they link to is copied
    app.connect("missing-reference", link)
    app.connect("env-check-consistency", complain_of_missing_names)
