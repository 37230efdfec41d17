"""Models that ``plan`` refuses, and the notes beside a forecast."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from docs_tools import numbers
from hf_ring_attn import cli
from hf_ring_attn.integration.model import loading
from hf_ring_attn.plan.hardware import KEPT_FREE
from hf_ring_attn.plan.positions import beyond
from hf_ring_attn.plan.seconds import attention_flops
from tests.plan.shapes import LLAMA_8B, shape

SMALL = {**LLAMA_8B, "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
TEXT = {
    "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
}  # fmt: skip
IMAGES = {
    "model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"], "text_config": TEXT,
    "vision_config": {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 256},
}  # fmt: skip


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command on a config; returns the exit code, what it printed, and its errors."""

    def run(entries: dict[str, Any], *arguments: str) -> tuple[int, str, str]:
        (tmp_path / "model.json").write_text(json.dumps(entries))
        capsys.readouterr()
        code = cli.main(["plan", "--model", str(tmp_path / "model.json"), "--gpus", "2", *arguments])
        return code, *capsys.readouterr()

    return run


def test_a_model_that_no_ring_trains_is_not_forecast(plan: Any) -> None:
    code, said, _ = plan({"model_type": "bart", "is_encoder_decoder": False}, "--tokens", "8K")
    assert code == 1 and said.startswith("BartForCausalLM cannot be trained in a ring exactly: no part of it takes")
    assert said.count("\n") == 1
    code, said, _ = plan({"model_type": "xlnet"}, "--tokens", "8K", "--json")
    assert code == 1 and list(json.loads(said)) == ["refused"]


