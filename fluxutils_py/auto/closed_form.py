"""Fit a linear head in closed form: ridge regression whose penalty is chosen by left-out rows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fluxutils_py.errors import DataError
from fluxutils_py.parallel import RankGroup

PENALTIES = np.logspace(-4, 2, 13).tolist()  # relative to the mean squared length of a row
MOST_ROWS = 4000  # of which the products with one another are kept: the dual form
FIXED_PENALTY = 1e-4  # times the mean squared length of a row, and the sum of weights
CLEARLY = 0.9  # of an error, below which features that are richer are worth it
MOST_LEFT_OUT = 2000  # rows of larger data whose errors choose the penalty
# a sum of products is as large for a short block as for a long one: short ones are joined to this
# many rows for each feature, or this many numbers
ROWS_OF_FEATURE = 4
MOST_JOINED = 2**21
TEMPERATURES = torch.logspace(-1, 2.5, 141, dtype=torch.float64)


class Rows(NamedTuple):
    """Some rows of the data; they are not changed.

    Attributes
    ----------
    features : Tensor of shape (n, P)
    targets : Tensor of shape (n, G)
    weights : Tensor of shape (n,) or (n, G)
        For all targets of a row, or for each. What has the weight 0 has no effect.
    groups : Tensor of shape (n,), int64
        Rows of one group, such as the series of one patient, are left out together: a choice by
        single rows is too hopeful where rows resemble one another.
    """

    features: Tensor
    targets: Tensor
    weights: Tensor
    groups: Tensor

    def of(self, columns: Tensor) -> Rows:
        """Return what counts for some targets, which have the same weights."""
        weights = self.weights
        if weights.dim() == 2:
            weights = weights[:, columns[0]]
        rows = Rows(self.features, self.targets[:, columns], weights, self.groups)
        counts = weights > 0
        return rows if counts.all() else Rows(*(part[counts] for part in rows))


class ClosedFormHead(NamedTuple):
    """A linear map from features to outputs, and how well it does on rows that were left out.

    Attributes
    ----------
    weight : Tensor of shape (G, P), float64
    bias : Tensor of shape (G,), float64
    alpha : Tensor of shape (G,), float64
        The penalty of each output, relative to features that were standardised and divided by
        sqrt(P).
    groups : Tensor of shape (m,), int64
        The groups of the rows that were left out in turn; all rows in the dual form.
    left_out : Tensor of shape (m, G), float64
        What models that had not seen these rows predict for them.
    targets, weights : Tensor of shape (m, G), float64
        Of these rows. Outputs with other weights than others have rows of their own, in which those
        have the weight 0.
    candidate : Tensor of shape (G,), int64
        Which of the factors of features was chosen for each output.
    penalty : Tensor of shape (G,), float64
        ``alpha``, relative to the mean squared length of a row.
    temperature : float
        For classes: the factor of the outputs whose softmax has the smallest log loss on rows that
        were left out; 1 for numbers.
    """

    weight: Tensor
    bias: Tensor
    alpha: Tensor
    groups: Tensor
    left_out: Tensor
    targets: Tensor
    weights: Tensor
    candidate: Tensor
    penalty: Tensor
    temperature: float = 1.0

    @property
    def squared_error(self) -> float:
        """Mean squared error of the rows that were left out."""
        errors = (self.targets - self.left_out).square()
        # not as a product, which rounds by where arrays lie in memory
        return float((self.weights * errors).sum() / self.weights.sum())

    @property
    def log_loss(self) -> float:
        """Mean cross-entropy of the rows that were left out, for classes."""
        weights = self.weights[:, 0]
        labels = self.targets.argmax(1)
        each = cross_entropy(self.temperature * self.left_out, labels, reduction="none")
        return float((weights * each).sum() / weights.sum())


def fit_closed_form(
    blocks: Iterable[Rows],
    n_rows: int | Sequence[int],
    *,
    is_classifier: bool = False,
    relative: Sequence[Tensor] | None = None,
    floor: float = 0.0,
    penalties: Sequence[float] = PENALTIES,
    fixed_penalty: bool = False,
    ranks: RankGroup | None = None,
) -> ClosedFormHead:
    """Fit a linear head on features that are read once, block by block.

    Parameters
    ----------
    blocks : iterable of Rows
    n_rows : int or sequence of G int
        In all, on all ranks; of each target, if they have weights of their own. Of up to 4000 rows
        that are no more than the features, the products with one another are kept (the dual form);
        of more, only sums (P, P), and the rows of some groups.
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
    penalties : sequence of float
        Those to choose from, relative to the mean squared length of a row.
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
        If there are fewer than two rows with a weight, or numbers are not finite or have squares
        that are not.

    Notes
    -----
    Minimises the weighted squared error plus ``alpha`` times the squared weights, without a penalty
    on the bias, for each of the penalties ``alpha``, by default 13 from .0001 to 100, on
    the CPU. The error of a group that is left out is exact, not refitted: with the smoother ``H``,
    errors ``e`` of the fit, and a group ``I``, it is ``(1 - H[I, I]) ** -1 e[I]``. Classes choose
    the highest accuracy, and among equals the smallest squared error.

    Targets with the same weights are fitted together; those with others, as where some are missing,
    as if they were alone. A target with a single row is a constant, and one without any is 0.

    Source: Hoerl & Kennard (1970), "Ridge regression"; Rifkin & Lippert (2007), "Notes on
    regularized least squares", for the closed form of the errors; Chan, Golub & LeVeque (1983) for
    sums of blocks.
    """
    ranks = ranks or RankGroup()
    parts: list[_Kept] = []
    n_read = 0
    for read in blocks:
        block = Rows(*(part.cpu() for part in read))
        _check_finite(block, n_read)
        parts = parts or _to_keep(n_rows, block)
        if block.weights.dim() == 2 and len(block.weights):
            parts = _divided(parts, block.weights.unique(dim=1, return_inverse=True)[1])
        for part in parts:
            part.add(block.of(part.columns))
        n_read += len(block.weights)
    parts = _joined(parts, ranks)
    every: Sequence[Tensor | None] = relative or [None]
    heads = [
        _fit(part, every, floor, is_classifier, [] if fixed_penalty else penalties)
        for part in parts
    ]
    head = _side_by_side(parts, heads)
    if ranks.is_single:
        return head
    # linear algebra rounds by where arrays lie in memory
    of_rank_0: ClosedFormHead = ranks.allgather(head)[0]
    return of_rank_0


def _check_finite(block: Rows, first_row: int) -> None:
    named = {"features": block.features, "targets": block.targets, "weights": block.weights}
    for name, values in named.items():
        if not values.isfinite().all():
            bad = ~values.isfinite().reshape(len(values), -1).all(1)
            row = first_row + int(bad.nonzero()[0])
            raise DataError(f"the {name} of a closed-form head are not finite at row {row}")


# -- which outputs are fitted together ---------------------------------------------------------


def _to_keep(n_rows: int | Sequence[int], block: Rows) -> list[_Kept]:
    """Return what is to be kept, empty: a part for all outputs of as many rows."""
    n_features = block.features.shape[1]
    of_outputs = torch.as_tensor(n_rows).expand(block.targets.shape[1])
    parts: list[_Kept] = []
    for n in of_outputs.unique():
        columns = (of_outputs == n).nonzero()[:, 0]
        if n <= min(MOST_ROWS, n_features):
            parts.append(_Kept(columns))
        else:
            parts.append(_Sums(columns, math.ceil(n / MOST_LEFT_OUT)))
    return parts


def _divided(parts: Iterable[_Kept], labels: Tensor) -> list[_Kept]:
    """Return parts of which each has outputs of one label, (G,)."""
    divided = []
    for part in parts:
        own = labels[part.columns]
        different = own.unique()
        if len(different) == 1:
            divided.append(part)
        else:
            divided += [part.only(own == label) for label in different]
    return sorted(divided, key=lambda part: int(part.columns[0]))


def _labels(parts: list[_Kept]) -> Tensor:
    """Return the number of its part for each output, (G,)."""
    numbers = torch.repeat_interleave(torch.tensor([len(part.columns) for part in parts]))
    return numbers[torch.cat([part.columns for part in parts]).argsort()]


def _joined(parts: list[_Kept], ranks: RankGroup) -> list[_Kept]:
    """Return the parts of all ranks together; each rank gets the same."""
    every = [of_rank for of_rank in ranks.allgather(parts) if of_rank]
    joined: list[_Kept] = every[0] if every else []
    for other in every[1:]:
        joined = _divided(joined, _labels(other))
        for part, more in zip(joined, _divided(other, _labels(joined)), strict=True):
            part.merge(more)
    n = max((part.n_rows for part in joined), default=0)
    if n < 2:
        samples = "1 sample" if n == 1 else f"{n} samples"
        raise DataError(f"a closed-form head needs at least 2 rows with a weight, got {samples}")
    return joined


def _side_by_side(parts: list[_Kept], heads: list[ClosedFormHead]) -> ClosedFormHead:
    """Return one head for the outputs of all parts."""
    order = torch.cat([part.columns for part in parts]).argsort()

    def outputs(of_heads: Iterable[Tensor]) -> Tensor:
        return torch.cat(list(of_heads))[order]

    def rows(of_heads: Iterable[Tensor]) -> Tensor:
        return torch.block_diag(*of_heads)[:, order]

    return ClosedFormHead(
        weight=outputs(head.weight for head in heads),
        bias=outputs(head.bias for head in heads),
        alpha=outputs(head.alpha for head in heads),
        groups=torch.cat([head.groups for head in heads]),
        left_out=rows(head.left_out for head in heads),
        targets=rows(head.targets for head in heads),
        weights=rows(head.weights for head in heads),
        candidate=outputs(head.candidate for head in heads),
        penalty=outputs(head.penalty for head in heads),
        temperature=heads[0].temperature,  # classes are one part
    )


def _fit(
    part: _Kept,
    relative: Sequence[Tensor | None],
    floor: float,
    is_classifier: bool,
    penalties: Sequence[float],
) -> ClosedFormHead:
    """Return the head with the factors and the penalty that do best; without penalties, the first
    factors, and the fixed penalty.
    """
    rows = part.take_rows()
    if part.n_rows < 2:
        return _constant(rows)
    candidate = 0
    if not penalties or not len(rows.weights):
        problem = part.problem(rows, relative[0], floor)
        # of the whole weight: then a weight is worth that many rows
        alpha = FIXED_PENALTY * problem.mean_square * problem.total
        errors = problem.residuals(alpha) / rows.weights.sqrt()[:, None]
    else:
        problem, candidate, alpha, errors = _best_problem(
            part, rows, relative, floor, penalties, is_classifier
        )
    if not math.isfinite(_squared_error(rows, errors)):
        raise DataError("the targets of a closed-form head have squares that are not finite")
    weight, bias = problem.solve(alpha)
    left_out = rows.targets - errors
    temperature = 1.0
    if is_classifier:
        temperature = best_temperature(left_out, rows.targets, rows.weights)
    return ClosedFormHead(
        weight=weight,
        bias=bias,
        alpha=torch.full_like(bias, alpha),
        groups=rows.groups,
        left_out=left_out,
        targets=rows.targets,
        weights=rows.weights[:, None].expand_as(rows.targets),
        candidate=torch.full_like(bias, candidate, dtype=torch.long),
        penalty=torch.full_like(bias, alpha / problem.mean_square),
        temperature=temperature,
    )


def _constant(rows: Rows) -> ClosedFormHead:
    """Return the head of a target of one row or none."""
    bias = rows.targets.sum(0)
    none = rows.targets[:0]
    weight = bias.new_zeros(len(bias), rows.features.shape[1])
    zero = bias * 0
    return ClosedFormHead(weight, bias, zero, rows.groups[:0], none, none, none, zero.long(), zero)


def _best_problem(
    part: _Kept,
    rows: Rows,
    relative: Sequence[Tensor | None],
    floor: float,
    penalties: Sequence[float],
    is_classifier: bool,
) -> tuple[_Problem, int, float, Tensor]:
    """Return the problem with the factors that do best, their place, its penalty, and the errors of
    the rows that are left out.
    """
    best: tuple[_Problem, int, float, Tensor] | None = None
    least = math.inf
    for candidate, factors in enumerate(relative):
        problem = part.problem(rows, factors, floor)
        alpha, errors = _best_penalty(problem, penalties, is_classifier)
        squared_error = _squared_error(rows, errors)
        if best is None or squared_error < CLEARLY * least:
            best = problem, candidate, alpha, errors
            least = squared_error
    assert best is not None
    return best


def _best_penalty(
    problem: _Problem, penalties: Sequence[float], is_classifier: bool
) -> tuple[float, Tensor]:
    """Return the penalty that does best, and the errors of the rows that are left out."""
    best: tuple[float, Tensor] | None = None
    highest = 0.0  # accuracy
    least = math.inf  # squared error
    for penalty in penalties:
        alpha = penalty * problem.mean_square
        errors = problem.errors_left_out(alpha)
        accuracy = _accuracy(problem.rows, errors) if is_classifier else 0.0
        squared_error = _squared_error(problem.rows, errors)
        # equal ones may differ by rounding
        is_better = squared_error < (1 - 1e-9) * least
        if abs(accuracy - highest) > 1e-9:
            is_better = accuracy > highest
        if best is None or is_better:
            best = alpha, errors
            highest = accuracy
            least = squared_error
    assert best is not None
    return best


def _accuracy(rows: Rows, errors: Tensor) -> float:
    right = (rows.targets - errors).argmax(1) == rows.targets.argmax(1)
    return float(rows.weights / rows.weights.sum() @ right.double())


def _squared_error(rows: Rows, errors: Tensor) -> float:
    return float(rows.weights / rows.weights.sum() @ errors.square().sum(1))


def _factor(mean: Tensor, variance: Tensor, relative: Tensor | None, floor: float) -> Tensor:
    """Return by what features are multiplied to standardise them, without their mean."""
    if not variance.isfinite().all():
        at = int((~variance.isfinite()).nonzero()[0])
        raise DataError(
            f"feature {at} of a closed-form head has squares that are not finite: divide it"
        )
    # rounding leaves a little variance in a constant: it must not be blown up
    is_constant = (variance <= 1e-12 * mean.square()) | (variance == 0)
    factor = (variance + floor**2).rsqrt().masked_fill(is_constant, 0)
    factor = factor / math.sqrt(len(mean))
    return factor if relative is None else factor * relative.to(factor)


@dataclass
class _Problem:
    """A ridge regression that can be solved for any penalty, and the rows that are left out.

    Attributes
    ----------
    rows : Rows
        Those that are left out.
    mean, factor : Tensor of shape (P,)
        Features are standardised as ``(x - mean) * factor``.
    total, mean_square : float
        Weight of all rows, and the mean square of their length.
    mean_target : Tensor of shape (G,)
    values : Tensor of shape (q,)
        Sums of squares of features that are rotated so that they are uncorrelated.
    rotated : Tensor of shape (m, q)
        These features of the rows, times the roots of the weights.
    projected : Tensor of shape (q, G)
        Sums of their products with the targets.
    rotate_back : callable
        Turns weights (q, G) into those of the standardised features, (P, G).
    """

    rows: Rows
    mean: Tensor
    factor: Tensor
    total: float
    mean_square: float
    mean_target: Tensor
    values: Tensor
    rotated: Tensor
    projected: Tensor
    rotate_back: Callable[[Tensor], Tensor]

    def solve(self, alpha: float) -> tuple[Tensor, Tensor]:
        """Return weight (G, P) and bias (G,)."""
        solution = self.rotate_back(self.projected / (self.values + alpha)[:, None])
        weight = (self.factor[:, None] * solution).T
        return weight, self.mean_target - weight @ self.mean

    def residuals(self, alpha: float) -> Tensor:
        """Return errors (m, G) of the fit, times the roots of the weights."""
        fitted = self.rotated @ (self.projected / (self.values + alpha)[:, None])
        return self.rows.weights.sqrt()[:, None] * (self.rows.targets - self.mean_target) - fitted

    def errors_left_out(self, alpha: float) -> Tensor:
        """Return target minus prediction (m, G) of models that had not seen the row's group."""
        residuals = self.residuals(alpha)
        root = self.rows.weights.sqrt()[:, None]
        # the bias is one more feature, without a penalty
        divisor = torch.cat([self.values + alpha, self.values.new_tensor([self.total])])
        if not self._blocks:
            leverage = 1 - torch.cat([self.rotated, root], 1).square() @ (1 / divisor)
            return residuals / leverage.clamp(min=1e-12)[:, None] / root
        residuals = _with_zeros(residuals)
        errors = torch.empty_like(residuals)
        for places, features, products in self._blocks:
            within = residuals[places]
            if products is None:
                smoother = (features / divisor) @ features.mT
                rest = torch.eye(smoother.shape[1], dtype=smoother.dtype) - smoother
                errors[places] = _solved(rest, within)
            else:  # Woodbury
                solution = _solved(divisor.diag() - products, features.mT @ within)
                errors[places] = within + features @ solution
        return errors[:-1] / root

    @cached_property
    def _blocks(self) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """Groups of about the same size together, filled up with a row of zeros: positions (n, k),
        features (n, k, q + 1) with that of the bias, and their products if they are fewer than the
        rows. Empty if single rows are left out: no two are of one group, or all are, which leaves
        nothing to learn from.
        """
        m = len(self.rows.groups)
        _, number, counts = self.rows.groups.unique(return_inverse=True, return_counts=True)
        if len(counts) in (1, m):
            return []
        in_order = number.argsort(stable=True)
        first = counts.cumsum(0) - counts
        features = _with_zeros(torch.cat([self.rotated, self.rows.weights.sqrt()[:, None]], 1))
        size_class = counts.double().log2().ceil()
        blocks = []
        for size in size_class.unique():
            chosen = size_class == size
            at = torch.arange(int(counts[chosen].max()))
            place = (first[chosen, None] + at).clamp(max=m - 1)
            places = in_order[place].where(at < counts[chosen, None], m)
            own = features[places]
            blocks.append((places, own, own.mT @ own if own.shape[2] < len(at) else None))
        return blocks


