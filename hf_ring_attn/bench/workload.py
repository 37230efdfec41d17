"""The workload: one attention's shape, mask, inputs and flops, and the bytes that a rank receives for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.ring import Ring
from ..dtypes import accumulate_dtype
from ..kernels import Params, Request
from ..sharding.layout import Layout
from ..sharding.mask import CAUSAL, UNBOUNDED, Band, Mask, tiles
from ..sharding.plan import Plan, Tables


@dataclass(frozen=True)
class Workload:
    """Causal attention of one row.

    Args:
        tokens: tokens of the whole row.
        heads, kv_heads: of queries, and of keys and values.
        width, value_width: D and Dv.
        window: keys that a query sees, itself included; None for all before it.
        document: tokens of each packed document; None for one document.
    """

    tokens: int
    device: torch.device
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    value_width: int = 128
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    document: int | None = None
    deterministic: bool = False

    def mask(self, layout: Layout) -> Mask:
        band = CAUSAL if self.window is None else Band(0, self.window - 1)
        ids = None
        if self.document is not None or layout.padded > self.tokens:
            ids = layout.pad((torch.arange(self.tokens) // (self.document or self.tokens))[None], 1, -1)
        return Mask.of(band, 1, layout.padded, ids)

    def pairs(self) -> int:
        """The number of visible query-key pairs in the whole row."""
        whole = Layout(self.tokens, 1, 0)
        return visible_pairs(tiles(self.mask(whole), whole.whole(), whole.whole()))

    def flops(self) -> tuple[float, float]:
        """Flops of the matrix products over visible pairs: two in the forward, five in the backward."""
        each = 2.0 * self.pairs() * self.heads
        return each * (self.width + self.value_width), each * (3 * self.width + 2 * self.value_width)

    def params(self) -> Params:
        return Params(self.width**-0.5, deterministic=self.deterministic)

    def request(self) -> Request:
        return Request(
            self.device.type, self.dtype, self.heads, self.kv_heads, self.width, self.value_width, softcap=False,
            sinks=False, deterministic=self.deterministic,
        )  # fmt: skip

    def inputs(self, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient of the output, [1, tokens, heads, width], signed and random."""
        generator = torch.Generator(self.device).manual_seed(seed)
        shapes = [
            (self.heads, self.width), (self.kv_heads, self.width), (self.kv_heads, self.value_width),
            (self.heads, self.value_width),
        ]  # fmt: skip
        q, k, v, dout = (
            torch.randn(1, tokens, *shape, generator=generator, device=self.device, dtype=self.dtype)
            for shape in shapes
        )
        return q, k, v, dout


def visible_pairs(table: Tensor) -> int:
    """The number of visible pairs in a table of tiles."""
    total = 0
    for _, _, queries, q_first, _, keys, k_first, lo, hi in table.tolist():
        # query i sees keys from q_first + i - hi to q_first + i - lo, as far as there are such keys
        places = torch.arange(q_first, q_first + queries)
        first = (places - min(hi, UNBOUNDED)).clamp(min=k_first)
        last = (places - max(lo, -UNBOUNDED)).clamp(max=k_first + keys - 1)
        total += int((last - first + 1).clamp(min=0).sum())
    return total


def tokens_received(tables: Tables, layout: Layout) -> tuple[int, int]:
    """Tokens for which a rank receives keys and values in each pass, and tokens for which it receives accumulators."""
    if tables.exchange is None:  # both for every other rank's tokens: accumulators end at their owner
        others = (layout.world_size - 1) * layout.local_length
        return others, others
    sends, receives = tables.exchange.sends, tables.exchange.receives
    return sum(receives) - receives[layout.rank], sum(sends) - sends[layout.rank]


def received(work: Workload, layout: Layout) -> tuple[int, int]:
    """Bytes received in a forward and in a backward, without padding of accumulators to a kernel's blocks."""
    plan = Plan.of(Ring.simulated(layout.world_size, layout.rank), layout, work.mask(layout))
    keys, sums = tokens_received(plan.tables, layout)
    numbers = work.kv_heads * (work.width + work.value_width)  # elements of a token's keys and values
    narrow, wide = numbers * work.dtype.itemsize, numbers * accumulate_dtype(work.dtype).itemsize
    return keys * narrow, keys * narrow + sums * wide
