"""A causal, robust model of residuals, which tells how unlikely the last ones are: alarms without
labels.
"""

from __future__ import annotations

import math

import numpy as np

MEMORY = 1000  # steps, where neither the user nor a calibration tells
LEAST_MEMORY = 40
PARTS = (
    160,
    40,
    10,
)  # of the memory: the half-lives of the running means, for spikes, shifts and drifts
LARGEST = 5.0  # scales at which a residual is cut
MEAN_ABSOLUTE = math.sqrt(2 / math.pi)  # of a standard normal variable
# Of the sum of surprises where nothing changes, about (for residuals with heavy tails or that are
# correlated; for independent normal ones, alarms are rarer): the shape of a gamma distribution, an
# integer so that its tail has a closed form, and its scale.
SHAPE = 2
TAIL_SCALE = 1.75


class ResidualModel:
    """Running statistics of the residuals of each series, and how far the last ones are from them.

    Residuals are divided by a running robust scale and cut at ``LARGEST``. Exponential means whose
    half-lives are small ``PARTS`` of the memory follow the residuals, for shifts, and their
    absolute values, for bursts. Each is compared with its own running centre and spread over
    the memory, so that correlated or heavy-tailed residuals raise no alarm by themselves.

    Parameters
    ----------
    shape : (G, N)
    memory : int
        Half-life, in steps, of centres and spreads.
    """

    def __init__(self, shape: tuple[int, int], memory: int) -> None:
        self.memory = memory
        # scale, centre, number of steps; then for each mean of residuals its value and spread, and
        # for each mean of sizes its value, centre and spread
        self.values = np.zeros((3 + 5 * len(PARTS), *shape))
        lives = np.array([max(1.0, memory / part) for part in PARTS])
        self._gains = (1 - 0.5 ** (1 / lives))[:, None, None]
        self._slowest = 1 - 0.5 ** (1 / memory)
        spread = np.sqrt(self._gains / (2 - self._gains))
        _, means, sizes = self._parts(self.values)
        means[1] = spread
        sizes[1] = MEAN_ABSOLUTE
        sizes[2] = spread * math.sqrt(1 - 2 / math.pi)
        self.initial = self.values.copy()

    @staticmethod
    def _parts(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return views: (3, G, N), (2, 2, G, N) of means, and (3, 2, G, N) of sizes."""
        shape = values.shape[1:]
        n = len(PARTS)
        means, sizes = np.split(values[3:], [2 * n])
        return values[:3], means.reshape(2, n, *shape), sizes.reshape(3, n, *shape)

    def load(self, values: np.ndarray, initial: np.ndarray) -> None:
        """Continue from values of another one."""
        self.values = values.copy()
        self.initial = initial.copy()

    def reset(self, series: np.ndarray) -> None:
        """Start some series, given as indices, as they were after the calibration."""
        self.values[:, :, series] = self.initial[:, :, series]

    def calibrate(self, errors: np.ndarray, is_own: bool) -> None:
        """Begin with residuals (G, M, S): of the same series step by step, of others the scale."""
        for g, of_output in enumerate(errors):
            sizes = np.abs(of_output[~np.isnan(of_output)])
            if len(sizes):
                self.values[0, g] = np.median(sizes) / 0.6745
        if is_own:
            for t in range(errors.shape[2]):
                self.observe(errors[:, :, t])
        self.initial = self.values.copy()

    def observe(self, residual: np.ndarray) -> None:
        """Learn from residuals (G, N); NaN leaves a series as it is."""
        known = ~np.isnan(residual)
        if known.all():
            self._observe(self.values, residual)
            return
        before = self.values.copy()
        self._observe(self.values, np.where(known, residual, 0.0))
        self.values[:, ~known] = before[:, ~known]

    def _observe(self, values: np.ndarray, residual: np.ndarray) -> None:
        (scale, centre, count), means, sizes = self._parts(values)
        size = np.abs(residual)
        # the first residual that is not 0 tells the scale where nothing else has
        scale[:] = np.where(scale > 0, scale, size)
        divisor = np.where(scale > 0, scale, 1.0)
        u = np.clip(residual / divisor, -LARGEST, LARGEST)
        gain = np.maximum(self._slowest, 1 / (count + 10))
        count += 1
        means[0] += self._gains * (u - means[0])
        sizes[0] += self._gains * (np.abs(u) - sizes[0])
        # what follows learns slowly, and from bounded steps: an anomaly must not become the rule
        scale += gain * (np.minimum(size, 3 * scale) / MEAN_ABSOLUTE / 0.94 - scale)
        centre += gain * (np.clip(u, -2, 2) - centre)
        distance = np.minimum(np.abs(means[0] - centre), 3 * means[1])
        means[1] += gain * (distance / 0.75 - means[1])
        distance = np.clip(sizes[0] - sizes[1], -3 * sizes[2], 3 * sizes[2])
        sizes[1] += gain * distance
        sizes[2] += gain * (np.abs(distance) / 0.75 - sizes[2])

    def alarm(self) -> np.ndarray:
        """Return how unlikely the last residuals of each series are, (N,): minus the decimal
        logarithm of about how often such a state occurs; the largest of the outputs.
        """
        (_, centre, _), means, sizes = self._parts(self.values)
        tiny = 1e-9
        shifts = np.abs(means[0] - centre) / (means[1] + tiny)
        bursts = np.maximum(sizes[0] - sizes[1], 0) / (sizes[2] + tiny)
        total = (shifts + bursts).sum(0).max(0)
        return tail_decades(total)


def tail_decades(total: np.ndarray) -> np.ndarray:
    """Return minus the decimal logarithm of the tail of a gamma distribution with an integer
    shape.
    """
    x = total / TAIL_SCALE
    term = np.ones_like(x)
    series = np.ones_like(x)
    for k in range(1, SHAPE):
        term = term * x / k
        series = series + term
    return (x - np.log(series)) / math.log(10)
