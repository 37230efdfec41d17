"""Linear attention in a plan: weights against transformers' models, saved tensors counted, exchanges by hand."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_ring_attn import cli
from hf_ring_attn.bench.results import FILE, read
from hf_ring_attn.integration.model import loading
from hf_ring_attn.integration.model.recurrent import recurrent_layers
from hf_ring_attn.plan import hardware, linear_attention
from hf_ring_attn.plan.hardware import GIB, GPUS
from hf_ring_attn.plan.linear_attention import (
    TORCH,
    delta_flops,
    exchanged_bytes,
    memory_of_delta_rule,
    rank_heads,
    scan_seconds,
)
from hf_ring_attn.plan.memory import memory_of
from hf_ring_attn.plan.reading import shape_of
from hf_ring_attn.plan.seconds import seconds_of
from hf_ring_attn.plan.setup import Setup
from hf_ring_attn.plan.shape import AttentionShape, DeltaShape, ModelShape
from tests.plan.filed_steps import RESULTS
from tests.plan.saved_tensors import saved_bytes, scan, train
from tests.plan.shapes import shape

SMALL = {
    "hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 128,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
QWEN = {
    **SMALL, "num_key_value_heads": 2, "head_dim": 32, "linear_num_value_heads": 8, "linear_num_key_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 48,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5": {**QWEN, "model_type": "qwen3_5_text"},
    "qwen3_next": {**QWEN, **EXPERTS, "model_type": "qwen3_next", "shared_expert_intermediate_size": 32},
    "olmo_hybrid": {**QWEN, "model_type": "olmo_hybrid", "num_key_value_heads": 4},
    "kimi_linear": {
        **SMALL, **EXPERTS, "model_type": "kimi_linear", "num_key_value_heads": 4, "linear_num_heads": 4,
        "linear_head_dim": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 16,
        "num_local_experts": 8, "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
        "num_hidden_layers": 6,
    },
}  # fmt: skip
REAL = ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "kimi_linear"]
"""Kinds whose config of transformers, without an entry, is that of a released model."""


def delta_of(model: ModelShape) -> DeltaShape:
    """The linear attention of a model, which all such layers have alike."""
    (found,) = {layer.attention for layer in model.layers if isinstance(layer.attention, DeltaShape)}
    return found


@pytest.mark.parametrize(
    "entries",
    [*MODELS.values(), *({"model_type": kind} for kind in REAL)],
    ids=lambda entries: f"{entries['model_type']} {len(entries)}",
)
def test_weights_are_those_of_the_model(entries: dict[str, Any]) -> None:
    values = dict(entries)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = loading.empty_model(config)
    found = shape_of(config, model)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    blocks = [block for block in model.modules() if hasattr(block, "mlp")]  # of one class or two
    assert [layer.parameters for layer in found.layers] == [sum(p.numel() for p in b.parameters()) for b in blocks]
    linear = [isinstance(layer.attention, DeltaShape) for layer in found.layers]
    assert linear == [kind == "linear_attention" for kind in config.layer_types] and len(set(linear)) == 2


def test_heads_and_gates_are_read_from_modules() -> None:
    delta = DeltaShape(heads=8, key_heads=4, key_width=32, value_width=48, by_channel=False)
    full = AttentionShape(heads=4, kv_heads=2, key_width=32, value_width=32, has_gate=True)
    for name in ("qwen3_5", "qwen3_next"):
        assert [layer.attention for layer in shape(MODELS[name]).layers] == [delta, delta, delta, full]
    kimi = shape(MODELS["kimi_linear"])
    by_channel = DeltaShape(heads=4, key_heads=4, key_width=32, value_width=32, by_channel=True)
    latent = AttentionShape(heads=4, kv_heads=4, key_width=32, value_width=16)
    assert [layer.attention for layer in kimi.layers] == [by_channel, by_channel, latent] * 2
    assert delta.mixed_numbers == 2 * 4 * 32 + 8 * 48 and shape(MODELS["qwen3_5"]).layers[0].hidden_norms == 2


@pytest.mark.parametrize("tokens", [128, 448])
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_saved_tensors_are_counted(name: str, method: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer of transformers on the CPU, with a scan that saves what flash-linear-attention's saves."""
    values = dict(MODELS[name])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    module, attention = next(iter(recurrent_layers(model).values())), delta_of(shape(MODELS[name]))
    for function in ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"):
        if hasattr(sys.modules[type(model).__module__], function):
            monkeypatch.setattr(sys.modules[type(model).__module__], function, scan)
    train(module, method)
    x = torch.randn(1, tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(1, tokens, dtype=torch.int64)
    counted = saved_bytes(lambda: module(x, attention_mask=mask), [*module.parameters(), x, mask])
    counted -= x.nbytes  # the masked input, which takes the place of the norm's output
    setup = Setup(gpus=1, tokens=tokens, method=method)
    assert memory_of_delta_rule(attention, setup).saved == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("by_channel", [False, True])
def test_transformers_own_scan_saves_as_many_times_more_as_the_note_says(by_channel: bool) -> None:
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    tokens, heads, key_heads = 256, 2, 2 if by_channel else 1
    function = kimi.chunk_kimi_delta_attention if by_channel else qwen.torch_chunk_gated_delta_rule
    q, k, v = (torch.randn(1, tokens, n, 128).bfloat16().requires_grad_() for n in (key_heads, key_heads, heads))
    decays = (1, tokens, heads, 128) if by_channel else (1, tokens, heads)
    g, beta = -torch.rand(decays).requires_grad_(), torch.rand(1, tokens, heads).bfloat16().requires_grad_()
    counted = saved_bytes(lambda: function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True), [])
    delta = DeltaShape(heads=heads, key_heads=key_heads, key_width=128, value_width=128, by_channel=by_channel)
    of_kernels = linear_attention._scanned_bytes(delta, Setup(gpus=1, tokens=tokens))
    assert counted / of_kernels == pytest.approx(TORCH[by_channel], rel=0.05)


