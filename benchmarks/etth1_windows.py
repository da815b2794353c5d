"""ETTh1 as arrays of windows 24 hours ahead, for networks of one's own; the data and the protocol
of bench_etth1.py.
"""

import numpy as np

H, C, DAY = 24, 7, 24  # hours ahead, series, season
TRAIN, VAL, TEST = (30 * DAY * months for months in (12, 16, 20))  # where each part ends


def read(path):
    """The first 20 months, standardised with the first 12: (T, C) float32."""
    z = np.loadtxt(path, delimiter=",", skiprows=1, usecols=range(1, C + 1))[:TEST]
    assert z.shape == (TEST, C), (
        f"{path} has {z.shape} hours and series, expected at least {(TEST, C)}"
    )
    return ((z - z[:TRAIN].mean(0)) / z[:TRAIN].std(0)).astype("float32")


def arrays(z):
    """Inputs (C, 1, T), seasonal naive forecast and truth (H * C, 1, T) of the H hours after each
    hour.

    Where the truth lies beyond the data it is NaN: such steps carry no loss.
    """
    padded = np.concatenate([np.repeat(z[:1], DAY, 0), z])  # a first day for the lags to reach into
    x = z - padded[:-DAY]  # change against the day before
    # hour t+k: as hour t+k-24
    naive = np.concatenate([padded[k + 1 : k + 1 + TEST] for k in range(DAY)], 1)
    truth = np.full((TEST, H * C), np.nan, "float32")
    truth[:-H] = np.concatenate([z[k : k + TEST - H] for k in range(1, H + 1)], 1)
    return tuple(a.T[:, None] for a in (x, naive, truth))


def only(y, start, stop):
    """Targets of the hours ``start`` to ``stop``, NaN elsewhere."""
    kept = np.full_like(y, np.nan)
    kept[:, :, start:stop] = y[:, :, start:stop]
    return kept


def errors(forecast, truth):
    """MSE and MAE over every start from the last validation hour on whose 24 hours lie in the test
    months.
    """
    starts = slice(VAL - 1, TEST - H)
    e = (forecast - truth)[:, 0, starts]
    assert e.shape == (H * C, 2857), e.shape
    assert np.isfinite(e).all()
    return float((e**2).mean()), float(np.abs(e).mean())
