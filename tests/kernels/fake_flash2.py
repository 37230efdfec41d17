"""FlashAttention 2's conventions in plain torch: its masks with their traps, and what it rounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from hf_ring_attn.kernels import Params
from hf_ring_attn.kernels.flash2.libraries import Lengths
from hf_ring_attn.kernels.flash4.calls import Bounds


class Fake:
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

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, params: Params, bounds: Bounds, lengths: Lengths | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = torch.full_like(q, math.nan)[..., : v.shape[-1]], q.new_full(q.shape[:-1], math.nan).float()
        if v.shape[-1] > q.shape[-1]:
            out = q.new_full((*q.shape[:-1], v.shape[-1]), math.nan)
        for row_q, row_k, seen in self._entries("forward", q, k, bounds, lengths):
            scores, _ = _scores(q[row_q], k[row_k], params, seen)
            sums = scores.logsumexp(2)
            values = _repeated(v[row_k], q)
            out[row_q] = torch.einsum("hts,shd->thd", (scores - sums[..., None]).exp(), values).to(out.dtype)
            lse[row_q] = sums.T
        return out, lse.transpose(-1, -2)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, params: Params, bounds: Bounds,
        lengths: Lengths | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        assert lse.is_contiguous() and lse.shape[-2:] == (q.shape[-2], q.shape[-3]) and lse.dtype == torch.float32
        dq, dk, dv = (torch.full_like(x, math.nan) for x in (q, k, v))
        group = q.shape[-2] // k.shape[-2]
        for row_q, row_k, seen in self._entries("backward", q, k, bounds, lengths):
            scores, slope = _scores(q[row_q], k[row_k], params, seen)
            d_out = dout[row_q].float()
            delta = (d_out * out[row_q].float()).sum(2)
            weights = (scores - lse.transpose(-1, -2)[row_q].T[..., None]).exp()
            d_weights = torch.einsum("thd,shd->hts", d_out, _repeated(v[row_k], q))
            d_scores = weights * (d_weights - delta.T[..., None]) * slope * params.scale
            dq[row_q] = torch.einsum("hts,shd->thd", d_scores, _repeated(k[row_k], q)).to(q.dtype)
            for to, x in (
                (dk, torch.einsum("hts,thd->shd", d_scores, q[row_q].float())),
                (dv, torch.einsum("hts,thd->shd", weights, d_out)),
            ):
                # Rounded for each query head, and once more when they are added.
                to[row_k] = x.to(q.dtype).unflatten(1, (-1, group)).float().sum(2).to(q.dtype)
        return dq, dk, dv

    def _entries(
        self, kind: str, q: Tensor, k: Tensor, bounds: Bounds, lengths: Lengths | None
    ) -> Iterator[tuple[tuple[int | slice, ...], tuple[int | slice, ...], Tensor]]:
        """Where each rectangle lies in the queries and in the keys, and what in it sees what."""
        assert all(x.stride(-1) == 1 for x in (q, k)), "read 16 bytes at a time"
        self.calls.append((kind, bounds, 1 if lengths is None else len(lengths.q_starts) - 1))
        if lengths is None:
            assert q.dim() == 4 and q.shape[1] and k.shape[1]
            for b in range(q.shape[0]):
                everything = (b, slice(None))
                yield everything, everything, self._seen(bounds, q.shape[1], k.shape[1], k.shape[1])
            return
        starts, k_starts = lengths.q_starts.tolist(), lengths.k_starts.tolist()
        assert q.dim() == 3 and lengths.q_starts.dtype == torch.int32
        assert (starts[0], starts[-1], k_starts[0], k_starts[-1]) == (0, len(q), 0, len(k))
        assert max(b - a for a, b in pairwise(starts)) == lengths.most_queries
        assert max(b - a for a, b in pairwise(k_starts)) == lengths.most_keys
        for (a, b), (c, d) in zip(pairwise(starts), pairwise(k_starts), strict=True):
            yield (slice(a, b),), (slice(c, d),), self._seen(bounds, b - a, d - c, lengths.most_keys)

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
