"""A causal, robust model of residuals, which tells how unlikely the last ones are: alarms without
labels.
"""

from __future__ import annotations

import math
from operator import pos
from typing import Any

import numpy as np

from fluxutils_py.estimator.streams.conformal import Calibration
from fluxutils_py.estimator.streams.running_values import RunningValues, bounded

MEMORY = 1000  # steps; the shortest that no user asked for
LEAST_MEMORY = 40
PARTS = (160, 40, 10)  # of the memory: half-lives of the running means, for spikes, shifts, drifts
LARGEST = 5.0  # scales at which a residual is cut
MEAN_ABSOLUTE = math.sqrt(2 / math.pi)  # of a standard normal variable
# Compared are the sum of the distances of all means from their past, and the logarithm of the size
# of a residual in scales. Above a limit that a tenth exceeds, both are taken to fall off
# exponentially, so that sizes have the tail of a power. Limits and mean excesses are learnt; these
# are where they start, about right for normal residuals, and below which they never fall.
SHARE = 0.1  # one decade
TAILS = np.array([[7.2, 0.5], [1.75, 0.3]])
LEAST_TAILS = ((2.0, 0.3), (0.0, 0.1))  # limit and mean excess of each
TAIL_MEMORY = 4  # times the memory, since a tail is seen rarely
KNOWN = 3.0  # decades; what is less likely is left out of the tails
KEPT = 0.9535  # mean of an exponential variable without what is beyond KNOWN
SPIKE = 2.0  # decades from which on a single residual counts by itself
HALF = math.log10(2)
LN10 = math.log(10)
TINY = 1e-9
NOTHING = 1e-300
FOLDS = 10  # parts of a calibration, each judged by the covariance of the others
RIDGE = 1e-3  # on the diagonal of a correlation, besides what few steps need
DOUBT = 3.0  # what a short calibration leaves open; chosen on simulated quiet residuals


