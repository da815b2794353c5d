"""Draw ``docs/coverage.png``: ``python docs/coverage.py``, half a minute.

45 weekly series of two and a half years, such as sales: a year's season, persistent deviations, a
level that drifts. How often bands of the next 8 weeks hold the truth in the year that follows, as
the networks say them, and calibrated by the end of the training part.
"""

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import torch
from matplotlib import pyplot as plt

from fluxutils_py.forecasting import Forecaster

mpl.use("Agg")
torch.set_num_threads(1)

N, T, LATER, H = 45, 130, 52, 8
rng = np.random.default_rng(0)
t = np.arange(T + LATER)
season = rng.uniform(0.05, 0.5, (N, 1)) * np.sin(2 * np.pi * t / 52 + rng.uniform(0, 6, (N, 1)))
deviation = np.zeros((N, T + LATER))
stays = rng.uniform(0.2, 0.9, N)
sizes = rng.uniform(0.05, 0.3, N)
for week in range(1, T + LATER):
    deviation[:, week] = stays * deviation[:, week - 1] + sizes * rng.standard_t(5, N)
drift = rng.normal(0, 0.02, (N, T + LATER)).cumsum(1)
y = np.exp(rng.normal(5, 1, (N, 1)) + season + deviation + drift)
ids = np.repeat([f"s{i:02d}" for i in range(N)], T + LATER)
df = pd.DataFrame({"unique_id": ids, "ds": np.tile(t, N), "y": y.ravel()})

figure, ax = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
levels = (0.1, 0.25, 0.75, 0.9)
kinds = {False: ("tab:orange", "as the networks say"), True: ("tab:blue", "calibrated")}
for calibrate, (colour, name) in kinds.items():
    fc = Forecaster(
        H, 52, quantiles=levels, calibrate=calibrate, random_state=0, verbose=False
    ).fit(df[df.ds < T])
    walk = fc.cross_validation(
        df, n_windows=LATER - H + 1, step_size=1, refit=None, quantiles=levels
    )
    steps = walk.ds - walk.cutoff
    for low, high, style in ((0.1, 0.9, "-"), (0.25, 0.75, "--")):
        inside = walk.y.between(walk[f"Forecaster-q{low}"], walk[f"Forecaster-q{high}"])
        share = inside.groupby(steps).mean()
        label = f"{name}, {high - low:.0%}"
        ax.plot(share.index, share, style, color=colour, marker="o", markersize=3, label=label)
        print(f"{label}: {share.round(3).tolist()}, all {inside.mean():.3f}")
for aim in (0.5, 0.8):
    ax.axhline(aim, color="0.6", linewidth=1, zorder=0)
ax.set(ylim=(0.15, 1), xlabel="weeks ahead", ylabel="share of truths inside")
ax.set(title="Bands of 45 weekly series in the year after training")
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, ncols=2, loc="lower center", fontsize="small")
figure.savefig(Path(__file__).with_name("coverage.png"), dpi=120)
