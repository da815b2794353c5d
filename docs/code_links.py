"""Which code in the pages is a public name of this package: for ``conf.py``."""

import re

# whose names stand in the pages beside ours, some spelt alike
OTHERS = (
    "bobbin", "Darts", "FluxUtils.jl", "gomlx", "Ignite", "Keras", "Lightning", "PrayTools.jl", "PyTorch",
    "scikit-learn", "skorch", "sktime", "torch",
)  # fmt: skip
OF_ANOTHER = re.compile(rf"(?:^|[\s(])(?:{'|'.join(map(re.escape, OTHERS))})(?:['\u2019]s)?\s+$")


def named_target(code: str, before: str) -> str | None:
    """Return the name that a reference from this code would have; None if it is none of ours.

    ``code`` is what stands between backticks, such as ``reset(model)``, and ``before`` the text in
    front of it: in "gomlx `train`" and "torch's `SummaryWriter`", the name is another system's.
    """
    found = re.fullmatch(r"([\w.]+)(?<!\.py)(\(.*\))?", code)
    return None if found is None or OF_ANOTHER.search(before) else found[1]
