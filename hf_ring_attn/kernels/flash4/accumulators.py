"""Conversions to and from flash-attn-4's blocks: statistics of queries for its backward, gradients from its sums."""

from __future__ import annotations

import math
import weakref
from functools import lru_cache

import torch
from torch import Tensor

from ..base import Place
from .blocks import Blocks
from .library import Library


def in_blocks(lse: Tensor, delta: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Arranges lse * log2(e) and delta [B, H, T] in the blocks of their queries.

    Queries that see nothing, and padding of blocks, get lse +inf, so that their probabilities are 0.
    """
    lse_log2 = (lse * math.log2(math.e)).masked_fill_(lse == -math.inf, math.inf)
    joined = blocks.joined if blocks.shared else ()
    if len(joined) == 1 and joined[0].length == blocks.count * blocks.side == lse.shape[2]:
        return lse_log2, delta.contiguous()
    placed = [x.new_full(blocks.shape(lse.shape[1], 1), fill) for x, fill in ((lse, math.inf), (delta, 0.0))]
    if blocks.shared:
        for segment in joined:
            there = slice(segment.block * blocks.side, segment.block * blocks.side + segment.length)
            for to, x in zip(placed, (lse_log2, delta), strict=True):
                to[:, :, there] = x[:, :, segment.start : segment.stop]
    else:
        tokens, places = _index(blocks, lse.device)
        for to, x in zip(placed, (lse_log2, delta), strict=True):
            to.index_copy_(1, places, x.transpose(0, 1).flatten(1).index_select(1, tokens))
    return placed[0], placed[1]


def finish(library: Library, accumulator: Tensor, out: Tensor, place: Place) -> Tensor:
    """Writes the gradient to out [B, T, heads, width]: 16 bits by flash-attn-4's kernel, wider ones by reordering."""
    blocks = Blocks.of(place, library.sides[place.widths])
    batch, tokens, _, width = place.shape
    held = sum(segment.length for segment in blocks.segments) * (batch if blocks.shared else 1)
    if held != batch * tokens:
        out.zero_()
    if out.dtype.itemsize > 2:
        rows = _in_order(library, accumulator, place, blocks)
        if blocks.shared:
            for segment in blocks.joined:
                there = slice(segment.block * blocks.side, segment.block * blocks.side + segment.length)
                out[:, segment.start : segment.stop] = rows[:, :, there].transpose(1, 2)
        else:
            index, places = _index(blocks, accumulator.device)
            out.flatten(0, 1).index_copy_(0, index, rows.index_select(1, places).transpose(0, 1).to(out.dtype))
        return out if place.scale == 1 else out.mul_(place.scale)
    if blocks.shared:
        for segment in blocks.joined:
            row = accumulator[:, :, segment.block * blocks.side * width :]
            part = out[:, segment.start : segment.stop]
            library.finish(row, part, place.scale, place.of, place.widths, None, None)
    else:
        starts, lengths = _lengths(blocks, accumulator.device)
        library.finish(accumulator, out.flatten(0, 1), place.scale, place.of, place.widths, starts, lengths)
    return out


def _in_order(library: Library, accumulator: Tensor, place: Place, blocks: Blocks) -> Tensor:
    """Reorders an accumulator to [(B,) heads, tokens of all blocks, width], the tokens of each block in order."""
    width = place.shape[3]
    order = _order(library, place, blocks.side, accumulator.device)
    rows = accumulator.reshape(-1, blocks.side * width).index_select(1, order)
    return rows.view(*accumulator.shape[:-1], -1, width)


_ORDERS: weakref.WeakKeyDictionary[Library, dict[tuple[object, ...], Tensor]] = weakref.WeakKeyDictionary()


def _order(library: Library, place: Place, side: int, device: torch.device) -> Tensor:
    """[side * width]: the index in a block of each number of its tokens.

    Found by running flash-attn-4's finish on small integers, which bfloat16 holds exactly.
    """
    orders = _ORDERS.setdefault(library, {})
    role, width = "q" if place.of == "q" else "k", place.shape[3]
    key = role, place.widths, width, device
    if key not in orders:
        numbers = torch.arange(side * width, device=device)
        order = torch.zeros_like(numbers)
        for digit, unit in ((numbers % 256, 1), (numbers // 256, 256)):
            read = torch.empty(1, side, 1, width, dtype=torch.bfloat16, device=device)
            library.finish(digit.float().view(1, 1, -1), read, 1.0, place.of, place.widths, None, None)
            order += read.flatten().long() * unit
        assert torch.equal(order.sort().values, numbers), "flash-attn-4's order of a block is no permutation"
        orders[key] = order
    return orders[key]


def _index(blocks: Blocks, device: torch.device) -> tuple[Tensor, Tensor]:
    """The tokens of all segments, indexed through all rows, and the index of each in the blocks."""
    here, there, copied = _indices(blocks, device)
    if copied is not None:  # this stream may be another one than at the copy
        stream = torch.cuda.current_stream(device)
        stream.wait_event(copied)
        here.record_stream(stream)
    return here, there


@lru_cache(maxsize=64)  # 16 bytes a token of packed rows, on the GPU
def _indices(blocks: Blocks, device: torch.device) -> tuple[Tensor, Tensor, torch.cuda.Event | None]:
    """As `_index`: two views of one tensor, and the event of their copy."""
    tokens, places = (
        [torch.empty(0, dtype=torch.int64, device="cpu")],
        [torch.empty(0, dtype=torch.int64, device="cpu")],
    )
    for segment in blocks.segments:
        start = segment.row * blocks.tokens + segment.start
        tokens.append(torch.arange(start, start + segment.length, device="cpu"))
        places.append(
            torch.arange(segment.block * blocks.side, segment.block * blocks.side + segment.length, device="cpu")
        )
    both = torch.stack([torch.cat(tokens), torch.cat(places)])
    if device.type != "cuda":
        return both[0], both[1], None
    # Pinned: otherwise the copy would wait for all work that is queued on the GPU.
    here, there = both.pin_memory().to(device, non_blocking=True)
    return here, there, torch.cuda.current_stream(device).record_event()


@lru_cache(maxsize=256)
def _lengths(blocks: Blocks, device: torch.device) -> tuple[Tensor, Tensor]:
    """[N + 1] and [N] int32: first token (indexed through all rows) and length of each segment."""
    starts = [segment.row * blocks.tokens + segment.start for segment in blocks.segments] + [0]
    lengths = [segment.length for segment in blocks.segments]
    return (
        torch.tensor(starts, dtype=torch.int32, device=device), torch.tensor(lengths, dtype=torch.int32, device=device),
    )  # fmt: skip
