"""Write model cards: what a fitted object is, what it was fitted on, and how to load it."""

from __future__ import annotations

import inspect
import math
import os
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_is_fitted

from fluxutils_py.data.digest import digest_arrays
from fluxutils_py.estimator import persistence
from fluxutils_py.estimator.estimator import Estimator
from fluxutils_py.files import atomic_write
from fluxutils_py.parallel import get_communicator
from fluxutils_py.reporting.named_settings import named_settings, plain_setting
from fluxutils_py.versions import PACKAGES, installed_version

Row = tuple[str, object]
MOST_NAMES = 20  # of features, that are listed
OF_SEARCHES = ("best_params_", "best_score_")


def card(obj: Any, path: str | os.PathLike[str] | None = None) -> str:
    """Describe something fitted in Markdown: what it is, data, settings, scores, versions, loading.

    Parameters
    ----------
    obj : estimator, forecaster, transformer, Pipeline, or search
        What :func:`fluxutils_py.save` takes.
    path : str or path-like, optional
        File to write the card to, never half-written; a name such as ``model.md``. On several
        ranks, only rank 0 writes.

    Returns
    -------
    str
        The card. Of data it has shapes, types and a digest of the corners of each array, by which
        two cards can be compared; no values.

    Raises
    ------
    sklearn.exceptions.NotFittedError
        Before ``fit``.

    Examples
    --------
    >>> import numpy as np
    >>> import fluxutils_py
    >>> x = np.random.default_rng(0).normal(size=(3, 20, 50)).astype("float32")  # (F, N, T)
    >>> est = fluxutils_py.SequenceRegressor(4, epochs=1).fit(x, x[:1])
    >>> print(fluxutils_py.card(est).splitlines()[0])
    # Model card: SequenceRegressor
    """
    best = getattr(obj, "best_estimator_", obj)
    check_is_fitted(best)
    parts = dict(_parts(best, ""))
    first_paragraph = (inspect.getdoc(type(best)) or "").partition("\n\n")[0]
    summary = " ".join(first_paragraph.split())
    lines = [f"# Model card: {type(best).__name__}", "", summary, ""]
    lines += _section("Parts", _describe_parts(parts))
    lines += _section("Data", _of_each(parts, _data_rows))
    lines += _section("Settings", named_settings(best).items())
    lines += _section("Scores", [*_search_rows(obj), *_of_each(parts, _score_rows)])
    versions = {name: installed_version(name) for name in PACKAGES}
    versions["Python"] = platform.python_version()
    lines += _section("Versions", versions.items())
    lines += ["## Load", "", *_how_to_load(best, parts, path), ""]
    text = "\n".join(lines)
    if path is not None and get_communicator("auto").rank == 0:
        with atomic_write(path) as file:
            file.write(text.encode())
    return text


