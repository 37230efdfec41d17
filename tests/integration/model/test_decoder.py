"""The decoder layers of a model, and their kinds."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from hf_ring_attn.integration.model.decoder import decoder_layers, layer_kinds
from hf_ring_attn.integration.model.loading import empty_model

TEXT = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
VISION = {"depth": 3, "hidden_size": 64, "num_heads": 2, "out_hidden_size": 64}


def test_a_tower_with_as_many_layers_is_not_the_decoder() -> None:
    config = AutoConfig.for_model("qwen3_vl", text_config=TEXT, vision_config=VISION)
    model: Any = empty_model(config)
    found = decoder_layers(model)
    assert found is not None and found[0] == "model.language_model.layers"
    assert found[1] is model.model.language_model.layers and len(model.model.visual.blocks) == len(found[1])


def test_a_model_without_such_a_list_has_none() -> None:
    model: Any = empty_model(AutoConfig.for_model("llama", **TEXT, intermediate_size=64))
    model.model.layers = model.model.layers[:2]
    assert decoder_layers(model) is None


@pytest.mark.parametrize(
    ("entries", "kinds"),
    [
        ({"model_type": "llama"}, ["full_attention"] * 3),
        ({"model_type": "mistral", "sliding_window": 8}, ["sliding_attention"] * 3),
        ({"model_type": "mistral", "sliding_window": None}, ["full_attention"] * 3),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 8}, ["full_attention"] * 3),
        ({"model_type": "gemma2", "sliding_window": 8}, ["sliding_attention", "full_attention", "sliding_attention"]),
    ],
)
def test_kinds_are_those_of_the_config(entries: dict[str, Any], kinds: list[str]) -> None:
    given = dict(entries)
    assert layer_kinds(AutoConfig.for_model(given.pop("model_type"), **TEXT, **given)) == kinds
