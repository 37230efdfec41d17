"""A small attention that a library must get right before it serves: what it is trusted with, seen on this very GPU."""

from __future__ import annotations

import torch

from ...sharding.mask import UNBOUNDED, Tile
from ..base import Kernel, Params
from ..reference import Reference
from ..whole import whole

FAR = 0.02
"""A relative error that only another attention has: bfloat16 alone makes 0.003."""

TOKENS, KEYS = 150, 210
LENGTHS = (40, 1, 17, 60, 2, 30)


def _whole(lo: int, hi: int) -> list[Tile]:
    """The last queries of a row against all its keys."""
    return [Tile(0, 0, TOKENS, KEYS - TOKENS, 0, KEYS, 0, lo, hi)]


def _documents() -> list[Tile]:
    ends = [sum(LENGTHS[: at + 1]) for at in range(len(LENGTHS))]
    return [
        Tile(0, end - length, length, end - length, end - length, length, end - length, 0, UNBOUNDED)
        for end, length in zip(ends, LENGTHS, strict=True)
    ]


TABLES = {
    "causal": _whole(0, UNBOUNDED),
    "bidirectional": _whole(-UNBOUNDED, UNBOUNDED),
    "with a window": _whole(-20, 50),
    "of documents": _documents(),
}


def fails(kernel: Kernel, softcap: bool, deterministic: bool) -> tuple[str, ...]:
    """What attention a kernel gets wrong here, in words."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    shapes = (TOKENS, 4), (KEYS, 2), (KEYS, 2), (TOKENS, 4)
    tensors = [
        torch.randn(1, tokens, heads, 64, generator=generator, dtype=torch.float32, device="cpu").bfloat16()
        for tokens, heads in shapes
    ]
    params = Params(0.2, 3.0 if softcap else None, None, deterministic)
    reasons = []
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast(device, enabled=False):
        for what, tiles in TABLES.items():
            table = torch.tensor(tiles, dtype=torch.int64, device="cpu")
            q, k, v, dout = tensors
            want = whole(Reference(), q.float(), k.float(), v.float(), dout.float(), table, params)
            try:
                got = whole(kernel, q.to(device), k.to(device), v.to(device), dout.to(device), table, params)
            except RuntimeError as error:
                return (f"a small attention failed: {error}",)
            errors = [float((got[name].cpu().float() - y).norm() / y.norm()) for name, y in want.items()]
            if not all(error < FAR for error in errors):
                reasons.append(f"a small attention {what} came out wrong here, by {max(errors):.0%}")
    return tuple(reasons)
