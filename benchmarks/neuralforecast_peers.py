"""NeuralForecast's models, and statsforecast's, on the data of a benchmark: forecasts after each
cutoff, and the seconds of training.

A program of its own, because NeuralForecast is heavy and lives best in an environment of its own:
``peers`` runs it with that environment's interpreter, on the same series and threads. It needs
nothing of fluxutils_py.

    python -m venv peers && peers/bin/pip install torch==2.13.0 neuralforecast
    python benchmarks/bench_m4.py --data DIRECTORY --peers peers/bin/python
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MODELS = "NHITS", "DLinear", "LSTM"
STATISTICAL = "AutoETS", "AutoARIMA"  # of statsforecast, fitted anew at each cutoff
STEPS = 1500  # of training, like the Forecaster's max_steps; their default is 1000


def add_arguments(made: argparse.ArgumentParser, seconds: float) -> None:
    """The arguments of a benchmark that can run these peers."""
    made.add_argument(
        "--peers", metavar="PYTHON", help="the interpreter of an environment with NeuralForecast"
    )
    made.add_argument(
        "--peer-seconds",
        type=float,
        default=seconds,
        help="after which a peer's training is cut short",
    )


def peers(
    python: str,
    series: Sequence[np.ndarray],
    h: int,
    n_test: int,
    *,
    input_size: int,
    seconds: float,
    threads: int,
    models: Sequence[str] = MODELS,
    **more: Any,
) -> Iterator[tuple[str, np.ndarray, float]]:
    """Run each model in a process; yield its name and what cut it short, its forecasts, and seconds
    to train.

    Parameters
    ----------
    python : str
        The interpreter of an environment that has NeuralForecast.
    series : sequence of ndarray
        Values of each series, the last ``n_test`` of which are forecast and not trained on.
    h, n_test : int
        Forecasts of ``h`` steps, from each step before the last ``n_test - h`` on.
    input_size : int
    seconds : float
        After which training ends at the next step.
    threads : int
    models : sequence of str
        Models of NeuralForecast, or those of STATISTICAL.
    **more
        ``steps``; ``n_validation``, the number of steps before the test part that are not trained
        on either; ``step_size`` from one cutoff to the next, 1 by default; ``levels`` of quantiles
        to forecast in place of the mean; ``season`` of statistical models, and ``most_past``, how
        many of the last values they are fitted on.

    Yields
    ------
    str, ndarray of shape (N, W, h), or with levels (N, W, h, levels), float
        Seconds are those of training by the clock, or, with levels, of the processor, forecasts
        included.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        np.savez(path / "series.npz", *series)
        for model in models:
            task = {
                "model": model,
                "h": h,
                "n_test": n_test,
                "input_size": input_size,
                "seconds": seconds,
                **more,
            }
            command = [python, __file__, folder, json.dumps({"threads": threads, **task})]
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": ""}
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, timeout=1800
            )
            if done.returncode:
                raise RuntimeError(f"{model} ended with {done.returncode}: {done.stderr[-2000:]}")
            found = json.loads((path / "found.json").read_text())
            cut = (
                f", cut at {found['steps']} steps of its {found['of']}"
                if found["steps"] < found["of"]
                else ""
            )
            name = f"{found['library']} {found['version']} {model}{cut}"
            yield name, np.load(path / "forecasts.npy"), found["seconds"]


def main() -> None:
    folder, task = Path(sys.argv[1]), json.loads(sys.argv[2])
    import pandas as pd

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # theirs
    with np.load(folder / "series.npz") as stored:
        series = [stored[name] for name in stored.files]
    names, lengths = [f"{i:06d}" for i in range(len(series))], [len(y) for y in series]
    steps = np.concatenate([np.arange(n) for n in lengths])
    df = pd.DataFrame(
        {"unique_id": np.repeat(names, lengths), "ds": steps, "y": np.concatenate(series)}
    )
    forecast = statistical if task["model"] in STATISTICAL else neural
    values, found = forecast(df, task)
    np.save(folder / "forecasts.npy", values)
    (folder / "found.json").write_text(json.dumps(found))


def statistical(df: Any, task: dict[str, Any]) -> tuple[np.ndarray, dict[str, Any]]:
    """Forecasts of a model of statsforecast, and what is known of them."""
    import statsforecast
    from statsforecast import models

    model = getattr(models, task["model"])(season_length=task["season"])
    bands = [round(100 * abs(2 * q - 1)) for q in task["levels"]]
    began = time.process_time()
    found = statsforecast.StatsForecast(models=[model], freq=1).cross_validation(
        h=task["h"],
        df=df,
        test_size=task["n_test"],
        step_size=task["step_size"],
        input_size=task["most_past"],
        level=sorted(set(bands) - {0}),
    )
    seconds = time.process_time() - began
    found = found.sort_values(["unique_id", "cutoff", "ds"])
    columns = [
        task["model"] if band == 0 else f"{task['model']}-{'lo' if q < 0.5 else 'hi'}-{band}"
        for q, band in zip(task["levels"], bands, strict=True)
    ]
    values = found[columns].to_numpy().reshape(df.unique_id.nunique(), -1, task["h"], len(columns))
    return values, {
        "steps": 0,
        "of": 0,
        "seconds": seconds,
        "library": "statsforecast",
        "version": statsforecast.__version__,
    }


def neural(df: Any, task: dict[str, Any]) -> tuple[np.ndarray, dict[str, Any]]:
    """Forecasts of a model of NeuralForecast, and what is known of them."""
    import neuralforecast
    import torch
    from neuralforecast.losses.pytorch import MQLoss

    torch.set_num_threads(task["threads"])
    h, n_test, most = task["h"], task["n_test"], task.get("steps", STEPS)
    levels = task.get("levels")
    loss = {} if levels is None else {"loss": MQLoss(quantiles=levels)}
    quiet = {
        "enable_progress_bar": False,
        "logger": False,
        "enable_checkpointing": False,
        "accelerator": "cpu",
    }
    model = getattr(neuralforecast.models, task["model"])(
        h=h,
        input_size=task["input_size"],
        max_steps=most,
        random_seed=0,
        scaler_type="robust",
        max_time={"seconds": task["seconds"]},
        **loss,
        **quiet,
    )
    nf = neuralforecast.NeuralForecast(models=[model], freq=1)
    last = df.groupby("unique_id").ds.transform("max")
    n_validation = task.get("n_validation", 0)
    clock = time.perf_counter if levels is None else time.process_time
    began = clock()
    nf.fit(df[df.ds <= last - n_test - n_validation])
    seconds = clock() - began
    trained = nf.models[0].train_trajectories[-1][0] + 1
    found = nf.cross_validation(
        df,
        n_windows=None,
        test_size=n_test,
        step_size=task.get("step_size", 1),
        use_fitted=True,
    )
    if levels is not None:
        seconds = clock() - began
    found = found.sort_values(["unique_id", "cutoff", "ds"])
    columns = [c for c in found.columns if c.startswith(task["model"])]
    values = found[columns].to_numpy().reshape(df.unique_id.nunique(), -1, h, len(columns))
    return values if levels else values[..., 0], {
        "steps": trained,
        "of": most,
        "seconds": seconds,
        "library": "NeuralForecast",
        "version": neuralforecast.__version__,
    }


if __name__ == "__main__":
    main()
