"""Queries on a model that a batch makes several times."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_ring_attn.integration.context.introspect import loss_model_of, loss_models_of
from tests.helpers.models.tiny_models import tiny


class Unseen(nn.Module):
    """Must not be looked into."""

    def __getattribute__(self, name: str) -> Any:
        assert name != "_modules", "it was looked into"
        return super().__getattribute__(name)


def test_no_model_that_is_found_is_looked_into() -> None:
    """A batch asks several times, and a model with LoRA has thousands of modules."""
    model: Any = tiny("llama", "ring_fp32")
    unseen = Unseen()
    model.model.layers[0].mlp.register_module("unseen", unseen)
    whole = nn.ModuleDict({"wrapped": nn.Sequential(model)})
    assert loss_model_of(whole) is model
    assert loss_models_of(whole) == [model]


def test_a_part_of_a_model_that_is_registered_beside_it_is_no_other_model() -> None:
    first, second = tiny("llama", "ring_fp32"), tiny("gpt2", "ring_fp32")
    whole = nn.ModuleDict({"body": first.base_model, "first": first, "second": second, "again": second})
    assert loss_models_of(whole) == [first, second]
