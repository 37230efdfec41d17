"""Attention of tiles in plain torch: any device, any shape, exact in float64. The definition of every other kernel.

Forward: online softmax (Milakov & Gimelshein 2018) over blocks of keys. Backward: recomputes probabilities from lse
(Dao et al. 2022, FlashAttention). Both hold one block of scores at a time, so memory is linear in S. Grouped queries
are one matrix product per key head, so keys and values are never repeated. Inputs are widened to the accumulation dtype
block by block, and results are rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..dtypes import HALVES, accumulate_dtype
from ..sharding.mask import Tile
from .base import Gradients, InOrder, Kernel, Params, Request, row_products
from .score_mods.score_mod import Indices, Pull

SCORES_PER_BLOCK = 2**21
"""Upper bound on the elements of one block of scores: 8 MiB in float32, inside the caches of common CPUs."""
DTYPES = (torch.float64, torch.float32, *HALVES)
LARGEST_BLOCK = 512
SMALLEST_BLOCK = 64


class Block(NamedTuple):
    """Queries and keys of a few batch rows, computed at once; ``visible`` [t, s] is None if all pairs are.

    ``q_position`` and ``k_position``: of the first query and key in the whole row.
    """

    rows: slice
    queries: slice
    keys: slice
    visible: Tensor | None
    q_position: int
    k_position: int


def blocks(tiles: Tensor, heads: int, device: torch.device) -> Iterator[Block]:
    """Cuts tiles into blocks of bounded size. Rows of the batch with the same tile share a block."""
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, *rest in tiles.tolist():
        rows_of.setdefault(tuple(rest), []).append(row)
    for rest, row_list in rows_of.items():
        tile = Tile(0, *rest)
        for rows in _ranges(row_list):
            side = _block_side((rows.stop - rows.start) * heads)
            for i in range(0, tile.q_length, side):
                t = min(side, tile.q_length - i)
                for j in range(0, tile.k_length, side):
                    s = min(side, tile.k_length - j)
                    distance = tile.q_position + i - tile.k_position - j  # of the block's first query and first key
                    if distance + t - 1 < tile.lo or distance - (s - 1) > tile.hi:
                        continue
                    queries = slice(tile.q_offset + i, tile.q_offset + i + t)
                    keys = slice(tile.k_offset + j, tile.k_offset + j + s)
                    visible = _visible(distance, t, s, tile.lo, tile.hi, device)
                    yield Block(rows, queries, keys, visible, tile.q_position + i, tile.k_position + j)


def _ranges(rows: list[int]) -> Iterator[slice]:
    start = previous = rows[0]
    for row in [*rows[1:], None]:
        if row is None or row != previous + 1:
            yield slice(start, previous + 1)
            start = row if row is not None else 0
        previous = row if row is not None else previous


def _block_side(score_planes: int) -> int:
    side = LARGEST_BLOCK
    while side > SMALLEST_BLOCK and score_planes * side * side > SCORES_PER_BLOCK:
        side //= 2
    return side


def _visible(distance: int, t: int, s: int, lo: int, hi: int, device: torch.device) -> Tensor | None:
    if distance - (s - 1) >= lo and distance + t - 1 <= hi:
        return None
    difference = distance + torch.arange(t, device=device)[:, None] - torch.arange(s, device=device)[None]
    return (difference >= lo) & (difference <= hi)


class Reference(InOrder):
    """See the module. `name` is "reference"."""

    name = "reference"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, params: Params, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        batch, tokens, heads, _ = q.shape
        groups, value_dim = k.shape[2], v.shape[3]
        dtype = accumulate_dtype(q.dtype)
        grouped = (batch, groups, heads // groups, tokens)
        # State of the online softmax: largest score, sum of exponentials, weighted sum of values. A sink is a key
        # without a value, so the state starts with it.
        if params.sinks is None:
            largest = q.new_full(grouped, -torch.inf, dtype=dtype)
            total = q.new_zeros(grouped, dtype=dtype)
        else:
            largest = params.sinks.to(dtype).view(1, groups, -1, 1).expand(grouped).clone()
            total = q.new_ones(grouped, dtype=dtype)
        weighted = q.new_zeros(*grouped, value_dim, dtype=dtype)

        for block in blocks(tiles, heads, q.device):
            state = (block.rows, slice(None), slice(None), block.queries)
            scores, _ = _scores(_queries(q, block, groups, dtype), _keys(k, block, dtype), block, params)
            before = largest[state]
            after = torch.maximum(before, scores.amax(-1))
            shift = after.masked_fill(after == -torch.inf, 0.0)  # a query that has seen nothing yet
            weights = torch.exp(scores - shift[..., None])
            decay = torch.exp(before - shift)
            total[state] = total[state] * decay + weights.sum(-1)
            values = _by_group(weights) @ _keys(v, block, dtype)
            weighted[state] = weighted[state] * decay[..., None] + values.view(*weights.shape[:-1], value_dim)
            largest[state] = after

        lse = (largest + total.log()).view(batch, heads, tokens)
        weighted /= total.masked_fill(total == 0, 1.0)[..., None]
        found = weighted.permute(0, 3, 1, 2, 4).reshape(batch, tokens, heads, value_dim)
        return found.to(q.dtype).contiguous() if out is None else out.copy_(found), lse

    def delta(self, dout: Tensor, out: Tensor) -> Tensor:
        return row_products(dout, out)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, tiles: Tensor,
        params: Params, into: Gradients, out: Tensor | None = None,
    ) -> None:  # fmt: skip
        batch, tokens, heads, _ = q.shape
        groups = k.shape[2]
        dtype = accumulate_dtype(q.dtype)
        grouped = (batch, groups, heads // groups, tokens)
        # A query that sees nothing has lse -inf; +inf makes its probabilities 0 instead of NaN.
        lse = lse.masked_fill(lse == -torch.inf, torch.inf).view(grouped)
        delta = delta.view(grouped)

        for block in blocks(tiles, heads, q.device):
            state = (block.rows, slice(None), slice(None), block.queries)
            queries, keys = _queries(q, block, groups, dtype), _keys(k, block, dtype)
            values, d_out = _keys(v, block, dtype), _queries(dout, block, groups, dtype)
            scores, pull = _scores(queries, keys, block, params, into.extra)
            weights = torch.exp(scores - lse[state][..., None])
            _add_keys(into.dv, block, _by_group(weights).transpose(-1, -2) @ _by_group(d_out))
            d_weights = (_by_group(d_out) @ values.transpose(-1, -2)).view(weights.shape)
            d_scores = pull(weights * (d_weights - delta[state][..., None]))
            d_scores *= params.scale
            d_queries = (_by_group(d_scores) @ keys).view(queries.shape)
            into.dq[block.rows, block.queries] += d_queries.permute(0, 3, 1, 2, 4).flatten(2, 3)
            _add_keys(into.dk, block, _by_group(d_scores).transpose(-1, -2) @ _by_group(queries))

    def unsupported(self, request: Request) -> list[str]:
        if request.dtype in DTYPES:
            return []
        return [f"computes in float64, float32, bfloat16 or float16, got {request.dtype}"]


def _queries(q: Tensor, block: Block, groups: int, dtype: torch.dtype) -> Tensor:
    """Copies the block's queries to [b, G, H / G, t, D], grouped by the key head they read."""
    part: Tensor = q[block.rows, block.queries]
    part = part.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)
    return part.to(dtype).contiguous()  # a product's last bits depend on the strides of its factors


