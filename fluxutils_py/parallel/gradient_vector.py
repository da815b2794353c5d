"""The gradients of a model as one vector, and their sum over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fluxutils_py.nn.parameters import dense_gradients
from fluxutils_py.parallel.rank_group import RankGroup

# Numbers of a step: weight, weight * loss, data; counts of ranks with a batch, with an error, with
# a wish to stop; norms that are not finite.
FLAGS = 7
DIGEST = 24  # bits of a batch's digest, one number each: their sums are exact in float32
# Layouts of a parameter's gradient. A rank adds 0 or 1 to the sum for NONE or DENSE, and more than
# all ranks together for SPARSE: so the sum tells the layout.
NONE = 0
DENSE = 1
SPARSE = 2


class Totals(NamedTuple):
    """Sums over ranks."""

    weight: float
    loss: float  # times weight
    n_live: float
    n_batches: int  # ranks with a batch
    same_batches: bool
    bad_norm: float  # norms that are not finite


class GradientVector:
    """Gradients of parameters as one vector in ``net2vec`` order, which ranks sum in one
    collective.

    Parameters
    ----------
    params : sequence of nn.Parameter
    ranks : RankGroup

    Attributes
    ----------
    values : Tensor
        The vector.
    """

    def __init__(self, params: Sequence[nn.Parameter], ranks: RankGroup) -> None:
        self.params = list(params)
        self.ranks = ranks
        first = next((p for p in self.params if p.is_floating_point()), torch.empty(0))
        n = sum(p.numel() for p in self.params)
        n_params = len(self.params)
        if ranks.is_single:
            self.values = first.new_empty(n, requires_grad=False)
            return
        device = first.device if getattr(ranks.comm, "cuda_aware", False) else torch.device("cpu")
        # layouts and counts need exact integers, which 16 bits do not hold
        dtype = torch.promote_types(first.dtype, torch.float32)
        self._buffer = torch.zeros(n + n_params + FLAGS + DIGEST, dtype=dtype, device=device)
        self._sum = self._buffer[:n]
        self._host = self._buffer[n:].cpu()  # the same memory, if on the CPU
        self._layouts = self._host.numpy()[:n_params]
        self._tail = self._host.numpy()[n_params:]
        self._staged = first.device != device or first.dtype != dtype
        self.values = first.new_empty(n, requires_grad=False) if self._staged else self._sum

    def pack(self) -> Tensor:
        """Copy the gradients of the parameters into the vector, with zeros for missing ones.

        Returns the vector.
        """
        # in one kernel and without an allocation
        parts = [grad.reshape(-1) for grad in dense_gradients(self.params)]
        return torch.cat(parts, out=self.values)

    def layouts(self) -> list[int]:
        """Return NONE, DENSE or SPARSE per parameter's gradient; with several ranks, after
        :meth:`reduce`.
        """
        if self.ranks.is_single:
            return self.own_layouts()
        # the numbers of the three, in this order
        return [(n > 0) + (n > self.ranks.size) for n in self._layouts.tolist()]

    def own_layouts(self) -> list[int]:
        """Return NONE, DENSE or SPARSE per parameter's gradient on this rank."""
        return [NONE if p.grad is None else DENSE + p.grad.is_sparse for p in self.params]

    def assign(self, layouts: Sequence[int]) -> None:
        """Set the gradients of the parameters from the vector, as views where possible.

        Parameters with layout NONE get no gradient, so optimizers skip them.
        """
        for p, view, layout in zip(self.params, self.views, layouts, strict=True):
            if layout == NONE:
                p.grad = None
            elif layout == SPARSE:
                p.grad = view.to(p.dtype).to_sparse(1)
            elif p.dtype == view.dtype and p.is_contiguous():
                p.grad = view
            else:  # torch wants a gradient of the type and memory order of its parameter
                p.grad = torch.empty_like(p).copy_(view)

    def drop_nonfinite(self, by_element: bool) -> None:
        """Set the gradient of each parameter to zero if it is not finite, or only its elements
        that are not.
        """
        for view in self.views:
            bad = ~view.isfinite()
            view.masked_fill_(bad if by_element else bad.any(), 0)

    @cached_property
    def views(self) -> list[Tensor]:
        """The part of each parameter, in its shape."""
        parts = self.values.split([p.numel() for p in self.params])
        return [part.view(p.shape) for part, p in zip(parts, self.params, strict=True)]

    def reduce(
        self,
        weight: float,
        loss: float,
        n_live: float,
        *,
        has_batch: bool = True,
        digest: int = 0,
        with_vector: bool = True,
    ) -> Totals:
        """Sum the results of one step over ranks, together with errors and wishes to stop.

        Parameters
        ----------
        weight, loss : float
            This rank's loss, and its weight among the ranks. The vector becomes the sum of weights
            times gradients.
        n_live : float
            Amount of this rank's data. If 0, this rank adds nothing.
        has_batch : bool
            Whether this rank has a batch.
        digest : int
            Digest of the batch, if all ranks must have the same batch.
        with_vector : bool
            Set it to False to leave this rank's gradients, without weight, in the vector, for
            :meth:`sum_up` to sum later. Norms of gradients that are not finite are then part of the
            sums.

        Returns
        -------
        Totals
            Meaningless if ``ranks.stopped`` is set now.
        """
        failed, stop = self.ranks.flags()
        tail = self._tail
        tail[:] = 0
        has_part = bool(n_live) and not (failed or stop)
        if has_part:
            self.pack()
            tail[:3] = weight, weight * loss, n_live
        tail[3:6] = has_batch, failed, stop
        if digest:
            tail[FLAGS:] = [digest >> bit & 1 for bit in range(DIGEST)]
        if with_vector:
            self._fill_buffer(weight if has_part else None, self.own_layouts())
            self._sum_buffer()
        else:
            norm = float(torch.linalg.vector_norm(self.values)) if has_part else 0.0
            tail[6] = 0.0 if math.isfinite(norm) else norm
            self.ranks.call_comm(self.ranks.comm.allreduce_, self._host[len(self.params) :])
        return self._read_totals(with_vector)

    def _read_totals(self, with_vector: bool) -> Totals:
        """Return the sums over ranks, after reacting to errors and wishes to stop among them."""
        weight, loss, n_live, n_batches, failed, stop, bad_norm, *code = self._tail.tolist()
        self.ranks.check_flags(failed, stop, n_batches)
        if with_vector and self._staged and not stop:
            self.values.copy_(self._sum)
        # each bit of a digest is set on all ranks or on none
        same = all(n in (0, self.ranks.size) for n in (n_batches, *code))
        return Totals(weight, loss, n_live, int(n_batches), same, bad_norm)

    def sum_up(self, layouts: Iterable[int]) -> None:
        """Sum the vector over ranks, with the layouts of this rank's gradients.

        The ranks have agreed before that all of them call it.
        """
        self._tail[:] = 0
        self._fill_buffer(1, layouts)
        self._sum_buffer()
        if self._staged:
            self.values.copy_(self._sum)

    def _fill_buffer(
        self,
        weight: float | None,
        layouts: Iterable[int],
    ) -> None:
        """Fill the buffer with the vector times a weight, and with layouts; None: with zeros."""
        if weight is None:
            self._sum.zero_()
            self._layouts[:] = 0
            return
        if self._staged:
            self._sum.copy_(self.values)
        if weight != 1:
            self._sum.mul_(weight)
        sparse = self.ranks.size + 1
        self._layouts[:] = [sparse if k == SPARSE else k for k in layouts]

    def _sum_buffer(self) -> None:
        on_device = self._buffer.is_cuda  # then the numbers, filled in main memory, are a copy
        if on_device:
            self._buffer[len(self._sum) :].copy_(self._host)
        self.ranks.call_comm(self.ranks.comm.allreduce_, self._buffer)
        if on_device:
            self._host.copy_(self._buffer[len(self._sum) :])
