"""Recurrent layers that get a mask which the program keeps, and uses in several batches and outside of any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_ring_attn
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import CHECKPOINTING, Batch, attempt, gradients_of, tokens
from tests.helpers.jobs.whole_layer_jobs import by_documents, documents
from tests.helpers.models.tiny_models import tiny

EXACT = 1e-5
"""transformers' loss is float32, and so is a part of the layers."""
BATCHES = [documents(12, 11), documents(10, 13), tokens(23)]


def made(attention: str | None, checkpointing: str = "") -> Any:
    model: Any = tiny("qwen3_5", attention).double().train()
    model.config.use_cache = False
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING[checkpointing])
    masks: dict[tuple[int, ...], Tensor] = {}

    def give_kept(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        shape = tuple((args[0] if args else kwargs["hidden_states"]).shape[:2])
        kept = masks.setdefault(shape, torch.ones(shape, dtype=torch.bool))
        return args, {**kwargs, "attention_mask": kept}

    model.model.layers[0].linear_attn.register_forward_pre_hook(give_kept, with_kwargs=True)
    return model


def away(batches: list[Batch], checkpointing: str = "") -> list[float]:
    """How far gradients of each batch, and logits outside of a ring, are from one process; all batches are alive before
    the first backward."""
    model, own, alive, found = made("ring_fp32", checkpointing), made(None), [], []
    for batch in batches:
        with (sharded := hf_ring_attn.shard(batch, model=model)):
            alive.append((sharded, model(**sharded.inputs).loss, batch))
    for sharded, loss, batch in alive:
        loss.backward()
        sharded.reduce_gradients(model)
        gradients, (_, expected) = gradients_of(model), by_documents(own, batch)
        found += [relative_error(gradients[name], x) for name, x in expected.items()]
    with torch.no_grad():  # as many tokens as a rank had
        ids = {"input_ids": tokens(12)["input_ids"]}
        found.append(relative_error(model(**ids).logits, own(**ids).logits))
    return found


def refused(batches: list[Batch], checkpointing: str) -> tuple[str, str] | None:
    return attempt(lambda: away(batches, checkpointing))


def test_a_kept_mask_tells_of_no_earlier_batch(ranks: Ranks) -> None:
    """Later batches, and calls outside of a ring, were cut at the first batch's documents."""
    assert max(max(far) for far in ranks(2).run(away, BATCHES)) < EXACT


@pytest.mark.parametrize("batches", [BATCHES[:1] * 2, BATCHES[2:] * 2], ids=["documents", "rows"])
def test_recomputed(ranks: Ranks, batches: list[Batch]) -> None:
    assert max(max(far) for far in ranks(2).run(away, batches, "recomputed")) < EXACT


def test_a_recompute_of_one_of_several_batches_is_refused(ranks: Ranks) -> None:
    for raised in ranks(2).run(refused, BATCHES, "recomputed"):
        assert raised is not None, "not refused"
        assert raised[0] == "UnsupportedModel" and "make another mask for each batch" in raised[1]
