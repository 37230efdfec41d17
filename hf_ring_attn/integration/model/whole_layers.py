"""Layers that look along the sequence in a way that is not known: each rank computes them on whole documents.

They are exact by construction, as long as they get the padding mask that transformers makes for recurrent layers: it
carries the rows (`recurrent_rows`). Attention and MLPs around them stay shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ... import errors
from ...layers.halo import RowShare
from ...layers.whole_documents import compute_on_whole_documents
from ...traffic.gathered_kv import is_recomputing
from ..context.tensor_tree import tensors_of
from ..patching.compiler import uncompiled
from ..patching.modules import OwnForward, replace
from .recurrent_ops import BY_HOST
from .recurrent_rows import context_for_recurrence, refuse_cache, rows_in

_RAN = "_hf_ring_attn_whole"


def prepare(module: nn.Module) -> None:
    """Replaces the forward of a layer; without effect outside of sharded batches."""
    if not isinstance(module.__dict__.get("forward"), _OnWholeDocuments):  # a program may have set its own since
        replace(module, "forward", _OnWholeDocuments(module))


class _OnWholeDocuments(OwnForward):
    """A layer's forward in a sharded batch."""

    @uncompiled(BY_HOST)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given, own = [*args, *kwargs.values()], self.module.__dict__
        rows = rows_in(given)
        if rows is None:
            if context_for_recurrence() is not None or (_RAN in own and is_recomputing()):
                raise errors.RecurrentLayerWithoutMask(type(self.module).__name__)
            return self.forward(*args, **kwargs)
        own[_RAN] = True
        refuse_cache(type(self.module).__name__, given)
        of_tokens = list(_of_tokens((args, kwargs), rows))

        def compute(whole: list[Tensor]) -> Any:
            with_args, with_kwargs = _replaced((args, kwargs), dict(zip(map(id, of_tokens), whole, strict=True)))
            return self.forward(*with_args, **with_kwargs)

        return compute_on_whole_documents(rows, of_tokens, compute)


def _of_tokens(value: Any, rows: RowShare) -> Iterator[Tensor]:
    """The tensors [B, T, ...] of this rank's tokens among a call's arguments, each once."""
    seen: dict[int, Tensor] = {}
    for _, x in tensors_of(value):
        if x.dim() > 1 and x.shape[1] == rows.layout.local_length:
            seen.setdefault(id(x), x)
    return iter(seen.values())


def _replaced(value: Any, by: dict[int, Tensor]) -> Any:
    """The same arguments with other tensors."""
    if isinstance(value, Tensor):
        return by.get(id(value), value)
    if isinstance(value, dict):
        return {name: _replaced(part, by) for name, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_replaced(part, by) for part in value)
    return value
