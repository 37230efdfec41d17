"""What ranks and one process compute of whole rows: sums, means, last values, cumulative sums, and a loss of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.comm.ring import Ring
from hf_ring_attn.layers import rows
from hf_ring_attn.sharding.layout import Layout
from tests.helpers.defects import planted
from tests.helpers.jobs.balanced_jobs import chunks_forced
from tests.helpers.rank_functions import Answer

WIDTH, WORDS = 3, 11


@dataclass(frozen=True, kw_only=True)
class Case:
    """Four rows of ``length`` tokens. ``chunks``: that each rank holds, at random; 0 for the zigzag.

    ``counts``: one row counts every token, one none, one a few at its start, one all but its last.
    """

    why: str
    length: int = 23
    chunks: int = 0

    def layout(self, world_size: int, rank: int) -> Layout:
        owners = list(range(world_size)) * self.chunks
        random.Random(self.chunks).shuffle(owners)
        return Layout(self.length, world_size, rank, tuple(owners))

    def mask(self) -> Tensor:
        counts = torch.ones(4, self.length, dtype=torch.int64)
        counts[1], counts[2, 1:], counts[3, -1:] = 0, 0, 0
        return counts

    def numbers(self) -> Answer:
        generator = torch.Generator().manual_seed(self.length)
        shapes = {"x": (4, self.length, WIDTH), "weight": (WIDTH,), "d": (4, self.length, WIDTH)}
        return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


CASES = [
    Case(why="a length that fits", length=32),
    Case(why="padding of the ring"),
    Case(why="ranks that hold padding only", length=3),
    Case(why="one token", length=1),
    Case(why="one chunk a rank", chunks=1),
    Case(why="eight chunks a rank, padded", length=141, chunks=8),
]


def loss_of(found: dict[str, Tensor], of_rows: Tensor, d: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    """A loss in which every number has its own weight; ``total`` sums [4, T, WIDTH] over the row."""
    parts = [(found[name].tanh() * of_rows.sin()).sum() for name in ("sum", "mean", "last", "all")]
    return torch.stack([*parts, total(found["cumsum"].tanh() * d).sum()]).sum()


def in_one_process(case: Case) -> Answer:
    given, counts = case.numbers(), case.mask()
    weight = given["weight"].requires_grad_()
    x, kept = given["x"] * weight, counts[..., None].double()
    last = [int(row.nonzero().max()) if row.any() else 0 for row in counts]
    found = {
        "sum": (x * kept).sum(1), "mean": (x * kept).sum(1) / counts.sum(1).clamp(min=1)[:, None],
        "last": x[torch.arange(4), last], "all": x.sum(1), "cumsum": (x * kept).cumsum(1),
        "count": counts.sum(1), "counts": counts.cumsum(1), "end": x[:, -1],
    }  # fmt: skip
    loss = loss_of(found, given["d"][:, 0], given["d"], lambda y: y.sum(1))
    (gradient,) = torch.autograd.grad(loss, weight)
    return {**{name: y.detach() for name, y in found.items()}, "loss": loss.detach(), "gradient": gradient}


def in_a_ring(cases: list[Case]) -> list[Answer]:
    """The same from this rank's tokens; of cumulative sums all ranks' tokens in order, of gradients the mean."""
    return [_in_a_ring(case) for case in cases]


def _in_a_ring(case: Case) -> Answer:
    ring, layout = Ring.of(None), case.layout(dist.get_world_size(), dist.get_rank())
    given, counts = case.numbers(), case.mask()
    weight = given["weight"].requires_grad_()

    def mine(x: Tensor, padding: float) -> Tensor:
        return layout.shard(layout.pad(x, 1, padding), 1)

    # Nothing may read the ring's padding, nor, where a mask is given, the tokens that it leaves out.
    mask = mine(counts, 1)
    x, own = mine(given["x"], 1.0) * weight, (ring, layout)
    x = torch.where((layout.positions() < case.length)[None, :, None], x, torch.nan)
    hidden = torch.where(mask[..., None] != 0, x, torch.nan)
    found = {
        "sum": rows.sum_row(hidden, *own, mask), "mean": rows.mean_row(hidden, *own, mask.bool()),
        "last": rows.last_of_row(x, *own, mask.double()), "all": rows.sum_row(x, *own),
        "cumsum": rows.cumsum_row(hidden, *own, mask), "count": rows.sum_row(mask, *own),
        "counts": rows.cumsum_row(mask, *own), "end": rows.last_of_row(x, *own),
    }  # fmt: skip
    loss = loss_of(found, given["d"][:, 0], mine(given["d"], 1.0), lambda y: rows.sum_row(y, *own))
    (gradient,) = torch.autograd.grad(loss, weight)
    for name in ("cumsum", "counts"):
        found[name] = layout.merge(ring.gather(found[name].detach()).wait()[0])[:, : case.length]
    found |= {"loss": loss, "gradient": ring.mean(gradient)}
    return {name: y.detach() for name, y in found.items()}


# ---- the public methods, in a loss of pairs of rows ------------------------------------------------------------------


def pairs(length: int) -> dict[str, Tensor]:
    """Two pairs of rows, padded on either side; the completions of two begin late, one row has none."""
    ids = torch.randint(WORDS, (4, length), generator=torch.Generator().manual_seed(length))
    real, completion = torch.ones_like(ids), torch.zeros_like(ids)
    real[0, :5], real[1, -4:] = 0, 0
    completion[0, length // 2 :], completion[1, 3:-4], completion[2, length - 2 :] = 1, 1, 1
    # The loss weighs the token that predicts: the mask moves with the labels, on whole rows.
    return {
        "input_ids": ids, "attention_mask": real, "shift_labels": pad(ids[:, 1:], (0, 1), value=-100),
        "shift_mask": pad(completion[:, 1:], (0, 1)),
    }  # fmt: skip


class WholeRows:
    """The methods of a sharded batch, as they are for whole rows on one device."""

    def row_sum(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x.sum(1) if mask is None else (x * _beside(mask, x)).sum(1)

    def row_mean(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.row_sum(x, mask) / mask.sum(1).clamp(min=1).view(-1, *[1] * (x.dim() - 2))

    def last_token(self, x: Tensor, mask: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        return x[torch.arange(len(x)), (places * (mask != 0)).argmax(1)]

    def row_cumsum(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return (x if mask is None else x * mask).cumsum(1)


def _beside(mask: Tensor, x: Tensor) -> Tensor:
    return mask.view(*mask.shape, *[1] * (x.dim() - 2))


def preference(table: Tensor, inputs: dict[str, Tensor], rows: Any) -> Tensor:
    """LD-DPO's loss (https://arxiv.org/abs/2409.06411) of the policy ``table`` [WORDS, WORDS], with a reward's head."""
    logits, mask = table[inputs["input_ids"]], inputs["shift_mask"]
    per_token = logits.log_softmax(-1).gather(-1, inputs["shift_labels"].clamp(min=0)[..., None])[..., 0]
    counts, place = rows.row_sum(mask), rows.row_cumsum(mask)
    shared = torch.minimum(*counts.chunk(2)).repeat(2)[:, None]
    logps = rows.row_sum(per_token, mask.bool() & (place <= shared))
    logps = logps + 0.3 * rows.row_sum(per_token, mask.bool() & (place > shared))
    real = inputs["attention_mask"]
    rewards = rows.last_token(logits[..., 0], real) + rows.row_mean(logits.square(), real).sum(1)
    scores = 0.1 * logps + rewards + rows.row_mean(per_token, mask)
    chosen, rejected = scores.chunk(2)
    return -logsigmoid(chosen - rejected).mean()


def table_of_words() -> Tensor:
    return torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()


def preference_alone(length: int) -> Answer:
    table = table_of_words()
    loss = preference(table, pairs(length), WholeRows())
    return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, table)[0]}


def preference_in_a_ring(length: int, chunks: int = 0, defect: str | None = None) -> Answer:
    """``chunks``: those that each rank holds of packed rows, which then need position_ids; 0 for the zigzag."""
    table, batch = table_of_words(), pairs(length)
    if chunks:
        marks = torch.cat([torch.arange(length - length // 3), torch.arange(length // 3)])
        batch = {**batch, "position_ids": marks.expand(4, -1)}
        del batch["attention_mask"]
    with planted(defect), chunks_forced(chunks):
        sharded = hf_ring_attn.shard(batch, config=RingConfig(layout="balanced" if chunks else "zigzag"))
        inputs = dict(sharded.inputs)
        if chunks:
            assert sharded.ring.size == 1 or sharded.layout.chunks == chunks
            inputs["attention_mask"] = sharded.layout.shard(sharded.layout.pad(pairs(length)["attention_mask"], 1), 1)
        if defect == "mask_shifted_late":  # by a program that shards its mask first
            late = hf_ring_attn.shard({**batch, "shift_mask": pad(batch["shift_mask"][:, :-1], (1, 0))})
            inputs["shift_mask"] = pad(late.inputs["shift_mask"][:, 1:], (0, 1))
        loss = preference(table, inputs, sharded)
        (gradient,) = torch.autograd.grad(loss, table)
    return {"loss": loss.detach(), "gradient": sharded.ring.mean(gradient)}
