"""Count how large the package is, and how far a call travels through it."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import pkgutil
import sys
import tokenize
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

import fluxutils_py
from fluxutils_py import Estimator, SequenceRegressor, Spec
from fluxutils_py.forecasting import Forecaster
from fluxutils_py.nn import LSTM

PACKAGE = Path(fluxutils_py.__file__).parent
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
GUESTS = {"gomlx", "bobbin", "praytools"}


# -- the way of a call ---------------------------------------------------------------------------


class Stop(Exception):
    """Ends a call at the place up to which it is followed."""


class Journey:
    """The files of the package that a call enters, its calls, and the classes of objects made."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.files: set[str] = set()
        self.made: set[str] = set()
        self.n_calls = 0
        sys.setprofile(self._count)
        try:
            call()
        except Stop:
            pass
        finally:
            sys.setprofile(None)

    def _count(self, frame, event, arg):
        path = frame.f_code.co_filename
        if event != "call":
            return
        if path.startswith(str(PACKAGE)):
            self.files.add(path)
            self.n_calls += 1
        # methods of dataclasses and of named tuples have no file
        name = frame.f_code.co_name
        if name in ("__init__", "__new__"):
            given = frame.f_locals
            one = given.get("self", given.get("_cls", given.get("cls")))
            made = one if isinstance(one, type) else type(one)
            is_tuple = issubclass(made, tuple)
            if made.__module__.startswith("fluxutils_py") and (name == "__new__") == is_tuple:
                self.made.add(made.__name__)


X = np.random.default_rng(0).normal(size=(3, 40, 100)).astype("float32")
MODEL = nn.Sequential(LSTM(3, 16), nn.Linear(16, 1))


def plain_fit(opt: object = None) -> Estimator:
    """Fit a plain estimator."""
    spec = {"epochs": 60, "batchsize": 20, "seqsize": 50}
    est = Estimator(MODEL, opt=opt, spec=spec, random_state=0, verbose=False)
    return est.fit(X, X.mean(0, keepdims=True))


def way_to_first_update() -> tuple[Journey, int]:
    """Follow a plain fit to its first update; return that, and the frames on the stack there."""
    frames = []

    class FirstStep(torch.optim.AdamW):
        def step(self, *args, **kwargs):
            stack = traceback.extract_stack()
            frames.extend(s for s in stack if s.filename.startswith(str(PACKAGE)))
            raise Stop

    return Journey(lambda: plain_fit(FirstStep)), len(frames)


def measure_calls() -> dict[str, int]:
    """Follow a plain fit to its first update, then ``predict`` and a step of a stream."""
    fitted = plain_fit()  # everything is imported
    first_update, n_frames = way_to_first_update()
    prediction = Journey(lambda: fitted.predict(X))
    stream = fitted.stream(40)
    stream.step(X[:, :, 0])
    step = Journey(lambda: stream.step(X[:, :, 1]))
    return {
        "fit to the first update: files": len(first_update.files),
        "fit to the first update: frames": n_frames,
        "fit to the first update: classes made": len(first_update.made),
        "predict: files": len(prediction.files),
        "a step of a stream: files": len(step.files),
        "a step of a stream: calls": step.n_calls,
    }


# -- the size of the source ------------------------------------------------------------------------


def docstring_lines(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of docstrings."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            yield from range(first.lineno, first.end_lineno + 1)


def count_tokens(source: str) -> tuple[int, int]:
    """Return the tokens of Python and the lines with any, without layout, comments, docstrings."""
    left_out = set(docstring_lines(ast.parse(source)))
    n_tokens = 0
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in LAYOUT or token.start[0] in left_out:
            continue
        n_tokens += 1
        lines.update(range(token.start[0], token.end[0] + 1))
    return n_tokens, len(lines)


def public_names() -> tuple[int, int]:
    """Return the number of names at the top, and of all but the guests'."""
    names = set(fluxutils_py.__all__)
    of_guests: set[str] = set()
    for part in pkgutil.iter_modules(fluxutils_py.__path__):
        if part.ispkg:
            module = importlib.import_module(f"fluxutils_py.{part.name}")
            (of_guests if part.name in GUESTS else names).update(getattr(module, "__all__", []))
    return len(fluxutils_py.__all__), len(names - of_guests)


def measure_source() -> dict[str, int]:
    """Count classes, arguments, public names and tokens."""
    sources = [path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    tokens = [count_tokens(source) for source in sources]
    n_tokens = sum(n for n, _ in tokens)
    at_the_top, in_all = public_names()
    return {
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "arguments of SequenceRegressor": len(inspect.signature(SequenceRegressor).parameters),
        "arguments of Forecaster": len(inspect.signature(Forecaster).parameters),
        "arguments of Estimator": len(inspect.signature(Estimator).parameters),
        "fields of Spec": len(Spec.__dataclass_fields__),
        "public names at the top": at_the_top,
        "public names without the guests'": in_all,
        "tokens": n_tokens,
        "tokens in ten lines": round(10 * n_tokens / sum(n for _, n in tokens)),
    }
