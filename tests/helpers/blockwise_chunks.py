"""Chunks inside the steps of a ring, or of one device, on the package's kernel contract; and how that goes wrong.

The arrangement of ring-flash-attention's issue 24 (blockwise attention, Liu and Abbeel 2023, inside a ring): rank r
holds the r-th part of the row, and in each step computes its queries against one rank's keys, a chunk of queries and a
chunk of keys at a time. A step's gradients are summed in buffers of its own and then added to those of earlier steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_ring_attn.bench.replay import Answer, places
from hf_ring_attn.kernels import Gradients, Kernel, Params, Place
from hf_ring_attn.kernels.reference import Reference
from hf_ring_attn.sharding.layout import Run
from hf_ring_attn.sharding.mask import Mask, tiles
from hf_ring_attn.sharding.plan import SegmentTable


class Reusing(Reference):
    """The likely fault of that issue: ``+=`` into buffers that the caller hands over again, uncleared, in each step."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, torch.Size], Tensor] = {}

    def new_gradient(self, chunk: Tensor, place: Place | None = None) -> Tensor:
        assert place is not None
        return self.kept.setdefault((place.of, chunk.shape), super().new_gradient(chunk))


def blockwise(
    make: Callable[[], Kernel], q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask, chunk: int, params: Params,
    size: int = 1, wide: torch.dtype | None = None,
) -> Answer:  # fmt: skip
    """Whole rows [B, S, ...] in chunks, on a ring of ``size`` played rank after rank, each with a kernel of its own.

    Args:
        chunk: tokens of queries and of keys that meet in one call; divides S / size.
        wide: dtype of the gradients; None: their inputs'.
    """
    length, share = q.shape[1], q.shape[1] // size
    assert share * size == length and share % chunk == 0
    kernels = [make() for _ in range(size)]
    parts = [slice(start, start + share) for start in range(0, length, share)]
    chunks = [slice(start, start + chunk) for start in range(0, share, chunk)]
    out, lse, delta = _forward(kernels[0], q, k, v, dout, mask, chunk, params)

    totals = [kernels[0].finish(torch.zeros(x.shape), torch.float32) for x in (q, k, v)]
    for mine, kernel in zip(parts, kernels, strict=True):
        for step in range(size):
            theirs = parts[(parts.index(mine) - step) % size]
            if not len(tiles(mask, [Run(0, mine.start, share)], [Run(0, theirs.start, share)])):
                continue  # later keys, of which the ring makes no step either
            step_q, step_k, step_v = q[:, mine], k[:, theirs], v[:, theirs]
            whole = SegmentTable(torch.tensor([[0, 0, share]]), shared=True)
            home = places(step_q, step_k, step_v, whole, whole, params.scale)
            of_step = [kernel.new_gradient(x, p) for x, p in zip((step_q, step_k, step_v), home, strict=True)]
            for i in chunks:
                for j in chunks:
                    table = tiles(mask, [_run(mine, i)], [_run(theirs, j)])
                    into = Gradients(of_step[0][:, i], of_step[1][:, j], of_step[2][:, j])
                    rows = slice(mine.start + i.start, mine.start + i.stop)
                    kernel.backward(
                        dout[:, rows], step_q[:, i], step_k[:, j], step_v[:, j], lse[:, :, rows], delta[:, :, rows],
                        table, params, into,
                    )  # fmt: skip
            for total, at, part in zip(totals, (mine, theirs, theirs), of_step, strict=True):
                total[:, at] += part
    dq, dk, dv = (kernels[0].finish(x, wide or q.dtype) for x in totals)
    return Answer(out, lse, dq, dk, dv)


def _forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask, chunk: int, params: Params
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and delta, a chunk of queries at a time against all keys in one softmax."""
    length, whole = q.shape[1], [Run(0, 0, q.shape[1])]
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse, delta = (torch.empty(q.shape[0], q.shape[2], length) for _ in range(2))
    for start in range(0, length, chunk):
        at = slice(start, start + chunk)
        out[:, at], lse[:, :, at] = kernel.forward(q[:, at], k, v, tiles(mask, [Run(0, start, chunk)], whole), params)
        delta[:, :, at] = kernel.delta(dout[:, at], out[:, at])
    return out, lse, delta


def _run(part: slice, chunk: slice) -> Run:
    """A chunk of a part of the row, as a tensor of its own."""
    return Run(0, part.start + chunk.start, chunk.stop - chunk.start)