def _with_zeros(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])])


def _solved(matrices: Tensor, right: Tensor) -> Tensor:
    # without an error for a singular matrix: infinite errors lose against others
    solution: Tensor = torch.linalg.solve_ex(matrices, right)[0]
    return solution


class _Kept:
    """All rows of some outputs, for the dual form."""

    def __init__(self, columns: Tensor) -> None:
        self.columns = columns
        self.n_rows = 0
        self.kept: list[Rows] = []

    def add(self, block: Rows) -> None:
        """Take in rows of these outputs that have a weight."""
        self.n_rows += len(block.weights)
        self.kept.append(block)

    def merge(self, other: Any) -> None:
        """Take in what another rank has kept of the same outputs."""
        self.n_rows += other.n_rows
        self.kept += other.kept

    def only(self, chosen: Tensor) -> Self:
        """Return this for some of its outputs, given by a mask."""
        part = copy.copy(self)
        part.columns = self.columns[chosen]
        part.kept = [Rows(x, y[:, chosen], w, groups) for x, y, w, groups in self.kept]
        return part

    def take_rows(self) -> Rows:
        """Return the rows together, and forget them."""
        features, targets, weights, groups = map(torch.cat, zip(*self.kept, strict=True))
        self.kept = []  # the largest arrays: not twice
        return Rows(features, targets.double(), weights.double(), groups)

    def problem(self, rows: Rows, relative: Tensor | None, floor: float) -> _Problem:
        """Return the problem with as many unknowns as rows."""
        total = float(rows.weights.sum())
        share = rows.weights / total
        root = rows.weights.sqrt()
        # in place, because it is large; of a copy, because it is read again
        x = rows.features.to(torch.float64, copy=True)
        mean = share @ x
        x -= mean
        factor = _factor(mean, share @ x.square(), relative, floor)
        x *= factor
        x *= root[:, None]
        kernel = x @ x.T
        trace = float(kernel.trace())
        # The root of the weights is an eigenvector of the value 0, as rows are centred; it stands
        # for the bias, which has no penalty. It is moved to the end of the spectrum, since rounding
        # mixes it with others whose values are nearly 0.
        unit = root / root.norm()
        kernel += (2 * trace + 1) * unit[:, None] * unit
        values, vectors = torch.linalg.eigh(kernel)
        # Directions without features stay, with next to no length: rounding mixes them with others,
        # and only all of them together give the right weights.
        values = values[:-1].clamp(min=1e-30 * trace + 1e-150)
        vectors = vectors[:, :-1]
        lengths = values.sqrt()
        rotated = vectors * lengths
        mean_target = share @ rows.targets
        return _Problem(
            rows,
            mean,
            factor,
            total,
            trace / total or 1.0,
            mean_target,
            values,
            rotated,
            rotated.T @ (root[:, None] * (rows.targets - mean_target)),
            lambda w: x.T @ (vectors @ (w / lengths[:, None])),
        )


