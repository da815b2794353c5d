"""Fit a linear head in closed form: ridge regression whose penalty is chosen by left-out rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fluxutils_py.errors import DataError
from fluxutils_py.parallel import RankGroup

N_ALPHAS = 13
MOST_ROWS = 4000  # of which the products with one another are kept: the dual form
FEW_ROWS = 1000
FIXED_PENALTY = 1e-4  # times the mean squared length of a row, and the sum of weights
CLEARLY = 0.9  # of an error, below which features that are richer are worth it
MOST_LEFT_OUT = 2000  # rows of larger data whose errors choose the penalty
# a sum of products is as large for a short block as for a long one: short ones are joined to this
# many rows for each feature, or this many numbers
ROWS_OF_FEATURE = 4
MOST_JOINED = 2**21
TEMPERATURES = torch.logspace(-1, 2.5, 141, dtype=torch.float64)


class Rows(NamedTuple):
    """Some rows of the data.

    Attributes
    ----------
    features : Tensor of shape (n, P)
    targets : Tensor of shape (n, G)
    weights : Tensor of shape (n,)
        Rows of weight 0 have no effect.
    groups : Tensor of shape (n,), int64
        Rows of one group, such as the series of one patient, are left out together: a choice by
        single rows is too hopeful where rows resemble one another.
    """

    features: Tensor
    targets: Tensor
    weights: Tensor
    groups: Tensor


@dataclass(frozen=True)
class ClosedFormHead:
    """A linear map from features to outputs, and how well it does on rows that were left out.

    Attributes
    ----------
    weight : Tensor of shape (G, P), float64
    bias : Tensor of shape (G,), float64
    alpha : float
        The penalty, relative to features that were standardised and divided by sqrt(P).
    groups : Tensor of shape (m,), int64
        The groups of the rows that were left out in turn; all rows in the dual form.
    left_out : Tensor of shape (m, G), float64
        What models that had not seen these rows predict for them.
    targets, weights : Tensor of shapes (m, G) and (m,), float64
        Of these rows.
    temperature : float
        For classes: the factor of the outputs whose softmax has the smallest log loss on rows that
        were left out; 1 for numbers.
    """

    weight: Tensor
    bias: Tensor
    alpha: float
    groups: Tensor
    left_out: Tensor
    targets: Tensor
    weights: Tensor
    temperature: float

    @property
    def squared_error(self) -> float:
        """Mean squared error of the rows that were left out."""
        errors = (self.targets - self.left_out).square().mean(1)
        # not as a product, which rounds by where arrays lie in memory
        return float((self.weights * errors).sum() / self.weights.sum())


def fit_closed_form(
    blocks: Iterable[Rows],
    n_rows: int,
    *,
    is_classifier: bool = False,
    relative: Sequence[Tensor] | None = None,
    floor: float = 0.0,
    fixed_penalty: bool = False,
    ranks: RankGroup | None = None,
) -> ClosedFormHead:
    """Fit a linear head on features that are read once, block by block.

    Parameters
    ----------
    blocks : iterable of Rows
    n_rows : int
        In all, on all ranks. Up to 4000 rows that are no more than the features, and up to 1000 in
        any case, their products with one another are kept (the dual form); of more, only sums (P,
        P), and the rows of some groups.
    is_classifier : bool
        Whether targets are -1 and 1, one column per class, of which the largest output is the
        prediction.
    relative : sequence of Tensor of shape (P,), optional
        Factors of the standardised features: a larger one lets a feature do more, 0 leaves it out.
        Of several, from the simplest to the richest, a later one is chosen where its squared error
        on rows that are left out is less than nine tenths.
    floor : float
        Added, squared, to the variance of each feature: what varies less than this is rounding, and
        is not to be blown up.
    fixed_penalty : bool
        Whether to leave out nothing: the penalty is .0001 of the squared length of all rows,
        the first of ``relative`` applies, and a weight counts as that many equal rows.
    ranks : RankGroup, optional
        Each has some of the blocks; all get the same head.

    Returns
    -------
    ClosedFormHead

    Raises
    ------
    DataError
        If there are fewer than two rows with a weight, or features or targets are not finite.

    Notes
    -----
    Minimises the weighted squared error plus ``alpha`` times the squared weights, without a penalty
    on the bias, for ``alpha`` in 13 steps from .0001 to 100 of the mean squared length of a row, on
    the CPU. The error of a group that is left out is exact, not refitted: with the smoother ``H``,
    errors ``e`` of the fit, and a group ``I``, it is ``(1 - H[I, I]) ** -1 e[I]``. Classes choose
    the highest accuracy, and among equals the smallest squared error.

    Source: Hoerl & Kennard (1970), "Ridge regression"; Rifkin & Lippert (2007), "Notes on
    regularized least squares", for the closed form of the errors; Chan, Golub & LeVeque (1983) for
    sums of blocks.
    """
    kept: _Kernel | _Sums | None = None
    n_read = 0
    for read in blocks:
        block = Rows(*(part.cpu() for part in read))
        if kept is None:
            kept = _to_keep(n_rows, block.features.shape[1])
        _check_finite(block, n_read)
        kept.add(block)
        n_read += len(block.weights)
    kept = kept or _to_keep(n_rows, 0)  # a rank may have none
    kept.join(ranks or RankGroup())
    problem, best = _best_problem(kept, relative or [None], floor, is_classifier, fixed_penalty)
    weight, bias = problem.solve(best.alpha)
    temperature = 1.0
    if is_classifier:
        temperature = best_temperature(best.left_out, problem.targets, problem.weights)
    head = ClosedFormHead(
        weight=weight,
        bias=bias,
        alpha=best.alpha,
        groups=problem.groups,
        left_out=best.left_out,
        targets=problem.targets,
        weights=problem.weights,
        temperature=temperature,
    )
    if ranks is None or ranks.is_single:
        return head
    # linear algebra rounds by where arrays lie in memory
    of_rank_0: ClosedFormHead = ranks.allgather(head)[0]
    return of_rank_0


def _to_keep(n_rows: int, n_features: int) -> _Kernel | _Sums:
    if n_rows <= min(MOST_ROWS, max(FEW_ROWS, n_features)):
        return _Kernel()
    return _Sums(math.ceil(n_rows / MOST_LEFT_OUT))


def _best_problem(
    kept: _Kernel | _Sums,
    relative: Sequence[Tensor | None],
    floor: float,
    is_classifier: bool,
    fixed_penalty: bool,
) -> tuple[_Problem, _Candidate]:
    """Return the problem with the factors that do best, and its best penalty."""
    chosen: tuple[_Problem, _Candidate] | None = None
    for factors in relative:
        problem = kept.problem(Scaling(factors, floor))
        if fixed_penalty:
            # of the whole weight: then a weight is worth that many rows
            alpha = FIXED_PENALTY * problem.mean_square() * float(problem.weights.sum())
            errors = problem.residuals(alpha) / problem.weights.sqrt()[:, None]
            return problem, _Candidate.judged(alpha, problem, errors, is_classifier)
        candidate = _best_candidate(problem, is_classifier)
        error = candidate.squared_error
        if chosen is None or error < CLEARLY * chosen[1].squared_error:
            chosen = problem, candidate
    assert chosen is not None
    return chosen


def _best_candidate(problem: _Problem, is_classifier: bool) -> _Candidate:
    best: _Candidate | None = None
    for alpha in problem.alphas():
        errors = _errors_left_out(problem, float(alpha))
        candidate = _Candidate.judged(float(alpha), problem, errors, is_classifier)
        if best is None or candidate.is_better_than(best):
            best = candidate
    assert best is not None
    return best


def _check_finite(block: Rows, first_row: int) -> None:
    for name, values in (("features", block.features), ("targets", block.targets)):
        if not values.isfinite().all():
            row = first_row + int((~values.isfinite()).any(1).nonzero()[0])
            raise DataError(f"the {name} of a closed-form head are not finite at row {row}")


def _joined(blocks: list[Rows], ranks: RankGroup) -> Rows:
    """Return the rows of all blocks of all ranks that have a weight."""
    own = [tuple(part[block.weights > 0] for part in block) for block in blocks]
    every = [block for of_rank in ranks.allgather(own) for block in of_rank]
    n = sum(len(block[2]) for block in every)
    if n < 2:
        samples = "1 sample" if n == 1 else f"{n} samples"
        raise DataError(f"a closed-form head needs at least 2 rows with a weight, got {samples}")
    return Rows(*(torch.cat(parts) for parts in zip(*every, strict=True)))


class Scaling(NamedTuple):
    """How to standardise features; see :func:`fit_closed_form`."""

    relative: Tensor | None = None
    floor: float = 0.0


class _Scale(NamedTuple):
    """How features are standardised: ``(x - mean) * factor``."""

    mean: Tensor
    factor: Tensor

    @classmethod
    def of(cls, mean: Tensor, variance: Tensor, scaling: Scaling) -> _Scale:
        # rounding leaves a little variance in a constant: it must not be blown up
        is_constant = (variance <= 1e-12 * mean.square()) | (variance == 0)
        factor = (variance + scaling.floor**2).rsqrt().masked_fill(is_constant, 0)
        factor = factor / math.sqrt(len(mean))
        if scaling.relative is not None:
            factor = factor * scaling.relative.to(factor)
        return cls(mean, factor)


class _Problem:
    """A ridge regression that can be solved for any penalty, and the rows that are left out."""

    groups: Tensor  # (m,)
    targets: Tensor  # (m, G) of these rows
    weights: Tensor  # (m,)

    def alphas(self) -> Tensor:
        """Return the penalties to try."""
        steps = torch.logspace(-2, 4, N_ALPHAS, dtype=torch.float64)
        return steps * 0.01 * self.mean_square()

    def mean_square(self) -> float:
        """Return the mean squared length of a row of standardised features."""
        raise NotImplementedError

    def solve(self, alpha: float) -> tuple[Tensor, Tensor]:
        """Return weight (G, P) and bias (G,)."""
        raise NotImplementedError

    def residuals(self, alpha: float) -> Tensor:
        """Return errors (m, G) of the fit, times the roots of the weights."""
        raise NotImplementedError

    def leverage(self, alpha: float) -> Tensor:
        """Return the diagonal of 1 - H, (m,)."""
        raise NotImplementedError

    def leverage_block(self, alpha: float, rows: Tensor) -> Tensor:
        """Return 1 - H for some of the rows, given by position."""
        raise NotImplementedError


class _Kernel:
    """All rows, for the dual form."""

    def __init__(self) -> None:
        self.blocks: list[Rows] = []

    def add(self, block: Rows) -> None:
        self.blocks.append(block)

    def join(self, ranks: RankGroup) -> None:
        """Take in what the other ranks have kept."""
        self.rows = _joined(self.blocks, ranks)
        self.blocks.clear()  # the largest arrays: not twice

    def problem(self, scaling: Scaling) -> _DualProblem:
        return _DualProblem(self.rows, scaling)


class _DualProblem(_Problem):
    """As many unknowns as rows."""

    def __init__(self, rows: Rows, scaling: Scaling) -> None:
        self.groups = rows.groups
        self.targets = rows.targets.double()
        self.weights = rows.weights.double()
        share = self.weights / self.weights.sum()
        x = rows.features.double()
        mean = share @ x
        x -= mean
        self.scale = _Scale.of(mean, share @ x.square(), scaling)
        x *= self.scale.factor
        self.x = x
        self.root = self.weights.sqrt()
        self.mean_target = share @ self.targets
        kernel = x @ x.T
        self.mean_of_diagonal = float(share @ kernel.diagonal())
        kernel *= self.root[:, None]
        kernel *= self.root
        # The root of the weights is an eigenvector of the value 0, as rows are centred; it stands
        # for the bias, which has no penalty. It is moved to the end of the spectrum, since rounding
        # mixes it with others whose values are nearly 0.
        unit = self.root / self.root.norm()
        kernel += (2 * kernel.trace() + 1) * unit[:, None] * unit
        values, vectors = torch.linalg.eigh(kernel)
        self.values = values[:-1].clamp(min=0)
        self.vectors = vectors[:, :-1]
        self.projected = self.vectors.T @ (self.root[:, None] * (self.targets - self.mean_target))

    def mean_square(self) -> float:
        return self.mean_of_diagonal

    def _shrunk(self, alpha: float) -> Tensor:
        return 1 / (self.values + alpha)

    def solve(self, alpha: float) -> tuple[Tensor, Tensor]:
        dual = self.vectors @ (self._shrunk(alpha)[:, None] * self.projected)
        weight = (self.x.T @ (self.root[:, None] * dual)).T * self.scale.factor
        return weight, self.mean_target - weight @ self.scale.mean

    def residuals(self, alpha: float) -> Tensor:
        return self.vectors @ (alpha * self._shrunk(alpha)[:, None] * self.projected)

    def leverage(self, alpha: float) -> Tensor:
        return self.vectors.square() @ (alpha * self._shrunk(alpha))

    def leverage_block(self, alpha: float, rows: Tensor) -> Tensor:
        some = self.vectors[rows]
        return (some * (alpha * self._shrunk(alpha))) @ some.T


class _Sums:
    """Sums of products of features, for the primal form, and the rows of every k-th group."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.kept: list[Rows] = []
        self.waiting: list[Rows] = []
        self.n_waiting = 0
        self.total = 0.0

    def add(self, block: Rows) -> None:
        chosen = block.groups % self.every == 0
        self.kept.append(Rows(*(part[chosen] for part in block)))
        n_rows, n_features = block.features.shape
        self.waiting.append(block)
        self.n_waiting += n_rows
        if self.n_waiting >= min(ROWS_OF_FEATURE * n_features, MOST_JOINED // max(n_features, 1)):
            self._add_waiting()

    def _add_waiting(self) -> None:
        if self.waiting:
            self._add_products(Rows(*map(torch.cat, zip(*self.waiting, strict=True))))
        self.waiting.clear()
        self.n_waiting = 0

    def _add_products(self, block: Rows) -> None:
        weights = block.weights.double()
        total = float(weights.sum())
        if total == 0:
            return
        both = torch.cat([block.features.double(), block.targets.double()], 1)
        mean = weights @ both / total
        away = both - mean
        products = away.T @ (weights[:, None] * away)
        self._merge(total, mean, products)

    def _merge(self, total: float, mean: Tensor, products: Tensor) -> None:
        if self.total == 0:
            self.total, self.mean, self.products = total, mean, products
            return
        shift = mean - self.mean
        self.products += products
        self.products += torch.outer(shift, shift) * (self.total * total / (self.total + total))
        self.total += total
        self.mean += shift * (total / self.total)

    def join(self, ranks: RankGroup) -> None:
        """Take in what the other ranks have kept."""
        self._add_waiting()
        own = (self.total, self.mean, self.products) if self.total else None
        parts = [part for part in ranks.allgather(own) if part is not None]
        if not ranks.is_single:
            self.total = 0.0
            for part in parts:  # in the order of ranks, on all of them
                self._merge(*part)
        self.rows = _joined(self.kept, ranks)

    def problem(self, scaling: Scaling) -> _PrimalProblem:
        return _PrimalProblem(self, self.rows, scaling)


class _PrimalProblem(_Problem):
    """As many unknowns as features."""

    def __init__(self, sums: _Sums, rows: Rows, scaling: Scaling) -> None:
        n = rows.features.shape[1]
        self.groups = rows.groups
        self.targets = rows.targets.double()
        self.weights = rows.weights.double()
        self.total = sums.total
        self.mean_target = sums.mean[n:]
        variance = sums.products.diagonal()[:n] / sums.total
        self.scale = _Scale.of(sums.mean[:n], variance, scaling)
        factor = self.scale.factor
        self.mean_of_squares = float((variance * factor.square()).sum())
        squares = sums.products[:n, :n] * factor[:, None] * factor
        values, self.vectors = torch.linalg.eigh(squares)
        self.values = values.clamp(min=0)
        self.projected = self.vectors.T @ (factor[:, None] * sums.products[:n, n:])
        self.root = self.weights.sqrt()
        x = (rows.features.double() - self.scale.mean) * factor
        self.rotated = self.root[:, None] * (x @ self.vectors)

    def mean_square(self) -> float:
        return self.mean_of_squares

    def solve(self, alpha: float) -> tuple[Tensor, Tensor]:
        solution = self.vectors @ (self.projected / (self.values + alpha)[:, None])
        weight = (self.scale.factor[:, None] * solution).T
        return weight, self.mean_target - weight @ self.scale.mean

    def residuals(self, alpha: float) -> Tensor:
        fitted = self.rotated @ (self.projected / (self.values + alpha)[:, None])
        return self.root[:, None] * (self.targets - self.mean_target) - fitted

    def leverage(self, alpha: float) -> Tensor:
        of_bias = self.weights / self.total
        return 1 - of_bias - self.rotated.square() @ (1 / (self.values + alpha))

    def leverage_block(self, alpha: float, rows: Tensor) -> Tensor:
        some = self.rotated[rows]
        root = self.root[rows]
        smoother = (some / (self.values + alpha)) @ some.T + torch.outer(root, root) / self.total
        return torch.eye(len(rows), dtype=torch.float64) - smoother


def _errors_left_out(problem: _Problem, alpha: float) -> Tensor:
    """Return target minus prediction (m, G) of models that had not seen the row's group."""
    residuals = problem.residuals(alpha)
    root = problem.weights.sqrt()[:, None]
    groups = problem.groups.unique()
    if len(groups) == len(problem.groups):  # single rows
        return residuals / problem.leverage(alpha).clamp(min=1e-12)[:, None] / root
    errors = torch.empty_like(residuals)
    for group in groups:
        rows = (problem.groups == group).nonzero()[:, 0]
        block = problem.leverage_block(alpha, rows)
        errors[rows] = torch.linalg.lstsq(block, residuals[rows]).solution
    return errors / root


class _Candidate(NamedTuple):
    """A penalty, and what it does on rows that are left out."""

    alpha: float
    left_out: Tensor
    accuracy: float  # 0 for numbers
    squared_error: float

    @classmethod
    def judged(
        cls, alpha: float, problem: _Problem, errors: Tensor, is_classifier: bool
    ) -> _Candidate:
        left_out = problem.targets - errors
        share = problem.weights / problem.weights.sum()
        accuracy = 0.0
        if is_classifier:
            right = left_out.argmax(1) == problem.targets.argmax(1)
            accuracy = float(share @ right.double())
        return cls(alpha, left_out, accuracy, float(share @ errors.square().sum(1)))

    def is_better_than(self, other: _Candidate) -> bool:
        # accuracies are sums of shares: equal ones may differ by rounding
        if abs(self.accuracy - other.accuracy) > 1e-9:
            return self.accuracy > other.accuracy
        return self.squared_error < other.squared_error


def best_temperature(outputs: Tensor, targets: Tensor, weights: Tensor) -> float:
    """Return the factor t for which softmax(t * outputs) has the smallest log loss.

    Parameters
    ----------
    outputs : Tensor of shape (m, G)
    targets : Tensor of shape (m, G)
        1 in the column of the row's class, the others smaller.
    weights : Tensor of shape (m,)
    """
    labels = targets.argmax(1)
    losses = []
    for t in TEMPERATURES:
        each = torch.nn.functional.cross_entropy(t * outputs, labels, reduction="none")
        losses.append(float(weights @ each))
    return float(TEMPERATURES[min(range(len(losses)), key=losses.__getitem__)])
