"""Whole documents on every rank, for layers that look along the sequence in a way that is not known.

Each rank gathers the row, computes the layer as one process does, and keeps the results of its own tokens. So the
layer's work is not shared. Gradients of gathered inputs are summed in float32 over ranks. Packed documents are computed
one by one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from .. import errors
from .collectives import gather_sequence
from .halo import Piece, RowShare

Compute = Callable[[list[Tensor], Piece], Any]


def compute_on_whole_documents(rows: RowShare, tensors: Sequence[Tensor], compute: Compute, name: str) -> Any:
    """Applies ``compute`` to whole documents on every rank.

    Args:
        tensors: [B, T, ...] or [1, T, ...] of this rank's tokens.
        compute: maps these for the n tokens of a document, [b, n, ...], and its place to a tensor [b, n, ...], or to
            containers of such. What else they hold is returned if each row is one document; else its use is refused.
        name: of the layer, for the refusal.

    Returns:
        The same with the results of this rank's tokens, [B, T, ...]: zeros in ring padding.
    """
    whole = [gather_sequence(x, rows.ring, rows.layout) for x in tensors]
    pieces = [piece for documents in rows.pieces for piece in documents]
    found = [tree_flatten(compute([_cut(x, piece) for x in whole], piece)) for piece in pieces]
    if any(kind != found[0][1] for _, kind in found):
        raise errors.UnsupportedModel(name, [_OF_DOCUMENTS])
    size = max(len(x) for x in whole)
    parts = zip(*(leaves for leaves, _ in found), strict=True)
    return tree_unflatten([_joined(rows, pieces, part, size, name) for part in parts], found[0][1])


def _cut(x: Tensor, piece: Piece) -> Tensor:
    return x[piece.rows if len(x) > 1 else slice(None), piece.start : piece.stop]


def _joined(rows: RowShare, pieces: Sequence[Piece], parts: Sequence[Any], size: int, name: str) -> Any:
    """This rank's tokens of results, one a piece."""
    if not all(_is_of_tokens(part, piece, size) for part, piece in zip(parts, pieces, strict=True)):
        return parts[0] if all(_is_same(part, parts[0]) for part in parts[1:]) else OfDocuments.of(name)
    whole, at = [], 0
    for documents in rows.pieces:
        whole.append(torch.cat(tuple(parts[at : at + len(documents)]), 1))
        at += len(documents)
    return rows.layout.shard(rows.layout.pad(torch.cat(whole), 1), 1)


def _is_of_tokens(x: Any, piece: Piece, size: int) -> bool:
    count = len(range(size)[piece.rows])
    return isinstance(x, Tensor) and x.dim() > 1 and tuple(x.shape[:2]) == (count, piece.stop - piece.start)


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, bool | int | float | str) and a == b)


_OF_DOCUMENTS = (
    "in packed rows it is called for each document, and its result without tokens (a state, a loss) is another for each"
)


class OfDocuments(Tensor):
    """A result that each document of a packed row has for itself, which nobody may use.

    Attributes:
        of_layer: the name of the layer. why: for the refusal. last: the last document's, if it may be asked for.
    """

    of_layer: str
    why: str
    last: Tensor | None

    @classmethod
    def of(cls, name: str, why: str = _OF_DOCUMENTS, last: Tensor | None = None) -> OfDocuments:
        """Makes one of a layer."""
        made = torch.Tensor._make_subclass(cls, torch.empty(0))
        made.of_layer, made.why, made.last = name, why, last
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.last, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (_as_it_is, (self.last,))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _HOSTS_ASK:
            return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        given, _ = tree_flatten((args, kwargs))
        one = next(x for x in given if isinstance(x, cls))
        raise errors.UnsupportedModel(one.of_layer, [one.why])


_HOSTS_ASK = {
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf", "is_meta")),
    *(getattr(Tensor, name) for name in ("numel", "element_size", "is_inference")),
}
"""Questions that FSDP2 has for each output, and the self-check for each attribute."""


def _as_it_is(x: Any) -> Any:
    return x
