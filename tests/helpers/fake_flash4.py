"""flash-attn-4's conventions in plain torch: what it reads and writes where, rows beyond an entry's end included."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hf_ring_attn.kernels import Params
from hf_ring_attn.kernels.base import row_products
from hf_ring_attn.kernels.flash4.blocks import Sides, Table
from hf_ring_attn.kernels.flash4.calls import Bounds
from hf_ring_attn.kernels.flash4.library import Lengths

LOG2_E = math.log2(math.e)


class Entry(NamedTuple):
    """One rectangle: first token and length in [tokens, heads, width] tensors, first block of each accumulator."""

    q: int
    queries: int
    k: int
    keys: int
    q_block: int
    k_block: int


class Fake:
    """Records the calls it gets. Each block is kept in a random order of its own kind.

    ``sides``: tokens in a block, for heads of all widths.
    """

    def __init__(self, sides: tuple[int, int] = (3, 4)) -> None:
        self.sides: Table = defaultdict(lambda: Sides(*sides))
        self.calls: list[tuple[str, Bounds, int]] = []
        self.orders: dict[tuple[bool, int, int], Tensor] = {}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, params: Params, bounds: Bounds, reach: Bounds,
        lengths: Lengths | None,
    ) -> None:  # fmt: skip
        self.calls.append(("forward", bounds, 1 if lengths is None else len(lengths.q_lengths)))
        for b, entry in _entries(q, k, lengths, (1, 1)):
            rows = [x if b is None else x[b] for x in (q, k, v, out, lse)]
            queries, keys = slice(entry.q, entry.q + entry.queries), slice(entry.k, entry.k + entry.keys)
            scores = _scores(rows[0][queries], rows[1][keys], params, _seen(bounds, entry, entry.queries))[0]
            if params.sinks is not None:
                sink = params.sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
                scores = torch.cat([scores, sink], 2)
            total = scores.logsumexp(2)
            weights = (scores - total.masked_fill(total == -math.inf, 0)[..., None]).exp()[..., : entry.keys]
            values = rows[2][keys].float().repeat_interleave(q.shape[-2] // k.shape[-2], 1)
            rows[3][queries] = torch.einsum("hts,shd->thd", weights, values).to(out.dtype)
            rows[4][:, queries] = total

    def delta(self, dout: Tensor, out: Tensor) -> Tensor:
        return row_products(dout, out)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse_log2: Tensor, delta: Tensor, dq: Tensor, dk: Tensor,
        dv: Tensor, params: Params, bounds: Bounds, lengths: Lengths | None,
    ) -> None:  # fmt: skip
        self.calls.append(("backward", bounds, 1 if lengths is None else len(lengths.q_lengths)))
        sides, group = self.sides[q.shape[-1], v.shape[-1]], q.shape[-2] // k.shape[-2]
        for b, entry in _entries(q, k, lengths, sides):
            if not entry.queries or not entry.keys:
                continue
            row = [x if b is None else x[b] for x in (q, k, v, dout, lse_log2, delta, dq, dk, dv)]
            q_blocks, k_blocks = -(-entry.queries // sides.q), -(-entry.keys // sides.k)
            # Whole blocks are read: past a dense tensor's end lies zero, past an entry's end the next tokens.
            qs, dos = (_padded(x, entry.q, q_blocks * sides.q).float() for x in (row[0], row[3]))
            ks, vs = (
                _padded(x, entry.k, k_blocks * sides.k).float().repeat_interleave(group, 1) for x in (row[1], row[2])
            )
            stats = slice(entry.q_block * sides.q, (entry.q_block + q_blocks) * sides.q)
            lse_, delta_ = row[4][:, stats], row[5][:, stats]
            seen = _seen(bounds, entry, len(qs), len(ks))
            scores, slope = _scores(qs, ks, params, seen)
            weights = torch.exp2(scores * LOG2_E - lse_[..., None])
            d_scores = weights * (torch.einsum("thd,shd->hts", dos, vs) - delta_[..., None]) * slope
            self._add(row[6], torch.einsum("hts,shd->htd", d_scores, ks), entry.q_block, sides.q, True)
            for to, x in (
                (row[7], torch.einsum("hts,thd->hsd", d_scores, qs)),
                (row[8], torch.einsum("hts,thd->hsd", weights, dos)),
            ):
                self._add(to, x.unflatten(0, (-1, group)).sum(1), entry.k_block, sides.k, False)

    def finish(
        self, accumulator: Tensor, out: Tensor, scale: float, role: Literal["q", "k", "v"], widths: tuple[int, int],
        starts: Tensor | None, lengths: Tensor | None,
    ) -> None:  # fmt: skip
        side, width = self.sides[widths].of(role), out.shape[-1]
        order = self._order(role == "q", side, width)
        rows = torch.empty_like(accumulator).view(*accumulator.shape[:-1], -1, side * width)
        rows[..., order] = accumulator.view(rows.shape)
        rows = (rows * scale).to(out.dtype).view(*accumulator.shape[:-1], -1, width)
        if starts is None or lengths is None:
            out.copy_(rows[:, :, : out.shape[1]].transpose(1, 2))
            return
        for number, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=False)):
            there = (start + number * side) // side * side
            out[start : start + length] = rows[:, there : there + length].transpose(0, 1)

    def _order(self, of_queries: bool, side: int, width: int) -> Tensor:
        """order[i]: the number of the token's entry (in order) that lies i-th in a block."""
        key = of_queries, side, width
        if key not in self.orders:
            generator = torch.Generator().manual_seed(side * width + of_queries)
            self.orders[key] = torch.randperm(side * width, generator=generator)
        return self.orders[key]

    def _add(self, to: Tensor, rows: Tensor, block: int, side: int, of_queries: bool) -> None:
        """Adds [heads, tokens of whole blocks, width] to [heads, ...] from a block on."""
        width = rows.shape[2]
        size = side * width
        blocks = rows.reshape(len(rows), -1, size)[..., self._order(of_queries, side, width)].flatten(1)
        assert blocks.shape[1] <= to.shape[1] - block * size, "written past the end"
        to[:, block * size : block * size + blocks.shape[1]] += blocks


