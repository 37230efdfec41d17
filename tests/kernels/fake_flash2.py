"""FlashAttention 2's conventions in plain torch: its masks with their traps, and what it rounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from hf_ring_attn.kernels import Params
from hf_ring_attn.kernels.flash2 import How, Torch
from hf_ring_attn.kernels.flash4.calls import Bounds

Slices = tuple[slice, slice, Tensor]


class Fake(Torch):
    """Records the calls it gets: which pass, its bounds, and how many entries.

    Args:
        lacks: its `reasons`, whatever is asked.
        shift: a fault: how many keys too many a causal query sees.
    """

    name = "fake"

    def __init__(self, lacks: Sequence[str] = (), shift: int = 0) -> None:
        self.lacks = lacks
        self.shift = shift
        self.calls: list[tuple[str, Bounds, int]] = []

    def reasons(self, softcap: bool, deterministic: bool) -> Sequence[str]:
        return self.lacks

    def forward(self, how: How, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out, lse = q.new_full((*q.shape[:-1], v.shape[-1]), math.nan), q.new_full(q.shape[:-1], math.nan).float()
        for of_q, of_k, seen in self._entries("forward", q, k, how):
            scores, _ = _scores(q[of_q], k[of_k], how.params, seen)
            sums = scores.logsumexp(2)
            values = _repeated(v[of_k], q)
            out[of_q] = torch.einsum("hts,shd->thd", (scores - sums[..., None]).exp(), values).to(out.dtype)
            lse[of_q] = sums.T
        return out, lse.T

    def backward(self, how: How, *dout_q_k_v_out_lse: Tensor) -> tuple[Tensor, ...]:
        dout, q, k, v, out, lse = dout_q_k_v_out_lse
        assert lse.is_contiguous() and lse.shape == q.shape[1::-1] and lse.dtype == torch.float32
        dq, dk, dv = (torch.full_like(x, math.nan) for x in (q, k, v))
        group = q.shape[1] // k.shape[1]
        for of_q, of_k, seen in self._entries("backward", q, k, how):
            scores, slope = _scores(q[of_q], k[of_k], how.params, seen)
            d_out = dout[of_q].float()
            delta = (d_out * out[of_q].float()).sum(2)
            weights = (scores - lse[:, of_q, None]).exp()
            d_weights = torch.einsum("thd,shd->hts", d_out, _repeated(v[of_k], q))
            d_scores = weights * (d_weights - delta.T[..., None]) * slope * how.params.scale
            dq[of_q] = torch.einsum("hts,shd->thd", d_scores, _repeated(k[of_k], q)).to(q.dtype)
            for to, x in (
                (dk, torch.einsum("hts,thd->shd", d_scores, q[of_q].float())),
                (dv, torch.einsum("hts,thd->shd", weights, d_out)),
            ):
                # Rounded for each query head, and once more when they are added.
                to[of_k] = x.to(q.dtype).unflatten(1, (-1, group)).float().sum(2).to(q.dtype)
        return dq, dk, dv

    def _entries(self, kind: str, q: Tensor, k: Tensor, how: How) -> Iterator[Slices]:
        """The tokens of each rectangle among the queries and the keys, and what in it sees what."""
        assert all(x.stride(-1) == 1 and x.dim() == 3 for x in (q, k)), "read 16 bytes at a time"
        of_q, of_k, most_queries, most_keys = how.lengths
        self.calls.append((kind, how.bounds, len(of_q) - 1))
        starts, k_starts = of_q.tolist(), of_k.tolist()
        assert of_q.dtype == of_k.dtype == torch.int32
        assert (starts[0], starts[-1], k_starts[0], k_starts[-1]) == (0, len(q), 0, len(k))
        assert max(b - a for a, b in pairwise(starts)) == most_queries
        assert max(b - a for a, b in pairwise(k_starts)) == most_keys
        for (a, b), (c, d) in zip(pairwise(starts), pairwise(k_starts), strict=True):
            yield slice(a, b), slice(c, d), self._seen(how.bounds, b - a, d - c, most_keys)

    def _seen(self, bounds: Bounds, rows: int, columns: int, most_keys: int) -> Tensor:
        """As flash_api.cpp's set_params_fprop and its callers make it of the bounds."""
        left, right = (-1 if bound is None else bound for bound in bounds)
        assert bounds.left is None or left >= 0, "a negative bound counts as none"
        assert bounds.right is None or right >= 0, "a negative bound counts as none"
        left, right = (-1 if bound >= most_keys else bound for bound in (left, right))
        if left < 0 and right < 0:
            return torch.ones(rows, columns, dtype=torch.bool)
        left, right = (most_keys if bound < 0 else bound for bound in (left, right))
        distance = torch.arange(rows)[:, None] + columns - rows - torch.arange(columns)[None]
        return (distance <= left) & (distance >= -right - self.shift)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    return x.float().repeat_interleave(q.shape[-2] // x.shape[-2], 1)


def _scores(q: Tensor, k: Tensor, params: Params, seen: Tensor) -> tuple[Tensor, Tensor]:
    """[H, t, s] scores and the softcap's derivative."""
    scores = torch.einsum("thd,shd->hts", q.float(), _repeated(k, q)) * params.scale
    slope = torch.ones_like(scores)
    if params.softcap is not None:
        bent = torch.tanh(scores / params.softcap)
        scores, slope = bent * params.softcap, 1 - bent * bent
    return scores.masked_fill(~seen.to(q.device), -math.inf), slope
