"""Random masks against a dense boolean one: terms, tiles, what ranks hold and are sent, and attention through a ring.

`pytest tests/test_mask_fuzz.py --fuzz 20000` tries more of them than a usual run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import Tensor

from hf_ring_attn.attention.call import Call, RingOptions
from hf_ring_attn.attention.op import attend
from hf_ring_attn.comm.ring import Ring
from hf_ring_attn.kernels import Params
from hf_ring_attn.sharding import plan as plan_module
from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.sharding.mask import BIDIRECTIONAL, CAUSAL, UNBOUNDED, Band, Mask, Term, Terms, both, either, tiles
from hf_ring_attn.sharding.plan import Plan
from hf_ring_attn.testing import relative_error
from tests.helpers.checks import EXACT, Ranks

BUNCH = 25
"""Problems that the ranks solve in one run."""


@dataclass(frozen=True)
class Problem:
    """A mask as a model would have it, drawn from a seed: what joins it is drawn too, and told in words by the fields.

    ``documents``, ``blocks``: [B][S] ids, -1 for padding and for tokens of no block; blocks lie in one document each.
    ``hidden``: [B][S] keys that nobody sees. ``chunk``: positions of a document in a chunk, 0 for no chunks.
    ``windowed``: the window holds inside blocks too.
    """

    seed: int
    length: int
    rows: int
    lo: int
    hi: int
    chunk: int
    documents: list[list[int]]
    blocks: list[list[int]]
    hidden: list[list[bool]]
    windowed: bool
    share: float
    key_block: int

    @classmethod
    def of(cls, seed: int) -> Problem:
        draw = random.Random(seed)
        length, rows = draw.randint(1, 48), draw.randint(1, 2)
        lo = draw.choice([0, 0, 0, -UNBOUNDED, -draw.randint(1, 6)])
        hi = draw.choice([UNBOUNDED, UNBOUNDED, draw.randint(0, 12)])
        documents = [runs(draw, length, 20, draw.random() < 0.5) for _ in range(rows)]
        blocks = [spans(draw, row, draw.random() < 0.4) for row in documents]
        hidden = [[draw.random() < 0.1 for _ in range(length)] if draw.random() < 0.3 else [False] * length] * rows
        return cls(
            seed, length, rows, lo, hi, draw.choice([0, 0, draw.randint(1, 9)]), documents, blocks, hidden,
            draw.random() < 0.5, draw.choice([0.0, 0.5, 1.0]), draw.choice([1, 3, 4]),
        )  # fmt: skip

    def dense(self) -> Tensor:
        """[B, S, S] bool, pair by pair from the definition."""
        seen = torch.zeros(self.rows, self.length, self.length, dtype=torch.bool)
        for row in range(self.rows):
            documents, blocks = self.documents[row], self.blocks[row]
            starts = [next(p for p in range(q + 1) if documents[p : q + 1] == [documents[q]] * (q + 1 - p))
                      for q in range(self.length)]  # fmt: skip
            for q in range(self.length):
                for k in range(self.length):
                    near = self.lo <= q - k <= self.hi
                    if self.chunk:
                        near = near and (q - starts[q]) // self.chunk == (k - starts[k]) // self.chunk
                    block = blocks[q] == blocks[k] >= 0 and (not self.windowed or q - k <= self.hi)
                    alike = documents[q] == documents[k] >= 0 and starts[q] == starts[k]
                    seen[row, q, k] = alike and (near or block) and not self.hidden[row][k]
        return seen

    def terms(self) -> Terms:
        """The same from the parts that a model's mask function is made of, joined as masking_utils joins them."""
        ids = torch.tensor(self.documents)
        for row in ids:  # a document that comes back is another one: its positions begin anew
            changes = torch.diff(row, prepend=row[:1]).ne(0).cumsum(0)
            row.copy_(torch.where(row < 0, -1, changes))
        blocks: Terms = (Term(ids=torch.tensor(self.blocks)),)
        near: Terms = (Term(Band(lo=self.lo)),)
        if self.chunk:
            place = torch.arange(self.length)
            first = [[int((row == d).nonzero()[0]) if d >= 0 else 0 for d in row] for row in ids]
            near = both(near, (Term(ids=(place - torch.tensor(first)) // self.chunk),))
        window: Terms = (Term(Band(hi=self.hi)),)
        joined = both(window, either(near, blocks)) if self.windowed else either(both(window, near), blocks)
        return both(joined, (Term(BIDIRECTIONAL, ids),))

    def mask(self, layout: Layout) -> Mask:
        terms: list[Term] = []
        for term in self.terms():
            assert term.ids is not None
            terms.append(Term(term.band, layout.pad(term.ids, 1, -1)))
        return Mask.of_terms(tuple(terms), self.rows, layout.padded, layout.pad(torch.tensor(self.hidden), 1, False))


def runs(draw: random.Random, length: int, longest: int, several: bool) -> list[int]:
    """[S] ids in runs; -1 now and then; ids may come back."""
    row: list[int] = []
    while several and len(row) < length:
        row += [draw.randint(-1, 3)] * draw.randint(1, longest)
    return row[:length] if several else [0] * length


def spans(draw: random.Random, documents: list[int], some: bool) -> list[int]:
    """[S] ids of blocks, each within a run of one document and of one chunk of no chunks."""
    row, at, block = [-1] * len(documents), 0, 0
    while some and at < len(documents):
        at += draw.randint(0, 6)
        stop = at
        while stop < len(documents) and documents[stop] == documents[at] and stop - at < 9:
            stop += 1
        stop = min(stop, at + draw.randint(1, 9))
        if at < len(documents) and documents[at] >= 0:
            row[at:stop] = [block] * (stop - at)
            block += 1
        at = max(stop, at + 1)
    return row


def solvable(seed: int) -> Problem | None:
    """The problem of a seed; None for chunks with blocks, which a block may cross: refused by name."""
    problem = Problem.of(seed)
    return None if problem.chunk and any(max(row) >= 0 for row in problem.blocks) else problem


def layout_of(problem: Problem, world_size: int, rank: int) -> Layout:
    """A zigzag, or up to four chunks a rank, dealt at random."""
    draw = random.Random(problem.seed + world_size)
    owners = list(range(world_size)) * draw.choice([0, 0, 1, 2, 3, 4])
    draw.shuffle(owners)
    return Layout(problem.length, world_size, rank, tuple(owners))


def solve(seed: int) -> dict[str, Tensor]:
    """Whole answers, gathered by hand from the ranks' shares on every rank: out, dq, dk, dv."""
    problem = solvable(seed)
    assert problem is not None
    ring = Ring.of(None)
    layout = layout_of(problem, ring.size, ring.rank)
    generator = torch.Generator().manual_seed(seed)
    shape = (problem.rows, problem.length)
    rows = [torch.randn(*shape, h, 4, generator=generator, dtype=torch.float64) for h in (2, 1, 1, 2)]
    q, k, v, dout = (layout.shard(layout.pad(x, 1), 1) for x in rows)
    for x in (q, k, v):
        x.requires_grad_()
    with mock.patch.object(plan_module, "KEY_BLOCK", problem.key_block):
        plan = Plan.of(ring, layout, problem.mask(layout), problem.share)
        backward = "gather" if seed % 3 == 0 else "ring"
        out, _ = attend(Call(q, k, v, plan, Params(0.5), RingOptions("reference", backward)))
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    mine = torch.nonzero(layout.positions() < problem.length).flatten()
    found = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))
    return {"held": layout.positions()[mine], **{name: x[:, mine] for name, x in found.items()}}


def solve_all(seeds: list[int]) -> list[dict[str, Tensor]]:
    return [solve(seed) for seed in seeds]


def wanted(problem: Problem) -> dict[str, Tensor]:
    """Dense attention and autograd."""
    generator = torch.Generator().manual_seed(problem.seed)
    shape = (problem.rows, problem.length)
    q, k, v, dout = (torch.randn(*shape, h, 4, generator=generator, dtype=torch.float64) for h in (2, 1, 1, 2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("bthd,bsgd->bhts", q, k) * 0.5
    scores = scores.masked_fill(~problem.dense()[:, None], -torch.inf)
    weights = torch.nan_to_num(scores.softmax(-1), nan=0.0)
    out = torch.einsum("bhts,bsgd->bthd", weights, v)
    found = torch.autograd.grad(out, leaves, dout)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *(torch.nan_to_num(x) for x in found)), strict=True))


