"""NAB's score, beside a plain walk through the steps, and values that its rules fix."""

import math

import numpy as np
import pytest


@pytest.fixture
def scorer(module):
    return module("nab_scorer")


def plain(scores, windows, threshold, profile, begin):
    """The sum for one series, step by step, as the paper tells it."""
    sigmoid = lambda y: -1.0 if y > 3 else 2 / (1 + math.exp(5 * y)) - 1  # noqa: E731
    best = {w: -profile.miss for w in windows if w[1] >= begin}
    alarms = 0.0
    for t in range(begin, len(scores)):
        if scores[t] < threshold:
            continue
        inside = [w for w in windows if w[0] <= t <= w[1]]
        if inside:
            (w,) = inside
            place = -(w[1] - t + 1) / (w[1] - w[0] + 1)
            best[w] = max(best[w], sigmoid(place) / sigmoid(-1))
            continue
        past = [w for w in windows if w[1] < t]
        worth = -1.0
        if past:
            worth = sigmoid((t - past[-1][1]) / (past[-1][1] - past[-1][0]))
        alarms += profile.false_alarm * worth
    return sum(best.values()) + alarms


@pytest.mark.parametrize("name", ["standard", "few false alarms", "few misses"])
def test_sums_are_those_of_a_plain_walk(scorer, name):
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 12, 200).astype(float)  # with equal ones
    windows = [(10, 35), (60, 80), (140, 150)]  # the first begins in the probation
    thresholds = np.array([0.0, 3.0, 7.5, 11.0, np.inf])
    profile = scorer.PROFILES[name]
    found = scorer.raw_scores(scores, windows, thresholds, profile)
    expected = [plain(scores, windows, k, profile, 30) for k in thresholds]
    np.testing.assert_allclose(found, expected)


def test_silence_is_0_and_a_detection_at_each_start_100(scorer):
    windows = [(50, 70), (120, 140)]
    perfect = np.zeros(200)
    perfect[[50, 120]] = 1
    for profile in scorer.PROFILES.values():
        assert scorer.nab_score([(np.zeros(200), windows)], profile)[0] == pytest.approx(0)
        score, threshold = scorer.nab_score([(perfect, windows)], profile)
        assert score == pytest.approx(100)
        assert threshold == 1


def test_one_threshold_serves_all_series(scorer):
    windows = [(50, 70)]
    first, second = np.zeros(200), np.zeros(200)
    first[[50, 180]] = 5, 3
    second[50] = 2
    both = scorer.nab_score([(first, windows), (second, windows)], scorer.PROFILES["standard"])
    assert both[1] == 2  # takes the false alarm of 3 along
    assert both[0] < 100
