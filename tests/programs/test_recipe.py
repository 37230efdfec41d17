"""recipes/long_context_lora, tiny, run as its users run it: a ring of two has the losses of one process without one."""

from __future__ import annotations

import json
import runpy
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.programs import CPU_2RANKS, REPOSITORY, launched_by, older_names, start

RECIPE = REPOSITORY / "recipes" / "long_context_lora"
TINY = ("--shape", "tiny", "--dtype", "float32", "--tokens", "301", "--steps", "3", "--learning-rate", "1e-2")
LOSS = 1e-5
"""Relative bound: the order of float32 sums differs."""
WEIGHT = 1e-4
"""Of the adapter's weights after three steps of 0.01 each."""


@pytest.mark.slow
def test_a_ring_of_two_trains_as_one_process(tmp_path: Path) -> None:
    runs = {
        "alone": ("--implementation", "sdpa"),
        "trainer": ("--trainer", "trainer"),
        "sft": ("--trainer", "sft"),
        "dpo alone": ("--trainer", "dpo", "--implementation", "sdpa"),
        "dpo": ("--trainer", "dpo"),
    }
    started = {}
    for name, options in runs.items():
        (folder := tmp_path / name).mkdir()
        ranks, environment = (1, {}) if name.endswith("alone") else (2, launched_by(CPU_2RANKS))
        given = (*TINY, *options, "--output", "results.json", "--save", "adapter")
        started[name] = start(folder, RECIPE / "train.py", *given, ranks=ranks, environment=environment)
    found: dict[str, Any] = {}
    for name, program in started.items():
        said = program.output()
        assert name.startswith("dpo") or not older_names(said), said  # TRL's DPOTrainer itself has older ones
        found[name] = json.loads((tmp_path / name / "results.json").read_text())
    alone, dpo_alone = found["alone"], found["dpo alone"]
    assert alone["ranks"] == 1 and len(alone["losses"]) == 3
    assert all(0 <= x < 1 for x in alone["seconds_of_garbage_collection"]) and len(alone["seconds"]) == 3
    assert alone["losses"][2] != pytest.approx(alone["losses"][0], rel=1e-3)
    for name, one in [("trainer", alone), ("sft", alone), ("dpo", dpo_alone)]:
        ring = found[name]
        assert ring["ranks"] == 2
        assert ring["losses"] == pytest.approx(one["losses"], rel=LOSS)
        assert ring["grad_norms"] == pytest.approx(one["grad_norms"], rel=LOSS)
        assert ring["tokens_per_second"] > 0
        assert len(ring["said"]) == 1 and "ring of 2" in ring["said"][0] and "kernel reference" in ring["said"][0]
    for name, one_process in [("trainer", "alone"), ("sft", "alone"), ("dpo", "dpo alone")]:
        got, want = adapter(tmp_path / name), adapter(tmp_path / one_process)
        assert got.keys() == want.keys()
        for key, x in want.items():
            assert (got[key] - x).abs().max() <= WEIGHT, key


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    """What PEFT loads of the saved adapter, into a model that was made anew."""
    model = PeftModel.from_pretrained(LlamaForCausalLM(LlamaConfig(**train()["SHAPES"]["tiny"])), folder / "adapter")
    found = {name: x for name, x in model.state_dict().items() if "lora_" in name}
    assert any(x.abs().max() > 0 for name, x in found.items() if "lora_B" in name), "as it began"
    return found


def train() -> dict[str, Any]:
    with mock.patch.object(sys, "path", [str(RECIPE), *sys.path]):
        return runpy.run_path(str(RECIPE / "train.py"))


def test_the_work_of_a_step_is_counted_by_the_formula() -> None:
    with mock.patch.object(sys, "path", [str(RECIPE), *sys.path]):
        measure = runpy.run_path(str(RECIPE / "measure.py"))
    config = LlamaConfig(
        hidden_size=64, intermediate_size=192, num_hidden_layers=2, vocab_size=259, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    trained = 64 * 64
    frozen = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 192) + 64 * 259 - trained
    products = 4 * 100 * frozen + 6 * 100 * trained
    assert measure["flops_per_step"](model, config, 100) == products + 6 * 100**2 * 64 * 2
    forward = 2 * 100 * (frozen + trained) + 2 * 100**2 * 64 * 2
    assert measure["flops_per_step"](model, config, 100, forward_only=True) == forward
    config.sliding_window = 10
    pairs = sum(min(query + 0.5, 10) for query in range(10)) + 90 * 10
    assert measure["flops_per_step"](model, config, 100) == products + 12 * pairs * 64 * 2
    config.layer_types = ["full_attention", "sliding_attention"]
    assert measure["flops_per_step"](model, config, 100) == products + 12 * (pairs + 100**2 / 2) * 64


@pytest.mark.parametrize(("what", "compiled"), [("whole", {""}), ("parts", {"input_layernorm", "mlp"}), ("", set())])
def test_layers_are_compiled_in_place(what: str, compiled: set[str]) -> None:
    recipe = train()
    options = Namespace(rank=4, shape="tiny")
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**recipe["SHAPES"]["tiny"])), recipe["adapter"](options))
    recipe["compile_layers"](model, what)
    for layer in model.get_base_model().model.layers:
        found = {name for name, part in layer.named_modules() if part._compiled_call_impl is not None}
        assert found == compiled | ({"post_attention_layernorm"} if what == "parts" else set())


def test_casts_to_float32_and_back_leave_all_bits() -> None:
    recipe, ids = train(), torch.arange(40)[None] * 5 + 3
    answers = []
    for changed in (lambda model: model, recipe["without_casts"]):
        torch.manual_seed(0)
        net = LlamaForCausalLM(LlamaConfig(**recipe["SHAPES"]["tiny"])).bfloat16()
        model = changed(get_peft_model(net, recipe["adapter"](Namespace(rank=4, shape="tiny"))))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        answers.append([loss, *(x.grad for x in model.parameters() if x.grad is not None)])
    assert len(answers[0]) == 29 and all(map(torch.equal, *answers))
