"""A warning of rows that have more tokens than the model has positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

import hf_ring_attn
from hf_ring_attn.integration import log

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
}
YARN: Any = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
CONFIGS: dict[str, tuple[Any, str]] = {
    "RoPE": (LlamaConfig(**SMALL, max_position_embeddings=32), "it needs RoPE scaling such as YaRN"),
    "YaRN": (LlamaConfig(**SMALL, max_position_embeddings=32, rope_parameters=YARN), ""),
    "table": (GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=64, vocab_size=64, attn_pdrop=0.0), ""),
}


def watched(config: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    """A model, and the warnings from now on."""
    found: list[str] = []
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setattr(log._logger(), "warning", found.append)
    made: Any = AutoModelForCausalLM
    return made.from_config(config, attn_implementation="ring_fp32"), found


def warnings_of(config: Any, tokens: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    model, found = watched(config, monkeypatch)
    for _ in range(2):
        ids = torch.arange(tokens)[None] % 64
        sharded = hf_ring_attn.shard({"input_ids": ids, "labels": ids})
        with sharded:
            model(**sharded.inputs)
    return [line for line in found if "positions in the config" in line]


@pytest.mark.parametrize("kind", CONFIGS)
def test_rows_beyond_the_positions_of_a_model_are_warned_of_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, words = CONFIGS[kind]
    assert warnings_of(config, 32, monkeypatch) == []
    (*lines,) = warnings_of(config, 48, monkeypatch)
    assert len(lines) == bool(words) and all(words in line and "the 32 positions" in line for line in lines)


def test_a_table_of_positions_is_named_before_the_model_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = watched(CONFIGS["table"][0], monkeypatch)
    sharded = hf_ring_attn.shard({"input_ids": torch.zeros(1, 80, dtype=torch.int64)})
    with pytest.raises(IndexError), sharded:
        model(**sharded.inputs)
    assert any("a longer table of positions, which has to be trained" in line for line in found)