def _keys(k: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """Copies the block's keys (or values) to [b, G, s, D]."""
    return k[block.rows, block.keys].transpose(1, 2).to(dtype).contiguous()


def _add_keys(accumulator: Tensor, block: Block, gradient: Tensor) -> None:
    accumulator[block.rows, block.keys] += gradient.transpose(1, 2)


def _by_group(x: Tensor) -> Tensor:
    """Flattens [b, G, H / G, t, ...] to [b, G, (H / G) t, ...]: all queries of a key head in one matrix."""
    return x.flatten(2, 3)


def _scores(
    queries: Tensor, keys: Tensor, block: Block, params: Params, extra: dict[str, Tensor] | None = None
) -> tuple[Tensor, Pull]:
    """Computes scores [b, G, H / G, t, s], -inf for invisible pairs, and their backward to the scaled scores, in place.

    The backward adds gradients of captured tensors to ``extra``; without ``extra`` a score_mod has none."""
    # Padded: a small product's last bits depend on its size, and forward and backward of a ring have different blocks.
    # If the last bit of a score of 1e6 differs, a probability of 1 becomes 1.06.
    q, k = (torch.nn.functional.pad(x, (0, 0, 0, -x.shape[-2] % SMALLEST_BLOCK)) for x in (queries, keys))
    products = (_by_group(q) @ k.transpose(-1, -2)).view(*q.shape[:-1], k.shape[2])
    scores = products[..., : queries.shape[3], : keys.shape[2]] * params.scale
    back: list[Pull] = []
    if params.softcap is not None:
        bent = torch.tanh(scores / params.softcap)
        back.append((1 - bent * bent).mul_)
        scores = bent * params.softcap
    if params.score_mod is not None:
        mod, heads = params.score_mod, queries.shape[1] * queries.shape[2]
        at = Indices.of(
            block.rows, slice(mod.first_head, mod.first_head + heads), block.q_position, block.k_position,
            (scores.shape[3], scores.shape[4]), block.visible, scores.device,
        )  # fmt: skip
        if extra is None:
            scores = mod(scores.flatten(1, 2), at).view(scores.shape)
        else:
            after, pull = mod.differentiable(scores.flatten(1, 2), at, extra)
            back.append(lambda d_scores: pull(d_scores.flatten(1, 2)).view(d_scores.shape))
            scores = after.view(scores.shape)
    if block.visible is not None:
        scores = scores.masked_fill(~block.visible, -torch.inf)

    def to_scaled(d_scores: Tensor) -> Tensor:
        for step in reversed(back):
            d_scores = step(d_scores)
        return d_scores

    return scores, to_scaled


def whole(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, tiles: Tensor, params: Params
) -> dict[str, Tensor]:
    """Runs both passes of a kernel: out, lse, and dq, dk, dv before their rounding, by name."""
    out, lse = kernel.forward(q, k, v, tiles, params)
    into = Gradients(kernel.new_gradient(q), kernel.new_gradient(k), kernel.new_gradient(v))
    kernel.backward(dout, q, k, v, lse, kernel.delta(dout, out), tiles, params, into, out)
    return {"out": out, "lse": lse, "dq": into.dq, "dk": into.dk, "dv": into.dv}
