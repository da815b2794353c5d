"""Make the pages of the examples: ``python docs/examples.py [NAME ...]``, four minutes for all.

Runs the notebooks, which are stored without outputs, and writes each as a page with its outputs and
pictures to ``docs/examples/``. The pages are stored, so that the documentation is built without
running anything. ``tests/test_notebooks.py`` runs the notebooks too, and compares what they print
with the pages, but for numbers.
"""

import base64
import io
import os
import re
import sys
from pathlib import Path

import nbformat

DOCS = Path(__file__).resolve().parent
NOTEBOOKS = DOCS.parent / "notebooks"
PAGES = DOCS / "examples"
MOST_BYTES = 60_000  # of a picture
_OUTPUT = re.compile(r"```(?:output|text)\n.*?\n```\n\n|!\[[^\]]*\]\([\w-]+\.png\)\n\n", re.DOTALL)
_NUMBER = re.compile(r"\b[0-9a-f]{12}\b|-?\d[\d.]*(?:e[-+]?\d+)?|\bnan\b")


def run(notebook, client=None, timeout=120):
    """Run the notebook in a folder of its own; its cells then have outputs. Return what it leaves
    behind in the folder.
    """
    from tempfile import TemporaryDirectory

    from nbclient import NotebookClient

    sharp = nbformat.v4.new_code_cell(
        "%config InlineBackend.print_figure_kwargs = "
        "{'dpi': 140, 'facecolor': 'white', 'bbox_inches': 'tight'}\nimport "
        "pandas\npandas.set_option('display.width', 100)"
    )
    notebook.cells.insert(0, sharp)
    with TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        (client or NotebookClient)(notebook, timeout=timeout, resources=resources).execute()
        left = sorted(os.listdir(folder))
    del notebook.cells[0]
    return left


def page(notebook, name, pictures=None):
    """A notebook as Markdown; its pictures, as PNG files by name, are put into the dict
    ``pictures``. What a cell prints is fenced as ``text`` if the cell says that it ``varies``.
    """
    text = f"<!-- Made by docs/examples.py from notebooks/{name}.ipynb -->\n\n"
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            text += cell.source.replace("](../docs/", "](../") + "\n\n"
            if cell is notebook.cells[0]:
                text += f"[The notebook](../../notebooks/{name}.ipynb)\n\n"
            continue
        text += f"```python\n{cell.source.removesuffix(';')}\n```\n\n"
        said = ""
        for output in cell.outputs:
            data = output.get("data", {})
            if "IProgress not found" in output.get("text", ""):
                continue  # tqdm's advice to install widgets is not for readers
            if "image/png" in data:
                pictures[f"{name}-{len(pictures) + 1}.png"] = small(
                    base64.b64decode(data["image/png"])
                )
                said += f"![{cell.metadata['alt']}]({list(pictures)[-1]})\n\n"
            else:
                shown = re.sub(
                    r"/\S*/tmp\w{8}/", "", output.get("text") or data["text/plain"]
                )  # temporary folders
                fence = "text" if cell.metadata.get("varies") else "output"
                said += f"```{fence}\n{shown.rstrip()}\n```\n\n"
        text += re.sub("```\n\n```(output|text)\n", "", said)
    return text.rstrip() + "\n"


def small(png):
    """The picture in at most 64 colours, a third of its size; in fewer if it is still large."""
    from PIL import Image

    picture = Image.open(io.BytesIO(png)).convert("RGB")
    for n_colours in (64, 16):
        file = io.BytesIO()
        picture.quantize(n_colours, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
        if len(file.getvalue()) < MOST_BYTES:
            break
    return file.getvalue()


def printed(text):
    """What the cells of a page print, but for numbers, spaces and lines of tables, and for what
    varies from machine to machine.
    """
    found = re.findall(r"^```output\n(.*?)\n```$", text, re.DOTALL | re.MULTILINE)
    bare = (re.sub(r"[\u2500-\u257f+|-]+|\s+", " ", _NUMBER.sub("0", each)) for each in found)
    return [" ".join(each.split()) for each in bare]


def without_outputs(text):
    return _OUTPUT.sub("", text.rstrip() + "\n\n").rstrip() + "\n"


if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if len(sys.argv) == 1 or path.stem in sys.argv:
            notebook = nbformat.read(path, as_version=4)
            run(notebook)
            pictures = {}
            text = page(notebook, path.stem, pictures)
            for old in PAGES.glob(f"{path.stem}[.-]*"):
                old.unlink()
            (PAGES / f"{path.stem}.md").write_text(text, "utf-8")
            for name, picture in pictures.items():
                (PAGES / name).write_bytes(picture)
            print(
                path.stem,
                *(f"{name} {len(picture) / 1024:.0f} KiB" for name, picture in pictures.items()),
            )
