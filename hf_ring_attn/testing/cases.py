"""The one table of cases, for tests, doctor and benchmarks, and the tensors that go with a case.

Letters: B batch, S tokens, H query heads, G key/value heads, D head width, Dv value width, W ring size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

WORLD_SIZES = (1, 2, 4, 8)
"""The ring sizes that every case is tried at."""

PADDING = -1
"""The document id of tokens that see nothing and are not seen."""

BIDIRECTIONAL = (None, None)
CAUSAL = (0, None)

Band = tuple[int | None, int | None]
Row = tuple[tuple[int, int], ...]
"""One batch row as runs of tokens: (document, count), in order, with document `PADDING` for padding."""


def sliding(window: int) -> Band:
    """Causal: a query sees itself and the ``window - 1`` tokens before it, as transformers' ``sliding_window``."""
    return 0, window - 1


def packed(*counts: int) -> Row:
    """Documents of these many tokens one after the other; a negative count is that much padding."""
    before = (sum(count > 0 for count in counts[:at]) for at in range(len(counts)))
    return tuple((n, count) if count > 0 else (PADDING, -count) for n, count in zip(before, counts, strict=True))


@dataclass(frozen=True, kw_only=True)
class Case:
    """An attention to compute exactly.

    Args:
        why: the reason for this row of the table; unique, and its name in test reports.
        batch, length, heads, kv_heads, head_dim, value_dim: B, S, H, G, D, Dv; query head h reads key head
            h // (H / G).
        band: (lo, hi): a query sees a key of its own document iff lo <= query position - key position <= hi, with
            positions in the whole row; None is no bound. Every band holds 0: a token of a document sees itself.
        documents: for each batch row its runs of tokens; (): every row is one document.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: each query head has one more logit in its softmax, with no value.
        scale: factor of the scores; None is D ** -0.5.
        seed: of the random tensors.
    """

    why: str
    batch: int = 1
    length: int
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 8
    band: Band = CAUSAL
    documents: tuple[Row, ...] = ()
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        lo, hi = self.band
        assert (lo or 0) <= 0 <= (hi or 0), f"{self.why}: the band must hold 0"
        assert self.heads % self.kv_heads == 0, f"{self.why}: H must be a multiple of G"
        assert len(self.documents) in (0, self.batch), f"{self.why}: documents are given for every row or for none"
        for row in self.documents:
            assert sum(count for _, count in row) == self.length, f"{self.why}: the runs of a row must make S tokens"
            ids = [document for document, _ in row if document != PADDING]
            assert ids == sorted(ids), f"{self.why}: a document ends before the next one starts"

    @property
    def causal(self) -> bool:
        """True if no query sees a later key."""
        return self.band[0] == 0

    @property
    def window(self) -> Band:
        """The band as (left, right) in flash-attn's count: keys q - left to q + right are seen; None is no bound."""
        lo, hi = self.band
        return hi, None if lo is None else -lo

    def chunk(self, world_size: int) -> int:
        """Tokens in a zigzag chunk: the row is padded to a multiple of 2W and cut into 2W of them."""
        return -(-self.length // (2 * world_size))


class Inputs(TypedDict):
    """The tensors of a case: q, dout [B, S, H, D or Dv]; k, v [B, S, G, D or Dv]; sinks [H] or None, all of one dtype;
    documents [B, S] int64 with -1 for padding, or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sinks: Tensor | None
    documents: Tensor | None


def inputs(case: Case, dtype: torch.dtype = torch.float64) -> Inputs:
    """Signed random tensors with outliers, the same in every run and, up to rounding, in every dtype.

    Outliers of q lie in the first column and those of k in the last, so that they do not meet: they bend the softmax
    without making it one-hot. Padding tokens hold values as large as any, so that a leak shows.
    """
    generator = torch.Generator().manual_seed(case.seed)

    def random(heads: int, width: int) -> Tensor:
        return torch.randn(case.batch, case.length, heads, width, generator=generator, dtype=torch.float64)

    def strike(x: Tensor, share: float, low: float, high: float) -> None:
        """Make a share of the entries, and at least one, as large as ``low`` to ``high``."""
        count = max(1, int(share * x.numel()))
        at = torch.unravel_index(torch.randperm(x.numel(), generator=generator)[:count], x.shape)
        x[at] = x[at].sign() * (low + (high - low) * torch.rand(count, generator=generator, dtype=torch.float64))

    q, k = random(case.heads, case.head_dim), random(case.kv_heads, case.head_dim)
    v, dout = random(case.kv_heads, case.value_dim), random(case.heads, case.value_dim)
    strike(q[..., 0], 1 / 16, 10, 20)
    strike(k[..., -1], 1 / 32, 8, 10)
    strike(v, 1 / 32, 10, 30)
    strike(dout, 1 / 32, 10, 30)
    sinks = 2 * torch.randn(case.heads, generator=generator, dtype=torch.float64) if case.sinks else None
    return Inputs(
        q=q.to(dtype),
        k=k.to(dtype),
        v=v.to(dtype),
        dout=dout.to(dtype),
        sinks=None if sinks is None else sinks.to(dtype),
        documents=_documents(case),
    )


def _documents(case: Case) -> Tensor | None:
    if not case.documents:
        return None
    return torch.tensor([[document for document, count in row for _ in range(count)] for row in case.documents])


# Chunks of S = 48 tokens: 24, 12, 6, 3 at W = 1, 2, 4, 8; of S = 64: 32, 16, 8, 4.
CASES = (
    # Lengths
    Case(why="one token, the other ranks hold nothing but padding", length=1, seed=1),
    Case(why="two tokens in two rows", batch=2, length=2, seed=2),
    Case(why="five tokens, bidirectional", length=5, band=BIDIRECTIONAL, head_dim=4, value_dim=6, seed=3),
    Case(why="thirteen tokens, the last chunk of eight ranks is empty", length=13, heads=3, kv_heads=1, seed=4),
    Case(why="causal with nothing to pad", length=32, seed=5),
    Case(why="bidirectional with nothing to pad", length=32, band=BIDIRECTIONAL, seed=6),
    # Heads and widths
    Case(why="four query heads a key head, two rows", batch=2, length=48, heads=4, kv_heads=1, seed=7),
    Case(why="three query heads a key head", length=36, heads=6, kv_heads=2, seed=8),
    Case(why="odd length, odd widths, values narrower", length=37, head_dim=5, value_dim=3, seed=9),
    Case(
        why="odd widths, values wider, bidirectional, two rows",
        batch=2, length=31, heads=3, kv_heads=3, head_dim=3, value_dim=7, band=BIDIRECTIONAL, seed=10,
    ),
    # Windows
    Case(why="window of one: gradients of q and k are zero", length=24, band=sliding(1), seed=11),
    Case(why="window smaller than any chunk", length=48, band=sliding(2), seed=12),
    Case(why="window of one token more than a chunk of eight ranks", length=64, band=sliding(5), seed=13),
    Case(why="window larger than a chunk", length=48, band=sliding(29), heads=4, seed=14),
    Case(why="window larger than the row", length=33, band=sliding(100), seed=15),
    Case(why="bidirectional window smaller than any chunk", length=48, band=(-1, 1), seed=16),
    Case(why="bidirectional window larger than a chunk", length=45, band=(-20, 20), seed=17),
    Case(why="window longer to the left than to the right", length=41, band=(-3, 7), heads=3, kv_heads=1, seed=18),
    Case(why="all of the future, little of the past", length=40, band=(None, 2), seed=19),
    # Documents and padding
    Case(
        why="documents shorter than a chunk",
        length=64, documents=(packed(3, 2, 1, 5, 4, 1, 1, 6, 3, 2, 7, 3, 5, 2, 3, 1, 4, 8, 3),), seed=20,
    ),
    Case(why="a document longer than two ranks hold", length=48, documents=(packed(5, 41, 2),), seed=21),
    Case(
        why="other documents in each row, bidirectional",
        batch=2, length=43, band=BIDIRECTIONAL, documents=(packed(1, 30, 12), packed(11, 11, 21)), seed=22,
    ),
    Case(
        why="padding on the right, and a row of nothing but padding",
        batch=3, length=32, documents=(packed(32), packed(19, -13), packed(-32)), seed=23,
    ),
    Case(
        why="padding on the left, bidirectional",
        batch=2, length=30, band=BIDIRECTIONAL, documents=(packed(-9, 21), packed(-26, 4)), seed=24,
    ),
    Case(
        why="holes between and inside documents",
        batch=2, length=40, heads=4, kv_heads=2,
        documents=(packed(-1, 9, -5, 12, -3, 10), ((0, 6), (PADDING, 3), (0, 14), (PADDING, 1), (1, 16))), seed=25,
    ),
    Case(
        why="window across a hole of its document",
        length=40, band=sliding(9), documents=(((0, 17), (PADDING, 4), (0, 19)),), seed=26,
    ),
    # Scores
    Case(why="softcap that bends most scores", length=40, softcap=1.5, seed=27),
    Case(why="softcap of Gemma 2 with scale 1", length=35, softcap=50.0, scale=1.0, band=sliding(12), seed=28),
    Case(why="sinks, grouped heads", length=48, heads=4, kv_heads=2, sinks=True, seed=29),
    Case(why="sinks with a window, as gpt-oss", length=53, heads=8, kv_heads=2, band=sliding(10), sinks=True, seed=30),
    Case(
        why="sinks where a query sees no key",
        batch=2, length=29, sinks=True, documents=(packed(20, -9), packed(-11, 7, -1, 10)), seed=31,
    ),
    Case(why="a scale of its own, bidirectional", length=34, band=BIDIRECTIONAL, scale=0.11, seed=32),
    # All at once
    Case(
        why="window, documents, padding, sinks, softcap, grouped heads, odd everything",
        batch=2, length=61, heads=6, kv_heads=2, head_dim=7, value_dim=5, band=sliding(13),
        documents=(packed(3, 39, 1, 15, -3), packed(-2, 27, 32)), softcap=2.5, sinks=True, scale=0.5, seed=33,
    ),
    Case(
        why="bidirectional window, documents, holes, sinks, softcap, one key head",
        batch=2, length=47, heads=4, kv_heads=1, head_dim=9, value_dim=3, band=(-6, 6),
        documents=(packed(14, -3, 30), packed(47)), softcap=3.0, sinks=True, seed=34,
    ),
)  # fmt: skip