def _parts(obj: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the object, or the steps of a pipeline, with their names."""
    if isinstance(obj, Pipeline):
        for step_name, step in obj.steps:
            if step is not None and not isinstance(step, str):
                yield from _parts(step, f"{name}{step_name}.")
        return
    yield name, obj
    # the model of TransformedTargetRegressor
    if hasattr(obj, "regressor_"):
        yield from _parts(obj.regressor_, f"{name}regressor_.")


def _of_each(parts: dict[str, Any], rows: Any) -> Iterator[Row]:
    for name, part in parts.items():
        for label, value in rows(part):
            yield f"{name}{label}", value


def _describe_parts(parts: dict[str, Any]) -> Iterator[Row]:
    for name, part in parts.items():
        yield name.removesuffix(".") or "model", type(part).__name__
        models = getattr(part, "models_", None) or [getattr(part, "model_", None)]
        if models[0] is not None:
            n = sum(p.numel() for model in models for p in model.parameters())
            yield f"{name}network", f"{type(models[0]).__name__}, {n} parameters"
        if hasattr(part, "cell_"):
            yield f"{name}cell_", part.cell_


def _data_rows(part: Any) -> Iterator[Row]:
    if isinstance(part, Estimator):
        yield from part.fitted_parts_.data.items()
        yield "outputs", part.n_outputs_
    history: Any = getattr(part, "history_", None)
    if hasattr(history, "tail"):  # of a forecaster
        yield "series", history.n_series
        lengths = np.asarray(history.lengths)
        yield "steps of each series", f"{lengths.min()} to {lengths.max()}"
        yield "frequency", getattr(part.frequency_, "text", None)
        yield "ends of the series (digest)", digest_arrays(np.asarray(history.tail))
    if hasattr(part, "n_features_in_"):
        yield "features", part.n_features_in_
    if hasattr(part, "feature_names_in_"):
        yield "names of features", _shortened(part.feature_names_in_)
    if hasattr(part, "classes_"):
        yield "classes", _shortened(part.classes_)


def _shortened(values: Iterable[object]) -> str:
    names = [str(value) for value in values]
    if len(names) > MOST_NAMES:
        names[MOST_NAMES:] = [f"and {len(names) - MOST_NAMES} more"]
    return ", ".join(names)


def _search_rows(obj: Any) -> Iterator[Row]:
    """Yield what a search has found; :func:`load` gives it to the best estimator."""
    for name in OF_SEARCHES:
        value = getattr(obj, name, None)
        if isinstance(value, dict):
            yield from ((f"best {setting}", plain_setting(v)) for setting, v in value.items())
        elif value is not None:
            yield "best mean score of the search", value


def _score_rows(part: Any) -> Iterator[Row]:
    if hasattr(part, "n_iter_"):
        yield "epochs", part.n_iter_
    losses = getattr(part, "loss_curve_", None)
    if losses:
        yield "training loss of the last epoch", losses[-1]
    validation = [v for v in getattr(part, "validation_loss_curve_", ()) if not math.isnan(v)]
    if validation:
        yield "least validation loss", min(validation)
        yield "validation loss of the last epoch", validation[-1]


def _how_to_load(obj: Any, parts: dict[str, Any], path: object) -> list[str]:
    name = "model.pt" if path is None else Path(os.fspath(str(path))).with_suffix(".pt").name
    arguments = [f'"{name}"']
    for part in parts.values():
        arguments += [f"{argument}={code}" for argument, code in _code_of(part).items()]
    lines = ["import fluxutils_py", ""]
    if len(arguments) > 1:
        lines.append("# the file only names code of its author: import it, and give it to load")
    # a class of the user has a load of its own
    is_own = isinstance(obj, Estimator) and not type(obj).__module__.startswith("fluxutils_py.")
    loader = type(obj).__name__ if is_own else "fluxutils_py"
    lines.append(f"model = {loader}.load({', '.join(arguments)})")
    lines[-1] += "  # written by fluxutils_py.save; runs no code"
    if hasattr(obj, "predict"):
        lines.append("predictions = model.predict(...)  # data as in fit: (features, series, time)")
    return ["```python", *lines, "```"]


def _code_of(part: Any) -> dict[str, str]:
    """Return the arguments that load needs for a part, with the names of what to give."""
    if isinstance(part, Estimator):
        return persistence.code_to_give(part)
    if hasattr(part, "correction_"):  # a forecaster, whose room is slow to load
        from fluxutils_py.forecasting.forecaster_files import code_arguments

        return dict.fromkeys(code_arguments(part), "...")
    return {}


def _section(title: str, rows: Iterable[Row]) -> list[str]:
    """Return a table of two columns under a title, nothing without rows."""
    cells = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows]
    if not cells:
        return []
    return [f"## {title}", "", "| | |", "|---|---|", *cells, ""]


def _cell(value: object) -> str:
    """Return a value for a table, numbers with six digits."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    # a text may come from a stranger's file
    for mark in ("\\", "|", "<", "[", "`"):
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())