class _Sums(_Kept):
    """Sums of products of features, for the primal form, and the rows of every k-th group."""

    def __init__(self, columns: Tensor, every: int) -> None:
        super().__init__(columns)
        self.every = every
        self.waiting: list[Rows] = []
        self.n_waiting = 0
        self.total = 0.0

    def add(self, block: Rows) -> None:
        n_rows, n_features = block.features.shape
        self.n_rows += n_rows
        chosen = block.groups % self.every == 0
        self.kept.append(Rows(*(part[chosen] for part in block)))
        self.waiting.append(block)
        self.n_waiting += n_rows
        if self.n_waiting >= min(ROWS_OF_FEATURE * n_features, MOST_JOINED // max(n_features, 1)):
            self.add_waiting()

    def add_waiting(self) -> None:
        """Add up the rows that wait for others."""
        if self.n_waiting:
            self._add_products(Rows(*map(torch.cat, zip(*self.waiting, strict=True))))
        self.waiting = []
        self.n_waiting = 0

    def _add_products(self, block: Rows) -> None:
        weights = block.weights.double()
        total = float(weights.sum())
        both = torch.cat([block.features.double(), block.targets.double()], 1)
        mean = weights @ both / total
        both -= mean
        both *= weights.sqrt()[:, None]
        # NumPy knows a product of a matrix with itself, which is half the work
        away = both.numpy()
        with np.errstate(over="ignore", invalid="ignore"):  # refused later, with a name
            products = torch.from_numpy(away.T @ away)
        self._merge_sums(total, mean, products)

    def _merge_sums(self, total: float, mean: Tensor, products: Tensor) -> None:
        if self.total == 0:
            self.total, self.mean, self.products = total, mean, products
            return
        shift = mean - self.mean
        self.products += products
        self.products += torch.outer(shift, shift) * (self.total * total / (self.total + total))
        self.total += total
        self.mean += shift * (total / self.total)

    def merge(self, other: Any) -> None:
        super().merge(other)
        self.add_waiting()
        other.add_waiting()
        if other.total:
            self._merge_sums(other.total, other.mean, other.products)

    def only(self, chosen: Tensor) -> Self:
        self.add_waiting()
        part = super().only(chosen)
        if self.total:
            at = torch.cat([chosen.new_ones(len(self.mean) - len(chosen)), chosen])
            part.mean = self.mean[at]
            part.products = self.products[at][:, at]
        return part

    def problem(self, rows: Rows, relative: Tensor | None, floor: float) -> _Problem:
        """Return the problem with as many unknowns as features."""
        self.add_waiting()
        n = rows.features.shape[1]
        variance = self.products.diagonal()[:n] / self.total
        mean = self.mean[:n]
        factor = _factor(mean, variance, relative, floor)
        # features that are constant or left out are no unknowns
        used = factor.nonzero()[:, 0]
        scale = factor[used]
        products = self.products[used]
        values, vectors = torch.linalg.eigh(products[:, used] * scale[:, None] * scale)
        x = (rows.features[:, used].double() - mean[used]) * scale
        return _Problem(
            rows,
            mean,
            factor,
            self.total,
            float((variance * factor.square()).sum()) or 1.0,
            self.mean[n:],
            values.clamp(min=0),
            rows.weights.sqrt()[:, None] * (x @ vectors),
            vectors.T @ (scale[:, None] * products[:, n:]),
            lambda w: w.new_zeros(n, w.shape[1]).index_copy(0, used, vectors @ w),
        )


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
