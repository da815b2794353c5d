"""Causal attention over the last steps, which keeps their keys and values from call to call."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fluxutils_py.nn.kernels.modules import is_transformed
from fluxutils_py.nn.linear_recurrence import append_zeros
from fluxutils_py.nn.recurrent import Recur
from fluxutils_py.nn.sizes import check_features, set_sizes

ROTARY_BASE = 10_000.0
State = tuple[Tensor, Tensor, Tensor]


class _WindowedAttention(nn.Module):
    """Inner module of :class:`SlidingWindowAttention`.

    The state holds the keys and values of the last ``window - 1`` steps, which the next step sees
    besides itself, and whether each step exists. Keys before the start of a series are zeros, which
    the mask excludes.
    """

    takes_windows = True
    batch_dim = 1

    def __init__(
        self,
        n_in: int,
        n_out: int,
        n_heads: int,
        window: int,
    ) -> None:
        super().__init__()
        self.n_in = n_in
        self.n_out = n_out
        self.n_heads = n_heads
        self.window = window
        self.qkv = nn.Linear(n_in, 3 * n_out)
        self.out = nn.Linear(n_out, n_out)

    def empty_state(self) -> State:
        return self._no_past(self.out.weight.detach(), 0)

    def _no_past(self, like: Tensor, n_series: int) -> State:
        """Return the state before the start of a series, of the type of ``like``."""
        zeros = like.new_zeros(self.window - 1, n_series, self.n_out)
        return zeros, zeros, zeros[..., 0]

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        check_features("SlidingWindowAttention", x, self.n_in)
        S, B, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, 2)
        if state is None:
            state = self._no_past(x, B)
        past_k, past_v, past_exists = state
        k = torch.cat([past_k, k])  # (window - 1 + S, B, H)
        v = torch.cat([past_v, v])
        exists = torch.cat([past_exists, past_exists.new_ones(S, B)])
        attended = self._attend_in_blocks(q, k, v, exists != 0)
        # not where gradients are computed, which would be NaN too
        is_plain = S > 1 and not (torch.is_grad_enabled() or is_transformed())
        if is_plain and not math.isfinite(attended.sum()):
            # a later step whose weight is 0 makes NaN of a number that is too large; a step by
            # itself does not see it
            seen = [slice(t, t + self.window) for t in range(S)]
            steps = [
                self._attend_in_blocks(q[t : t + 1], k[at], v[at], exists[at] != 0)
                for t, at in enumerate(seen)
            ]
            attended = torch.cat(steps)
        # clones, because views would keep the whole window in memory
        return self.out(attended), (k[S:].clone(), v[S:].clone(), exists[S:].clone())

    def _attend_in_blocks(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        exists: Tensor,
    ) -> Tensor:
        """Attend in blocks of queries, each with the keys that it sees: cost and memory are linear
        in S.
        """
        S, B, H = q.shape
        n_past = self.window - 1
        n_blocks = math.ceil(S / self.window)
        size = math.ceil(S / n_blocks)  # steps per block, at most ``window``
        n_keys = n_past + size
        n_steps = n_blocks * size
        if n_steps > S:
            q, k, v, exists = (append_zeros(t, n_steps - S) for t in (q, k, v, exists))
        n_features = H // self.n_heads
        head = (self.n_heads, n_features)

        def windows(t: Tensor) -> Tensor:
            """Cut (past + S, B, H) into (n_blocks * B, heads, n_keys, H / heads)."""
            blocks = t.unfold(0, n_keys, size).permute(0, 1, 3, 2)
            return blocks.unflatten(3, head).flatten(0, 1).transpose(1, 2)

        cos, sin = rotary_table(n_keys, n_features // 2, q.dtype, q.device)
        # each block attends as if it were another series: one call for all
        queries = q.view(n_blocks, size, B, *head).permute(0, 2, 3, 1, 4).flatten(0, 1)
        # angles count from the first key of a block, which is n_past steps before its first query
        queries = _rotate_pairs(queries, cos[n_past:], sin[n_past:])
        keys = _rotate_pairs(windows(k), cos, sin)
        exists = exists.unfold(0, n_keys, size).flatten(0, 1)  # (n_blocks * B, n_keys)
        # which keys each query sees, if they exist: itself and the n_past keys before it
        steps = torch.arange(n_keys, device=exists.device)
        ahead = steps - steps[n_past:, None]  # (size, n_keys), from query to key
        in_reach = (ahead <= 0) & (ahead >= -n_past)
        # padded queries see themselves: a softmax over nothing would make outputs and gradients NaN
        mask = (in_reach & exists[:, None] | (ahead == 0))[:, None]  # (rows, 1, size, n_keys)
        y = F.scaled_dot_product_attention(queries, keys, windows(v), attn_mask=mask)
        y = y.unflatten(0, (n_blocks, B)).permute(0, 3, 1, 2, 4)
        return y.reshape(n_steps, B, H)[:S]


@functools.lru_cache(maxsize=64)
def rotary_table(
    n_steps: int,
    n_pairs: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, both (n_steps, n_pairs), of the rotation of each pair of features at
    each step.
    """
    # the table is kept, and training cannot use tensors made in inference mode
    with torch.inference_mode(False), torch.no_grad():
        pairs = torch.arange(n_pairs, dtype=torch.float64)
        steps = torch.arange(n_steps, dtype=torch.float64)
        rates = ROTARY_BASE ** -(pairs / max(n_pairs, 1))
        angles = steps[:, None] * rates
        return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + n_pairs) of features by their angles; an odd last feature stays
    unchanged.
    """
    n = cos.shape[1]
    first = x[..., :n]
    second = x[..., n : 2 * n]
    parts = [first * cos - second * sin, second * cos + first * sin, x[..., 2 * n :]]
    return torch.cat(parts, -1)


class SlidingWindowAttention(Recur):
    """Causal self-attention in which each step sees itself and the ``window - 1`` steps before it.

    Parameters
    ----------
    n_in, n_out : int
        Number of input features, and number of output features, which the heads share equally.
    n_heads : int
        Number of heads; must divide ``n_out``.
    window : int
        Number of steps that each step sees, including itself.

    Raises
    ------
    TypeError, ValueError
        If a size is not an integer or below 1, or ``n_heads`` does not divide ``n_out``; the
        message names it.
    ShapeError
        In ``forward``, if the input does not have ``n_in`` features.

    Notes
    -----
    Takes ``(B, n_in)`` or ``(S, B, n_in)`` and returns ``(B, n_out)`` or ``(S, B, n_out)``. The
    state holds the keys and values (window - 1, B, n_out) of the last steps, and a mask (window -
    1, B): 1 for a step, 0 before the start of a series. Positions are rotary and relative. Each
    call counts them anew, so nothing grows with the length of a series. Torch's fused attention
    makes the work linear in S.

    Gradients reach at most ``window - 1`` steps before a window, through ``overlap``.

    Source: Vaswani et al. (2017), arXiv:1706.03762; sliding window: Beltagy et al. (2020),
    arXiv:2004.05150; rotary positions: Su et al. (2021), arXiv:2104.09864.

    Examples
    --------
    >>> layer = SlidingWindowAttention(3, 8, n_heads=2, window=5)
    >>> layer(torch.zeros(7, 4, 3)).shape, layer.state[0].shape
    (torch.Size([7, 4, 8]), torch.Size([4, 4, 8]))
    """

    n_in: int
    n_out: int
    n_heads: int
    window: int

    def __init__(
        self,
        n_in: int,
        n_out: int,
        n_heads: int = 4,
        window: int = 64,
    ) -> None:
        set_sizes(self, n_in=n_in, n_out=n_out, n_heads=n_heads, window=window)
        if self.n_out % self.n_heads:
            raise ValueError(
                f"SlidingWindowAttention: n_heads={self.n_heads} does not divide "
                f"n_out={self.n_out}; each head has n_out / n_heads features"
            )
        inner = _WindowedAttention(self.n_in, self.n_out, self.n_heads, self.window)
        super().__init__(inner)