def test_a_rank_computes_whole_rows_of_its_heads() -> None:
    delta = DeltaShape(heads=8, key_heads=4, key_width=128, value_width=64, by_channel=False)
    assert [rank_heads(delta, ranks) for ranks in (1, 2, 4, 8, 16)] == [(8, 4), (4, 2), (2, 1), (1, 1), (1, 1)]
    one, two, many = (Setup(gpus=gpus, tokens=65536) for gpus in (1, 2, 16))
    inputs, output = exchanged_bytes(delta, two)
    assert output == 65536 * 4 * 64 * 2
    assert inputs == 65536 * (2 * 2 * 128 * 2 + 4 * (64 * 2 + 4 + 2))
    alone, shared = (linear_attention._scanned_bytes(delta, setup) for setup in (one, two))
    assert alone == 2 * shared, "half of the heads of all tokens are as many as all heads of half the tokens"
    assert linear_attention._scanned_bytes(delta, many) == linear_attention._scanned_bytes(
        delta, Setup(gpus=8, tokens=65536)
    ), "of 16 ranks eight have no head"


def test_buffers_of_the_scans_backward_by_hand() -> None:
    """Heads 128 wide: eight tensors of their width, a state of each chunk and its gradient, and two of the keys."""
    delta = DeltaShape(heads=32, key_heads=16, key_width=128, value_width=128, by_channel=False)
    setup = Setup(gpus=2, tokens=131072)
    states = 2 * 128 * 128 / 64
    of_head = 8 * 128 + states + 2 * 128 / 2
    assert linear_attention._backward_bytes(delta, setup) == 131072 * 16 * (of_head * 2 + 3 * 4)
    channel = replace(delta, key_heads=32, by_channel=True)
    of_head = (7 * 128 + states) * 2 + (6 * 128 + 2 * 64) * 4
    assert linear_attention._backward_bytes(channel, setup) == 131072 * 16 * of_head


@pytest.mark.parametrize(("name", "by_channel"), [("scan", False), ("scan_kda", True)])
def test_the_peak_of_a_scan_is_the_filed_one(name: str, by_channel: bool) -> None:
    """Inputs were there before, of which it saves values, beta, decays by channel; it keeps the output's gradient."""
    delta = DeltaShape(heads=16, key_heads=16, key_width=128, value_width=128, by_channel=by_channel)
    (run,) = [run for run in read(RESULTS / "2026-11-27-linear-attention" / FILE) if run.name == name]
    rows = {row["tokens"]: row["peak_MiB"] for row in run.rows if row["kind"] == ("kda" if by_channel else "gdr")}
    for tokens in (32768, 131072):
        setup, number = Setup(gpus=1, tokens=tokens), tokens * 16
        saved = linear_attention._scanned_bytes(delta, setup) - number * (2 * (128 + 1) + 4 * 128 * by_channel)
        peak = saved + linear_attention._backward_bytes(delta, setup) + number * 2 * 128
        assert peak / 2**20 == pytest.approx(rows[tokens], rel=0.005)


