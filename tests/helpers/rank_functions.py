"""What the ranks of the core's tests compute, and who holds what in words of its own, not in those of layout.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from hf_ring_attn.attention import backward
from hf_ring_attn.attention.function import ring_attention
from hf_ring_attn.config import RingConfig
from hf_ring_attn.kernels import Place
from hf_ring_attn.kernels.reference import Reference
from hf_ring_attn.sharding import plan
from hf_ring_attn.testing import Case, Inputs, inputs
from tests.helpers.defects import planted

Answer = dict[str, Tensor]
"""out [B, S, H, Dv], lse [B, H, S], dq, dk, dv of their inputs' shapes, dsinks [H]: of a rank, or of the whole row."""

DIM = {"lse": 2}
"""The dim of an answer that runs over tokens, where it is not 1."""


def held(length: int, rank: int, world_size: int) -> Tensor:
    """The tokens of a row that a rank holds: the row in 2W chunks, and of these the rank's from either end."""
    chunk = -(-length // (2 * world_size))
    starts = (rank * chunk, (2 * world_size - 1 - rank) * chunk)
    return torch.tensor([p for start in starts for p in range(start, start + chunk) if p < length], dtype=torch.int64)


def qkv(length: int = 8, *, heads: int = 4, kv_heads: int = 2, batch: int = 2) -> dict[str, Any]:
    """Rows of q, k and v by name, the same on every rank: widths 6, 6 and 5, float32."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"q": (heads, 6), "k": (kv_heads, 6), "v": (kv_heads, 5)}
    return {name: torch.randn(batch, length, *shape, generator=generator) for name, shape in shapes.items()}


def whole(shares: Sequence[Answer], length: int) -> Answer:
    """The answer of the row from its ranks' shares; what no rank holds stays nan. A sink's gradient is a sum."""
    answer: Answer = {}
    for name, first in shares[0].items():
        if name == "dsinks":
            answer[name] = torch.stack([share[name] for share in shares]).sum(0)
            continue
        dim = DIM.get(name, 1)
        shape = list(first.shape)
        shape[dim] = length
        answer[name] = torch.full(shape, torch.nan, dtype=first.dtype)
        for rank, share in enumerate(shares):
            answer[name].index_copy_(dim, held(length, rank, len(shares)), share[name])
    return answer


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that torch hands out uninitialised holds nan, so that a result read from it shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@dataclass
class Spy:
    """The gradients as they were before their rounding: what the kernel's `finish` was given. ``of_q``: those of q."""

    seen: list[Tensor] = field(default_factory=list)
    of_q: list[Tensor] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator[None]:
        def round_into(out: Tensor, gradient: Tensor, place: Place | None = None) -> None:
            if out.dtype != gradient.dtype:
                (self.of_q if place is not None and place.of == "q" else self.seen).append(gradient.clone())
            out.copy_(gradient)

        def finish(
            _: Reference, accumulator: Tensor, dtype: torch.dtype, place: Place | None = None, out: Tensor | None = None
        ) -> Tensor:
            out = torch.empty_like(accumulator, dtype=dtype) if out is None else out
            round_into(out, accumulator, place)
            return out

        with mock.patch.object(Reference, "finish", finish), mock.patch.object(backward, "_round_into", round_into):
            yield

    def answer(self, real: Tensor) -> Answer:
        """Those of the real tokens; they were rounded a few heads at a time."""
        of_k, of_v = self.seen[::2], self.seen[1::2]
        parts = {name: torch.cat(heads, 2) for name, heads in (("dq", self.of_q), ("dk", of_k), ("dv", of_v))}
        return {name: x[:, real] for name, x in parts.items()}


def attention(
    case: Case, config: RingConfig = RingConfig(), *, given: Inputs | None = None, length: int | None = None
) -> Answer:
    """This rank's share of a case's answer, through the public function and autograd."""
    x = inputs(case) if given is None else given
    mine = held(case.length, dist.get_rank(), dist.get_world_size())
    leaves = {f"d{name}": x[name][:, mine].requires_grad_() for name in ("q", "k", "v")}
    sinks = x["sinks"]
    if sinks is not None:
        leaves["dsinks"] = sinks = sinks.clone().requires_grad_()
    left, right = case.window
    answer = ring_attention(
        leaves["dq"], leaves["dk"], leaves["dv"], causal=case.causal, window=(left, None if case.causal else right),
        documents=x["documents"], softcap=case.softcap, sinks=sinks, scale=case.scale, length=length,
        return_lse=True, config=config,
    )  # fmt: skip
    out, lse = answer
    gradients = torch.autograd.grad(out, list(leaves.values()), x["dout"][:, mine])
    return {"out": out.detach(), "lse": lse, **dict(zip(leaves, gradients, strict=True))}


def attentions(
    case: Case, configs: Sequence[RingConfig], defect: str | None = None, share: float = plan.SPARSE_SHARE
) -> list[Answer]:
    """`attention` in float64 with each config, on poisoned memory; the row's length told and found out in turn.

    ``share``: in place of SPARSE_SHARE; with 0 every rank gets all keys, with 1 those that it sees.
    """
    block = mock.patch.object(plan, "KEY_BLOCK", 4 if share == 1 else plan.KEY_BLOCK)  # cases are shorter than 384
    with poisoned_memory(), planted(defect), mock.patch.object(plan, "SPARSE_SHARE", share), block:
        return [
            attention(case, config, length=case.length if turn % 2 else None) for turn, config in enumerate(configs)
        ]


def planted_attention(case: Case, config: RingConfig, given: Inputs, defect: str | None = None) -> Answer:
    """`attention`, with a defect if one is named."""
    with planted(defect):
        return attention(case, config, given=given)


def accumulated(case: Case, dtype: torch.dtype, config: RingConfig, defect: str | None = None) -> tuple[Answer, Answer]:
    """`attention` in a narrow dtype (sinks in float32), and its gradients before they were rounded to that dtype."""
    spy = Spy()
    with poisoned_memory(), planted(defect), spy.watching():
        rounded = attention(case, config, given=narrow_inputs(case, dtype))
    size = dist.get_world_size()
    padded = case.length if size == 1 else 2 * size * case.chunk(size)
    return rounded, spy.answer(held(padded, dist.get_rank(), size) < case.length)


def narrow_inputs(case: Case, dtype: torch.dtype) -> Inputs:
    """The tensors of a case in a narrow dtype, with sinks in float32, as a parameter is usually kept."""
    x = inputs(case, dtype)
    x["sinks"] = None if x["sinks"] is None else x["sinks"].float()
    return x
