"""NeuralForecast's models on the data of a benchmark: forecasts after each cutoff, and the seconds
of training.

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
    **more
        ``steps``; ``n_validation``, the number of steps before the test part that are not trained
        on either.

    Yields
    ------
    str, ndarray of shape (N, n_test - h + 1, h), float
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        np.savez(path / "series.npz", *series)
        for model in MODELS:
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
                command, capture_output=True, text=True, env=environment, timeout=900
            )
            if done.returncode:
                raise RuntimeError(
                    f"NeuralForecast's {model} ended with {done.returncode}: {done.stderr[-2000:]}"
                )
            found = json.loads((path / "found.json").read_text())
            cut = (
                f", cut at {found['steps']} steps of its {found['of']}"
                if found["steps"] < found["of"]
                else ""
            )
            name = f"NeuralForecast {found['version']} {model}{cut}"
            yield name, np.load(path / "forecasts.npy"), found["seconds"]


def main() -> None:
    folder, task = Path(sys.argv[1]), json.loads(sys.argv[2])
    import neuralforecast
    import pandas as pd
    import torch

    torch.set_num_threads(task["threads"])
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # theirs
    with np.load(folder / "series.npz") as stored:
        series = [stored[name] for name in stored.files]
    names, lengths = [f"{i:06d}" for i in range(len(series))], [len(y) for y in series]
    steps = np.concatenate([np.arange(n) for n in lengths])
    df = pd.DataFrame(
        {"unique_id": np.repeat(names, lengths), "ds": steps, "y": np.concatenate(series)}
    )
    h, n_test, most = task["h"], task["n_test"], task.get("steps", STEPS)
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
        **quiet,
    )
    nf = neuralforecast.NeuralForecast(models=[model], freq=1)
    last = df.groupby("unique_id").ds.transform("max")
    n_validation = task.get("n_validation", 0)
    began = time.perf_counter()
    nf.fit(df[df.ds <= last - n_test - n_validation])
    seconds = time.perf_counter() - began
    trained = nf.models[0].train_trajectories[-1][0] + 1
    found = nf.cross_validation(df, n_windows=None, test_size=n_test, step_size=1, use_fitted=True)
    found = found.sort_values(["unique_id", "cutoff", "ds"])
    np.save(folder / "forecasts.npy", found[task["model"]].to_numpy().reshape(len(series), -1, h))
    (folder / "found.json").write_text(
        json.dumps(
            {
                "steps": trained,
                "of": most,
                "seconds": seconds,
                "version": neuralforecast.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
