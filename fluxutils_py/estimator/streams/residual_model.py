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
# Compared are the sum of the distances of all means from their past, and the logarithm of the size
# of a residual in scales. Above a limit that a tenth exceeds, both are taken to fall off
# exponentially, so that sizes have the tail of a power. Limits and mean excesses are learnt; these
# are where they start, about right for normal residuals, and below which they never fall.
SHARE = 0.1
TAILS = np.array([[7.2, 0.5], [1.75, 0.3]])
LEAST_TAILS = np.array([[2.0, 0.0], [0.3, 0.1]])
TAIL_MEMORY = 4  # times the memory, since a tail is seen rarely
KNOWN = 3.0  # decades; what is less likely is left out of the tails
KEPT = 0.9535  # mean of an exponential variable without what is beyond KNOWN
SPIKE = 2.0  # decades from which on a single residual counts by itself
HALF = math.log10(2)


class ResidualModel:
    """Running statistics of the residuals of each series, and how far the last ones are from them.

    Residuals are divided by a running robust scale and cut at ``LARGEST``. Exponential means whose
    half-lives are small ``PARTS`` of the memory follow the residuals, for shifts, and their
    absolute values, for bursts. Each is compared with its own running centre and spread over
    the memory. The tails of the sum of these distances, and of the sizes of single residuals, for
    spikes, are learnt too (peaks over a threshold; of sizes, the estimator of Hill 1975), so that
    correlated or heavy-tailed residuals raise no alarm by themselves.

    Parameters
    ----------
    shape : (G, N)
    memory : int
        Half-life, in steps, of centres and spreads.
    """

    def __init__(self, shape: tuple[int, int], memory: int) -> None:
        self.memory = memory
        # scale, centre, number of steps, alarm; limits and mean excesses of both tails; then for
        # each mean of residuals its value and spread, and for each mean of sizes its value, centre
        # and spread
        self.values = np.zeros((8 + 5 * len(PARTS), *shape))
        lives = np.array([max(1.0, memory / part) for part in PARTS])
        self._gains = (1 - 0.5 ** (1 / lives))[:, None, None]
        self._slowest = 1 - 0.5 ** (1 / memory)
        spread = np.sqrt(self._gains / (2 - self._gains))
        _, tails, means, sizes = self._parts(self.values)
        tails[:] = TAILS[:, :, None, None]
        means[1] = spread
        sizes[1] = MEAN_ABSOLUTE
        sizes[2] = spread * math.sqrt(1 - 2 / math.pi)
        self.initial = self.values.copy()

    @staticmethod
    def _parts(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return views: (4, G, N), (2, 2, G, N) of tails, (2, n, G, N) of means, and (3, n, G, N)
        of sizes.
        """
        shape = values.shape[1:]
        n = len(PARTS)
        first, tails, means, sizes = np.split(values, [4, 8, 8 + 2 * n])
        return (
            first,
            tails.reshape(2, 2, *shape),
            means.reshape(2, n, *shape),
            sizes.reshape(3, n, *shape),
        )

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
        (scale, centre, count, alarm), tails, means, sizes = self._parts(values)
        size = np.abs(residual)
        # the first residual that is not 0 tells the scale where nothing else has
        scale[:] = np.where(scale > 0, scale, size)
        divisor = np.where(scale > 0, scale, 1.0)
        in_scales = residual / divisor
        u = np.clip(in_scales, -LARGEST, LARGEST)
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
        tiny = 1e-9
        shifts = np.abs(means[0] - centre) / (means[1] + tiny)
        bursts = np.maximum(sizes[0] - sizes[1], 0) / (sizes[2] + tiny)
        total = (shifts + bursts).sum(0)
        found = np.stack([total, np.log(np.maximum(np.abs(in_scales), tiny))])
        gain = np.maximum(self._slowest / TAIL_MEMORY, 1 / (count + 10))
        of_means, of_size = self._decades(found, tails, gain)
        # a second chance to be above 2, so it counts for half; less would only drown what lasts
        of_size -= HALF
        alarm[:] = np.maximum(of_means, of_size * (of_size > SPIKE))

    @staticmethod
    def _decades(found: np.ndarray, tails: np.ndarray, gain: np.ndarray) -> np.ndarray:
        """Return how unlikely values (2, G, N) are by their tails, and let the tails learn."""
        limit, excess = tails
        above = found - limit
        is_above = above > 0
        # below the limit: of a distance, which is uniform there; a size says nothing
        below = np.zeros_like(found)
        below[0] = -np.log10(1 - (1 - SHARE) * np.minimum(found[0] / limit[0], 1))
        decades = np.where(is_above, above / excess / math.log(10) - math.log10(SHARE), below)
        rate = np.minimum(gain / SHARE, 0.3) * (decades < KNOWN)
        limit += rate * excess * (is_above - SHARE)
        excess += rate * is_above * (above / KEPT - excess)
        np.maximum(tails, LEAST_TAILS[:, :, None, None], out=tails)
        return decades

    def alarm(self) -> np.ndarray:
        """Return how unlikely the last residuals of each series are, (N,): minus the decimal
        logarithm of about how often such a state occurs; the largest of the outputs.
        """
        return self.values[3].max(0)
