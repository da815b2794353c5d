"""Draw ``docs/loss_curve.png``: ``python docs/loss_curve.py``, half a minute.

What is to be told at each step is whether there was a pulse 8 steps before. A window of 5 steps
never holds both, so that its gradient teaches nothing of it; with ``overlap`` gradients reach far
enough.
"""

from functools import partial
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import pyplot as plt

from fluxutils_py import LossCurveDisplay, SequenceRegressor

mpl.use("Agg")
torch.set_num_threads(1)

x = (np.random.default_rng(0).random(size=(1, 64, 400)) < 0.1).astype(
    "float32"
)  # (F, N, T): pulses
y = np.roll(x, 8, axis=2)
y[:, :, :8] = np.nan

figure, ax = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
fit = partial(SequenceRegressor, 24, seqsize=5, batchsize=32, epochs=20, lr=1e-2, random_state=0)
for colour, overlap in zip(("tab:orange", "tab:blue"), (0, 10), strict=True):
    est = fit(spec={"overlap": overlap})
    est.fit(x[:, :48], y[:, :48], validation_data=(x[:, 48:], y[:, 48:]))
    LossCurveDisplay.from_estimator(
        est, ax=ax, name=f"seqsize=5, overlap={overlap}", curve_kwargs={"color": colour}
    )
ax.axhline(np.nanvar(y), color="0.6", linewidth=1, zorder=0, label="always the mean")
ax.set(ylim=(0, None), ylabel="mean squared error", title="Was there a pulse 8 steps ago?")
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, loc="center right", fontsize="small")
figure.savefig(Path(__file__).with_name("loss_curve.png"), dpi=120)