class ResidualModel(RunningValues):
    """Running statistics of the residuals of each series, and how far the last ones are from them.

    Residuals are divided by a running robust scale and cut at ``LARGEST``. Exponential means whose
    half-lives are small ``PARTS`` of the memory follow the residuals, for shifts, and their
    absolute values, for bursts. Each is compared with its own running centre and spread over
    the memory. The tails of the sum of these distances, and of the sizes of single residuals, for
    spikes, are learnt too (peaks over a threshold; of sizes, the estimator of Hill 1975), so that
    correlated or heavy-tailed residuals raise no alarm by themselves.

    Several outputs have one residual: their squared Mahalanobis distance by the covariance of all
    errors, made about normal. That covariance is learnt in a calibration, or else in the first
    steps of the memory.

    Parameters
    ----------
    shape : (G, N)
    memory : int
        Half-life, in steps, of centres and spreads.
    frozen : bool
        Whether nothing is learnt after the calibration.

    Notes
    -----
    Source: Hotelling (1947), Multivariate quality control, for the distance; Lowry, Woodall, Champ
    & Rigdon (1992), A multivariate exponentially weighted moving average control chart, for running
    means.
    """

    def __init__(self, shape: tuple[int, ...], memory: int, *, frozen: bool = False) -> None:
        self.memory = memory
        self.frozen = frozen
        self._gains = [1 - 0.5 ** (1 / max(1.0, memory / part)) for part in PARTS]
        self._slowest = 0.0 if frozen else 1 - 0.5 ** (1 / memory)
        # scale, centre, number of steps, alarm; limits and mean excesses of both tails; then for
        # all means of residuals their values and spreads, and for means of sizes their values,
        # centres and spreads, all in the place of the first output; then of several outputs how
        # many errors were seen, the running parts of the distance, and the second moments (G rows)
        self._n_rows = 8 + 5 * len(PARTS)
        n_joint = (2 + shape[0]) * (shape[0] > 1)
        super().__init__(np.zeros((self._n_rows + n_joint, *shape)))
        # as many independent steps have a mean that varies as little as each running one
        self._n_steps = 2 / np.array(self._gains)[:, None] - 1
        spread = 1 / np.sqrt(self._n_steps)
        self.values[4:8, 0] = TAILS.reshape(4, 1)
        of_means = self._of_means()
        of_means[1] = spread
        of_means[3] = MEAN_ABSOLUTE * (shape[0] == 1)
        of_means[4] = spread * math.sqrt(1 - 2 / math.pi)
        self.initial = self.values.copy()

    def _of_means(self) -> np.ndarray:
        return self.values[8 : self._n_rows, 0].reshape(5, len(PARTS), -1)

    @property
    def joint(self) -> np.ndarray:
        """A view of what is of several outputs: counts, running parts, and second moments."""
        return self.values[self._n_rows :]

    def _refresh(self) -> None:
        if len(self.joint):
            self._whitening = whitening(self.joint[2:], self.joint[0] > 0)

    # -- the beginning -----------------------------------------------------------------------------

    def calibrate(self, calibration: Calibration) -> None:
        """Begin with errors: of the same series step by step, of others on average.

        Steps of the same series count twice, and of several outputs a thousand times, so that a
        fault soon after is not learnt. A series without any starts as the others.
        """
        errors = calibration.errors
        is_own = calibration.is_of(self.values.shape[2])
        model = self
        if not is_own:
            model = ResidualModel(errors.shape[:2], self.memory, frozen=self.frozen)
        model.run_through(errors)
        is_empty = np.isnan(errors).all((0, 2))
        mean = model.values[:, :, ~is_empty].mean(2, keepdims=True)
        mean[3] = 0.0
        if not is_own and not self.frozen:
            mean[2] = errors.shape[2]
        self.values[:, :, is_empty if is_own else slice(None)] = mean
        self.initial = self.values.copy()
        self._refresh()

    def run_through(self, errors: np.ndarray) -> None:
        """Learn from errors (G, N, S), with doubts about what so few steps tell."""
        residuals = self._judged(errors) if len(errors) > 1 else errors[0]
        count = self.values[2, 0]
        known = np.abs(residuals[~np.isnan(residuals)])
        if len(known):
            self.values[0, 0] = np.median(known) / 0.6745
        for residual in residuals.T:
            self._learn(residual)
        np.maximum(count, 1, out=count)
        self._of_means()[[1, 4]] *= np.sqrt(1 + DOUBT * self._n_steps / count)
        weight = 1000.0 if len(self.joint) else 2.0
        count *= np.inf if self.frozen else weight

    def _judged(self, errors: np.ndarray) -> np.ndarray:
        """Return residuals (N, S) of errors (G, N, S) by the covariance of the other parts, and
        keep that of all.
        """
        n_series, n_steps = errors.shape[1:]
        part = np.linspace(0, FOLDS, n_steps, endpoint=False).astype(int)
        # side by side without each part, and whole
        copies = np.stack([np.where(part == p, np.nan, errors) for p in range(FOLDS + 1)], axis=1)
        learner = ResidualModel((len(errors), (FOLDS + 1) * n_series), self.memory)
        for step in copies.transpose(3, 0, 1, 2):
            learner.learn_moments(step.reshape(len(errors), -1))
        found = np.empty((n_series, n_steps))
        for p, values in enumerate(np.split(learner.joint, FOLDS + 1, axis=2)):
            self.joint[:] = values
            self._refresh()
            for t in np.flatnonzero(part == p):
                found[:, t] = self._residual(errors[:, :, t])
        count = self.joint[0]
        count[count > 0] = np.inf
        return found

    # -- steps -------------------------------------------------------------------------------------

    def observe(self, errors: np.ndarray) -> None:
        """Learn from errors (G, N), NaN where unknown; without any, a series stays as it is."""
        residual = errors[0]
        if len(errors) > 1:
            if not self.frozen and (self.joint[0] < self.memory).any():
                self.learn_moments(errors)
                self._refresh()
            residual = self._residual(errors)
        self._learn(residual)

    def learn_moments(self, errors: np.ndarray) -> None:
        """Learn the second moments of errors (G, N), NaN where unknown."""
        count, moments = self.joint[0], self.joint[2:]
        known = ~np.isnan(errors)
        count += known
        n_both = np.maximum(np.minimum(count[:, None], count), 1)
        scale = np.sqrt(np.diagonal(moments)).T
        errors = bounded(errors, np.where(scale > 0, LARGEST * scale, np.inf))
        products = errors[:, None] * errors
        # the fewer steps, the closer correlations are to 0
        off_diagonal = 1 - np.eye(len(errors))[:, :, None]
        products /= 1 + off_diagonal * (RIDGE + len(errors) / n_both)
        moments += np.where(known[:, None] & known, products - moments, 0.0) / n_both

    def _residual(self, errors: np.ndarray) -> np.ndarray:
        """Return the residual (N,) of errors (G, N) of several outputs; NaN without any."""
        count, running = self.joint[:2]
        known = ~np.isnan(errors) & (count > 0)
        matrices = self._whitening
        if not known.all():
            errors = np.where(known, errors, 0.0)
            matrices = whitening(self.joint[2:], known)
        # bounded for an output that never erred before
        parts = np.minimum((matrices @ errors.T[:, :, None])[:, :, 0].T ** 2, 1e12)
        n_known = known.sum(0)
        running += self._gains[0] * (n_known > 0) * (parts - running)
        # Wilson & Hilferty 1931: about a standard normal variable
        variance = 2 / (9 * np.where(n_known > 0, n_known, np.nan))
        return (np.cbrt(parts.sum(0) * variance * 4.5) - 1 + variance) / np.sqrt(variance)

    def _learn(self, residual: np.ndarray) -> None:
        """Learn from residuals (N,), NaN where unknown."""
        rows = self.values[: self._n_rows, 0]
        known = ~np.isnan(residual)
        if len(residual) == 1:  # numbers are ten times as fast as arrays of one
            found = rows[:, 0].tolist()
            self._renew(found, residual.item(), min, max, math.log)
        else:
            found = list(rows)
            self._renew(found, np.where(known, residual, 0.0), np.minimum, np.maximum, np.log)
        rows[:, known] = np.reshape(found, rows.shape)[:, known]

    def _renew(self, rows: list[Any], residual: Any, least: Any, most: Any, log: Any) -> None:
        """Put those after a residual in the place of rows: of numbers, or of arrays with functions
        of arrays.
        """
        scale, centre, count, _, *tails = rows[:8]
        size = abs(residual)
        # the first residual that is not 0 tells the scale where nothing else has
        scale = scale + (scale <= 0) * size
        in_scales = residual / most(scale, NOTHING)
        u = most(least(in_scales, LARGEST), -LARGEST)
        gain = most(self._slowest, 1 / (count + 10))
        count = count + 1
        # what follows learns slowly, and from bounded steps: an anomaly must not become the rule
        scale = scale + gain * (least(size, 3 * scale) / MEAN_ABSOLUTE / 0.94 - scale)
        centre = centre + gain * (most(least(u, 2.0), -2.0) - centre)
        # only a larger distance of several outputs is one
        size_of = pos if len(self.joint) else abs
        total = 0.0
        for i, rate in enumerate(self._gains):
            mean, spread, of_size, its_centre, its_spread = rows[8 + i :: len(PARTS)]
            mean = mean + rate * (u - mean)
            of_size = of_size + rate * (size_of(u) - of_size)
            shift = mean - centre
            spread = spread + gain * (least(abs(shift), 3 * spread) / 0.75 - spread)
            distance = most(least(of_size - its_centre, 3 * its_spread), -3 * its_spread)
            its_centre = its_centre + gain * distance
            its_spread = its_spread + gain * (abs(distance) / 0.75 - its_spread)
            total = total + size_of(shift) / (spread + TINY)
            total = total + most(of_size - its_centre, 0.0) / (its_spread + TINY)
            rows[8 + i :: len(PARTS)] = mean, spread, of_size, its_centre, its_spread
        # below the limit: of a sum, which is uniform there, or falls off; a size says nothing
        if len(self.joint):
            below = math.e ** (least(total - tails[0], 0.0) / tails[2] / LN10)
        else:
            below = -log(1 - (1 - SHARE) * least(total / tails[0], 1.0)) / LN10
        gain = least(most(self._slowest / TAIL_MEMORY, 1 / (count + 10)) / SHARE, 0.3)
        decades = []
        for k, value in enumerate((total, log(most(size_of(in_scales), TINY)))):
            excess = tails[2 + k]
            above = value - tails[k]
            is_above = above > 0
            decades.append(is_above * (above / excess / LN10 + 1))
            rate = gain * (decades[k] < KNOWN)
            tails[k] = most(tails[k] + rate * excess * (is_above - SHARE), LEAST_TAILS[k][0])
            excess = excess + rate * is_above * (above / KEPT - excess)
            tails[2 + k] = most(excess, LEAST_TAILS[k][1])
        # a second chance to be above 2, so it counts for half; less would only drown what lasts
        spike = decades[1] - HALF
        alarm = most(most(decades[0], below), spike * (spike > SPIKE))
        # a few residuals cannot tell what is rare
        rows[:8] = scale, centre, count, least(alarm, count / 10), *tails

    def alarm(self) -> np.ndarray:
        """Return how unlikely the last residuals of each series are, (N,): minus the decimal
        logarithm of about how often such a state occurs.
        """
        return self.values[3, 0].copy()

    def shares(self) -> np.ndarray:
        """Return the share of each output in the running distance of each series, (G, N)."""
        if not len(self.joint):
            return np.ones(self.values.shape[1:])
        running = self.joint[1]
        return running / np.maximum(running.sum(0), TINY)


def whitening(moments: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return matrices (N, G, G) that make errors with these second moments (G, G, N) independent,
    each as close to its output as can be; 0 for outputs that are not ``known`` (G, N).

    Notes
    -----
    Source: Garthwaite & Koch (2016), Evaluating the contributions of individual variables to a
    quadratic form, the corr-max transformation.
    """
    moments, known = moments.transpose(2, 0, 1), known.T
    variance = np.diagonal(moments, axis1=1, axis2=2)
    factor = known / np.sqrt(np.maximum(variance, NOTHING))
    values, vectors = np.linalg.eigh(moments * factor[:, :, None] * factor[:, None])
    root = vectors / np.sqrt(np.maximum(values, 1e-6))[:, None]
    return (root @ vectors.transpose(0, 2, 1)) * factor[:, None]
