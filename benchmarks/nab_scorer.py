"""The scorer of the Numenta Anomaly Benchmark, written anew from its published rules.

Lavin & Ahmad (2015), Evaluating real-time anomaly detection algorithms, arXiv:1510.03336, section
II, and ``sweeper.py`` of the benchmark's repository:

- What happens in the first 15 per cent of a series, at most 750 steps, does not count.
- A window with detections earns the score of its best one, a scaled sigmoid of its place: 1 at the
  window's first step and 0 at its end. A window without any costs ``miss``.
- Each detection outside of windows costs ``false_alarm``, less if it is soon after a window, by the
  same sigmoid, which is then negative.
- One threshold serves all series: the one with the largest sum.
- 0 is what a detector gets that never alarms, 100 a perfect one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PROBATION = 0.15
MOST_PROBATION = 750


@dataclass(frozen=True)
class Profile:
    """What outcomes are worth; a detection at the start of a window is worth 1."""

    false_alarm: float
    miss: float


PROFILES = {
    "standard": Profile(0.11, 1.0),
    "few false alarms": Profile(0.22, 1.0),
    "few misses": Profile(0.11, 2.0),
}

Windows = Sequence[tuple[int, int]]  # first and last step of each


def n_probation(n_steps: int) -> int:
    """How many steps of a series do not count."""
    return min(int(PROBATION * n_steps), MOST_PROBATION)


def scaled_sigmoid(position: float) -> float:
    """The worth of a detection: 1 a window's length before its end, 0 at its end, -1 long after."""
    if position > 3:
        return -1.0
    return 2 / (1 + math.exp(5 * position)) - 1


def worth(n_steps: int, windows: Windows) -> np.ndarray:
    """What a detection at each step is worth, (T,): up to 1 in windows, down to -1 outside."""
    worths = np.full(n_steps, -1.0)
    for first, last in windows:
        length = last - first + 1
        for t in range(first, last + 1):
            worths[t] = scaled_sigmoid(-(last - t + 1) / length) / scaled_sigmoid(-1.0)
    for i, (first, last) in enumerate(windows):
        stop = windows[i + 1][0] if i + 1 < len(windows) else n_steps
        for t in range(last + 1, stop):
            worths[t] = scaled_sigmoid((t - last) / (last - first))
    return worths


def raw_scores(
    scores: np.ndarray, windows: Windows, thresholds: np.ndarray, profile: Profile
) -> np.ndarray:
    """The sum of worths of one series for each threshold, (K,); a score at least as large as the
    threshold is a detection.
    """
    n_steps = len(scores)
    begin = n_probation(n_steps)
    worths = worth(n_steps, windows)
    inside = np.zeros(n_steps, bool)
    total = np.zeros(len(thresholds))
    for first, last in windows:
        inside[first : last + 1] = True
        steps = np.arange(max(first, begin), last + 1)
        if not len(steps):
            continue
        detected = scores[None, steps] >= thresholds[:, None]
        best = np.where(detected, worths[None, steps], -np.inf).max(1)
        total += np.where(np.isfinite(best), best, -profile.miss)
    counts = np.flatnonzero(~inside & (np.arange(n_steps) >= begin))
    order = counts[np.argsort(-scores[counts], kind="stable")]
    sums = np.concatenate([[0.0], np.cumsum(worths[order])])
    n_above = np.searchsorted(-scores[order], -thresholds, side="right")
    return total + profile.false_alarm * sums[n_above]


def nab_score(
    series: Sequence[tuple[np.ndarray, Windows]], profile: Profile
) -> tuple[float, float]:
    """The score of a detector on several series with one threshold, and that threshold.

    Parameters
    ----------
    series : sequence of (scores, windows)
        Scores (T,) of which larger means more anomalous, and the labelled windows.
    """
    judged = [scores[n_probation(len(scores)) :] for scores, _ in series]
    thresholds = np.append(np.unique(np.concatenate(judged)), np.inf)
    raw = sum(raw_scores(scores, windows, thresholds, profile) for scores, windows in series)
    n_windows = sum(
        sum(last >= n_probation(len(scores)) for _, last in windows) for scores, windows in series
    )
    best = int(np.argmax(raw))
    silent = -profile.miss * n_windows
    return 100 * (float(raw[best]) - silent) / (n_windows - silent), float(thresholds[best])
