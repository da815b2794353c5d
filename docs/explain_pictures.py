"""Draw the pictures of ``docs/guide/explain.md``, by its own code: ``python docs/explain_pictures.py``,
half a minute.
"""

import os
import re
from pathlib import Path

import matplotlib as mpl
import torch
from PIL import Image

mpl.use("Agg")
mpl.rcParams["savefig.dpi"] = 110
torch.set_num_threads(1)

DOCS = Path(__file__).resolve().parent
os.chdir(DOCS)
page = (DOCS / "guide" / "explain.md").read_text("utf-8")
program = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
exec(compile(program, "explain.md", "exec"), {"__name__": "explain"})

for path in map(DOCS.__truediv__, ("explanation.png", "prediction.png")):
    picture = Image.open(path).convert("RGB")  # a third of the size with 64 colours
    picture.quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