@pytest.mark.parametrize(("name", "by_channel"), [("scan", False), ("scan_kda", True)])
def test_the_speed_of_a_scan_is_the_filed_one(name: str, by_channel: bool) -> None:
    delta = DeltaShape(heads=16, key_heads=16, key_width=128, value_width=128, by_channel=by_channel)
    (run,) = [run for run in read(RESULTS / "2026-11-27-linear-attention" / FILE) if run.name == name]
    (row,) = [row for row in run.rows if row["heads"] == 16 and row["tokens"] == 131072 and row["kind"] != "conv"]
    found = scan_seconds(delta, Setup(gpus=1, tokens=131072))
    assert found is not None
    assert found[0] * 1e3 == pytest.approx(row["forward_ms"], rel=0.01)
    assert sum(found) * 1e3 == pytest.approx(row["both_ms"], rel=0.01)


def test_operations_grow_with_the_tokens() -> None:
    delta = DeltaShape(heads=32, key_heads=16, key_width=128, value_width=128, by_channel=False)
    assert delta_flops(delta, 2**20) == 32 * delta_flops(delta, 2**15)
    within, between = 64 * (3 * 128 + 2 * 128), 3 * 128 * 128
    assert delta_flops(delta, 1) == 2 * 32 * (within + between)


def test_linear_attention_is_not_saved_and_its_peak_is_one_layers() -> None:
    model, base = shape(MODELS["qwen3_5"]), Setup(gpus=2, tokens=65536, gpu=GPUS["h200"], save_attention=True)
    saved = memory_of(model, base).moments["loss"]["saved attention"]
    assert saved == 32768 * (4 * 32 * 2 + 4 * 4), "of the one layer of four that has softmax"
    delta = delta_of(model)
    memory = memory_of_delta_rule(delta, base)
    moment = memory_of(model, base).moments["backward of the last layer's MLP"]
    assert moment["linear attention"] == memory.saved > memory.at_backward > 0


def test_a_filed_speed_is_where_its_time_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    model, setup = shape(MODELS["qwen3_5"]), Setup(gpus=2, tokens=2**16)
    delta = delta_of(model)
    monkeypatch.setattr(linear_attention, "DELTA_RULES", {"by head": {}, "by channel": {(4, 32): (1.0, 1.0)}})
    without = seconds_of(model, setup)
    assert scan_seconds(delta, setup) is None and without.left_out == ["linear attention"]
    assert without.linear_attention is None and "linear attention" not in without.parts
    rows = {(2, 32): (3.0, 9.0), (16, 32): (24.0, 72.0), (4, 128): (5.0, 5.0)}
    monkeypatch.setattr(linear_attention, "DELTA_RULES", {"by head": rows, "by channel": {}})
    assert scan_seconds(delta, setup) == pytest.approx((2**16 * 6e-9, 2**16 * 18e-9)), "four heads, by the row of two"
    found = seconds_of(model, setup)
    assert found.left_out == [] and found.parts["linear attention"] == pytest.approx(3 * 2**16 * (2 * 6 + 18) * 1e-9)
    assert found.total == pytest.approx(without.total + found.parts["linear attention"])


def test_an_exchange_waits() -> None:
    """Of the inputs and of the output, in the forward, its recompute and the backward of three layers."""
    model, gpu = shape(MODELS["qwen3_5"]), GPUS["h200"]
    one, two = (seconds_of(model, Setup(gpus=gpus, tokens=2**16, gpu=gpu, shard="ddp")) for gpus in (1, 2))
    delta = delta_of(model)
    exchanged = sum(exchanged_bytes(delta, Setup(gpus=2, tokens=2**16))) / 2 / (gpu.link_gbs * 1e9)
    assert one.communication == 0 and two.communication > 3 * 3 * exchanged
    assert two.communication < 3 * 3 * exchanged * 1.5, "the layer with softmax waits for less"


def test_the_table_and_the_json_say_what_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_attention, "DELTA_RULES", {"by head": {}, "by channel": {}})
    (tmp_path / "model.json").write_text(json.dumps(MODELS["qwen3_5"]))
    plan = ["plan", "--model", str(tmp_path / "model.json"), "--gpus", "2", "--tokens", "64K"]
    assert cli.main(plan) == 0
    said = capsys.readouterr().out
    assert "note: the time of linear attention is not measured, and left out: a step takes longer" in said
    assert "total without linear attention" in said and "MFU" not in said and "tokens/s" not in said
    assert cli.main([*plan, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seconds"]["left_out"] == ["linear attention"] and found["mfu"] is None
    more = 11 * linear_attention._scanned_bytes(delta_of(shape(MODELS["qwen3_5"])), Setup(gpus=2, tokens=65536)) / GIB
    assert f"forecast with flash-linear-attention; with transformers' own function it takes {more:.1f} GiB more" in said
    assert hardware.DELTA_RULES.keys() == {"by head", "by channel"}
