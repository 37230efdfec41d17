"""A model's answers to one row: alone by eager attention, document by document, and sharded in a ring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..config import RingConfig
from ..integration.batch.shard import Sharded, shard
from ..integration.context.introspect import configs_of
from ..integration.context.whole_batch import IGNORED
from ..integration.selfcheck.row import ordinary_words

Batch = dict[str, Tensor]


class Answer(NamedTuple):
    """Logits [1, S, V], the loss, and gradients by parameter, in host memory."""

    logits: Tensor
    loss: float
    gradients: dict[str, Tensor]


def random_batch(model: Any, stops: Sequence[int], device: torch.device) -> Batch:
    """Makes a row of random words; documents end at ``stops``, and no label asks for another document's first token."""
    generator = torch.Generator().manual_seed(0)
    words = ordinary_words(model.config.get_text_config(), None, list(configs_of(model)))
    ids = words[torch.randint(len(words), (1, stops[-1]), generator=generator)].to(device)
    labels, positions = ids.clone(), torch.empty_like(ids)
    for start, stop in spans(stops):
        labels[:, start] = IGNORED
        positions[:, start:stop] = torch.arange(stop - start, device=device)
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def spans(stops: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First token and end of each document."""
    return pairwise([0, *stops])


def answer_whole(model: nn.Module, batch: Batch) -> Answer:
    """The answer to the whole row without a ring, with the model's own loss."""
    model.zero_grad()
    out = model(**batch, use_cache=False)
    out.loss.backward()
    return Answer(out.logits.detach(), float(out.loss.detach()), _gradients(model))


def answer_by_documents(model: nn.Module, batch: Batch, stops: Sequence[int]) -> Answer:
    """The answer without a ring; each document is a batch of its own, so that nothing can leak."""
    model.zero_grad()
    count, total, logits = int((batch["labels"] != IGNORED).sum()), 0.0, []
    for start, stop in spans(stops):
        ids, labels = batch["input_ids"][:, start:stop], batch["labels"][:, start:stop]
        out = model(input_ids=ids, position_ids=batch["position_ids"][:, start:stop], use_cache=False)
        logits.append(out.logits.detach())
        rows = out.logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(rows, labels[0, 1:], reduction="sum", ignore_index=IGNORED) / count
        loss.backward()
        total += float(loss.detach())
    return Answer(torch.cat(logits, 1), total, _gradients(model))


def answer_in_ring(model: nn.Module, batch: Batch) -> Answer:
    """The answer of all ranks together; the same on each."""
    model.zero_grad()
    sharded = sharded_unchecked(batch, labels=True)
    with sharded:
        out = model(**sharded.inputs)
    out.loss.backward()
    sharded.reduce_gradients(model)
    return Answer(logits_in_ring(model, batch), float(sharded.reduce(out.loss)), _gradients(model))


@torch.no_grad()
def logits_in_ring(model: nn.Module, batch: Batch) -> Tensor:
    """[1, S, V], the same on every rank."""
    sharded = sharded_unchecked(batch)
    with sharded:
        out = model(**sharded.inputs)
    return sharded.gather(out.logits)


def sharded_unchecked(batch: Batch, labels: bool = False) -> Sharded:
    """This rank's share; the self-check, which would refuse what `verify` names, is run by itself."""
    given = {name: x for name, x in batch.items() if labels or name != "labels"}
    return shard(given, config=RingConfig(self_check=False))


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: x.grad.cpu() for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return found