def _entries(
    q: Tensor, k: Tensor, lengths: Lengths | None, sides: tuple[int, int]
) -> Iterator[tuple[int | None, Entry]]:
    if lengths is None:
        assert q.dim() == 4
        for b in range(q.shape[0]):
            yield b, Entry(0, q.shape[1], 0, k.shape[1], 0, 0)
        return
    assert q.dim() == 3 and len(lengths.q_starts) == len(lengths.q_lengths) + 1
    assert lengths.most_queries >= int(lengths.q_lengths.max()) and lengths.most_keys >= int(lengths.k_lengths.max())
    columns = (lengths.q_starts[:-1], lengths.q_lengths, lengths.k_starts[:-1], lengths.k_lengths)
    for number, (qs, ql, ks, kl) in enumerate(zip(*(x.tolist() for x in columns), strict=True)):
        yield None, Entry(qs, ql, ks, kl, (qs + number * sides[0]) // sides[0], (ks + number * sides[1]) // sides[1])


def _padded(x: Tensor, start: int, count: int) -> Tensor:
    part = x[start : start + count]
    return torch.cat([part, part.new_zeros(count - len(part), *part.shape[1:])])


def _seen(bounds: Bounds, entry: Entry, rows: int, columns: int | None = None) -> Tensor:
    i, j = torch.arange(rows)[:, None], torch.arange(entry.keys if columns is None else columns)[None]
    distance = i + entry.keys - entry.queries - j
    seen = (j < entry.keys).expand(rows, -1)
    if bounds.left is not None:
        seen = seen & (distance <= bounds.left)
    if bounds.right is not None:
        seen = seen & (distance >= -bounds.right)
    return seen


def _scores(q: Tensor, k: Tensor, params: Params, seen: Tensor) -> tuple[Tensor, Tensor]:
    """[H, t, s] scores and the softcap's derivative."""
    k = k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("thd,shd->hts", q.float(), k) * params.scale
    slope = torch.ones_like(scores)
    if params.softcap is not None:
        bent = torch.tanh(scores / params.softcap)
        scores, slope = bent * params.softcap, 1 - bent * bent
    return scores.masked_fill(~seen, -math.inf), slope
