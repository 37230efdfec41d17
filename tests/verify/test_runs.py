"""The random rows of ``verify``: ordinary words alone, since special tokens have a meaning for some models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_ring_attn.integration.selfcheck.row import ordinary_words
from hf_ring_attn.verify.runs import random_batch
from tests.helpers.models.tiny_models import VOCABULARY, tiny

SPECIAL = {
    "one end": (3, {0, 3}),
    "several ends, as in Llama 3.1 Instruct": ([1, 2], {0, 1, 2}),
    "an end outside of the vocabulary": ([5, VOCABULARY], {0, 5}),
    "no end": (None, {0}),
}


@pytest.mark.parametrize(("ends", "special"), SPECIAL.values(), ids=list(SPECIAL))
def test_no_special_token_is_drawn(ends: Any, special: set[int]) -> None:
    """Several ends raised TypeError in ``verify``, and the self-check drew them."""
    model = tiny("llama", "eager")
    model.config.eos_token_id = ends
    words = set(range(VOCABULARY)) - special
    assert set(ordinary_words(model.config, None, [model.config]).tolist()) == words
    batch = random_batch(model, (2000, 4000), torch.device("cpu"))
    assert set(batch["input_ids"].flatten().tolist()) == words
