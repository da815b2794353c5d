"""Draw the pictures of ``docs/explain.md``, by its own code: ``python docs/explain_pictures.py``,
half a minute.
"""

import os
import re
from pathlib import Path

import matplotlib as mpl
import torch

mpl.use("Agg")
mpl.rcParams["savefig.dpi"] = 110
torch.set_num_threads(1)

DOCS = Path(__file__).resolve().parent
os.chdir(DOCS)
page = (DOCS / "explain.md").read_text("utf-8")
program = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
exec(compile(program, "explain.md", "exec"), {"__name__": "explain"})
