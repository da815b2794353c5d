"""The oracle of ``cell="linear"``: features of one step after another, and ridges that are refitted
without each group of rows.
"""

import itertools

import numpy as np

LAGS, FEATURES, SPANS = 48, 400, (5, 20, 80)


class Ridge:
    """Fits some :class:`Data`, and predicts like :class:`Oracle`."""

    def __init__(self, data):
        (x,), (y,) = data.x, data.y
        there = np.zeros(x.shape[1:], bool)
        for n, t in _steps(data):
            there[n, t] = True
        w = np.ones(there.shape) if data.w is None else data.w
        w = np.where(there & ~np.isnan(y), w, 0)  # (G, N, T)
        w = w * ((w > 0).sum() / w.sum())
        self.mean_y, self.scale_y = (a[:, None] for a in _moments(y, w))
        self.mean, self.scale = _moments(x, np.broadcast_to(w.max(0), x.shape))
        self.n_lags = min(data.lengths.max(), LAGS, FEATURES // len(x))
        self.has_statistics = data.lengths.max() > 1
        z = self.features(data)
        rows = [at for at in _steps(data) if w[:, *at].any()]
        first, last = _ends(rows)
        # as many groups as there are tenths of the longest series
        block = min(100, max(1, max(last[n] - first[n] + 1 for n in first) // 10))
        x = np.array([z[at] for at in rows])
        y = ((y[:, *np.transpose(rows)] - self.mean_y) / self.scale_y).T
        w = w[:, *np.transpose(rows)].T
        groups = np.unique([(n, t // block) for n, t in rows], axis=0, return_inverse=True)[1]
        is_table = data.lengths.max() == 1 and len(rows) < 100
        self.weight, self.bias = np.zeros((x.shape[1], y.shape[1])), np.zeros(y.shape[1])
        done = set()
        for g in range(y.shape[1]):
            alike = [h for h in range(y.shape[1]) if (w[:, h] == w[:, g]).all()]
            if g not in done:
                done.update(alike)
                k = w[:, g] > 0
                found = self._head(x[k], y[k][:, alike], w[k, g], groups.ravel()[k], is_table)
                self.weight[:, alike], self.bias[alike] = found

    def features(self, data):
        """Of each step of each series."""
        (x,) = data.x
        spans = SPANS if self.has_statistics else ()
        z = (x - self.mean[:, None, None]) / self.scale[:, None, None]
        z[:, np.isnan(x).any(0)] = 0
        found = {}
        for n, t in _steps(data):
            past = z[:, n, data.starts[n] : t + 1].T[::-1]  # the newest first
            lags = np.zeros((self.n_lags, len(x)))
            lags[: len(past)] = past[: self.n_lags]
            parts = [lags.ravel()]
            for span in spans:
                shares = (1 - 2 / (span + 1)) ** np.arange(len(past))
                parts.append(shares @ past / shares.sum())
            for span in spans:
                window = past[:span][::-1]
                k = np.arange(len(window)) - (len(window) - 1) / 2
                slope = k @ window / max((k**2).sum(), 1e-3)
                parts += [window.mean(0), window.std(0), slope]
            found[n, t] = np.concatenate(parts)
        return found

    def _head(self, x, y, w, groups, is_table):
        if len(w) < 2:
            return np.zeros((x.shape[1], y.shape[1])), y.sum(0)
        mean = w @ x / w.sum()
        variance = w @ (x - mean) ** 2 / w.sum()
        is_constant = variance <= 1e-12 * mean**2
        factor = np.where(is_constant, 0, 1 / np.sqrt(variance + 1e-6)) / np.sqrt(x.shape[1])
        n_inputs = len(self.mean)
        trust = 1 / np.sqrt(1 + np.arange(self.n_lags).repeat(n_inputs))
        n_others = x.shape[1] - len(trust)
        if len(set(groups)) == 1:
            groups = np.arange(len(groups))
        best = None
        for others in (0.0, 1.0):
            scale = factor * np.concatenate([trust, np.full(n_others, others)])
            z = (x - mean) * scale
            unit = (w @ (z**2).sum(1) / w.sum()) or 1.0
            alphas = [1e-4 * unit * w.sum()] if is_table else np.logspace(-4, 2, 13) * unit
            errors = [0.0 if is_table else _error_left_out(z, y, w, groups, a) for a in alphas]
            # the first of equal ones
            k = next(i for i, e in enumerate(errors) if e <= (1 + 1e-9) * min(errors))
            if best is None or errors[k] < 0.9 * best[0]:
                weight, bias = _ridge(z, y, w, alphas[k])
                weight = weight * scale[:, None]
                best = errors[k], weight, bias - mean @ weight
        return best[1:]

    def predict(self, data):
        out = np.full((len(self.bias), data.n_series, data.n_steps), np.nan)
        for (n, t), z in self.features(data).items():
            if not np.isnan(data.x[0][:, n, t]).all():
                out[:, n, t] = z @ self.weight + self.bias
        return [out * self.scale_y[..., None] + self.mean_y[..., None]], None


def _steps(data):
    for n, (start, length) in enumerate(zip(data.starts, data.lengths, strict=True)):
        yield from ((n, t) for t in range(start, start + length))


def _ends(rows):
    rows = sorted(rows)
    by_series = itertools.groupby(rows, key=lambda at: at[0])
    steps = {n: [t for _, t in group] for n, group in by_series}
    return {n: t[0] for n, t in steps.items()}, {n: t[-1] for n, t in steps.items()}


def _moments(a, w):
    """Mean and scale of each row of an array (F, N, T) where there are weights."""
    means, scales = [], []
    for values, weights in zip(a, w, strict=True):
        live = (weights > 0) & ~np.isnan(values)
        if not live.any():
            means.append(0.0)
            scales.append(1.0)
            continue
        mean = np.average(values[live], weights=weights[live])
        scale = np.sqrt(np.average((values[live] - mean) ** 2, weights=weights[live]))
        means.append(mean)
        scales.append(scale if scale > 1e-14 * abs(mean) else 1.0)
    return np.array(means), np.array(scales)


def _ridge(z, y, w, alpha):
    mean, mean_y = w @ z / w.sum(), w @ y / w.sum()
    root = np.sqrt(w)[:, None]
    a, b = root * (z - mean), root * (y - mean_y)
    if len(a) < a.shape[1]:
        weight = a.T @ np.linalg.solve(a @ a.T + alpha * np.eye(len(a)), b)
    else:
        weight = np.linalg.solve(a.T @ a + alpha * np.eye(a.shape[1]), a.T @ b)
    return weight, mean_y - mean @ weight


def _error_left_out(z, y, w, groups, alpha):
    total = 0.0
    for group in set(groups.tolist()):
        out = groups == group
        weight, bias = _ridge(z[~out], y[~out], w[~out], alpha)
        total += float((w[out, None] * (y[out] - z[out] @ weight - bias) ** 2).sum())
    return total
