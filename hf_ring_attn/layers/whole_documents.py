"""Whole documents on every rank, for layers that look along the sequence in a way that is not known.

Each rank gathers the row, computes the layer as one process does, and keeps the results of its own tokens. So the
layer's work is not shared. Gradients of gathered inputs are summed in float32 over ranks. Packed documents are computed
one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .collectives import gather_sequence
from .halo import Piece, RowShare

Compute = Callable[[list[Tensor]], Any]


def compute_on_whole_documents(rows: RowShare, tensors: Sequence[Tensor], compute: Compute) -> Any:
    """Applies ``compute`` to whole documents on every rank.

    Args:
        tensors: [B, T, ...] or [1, T, ...] of this rank's tokens.
        compute: maps these for the n tokens of a document, [b, n, ...], to a tensor [b, n, ...] or to a tuple. What
            else a tuple holds is returned if each row is one document; else it is None.

    Returns:
        The same with the results of this rank's tokens, [B, T, ...]: zeros in ring padding.
    """
    whole = [gather_sequence(x, rows.ring, rows.layout) for x in tensors]
    pieces = [piece for documents in rows.pieces for piece in documents]
    found = [compute([_cut(x, piece) for x in whole]) for piece in pieces]
    size = max(len(x) for x in whole)
    if isinstance(found[0], tuple):
        return tuple(_joined(rows, pieces, parts, size) for parts in zip(*found, strict=True))
    return _joined(rows, pieces, found, size)


def _cut(x: Tensor, piece: Piece) -> Tensor:
    return x[piece.rows if len(x) > 1 else slice(None), piece.start : piece.stop]


def _joined(rows: RowShare, pieces: Sequence[Piece], parts: Sequence[Any], size: int) -> Any:
    """This rank's tokens of results, one a piece."""
    if not all(_is_of_tokens(part, piece, size) for part, piece in zip(parts, pieces, strict=True)):
        return parts[0] if len(parts) == 1 else None
    whole, at = [], 0
    for documents in rows.pieces:
        whole.append(torch.cat(tuple(parts[at : at + len(documents)]), 1))
        at += len(documents)
    return rows.layout.shard(rows.layout.pad(torch.cat(whole), 1), 1)


def _is_of_tokens(x: Any, piece: Piece, size: int) -> bool:
    count = len(range(size)[piece.rows])
    return isinstance(x, Tensor) and x.dim() > 1 and tuple(x.shape[:2]) == (count, piece.stop - piece.start)
