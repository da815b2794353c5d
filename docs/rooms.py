"""List the files in ``docs/architecture.md`` by the first paragraphs of their docstrings: ``python
docs/rooms.py``.
"""

import ast
import re
from pathlib import Path

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "fluxutils_py"
PAGE = DOCS / "architecture.md"
FOLDERS = [
    *(
        "saving",
        "forecasting",
        "explaining",
        "auto",
        "estimator",
        "estimator/streams",
        "transformers",
        "gomlx",
        "bobbin",
        "praytools",
        "training",
        "frames",
        "inputs",
        "exporting",
        "steps",
    ),
    *("reporting", "parallel", "nn", "nn/kernels", "data", "data/hdf5", ""),
]
SECTION = re.compile(r"(?<=^## Files\n\n).*?(?=^## )", re.DOTALL | re.MULTILINE)


def rooms():
    """The list as Markdown: a table per folder, a row per file."""
    lines: list[str] = []
    for folder in FOLDERS:
        paths = sorted(p for p in (PACKAGE / folder).glob("*.py") if p.name != "__init__.py")
        if paths:
            lines += [f"| `{folder}/` | |" if folder else "| beside the folders | |", "|---|---|"]
            for path in paths:
                doc = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
                first = " ".join(doc.partition("\n\n")[0].split())  # it may take two lines
                lines.append(
                    f"| `{path.name}` | {first.replace('``', '`').replace('|', chr(92) + '|')} |"
                )
            lines.append("")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(SECTION.sub(lambda _: rooms(), PAGE.read_text("utf-8")), "utf-8")