def test_tiles_of_random_masks_are_the_dense_mask(request: pytest.FixtureRequest) -> None:
    """Each visible pair in one tile, and no other, for the queries of every rank of a ring of three."""
    tried = 0
    for seed in range(request.config.getoption("--fuzz")):
        problem = solvable(seed)
        if problem is None:
            continue
        tried += 1
        seen = problem.dense()
        for rank in range(3):
            layout = layout_of(problem, 3, rank)
            count = torch.zeros(problem.rows, layout.padded, layout.padded, dtype=torch.int64)
            for row, _, q_length, q_place, k_offset, k_length, k_place, lo, hi in tiles(
                problem.mask(layout), layout.runs(), layout.whole(), problem.key_block
            ).tolist():
                assert k_offset == k_place
                distance = q_place + torch.arange(q_length)[:, None] - k_place - torch.arange(k_length)
                tile = count[row, q_place : q_place + q_length, k_place : k_place + k_length]
                tile += (lo <= distance) & (distance <= hi)
            mine = layout.positions()
            want = torch.zeros_like(count)
            want[:, : problem.length, : problem.length] = seen
            assert torch.equal(count[:, mine], want[:, mine]), problem
    assert tried > request.config.getoption("--fuzz") // 2


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.turns
def test_attention_under_random_masks_is_dense_attention(
    ranks: Ranks, world_size: int, request: pytest.FixtureRequest
) -> None:
    count = request.config.getoption("--fuzz") // 4
    seeds = [seed for seed in range(world_size * 10**6, world_size * 10**6 + count) if solvable(seed) is not None]
    assert len(seeds) > count // 2
    for first in range(0, len(seeds), BUNCH):
        bunch = seeds[first : first + BUNCH]
        for seed, shares in zip(bunch, zip(*ranks(world_size).run(solve_all, bunch), strict=True), strict=True):
            problem = Problem.of(seed)
            for name, want in wanted(problem).items():
                got = torch.full_like(want, torch.nan)
                for share in shares:
                    got[:, share["held"]] = share[name]
                assert relative_error(got, want) < EXACT or float((got - want).abs().max()) < EXACT, (name, problem)


def test_a_window_off_by_one_is_seen() -> None:
    """The fuzz can fail."""
    problem = Problem.of(next(seed for seed in range(1000) if Problem.of(seed).hi < 5 and Problem.of(seed).lo == 0))
    wrong = Mask.of(Band(0, problem.hi + 1) & CAUSAL, problem.rows, problem.length, torch.tensor(problem.documents))
    layout = Layout(problem.length, 1, 0)
    right = problem.mask(layout)
    assert tiles(right, layout.runs(), layout.whole()).tolist() != tiles(wrong, layout.runs(), layout.whole()).tolist()