@pytest.mark.parametrize("command", ["plan --gpus 2 --tokens 8K", "verify"])
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_an_encoder_decoder_is_refused_by_the_path_before_ranks_start(
    command: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_ring_attn.verify.command.start_ranks", lambda *_: pytest.fail("ranks start"))
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"model_type": kind}))
    assert cli.main([*command.split(), "--model", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{path} is an encoder-decoder model ({kind}). A ring trains decoder models only")


def test_a_model_without_a_language_head_is_refused_by_the_path(plan: Any, tmp_path: Path) -> None:
    code, _, said = plan({"model_type": "clip"}, "--tokens", "8K")
    assert code == 2 and f"'{tmp_path / 'model.json'}'" in said
    assert "transformers has no causal language model of kind clip" in said and "BertConfig" not in said


@pytest.mark.parametrize("source", ["cfg/nope/config.json", "./nope", "nope.json", "/nope/model"])
def test_a_missing_path_is_called_so(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model", source, "--gpus", "2", "--tokens", "8K"]) == 2
    assert f"'{source}' cannot be read (no such file or folder)" in capsys.readouterr().err


def test_another_class_than_that_of_the_config_is_named(plan: Any) -> None:
    bert = {"model_type": "bert", "num_hidden_layers": 2, "max_position_embeddings": 8192}
    _, said, _ = plan({**bert, "architectures": ["BertForMaskedLM"]}, "--tokens", "8K")
    assert "note: the config names BertForMaskedLM; this forecast is of BertLMHeadModel\n" in said
    assert "note:" not in plan({**bert, "architectures": ["BertLMHeadModel"]}, "--tokens", "8K")[1]


def test_a_model_of_images_is_planned_by_its_text_part(plan: Any) -> None:
    code, said, _ = plan(IMAGES, "--tokens", "8K", "--json")
    found = json.loads(said)
    assert code == 0 and found["model"] == "Qwen3VLForConditionalGeneration"
    assert found["notes"] == ["the weights of model.visual are counted, its activations and its time are not"]
    assert "AutoModelForImageTextToText.from_pretrained(" in found["launch"]["program"]


def test_full_fine_tuning_on_one_gpu_names_what_fsdp2_needs(plan: Any) -> None:
    llama = {"model_type": "llama", "num_hidden_layers": 2}
    want = (
        "under a launch config with FSDP2, as the recipes have, one GPU holds trained weights and gradients in float32"
    )
    assert want in plan(llama, "--tokens", "8K", "--gpus", "1", "--method", "full")[1]
    for others in (
        ("--gpus", "2", "--method", "full"),
        ("--gpus", "1"),
        ("--gpus", "1", "--method", "full", "--dtype", "float32"),
    ):
        assert want not in plan(llama, "--tokens", "8K", *others)[1]


OWN_TABLES: dict[str, dict[str, Any]] = {
    "a part of the model": {
        "model_type": "deepseek_vl_hybrid", "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 1},
        "high_res_vision_config": {"model_type": "sam_vision_model", "num_hidden_layers": 1},
    },
    "a part of its vision part": {
        "model_type": "deepseek_ocr2",
        "text_config": {
            **TEXT, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "mlp_layer_types": ["dense", "sparse"],
        },
        "vision_config": {"sam_config": {"num_hidden_layers": 1}, "encoder_config": {"num_hidden_layers": 1}},
    },
}  # fmt: skip
"""Models whose vision encoder (SAM) has a table of attention classes of its own."""
SAM = {"SamVisionModel", "DeepseekOcr2SamVisionEncoder"}


@pytest.mark.parametrize("entries", OWN_TABLES.values(), ids=list(OWN_TABLES))
def test_a_vision_part_with_attention_classes_of_its_own_leaves_the_ring_to_the_text_model(
    plan: Any, entries: dict[str, Any]
) -> None:
    code, said, _ = plan(entries, "--tokens", "1K", "--json")
    found = json.loads(said)
    assert code == 0 and "vision" in " ".join(found["notes"])
    assert '    attn_implementation="ring_fp32",' in found["launch"]["program"]
    config = AutoConfig.for_model(**json.loads(json.dumps(entries)))
    for _ in range(2):
        built: Any = loading.empty_model(config, "ring_fp32")
        assert built.config.text_config._attn_implementation == "ring_fp32"
        (tower,) = (x for x in built.modules() if type(x).__name__ in SAM)
        assert tower.config._attn_implementation == "sdpa"


def test_a_model_that_no_ring_trains_is_refused_though_its_vision_part_takes_none(plan: Any) -> None:
    layers = {"num_hidden_layers": 2, "layer_types": ["reference_sliding_attention", "linear_attention"]}
    code, said, _ = plan({"model_type": "unlimited_ocr", "text_config": layers}, "--tokens", "8K")
    assert code == 1 and "its layers of type ['linear_attention'] do not go through ring" in said


def test_quantized_weights_are_counted_otherwise_and_named(plan: Any) -> None:
    _, said, _ = plan({**SMALL, "quantization_config": {"quant_method": "fp8"}}, "--tokens", "8K")
    assert "note: the config's weights are quantized (fp8); this forecast counts them in bfloat16\n" in said
    assert "quantized" not in plan(SMALL, "--tokens", "8K")[1]


def test_a_missing_package_is_named(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' message begins with an empty line."""

    def fails(*_: Any, **__: Any) -> Any:
        raise ImportError("\nTimmWrapperModel requires the timm library\n")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", fails)
    code, _, said = plan(SMALL, "--tokens", "8K")
    assert code == 2 and "cannot be read (TimmWrapperModel requires the timm library)" in said


ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096}
POSITIONS = {
    "beyond": ({**SMALL, "max_position_embeddings": 4096}, "8,192 tokens are beyond the model's 4,096 positions"),
    "within": ({**SMALL, "max_position_embeddings": 8192}, ""),
    "scaled": ({**SMALL, "max_position_embeddings": 4096, "rope_parameters": ROPE}, ""),
    "scaled too little": (
        {**SMALL, "max_position_embeddings": 4096, "rope_parameters": {**ROPE, "factor": 1.0}},
        "4,096 positions: it needs a larger factor of its RoPE scaling (recipes/extend-context)",
    ),
    "not scaled": (
        {**SMALL, "max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "4,096 positions: it needs RoPE scaling such as YaRN (recipes/extend-context)",
    ),
    "with the factor in them, as Gemma 3's": (
        {**SMALL, "model_type": "gemma3_text", "head_dim": 64, "max_position_embeddings": 4096, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }},
        "4,096 positions: it needs a larger factor of its RoPE scaling (recipes/extend-context)",
    ),
    "of each kind of layers": (
        {
            **SMALL, "model_type": "olmo3", "max_position_embeddings": 4096,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        "",
    ),
    "learned": ({"model_type": "gpt2", "n_layer": 2}, "1,024 positions: it needs a longer table of positions"),
    "none": (
        {
            "model_type": "granitemoehybrid", "num_hidden_layers": 2, "layer_types": ["attention"] * 2,
            "position_embedding_type": "nope", "num_local_experts": 0, "num_experts_per_tok": 0,
        },
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("entries", "words"), POSITIONS.values(), ids=list(POSITIONS))
def test_positions_beyond_the_model_are_said(plan: Any, entries: dict[str, Any], words: str) -> None:
    said = plan(entries, "--tokens", "8K")[1]
    notes = [line for line in said.splitlines() if "positions" in line]
    assert len(notes) == bool(words) and all(line.startswith("note: ") and words in line for line in notes)
    found = json.loads(plan(entries, "--tokens", "8K", "--json")[1])
    assert found["notes"] == [x.removeprefix("note: ") for x in notes]


def test_the_program_scales_positions_that_the_model_lacks(plan: Any) -> None:
    """By YaRN, or by a larger factor; the model that it builds has the scaling, and is none that `plan` notes."""
    llama3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 2048,
              "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # fmt: skip
    for rope, found in (
        (None, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}),
        (llama3, {"factor": 4.0}), ({**ROPE, "factor": 1.5}, {"factor": 2.0}), (ROPE, {}),
    ):  # fmt: skip
        entries = {**SMALL, "max_position_embeddings": 4096, **({} if rope is None else {"rope_parameters": rope})}
        program = json.loads(plan(entries, "--tokens", "8K", "--json")[1])["launch"]["program"]
        assert (f"config.rope_parameters |= {json.dumps(found)}\n" in program) == bool(found)
        values: dict[str, Any] = dict(entries)
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        lines = [line for line in program.splitlines() if line.startswith("config.")]
        exec("\n".join(lines), {"config": config})
        assert list(beyond(config, loading.empty_model(config), 8192)) == []
    kinds = POSITIONS["with the factor in them, as Gemma 3's"][0]  # each kind of layers has its own
    assert "rope_parameters" not in json.loads(plan(kinds, "--tokens", "8K", "--json")[1])["launch"]["program"]


def test_the_longest_row_leaves_what_forecasts_missed(plan: Any) -> None:
    _, said, _ = plan(SMALL, "--max-tokens")
    assert "7 % stay free: measured steps took up to 7 % more than their forecasts" in said
    assert f"{100 * KEPT_FREE:.0f} %" == numbers.PLAN_WITHIN
    found = json.loads(plan(SMALL, "--max-tokens", "--json")[1])["memory_bytes"]
    assert 0.92 < found["total"] / found["limit"] <= 0.93 and found["kept_free"] == KEPT_FREE
    given = plan(SMALL, "--max-tokens", "--memory", "79.1")[1]
    assert "stay free" not in given, "the user's own number is all that there is"
    whole = json.loads(plan(SMALL, "--max-tokens", "--memory", "79.1", "--json")[1])["memory_bytes"]
    assert 0.99 < whole["total"] / whole["limit"] <= 1


def test_4_bit_weights_are_offered_only_to_make_a_row_fit(plan: Any) -> None:
    def offered(*arguments: str) -> list[list[str]]:
        found = json.loads(plan({**LLAMA_8B, "num_hidden_layers": 8}, "--shard", "ddp", *arguments, "--json")[1])
        return [one["changes"] for one in found["alternatives"]]

    assert not any("--method qlora" in changes for changes in offered("--tokens", "8K", "--memory", "40"))
    tight = ("--tokens", "64", "--memory", "6")
    assert any("--method qlora" in changes for changes in offered(*tight))
    said = plan({**LLAMA_8B, "num_hidden_layers": 8}, "--shard", "ddp", *tight)[1]
    assert " (it rounds the frozen weights, so it trains another model)\n" in said


def test_experts_of_attention_count_by_those_that_a_token_takes() -> None:
    """JetMoe: two of eight experts, of its MLPs and of its attention's queries and outputs."""
    (layer,) = shape({"model_type": "jetmoe", "num_hidden_layers": 1}).layers
    of_mlp, of_attention, rest = 3 * 2048 * 5632, 2 * 2048 * 2048, 4096 * 2048 + 2 * 8 * 2048
    assert layer.active == 2 * (of_mlp + of_attention) + rest
    assert layer.parameters > 8 * (of_mlp + of_attention) + rest
    assert (layer.mlp, layer.gated, layer.mlp_active) == (2 * 5632, True, 2 * of_mlp + 8 * 2048)


@pytest.mark.parametrize(("kind", "sees"), [({}, 2), ({"is_decoder": True}, 1), ({"sliding_window": 64}, 2)])
def test_attention_both_ways_sees_twice_as_many_keys(kind: dict[str, Any], sees: int) -> None:
    (layer,) = shape({"model_type": "bert", "num_hidden_layers": 1, **kind}).layers
    assert layer.is_causal == (sees == 1)
    seen = attention_flops(layer, 8192)[0] / attention_flops(replace(layer, is_causal=True), 8192)[0]
    assert seen == sees


def test_a_config_without_layers_is_refused_in_words(plan: Any) -> None:
    code, _, said = plan({**SMALL, "num_hidden_layers": 0}, "--tokens", "8K")
    assert code == 2 and "cannot be planned: its decoder layers were not found" in said


def test_cross_attention_between_layers_is_noted(plan: Any) -> None:
    idefics = {"model_type": "idefics", "num_hidden_layers": 4, "vocab_size": 64}
    _, said, _ = plan(idefics, "--tokens", "8K", "--json")
    notes = json.loads(said)["notes"]
    assert "the weights of model.gated_cross_attn_layers are counted, its activations are not" in notes


@pytest.mark.parametrize(("method", "told"), [("full", True), ("lora", False)])
def test_quantized_weights_are_not_trained(plan: Any, method: str, told: bool) -> None:
    quantized = {**SMALL, "quantization_config": {"quant_method": "mxfp4"}}
    _, said, _ = plan(quantized, "--tokens", "8K", "--method", method)
    assert ("note: transformers trains no quantized weights: load them dequantized" in said) == told
