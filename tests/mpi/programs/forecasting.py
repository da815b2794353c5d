"""Forecasters on as many ranks as there are; every rank hands over what it has.

Imported, it does the same in one process, with a batchsize that many times as large.
"""

import json
import warnings

import numpy as np
import pandas as pd

from fluxutils_py.forecasting import Forecaster, model_fitting

model_fitting.DROPOUT = 0.0  # whose random numbers differ between ranks


def panel():
    """Series of 9 to 60 days, late starts, missing values and missing days, and a category known
    ahead.
    """
    rng = np.random.default_rng(0)
    parts = []
    for i, n in enumerate((60, 41, 9, 52, 33, 60, 18)):
        ds = pd.date_range("2024-02-01", periods=60)[60 - n :]
        promo = rng.choice(["none", "flyer"], n)
        y = (
            20
            + 5 * np.sin(2 * np.pi * np.arange(n) / 7)
            + 4 * (promo == "flyer")
            + rng.normal(size=n)
        )
        w = np.linspace(0.5, 1, n)
        df = pd.DataFrame({"unique_id": f"s{i}", "ds": ds, "y": y, "promo": promo, "w": w})
        df.loc[rng.choice(n - 1, 2, replace=False), "y"] = np.nan
        parts.append(df.drop(index=3))
    return pd.concat(parts)


def results(factor, comm):
    """Parameters, forecasts, those after an update, and a walk forward; ``batchsize`` is 2 on each
    rank.
    """
    df = panel()
    settings = {
        "hidden_size": 5,
        "max_steps": 12,
        "seqsize": 10,
        "random_state": 0,
        "verbose": False,
    }
    fc = Forecaster(
        3, 7, "D", batchsize=2 * factor, quantiles=(0.1, 0.9), n_models=2, comm=comm, **settings
    )
    fc.set_params(futr_exog_list=["promo"])
    late = df.ds > "2024-03-28"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of series shorter than a season
        fc.fit(df[~late], sample_weight="w")
        futr = fc.make_future_dataframe().assign(promo="flyer")
        found = {"forecast": fc.predict(futr_df=futr)}
        fc.update(df[late])
        found["updated"] = fc.predict(futr_df=fc.make_future_dataframe().assign(promo="none"))
        walked = Forecaster(3, 7, "D", batchsize=2 * factor, comm=comm, **settings)
        for refit in (False, True):
            found[f"walked, refit={refit}"] = walked.cross_validation(df, n_windows=2, refit=refit)
    x = np.random.default_rng(1).normal(size=(2, 3, 90)).cumsum(2)
    settings |= {"seqsize": 2, "network": "segments", "quantiles": (0.1, 0.9), "n_models": 1}
    far = Forecaster(5, 6, batchsize=72 * factor, comm=comm, **settings).fit(x)
    assert far.correction_ is not None
    of_segments = {f"segments, {name}": values for name, values in far.predict().items()}
    columns = {name: frame.select_dtypes("number").to_numpy() for name, frame in found.items()}
    weights = [p.detach().numpy().ravel() for model in fc.models_ for p in model.parameters()]
    return columns | of_segments | {"parameters": np.concatenate(weights)}


def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def mistakes(rank, folder):
    """What each rank says of data that differ between ranks, by name."""
    df, y = panel(), np.random.default_rng(3).normal(size=(1, 4, 40))
    fc = Forecaster(3, 7, "D", hidden_size=3, max_steps=2, verbose=False)
    other = df.assign(y=df.y + 1e-9 * (rank == 1) * (df.unique_id == "s3"))
    return {
        "series": error_of(lambda: fc.fit(df[df.unique_id != "s2"] if rank == 1 else df)),
        "values": error_of(lambda: fc.fit(other)),
        "array": error_of(lambda: fc.set_params(freq=None).fit(y[:, rank:])),
        "walk": error_of(
            lambda: fc.set_params(freq="D").cross_validation(
                df.assign(unique_id=df.unique_id + str(rank))
            )
        ),
        "column": error_of(lambda: fc.fit(df.drop(columns="y") if rank == 1 else df)),
        "level": error_of(lambda: fc.set_params(quantiles=(0.5 + rank,)).fit(df)),
        "the same": error_of(lambda: fc.set_params(quantiles=()).fit(df)),
        "saved": error_of(lambda: fc.save(folder / f"of-rank-{rank}")),
        "forecast of its own": error_of(lambda: fc.predict(df[df.unique_id == f"s{3 * rank}"])),
    }


def main(folder):
    from fluxutils_py.parallel import get_communicator

    comm = get_communicator("auto")
    np.savez(folder / f"rank-{comm.rank}.npz", **results(1, "auto"))
    said = comm.allgather(mistakes(comm.rank, folder))
    if comm.rank == 0:
        (folder / "said.json").write_text(json.dumps(said))
