"""The blocks that a launch visits, computed on the host from a table of tiles.

Blocks begin at multiples of their size in the tensors, never at the start of a tile, so the order of a query's sums
does not depend on other queries: a chunk gives the bits of the whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...sharding.visible import FAR, columns, expand


@dataclass(frozen=True, eq=False)
class Schedule:
    """The programs of one launch over blocks of one side (queries or keys), the longest first.

    programs: [P, 4] int32: batch row, block, its first entry in ``runs``, the entry after its last.
    runs: [R, 3] int32, (first, middle, last): a program visits the other side's blocks first to middle - 1 with a mask,
        then middle to last - 1 without one, since all their pairs are visible. Ascending, no block twice.
    """

    programs: Tensor
    runs: Tensor


def schedule(
    tiles: Tensor, side: str, block: int, other_block: int, batch: int, tokens: int, *, idle: bool, by_row: bool
) -> Schedule:
    """Computes the programs that cover one side in blocks, each with the other side's blocks to visit.

    Args:
        tiles: [N, 9], see `hf_ring_attn.sharding.mask.tiles`.
        side: "queries" (forward, dq) or "keys" (dk, dv): each program owns a block of this side.
        block, other_block: tokens in a block of this side, and of the other.
        tokens: of this side, in each of ``batch`` rows.
        idle: blocks that see nothing have a program, too (the forward must write them).
        by_row: one batch row after another, to reuse caches; else the longest programs of all rows first.
    """
    row, start, stop, other_start, other_stop, lo, hi = columns(tiles)
    if side == "queries":
        lo, hi = -hi, -lo
    else:
        start, stop, other_start, other_stop = other_start, other_stop, start, stop
    # from here on: a token at i of this side meets those from i + lo to i + hi of the other
    per_row = -(-tokens // block)
    tile, index = expand(start // block, -(-stop // block))
    first = torch.maximum(start[tile], index * block)
    last = torch.minimum(stop[tile], (index + 1) * block) - 1
    meets = torch.maximum(other_start[tile], first + lo[tile])
    meets_stop = torch.maximum(meets, torch.minimum(other_stop[tile], last + hi[tile] + 1))
    whole = torch.maximum(other_start[tile], last + lo[tile])
    whole_stop = torch.minimum(other_stop[tile], first + hi[tile] + 1)
    covers = (first == index * block) & (last + 1 == ((index + 1) * block).clamp(max=tokens))

    owner = row[tile] * per_row + index
    touched = meets // other_block
    touched_stop = torch.where(meets < meets_stop, -(-meets_stop // other_block), touched)
    full, full_stop = -(-whole // other_block), whole_stop // other_block
    none = ~covers | (full >= full_stop)
    full = torch.where(none, touched_stop, full)
    full_stop = torch.where(none, touched_stop, full_stop)

    masked = _union(torch.cat([owner, owner]), torch.cat([touched, full_stop]), torch.cat([full, touched_stop]))
    unmasked = _union(owner, full, full_stop)
    runs = _pair(masked, unmasked)

    count = batch * per_row
    entries = torch.bincount(runs[0], minlength=count)
    work = torch.zeros(count, dtype=torch.int64, device="cpu").index_add_(0, runs[0], runs[3] - runs[1])
    past = entries.cumsum(0)
    owners = torch.arange(count, device="cpu")
    programs = torch.stack([owners // per_row, owners % per_row, past - entries, past], 1)
    chosen = owners if idle else torch.nonzero(work).flatten()
    key = work[chosen] - (programs[chosen, 0] * FAR if by_row else 0)
    chosen = chosen[torch.argsort(key, descending=True, stable=True)]
    return Schedule(programs[chosen].int().contiguous(), torch.stack(runs[1:], 1).int().contiguous())


def _union(owner: Tensor, start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Joins ranges of one owner that overlap or touch, drops empty ones, and sorts."""
    keep = start < stop
    start, stop = (owner * FAR + start)[keep], (owner * FAR + stop)[keep]
    order = torch.argsort(start)
    start, stop = start[order], stop[order]
    if len(start) == 0:
        return start, start, start
    reach = stop.cummax(0).values
    opens = torch.ones_like(start, dtype=torch.bool)
    opens[1:] = start[1:] > reach[:-1]
    starts = torch.nonzero(opens).flatten()
    ends = torch.cat([starts, starts.new_tensor([len(start)])])[1:] - 1
    return start[starts] // FAR, start[starts] % FAR, reach[ends] % FAR


def _pair(
    masked: tuple[Tensor, Tensor, Tensor], unmasked: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pairs each masked range with the unmasked one that follows it: (owner, first, middle, last)."""
    owner, start, stop = (torch.cat(columns) for columns in zip(masked, unmasked, strict=True))
    is_full = torch.arange(len(owner), device="cpu") >= len(masked[0])
    order = torch.argsort(owner * FAR + start)
    owner, start, stop, is_full = owner[order], start[order], stop[order], is_full[order]
    follows = torch.zeros_like(is_full)
    follows[1:] = is_full[1:] & ~is_full[:-1] & (owner[1:] == owner[:-1]) & (start[1:] == stop[:-1])
    opens = torch.nonzero(~follows).flatten()
    last = torch.zeros_like(follows)
    last[:-1] = follows[1:]
    end = torch.where(last[opens], opens + 1, opens)
    middle = torch.where(is_full[opens], start[opens], stop[opens])
    return owner[opens], start[opens], middle, stop[end]
