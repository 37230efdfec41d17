"""Cases of an attention, and their tensors.

Letters: B batch, S tokens, H query heads, G key/value heads, D head width, Dv value width, W ring size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

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

    Outliers of q are in the first column and those of k in the last, so that they do not meet: they bend the softmax
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
