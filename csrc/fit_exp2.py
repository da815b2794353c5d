"""The coefficients of ``step_numbers.h``: minimax polynomials p(r) of ``(2**r - 1) / r`` for r in [-1/2,
1/2].

The error that is made small is that of ``r * p(r)`` relative to ``2**r - 1``, so that tanh of a
small number keeps its leading digits. Remez' exchange in 60 digits, then the coefficients rounded
to their type; needs mpmath. Prints them, the highest power first, and the largest relative error
before and after rounding.

    python csrc/fit_exp2.py
"""

import struct

from mpmath import cos, expm1, linspace, log, lu_solve, matrix, mp, mpf, pi

mp.dps = 60


def target(r):
    return expm1(r * log(2)) / r if r else log(mpf(2))


def remez(degree, rounds=12):
    """Coefficients, lowest first, and the largest relative error."""
    n = degree + 2
    nodes = [-cos(pi * k / (n - 1)) / 2 for k in range(n)]
    grid = linspace(-mpf(1) / 2, mpf(1) / 2, 2001)
    for _ in range(rounds):
        a = matrix(n, n)
        b = matrix(n, 1)
        for i, r in enumerate(nodes):
            f = target(r)
            for j in range(degree + 1):
                a[i, j] = r**j / f
            a[i, degree + 1] = (-1) ** i
            b[i] = 1
        found = lu_solve(a, b)
        c = [found[j] for j in range(degree + 1)]
        errors = [error(c, r) for r in grid]
        # the extremum of each run of one sign
        extrema, best = [], 0
        for k in range(1, len(grid)):
            if errors[k] * errors[best] < 0:
                extrema.append(best)
                best = k
            elif abs(errors[k]) > abs(errors[best]):
                best = k
        extrema.append(best)
        if len(extrema) == n:
            nodes = [grid[k] for k in extrema]
    return c, max(abs(e) for e in errors)


def error(c, r):
    p = mpf(0)
    for a in reversed(c):
        p = p * r + a
    return p / target(r) - 1


def rounded(c, form):
    return [mpf(struct.unpack(form, struct.pack(form, float(a)))[0]) for a in c]


if __name__ == "__main__":
    for form, suffix, degree in (("f", "f", 5), ("d", "", 10)):
        c, e = remez(degree)
        short = rounded(c, form)
        after = max(abs(error(short, r)) for r in linspace(-mpf(1) / 2, mpf(1) / 2, 2001))
        print(f"relative error {float(e):.1e}, with rounded coefficients {float(after):.1e}")
        print(
            ", ".join(f"{float(a):.{9 if form == 'f' else 17}g}{suffix}" for a in reversed(short))
        )
