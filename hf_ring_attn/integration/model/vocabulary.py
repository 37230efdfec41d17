"""Ids of tokens that a model's vocabulary does not have: refused on all ranks, before the embeddings look them up.

One rank alone would fail there (on a GPU by an assertion that names no token), and the others would wait for it. The
smallest and largest id come with the comparison of batches. Only if they are none of the vocabulary's are ids looked
at, as the embeddings get them: a program, or a model with images, may have replaced them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ... import errors
from ..context import batch_context
from ..context.batch_context import BatchContext
from ..context.introspect import class_of, loss_models_of
from ..patching.compiler import uncompiled
from ..patching.modules import attach


class TokenIds:
    """The smallest and the largest id of a batch; 0 if they are not known."""

    least = most = 0


def extremes_of(batch: Mapping[str, Any]) -> list[int | Tensor]:
    """The smallest and the largest of a batch's ids, read by no one yet; zeros without ids."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or not ids.numel() or ids.dtype not in (torch.int32, torch.int64):
        return [0, 0]
    return [x.long() for x in ids.aminmax()]


def prepare(model: nn.Module, context: BatchContext) -> None:
    """Hooks the embeddings of a model whose vocabulary lacks an id of the batch."""
    ids = context.state(TokenIds)
    if context.ring.size > 1 and (ids.least < 0 or ids.most > 0):
        for table in _tables(model):
            if _lacks(table, ids):
                attach(table, "vocabulary", _check)


def _tables(model: nn.Module) -> Iterator[nn.Embedding]:
    for one in loss_models_of(model):
        with suppress(NotImplementedError, AttributeError):  # it has none
            embeddings = one.get_input_embeddings()
            yield from (part for part in embeddings.modules() if isinstance(part, nn.Embedding))


def _lacks(table: nn.Embedding, ids: TokenIds) -> bool:
    return ids.least < 0 or ids.most >= table.num_embeddings


@uncompiled("hf_ring_attn compares the ids of a batch that a vocabulary lacks")
def _check(table: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Lets all ranks raise if the embeddings of one have no entry for an id."""
    context = batch_context.current()
    assert isinstance(table, nn.Embedding)
    if context is None or not _lacks(table, context.state(TokenIds)):
        return
    ids = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), torch.zeros(1, 1))
    beyond = ((ids < 0) | (ids >= table.num_embeddings)).nonzero()
    failure = None
    if len(beyond):
        place = beyond[0].tolist()
        is_share = ids.dim() == 2 and ids.shape == context.local_shape and not context.before_text
        row, token = place if is_share else (place[0], place[-1])
        token = int(context.layout.positions()[token]) if is_share else token
        failure = errors.UnknownToken(class_of(table), int(ids[tuple(place)]), row, token, table.num_embeddings)
    context.ring.agree({}, context.ring.small_device(ids.device), failure=failure, doing="looked up its tokens")
