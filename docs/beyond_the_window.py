"""Draw ``docs/beyond_the_window.png``: ``python docs/beyond_the_window.py``, a minute.

What a flag marked is asked 200 or 1000 steps later, in windows of 10 steps. Truncated gradients end
at a window's start, and nothing tells the gate to open at the flag; exact ones come from there.
"""

import time
from functools import partial
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import pyplot as plt
from torch import nn

from fluxutils_py import Estimator
from fluxutils_py.nn import MinGRU

mpl.use("Agg")
torch.set_num_threads(1)


def recall(lag, n_series, seed):
    """Random signs at each step, of which a flag marks the first: the target after ``lag`` steps."""
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1.0, 1.0], size=(n_series, lag + 20))
    flags = np.zeros_like(signs)
    flags[:, 0] = 1
    y = np.full((1, n_series, lag + 20), np.nan)
    y[0, :, lag:] = signs[:, :1]
    return np.stack([signs, flags]).astype("float32"), y.astype("float32")


def model(bias):
    torch.manual_seed(0)
    layer = MinGRU(2, 8)
    nn.init.constant_(layer.module.linear.bias[:8], bias)  # gates that are almost closed
    return nn.Sequential(layer, nn.Linear(8, 1))


def curve(lag, bias, epochs, **spec):
    """Errors on other series after each epoch."""
    spec = {"epochs": epochs, "batchsize": 64, "seqsize": 10, "clip": 1.0, **spec}
    opt = partial(torch.optim.Adam, lr=0.05)
    est = Estimator(model(bias), None, opt, {"lr_schedule": "cosine", **spec}, random_state=0)
    began = time.perf_counter()
    est.fit(*recall(lag, 256, 0), validation_data=recall(lag, 64, 1))
    seconds = time.perf_counter() - began
    print(lag, spec.get("gradient"), round(est.validation_loss_curve_[-1], 3), f"{seconds:.1f} s")
    return est.validation_loss_curve_


figure, axes = plt.subplots(1, 2, figsize=(7.6, 3.2), layout="constrained", sharey=True)
for ax, (lag, bias, epochs) in zip(axes, [(200, -5, 25), (1000, -7, 25)], strict=True):
    for gradient, colour in (("truncated", "tab:orange"), ("exact", "tab:blue")):
        errors = curve(lag, bias, epochs, gradient=gradient)
        ax.plot(range(1, epochs + 1), errors, color=colour, label=f'gradient="{gradient}"')
    ax.axhline(1, color="0.6", linewidth=1, zorder=0, label="always 0")
    ax.set(title=f"What was the sign {lag} steps ago?", xlabel="epoch", ylim=(0, None))
    ax.spines[["top", "right"]].set_visible(False)
axes[0].set_ylabel("mean squared error")
axes[0].legend(frameon=False, loc="center right", fontsize="small")
figure.savefig(Path(__file__).with_name("beyond_the_window.png"), dpi=110)
