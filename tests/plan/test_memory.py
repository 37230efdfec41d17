"""Each part of the memory of a step, by hand on the shape of Llama 3.1 8B."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hf_ring_attn import errors
from hf_ring_attn.plan import search
from hf_ring_attn.plan.attention_memory import peer_bytes
from hf_ring_attn.plan.hardware import GIB, GPUS
from hf_ring_attn.plan.layer_memory import hidden_bytes, mlp_bytes
from hf_ring_attn.plan.layer_memory import saved_bytes as layer_bytes
from hf_ring_attn.plan.memory import (
    ACTIVATIONS,
    CHECKPOINTS,
    GRADIENTS,
    SAVED,
    logits_bytes,
    memory_of,
    weight_bytes,
)
from hf_ring_attn.plan.search import QLORA, alternatives, forecast, longer_rows, most_tokens
from hf_ring_attn.plan.seconds import attention_flops, pairs, seconds_of
from hf_ring_attn.plan.setup import Setup
from hf_ring_attn.plan.shape import AttentionShape
from tests.plan.shapes import LLAMA_8B, llama_8b, shape

LAYER = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336
ALL = 32 * (LAYER + 2 * 4096) + 2 * 128256 * 4096 + 4096
LORA = 16 * 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))


def setup(**changes: Any) -> Setup:
    return replace(Setup(gpu=GPUS["h200"], gpus=2, tokens=131072), **changes)


def test_parameters_are_counted_by_kind() -> None:
    model = llama_8b()
    assert (model.parameters, model.layers[0].active, model.head, model.embedding) == (
        ALL, LAYER, 128256 * 4096, 128256 * 4096,
    )  # fmt: skip
    assert model.adapter_parameters(16) == LORA
    assert model.attentions == {AttentionShape(heads=32, kv_heads=8, key_width=128, value_width=128)}
    assert model.layers[0].mlp == 14336


def test_states_of_lora_by_fsdp2_and_by_ddp() -> None:
    sharded, replicated = (memory_of(llama_8b(), setup(shard=shard)).always for shard in ("fsdp2", "ddp"))
    assert sharded["weights"] == (2 * ALL + 4 * LORA) / 2
    assert sharded["optimizer"] == 4 * LORA and "gradient buckets" not in sharded
    assert replicated["weights"] == 2 * ALL + 4 * LORA
    assert (replicated["gradient buckets"], replicated["optimizer"]) == (4 * LORA, 8 * LORA)


def test_states_of_qlora_and_of_full_training() -> None:
    quantized = 32 * LAYER
    four_bit = quantized * (0.5 + 1 / 64 + 4 / (64 * 256))
    assert weight_bytes(llama_8b(), setup(method="qlora")) == (ALL - quantized) * 2 + four_bit + 4 * LORA
    full = memory_of(llama_8b(), setup(method="full")).always  # accelerate's FSDP2 trains in float32
    assert (full["weights"], full["optimizer"]) == (2 * ALL, 4 * ALL)
    paged = memory_of(llama_8b(), setup(method="full", optimizer="paged_adamw_8bit", shard="ddp"))
    assert "optimizer" not in paged.always and paged.host["optimizer"] == ALL * (2 + 8 / 256)
    assert not {"weights", "optimizer"} & set(memory_of(llama_8b(), setup(offload_params=True)).always)


def test_checkpoints_and_saved_attention() -> None:
    here = memory_of(llama_8b(), setup(save_attention=True)).moments["loss"]
    assert here[CHECKPOINTS] == 32 * 65536 * 4096 * 2
    assert here[SAVED] == 32 * 65536 * (4096 * 2 + 32 * 4)
    away = memory_of(llama_8b(), setup(offload_above=0.0))
    assert away.moments["loss"][CHECKPOINTS] == 2 * 65536 * 4096 * 2
    assert away.host[CHECKPOINTS] == 32 * 65536 * 4096 * 2
    assert memory_of(llama_8b(), setup(checkpointing=False)).moments["loss"][ACTIVATIONS] > 32 * 65536 * 4 * 14336 * 2


def test_kept_layers_are_the_last_ones_and_are_not_computed_again() -> None:
    model, own = llama_8b(), setup(save_attention=True)
    memory, all_saved = (
        memory_of(model, replace(own, **new)) for new in ({"keep_layers": 8}, {"checkpointing": False})
    )
    loss, of_layer = memory.moments["loss"], layer_bytes(model, model.layers[0], replace(own, checkpointing=False))
    assert loss[CHECKPOINTS] == 24 * 65536 * 4096 * 2 and loss[ACTIVATIONS] == 8 * of_layer
    last, first = (memory.moments[f"backward of the {which} layer's MLP"] for which in ("last", "first"))
    assert last[ACTIVATIONS] == 7 * of_layer, "its own are among its intermediates"
    assert (first[CHECKPOINTS], first[ACTIVATIONS]) == (65536 * 4096 * 2, 0)
    assert all_saved.moments["loss"][ACTIVATIONS] == 32 * of_layer
    few, many, every = (seconds_of(model, replace(own, keep_layers=kept)).total for kept in (0, 8, 40))
    assert few - many == pytest.approx((few - every) / 4)
    assert every == seconds_of(model, replace(own, checkpointing=False)).total


def test_gradients_come_as_checkpoints_go() -> None:
    """A backward begins with all checkpoints and the head's gradient, and ends with one and almost all gradients."""
    model, head, layer = llama_8b(), 128256 * 4096, 65536 * 4096 * 2
    memory = memory_of(model, setup(method="full"))
    last, first = (memory.moments[f"backward of the {which} layer's MLP"] for which in ("last", "first"))
    assert (last[GRADIENTS], last[CHECKPOINTS]) == pytest.approx((2 * head, 32 * layer))
    rest = ALL - head - model.layers[0].parameters  # but the first layer's, and the embeddings'
    assert (first[GRADIENTS], first[CHECKPOINTS]) == pytest.approx((2 * rest, layer))
    again = memory_of(model, setup(method="full"), accumulates=True)
    assert {moment[GRADIENTS] for moment in again.moments.values()} == {2 * ALL}
    assert memory.allocated < again.allocated


def test_norms_that_compute_again_save_no_normed_input() -> None:
    """In full fine-tuning a norm saves it, for its weight's gradient; in chunks, and fused, it does not."""
    layer, normed = llama_8b().layers[0], 2 * 65536 * 4096 * 2
    for options, more in (({}, normed), ({"mlp_tokens": 4096}, 0), ({"liger": True}, 0)):
        full, lora = (hidden_bytes(llama_8b(), layer, setup(method=method, **options)) for method in ("full", "lora"))
        assert full - lora == more, options


def test_a_search_shards_no_weights_of_a_paged_optimizer() -> None:
    """The optimizer is one of bitsandbytes, whose step fails with weights of FSDP2."""
    paged = setup(method="full", optimizer="paged_adamw_8bit", shard="ddp")
    changed = (search._changed(llama_8b(), paged, chosen) for chosen in search._combinations(paged))
    sharded = [one[0] for one in changed if one is not None and one[0].is_sharded]
    assert {tried.optimizer for tried in sharded} == {"adamw_8bit"}


def test_the_mlp_and_its_chunks() -> None:
    layer = llama_8b().layers[0]
    assert mlp_bytes(layer, setup()) == 6 * 65536 * 14336 * 2
    assert mlp_bytes(layer, setup(mlp_tokens=4096)) == 6 * 4096 * 14336 * 2
    assert mlp_bytes(layer, setup(shard="ddp")) == 8 * 65536 * 14336 * 2  # with PEFT's float32 copies
    assert memory_of(llama_8b(), setup()).moment == "backward of the last layer's MLP"
    assert memory_of(llama_8b(), setup(mlp_tokens=4096)).moment == "backward of the last layer's attention"


def test_one_chunk_is_none() -> None:
    """A rank runs its MLPs whole if all its tokens fit one chunk: 32K on 2 x H100 seemed to fit, and did not."""
    kept = {"checkpointing": False, "liger": True, "tokens": 32768}
    for tokens, many in ((16384, False), (32768, False), (16383, True), (8192, True)):
        chunked, whole = memory_of(llama_8b(), setup(**kept, mlp_tokens=tokens)), memory_of(llama_8b(), setup(**kept))
        assert (chunked.total < 0.6 * whole.total) == many and (chunked.total == whole.total) != many
        longer = seconds_of(llama_8b(), setup(**kept, mlp_tokens=tokens)).total
        assert (longer > seconds_of(llama_8b(), setup(**kept)).total) == many


@pytest.mark.parametrize(
    ("tokens", "given", "offered"),
    [(131072, 0, "16384"), (32768, 0, "8192"), (32770, 0, "16384"), (2048, 0, ""), (2048, 512, "")],
)
def test_a_search_offers_several_chunks(tokens: int, given: int, offered: str) -> None:
    own = setup(tokens=tokens, checkpointing=False, liger=True, mlp_tokens=given)
    found = [x for _, changes in filter(None, (search._changed(llama_8b(), own, c) for c in search._combinations(own)))
             for x in changes if x.startswith("--mlp-tokens")]  # fmt: skip
    assert set(found) == ({f"--mlp-tokens {offered}"} if offered else set())


def test_logits_of_a_chunk_and_of_a_rank() -> None:
    assert logits_bytes(llama_8b(), setup()) == 3 * 4 * (2**27 // 128256) * 128256
    assert logits_bytes(llama_8b(), setup(loss="sharded")) == 3 * 4 * 65536 * 128256
    assert memory_of(llama_8b(), setup(loss="sharded")).moment == "loss"


def test_peer_to_peer_buffers_are_within_a_node() -> None:
    kv = 65536 * 8 * 256
    (attention,) = llama_8b().attentions
    assert peer_bytes(attention, setup()) == 2 * 2 * kv + 4 * kv  # one pass takes all heads: 512 MiB of sums
    assert peer_bytes(attention, setup(gpus_per_node=1)) == peer_bytes(attention, setup(gpus=1)) == 0


def test_windows_need_less_attention() -> None:
    entries = {**LLAMA_8B, "model_type": "mistral", "num_hidden_layers": 2, "sliding_window": 4096}
    window = shape(entries).layers[0]
    assert window.window == 4096 and pairs(131072, 4096) == 4096 * 131072 - 4096**2 / 2
    full = attention_flops(llama_8b().layers[0], 131072)[0]
    assert attention_flops(window, 131072)[0] / full == pytest.approx(2 * 4096 / 131072, rel=0.02)
    mixed = shape(
        {
            **LLAMA_8B, "model_type": "qwen3", "head_dim": 128, "num_hidden_layers": 2, "sliding_window": 4096,
            "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"],
        }
    )  # fmt: skip
    assert [layer.window for layer in mixed.layers] == [4096, None] and mixed.layers[0].head_norms


def test_experts_count_by_those_that_a_token_takes() -> None:
    model = shape(
        {
            "model_type": "qwen3_moe", "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 96,
            "num_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": 2, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1000,
        }
    )  # fmt: skip
    layer = model.layers[0]
    attention, router, expert = 256 * (256 + 64 + 64 + 256), 16 * 256, 3 * 256 * 96
    assert layer.active == attention + router + 4 * expert
    assert layer.parameters == attention + router + 16 * expert + 2 * 256 + 2 * 32
    assert (layer.mlp, layer.routed, layer.gated) == (4 * 96, 4 * 256, True)


def test_each_layer_may_have_its_own_heads() -> None:
    """Gemma 4: every sixth layer sees all keys, with heads twice as wide, of which fewer have keys, and no values."""
    model = shape(
        {
            "model_type": "gemma4_text", "num_hidden_layers": 12, "vocab_size": 64, "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True, "num_global_key_value_heads": 2,
        }
    )  # fmt: skip
    window = AttentionShape(heads=8, kv_heads=4, key_width=256, value_width=256)
    full = AttentionShape(heads=8, kv_heads=2, key_width=512, value_width=512)
    stay = replace(window, makes_kv=True), replace(full, makes_kv=True)  # transformers keeps the last ones
    assert [layer.attention for layer in model.layers] == [*[window] * 5, full, *[window] * 4, *stay]
    own = setup(gpus=4, save_attention=True)
    assert [own.kernel_of(one) for one in (window, full)] == ["flash4", "triton"]
    saved = (10 * 8 * 256 + 2 * 8 * 512) * 2 + 12 * 8 * 4
    assert memory_of(model, own).parts["saved attention"] == pytest.approx(131072 / 4 * saved, rel=1e-6)
    assert attention_flops(model.layers[5], 131072)[0] == 2 * 131072**2 / 2 * 8 * 1024


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        (
            {"model_type": "bamba", "num_hidden_layers": 2, "vocab_size": 64, "attn_layer_indices": [1]},
            r"the memory and time of its BambaMixer \('linear_attention'\) are not known",
        ),
        ({"model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, "not known"),
        ({"model_type": "mamba2", "num_hidden_layers": 1, "vocab_size": 64}, "its config is of another form"),
    ],
    ids=["Mamba", "a convolution", "no attention"],
)
def test_what_cannot_be_planned_is_refused_by_name(entries: dict[str, Any], why: str) -> None:
    with pytest.raises(errors.CannotPlan, match=why):
        shape(entries)


def longest(like: Setup, memory_gib: float) -> int:
    return most_tokens(llama_8b(), lambda tokens: replace(like, tokens=tokens), memory_gib)


def test_the_longest_row_is_where_the_table_ends() -> None:
    for changes in ({}, {"save_attention": True}, {"mlp_tokens": 4096, "offload_above": 0.0}):
        found = longest(setup(**changes), 80.0)
        assert found % 4 == 0
        assert forecast(llama_8b(), setup(tokens=found, **changes), 80.0).fits
        assert not forecast(llama_8b(), setup(tokens=found + 4, **changes), 80.0).fits
    assert longest(setup(), 5.0) == 0


def test_options_that_make_a_row_fit_are_found() -> None:
    long = setup(tokens=2**20)
    assert not forecast(llama_8b(), long, 139.8).fits
    found = alternatives(llama_8b(), forecast(llama_8b(), long, 139.8), 139.8)
    assert all(one.fits and "--offload-above 0" in one.changes for one in found)
    seconds = [one.seconds.total for one in found]
    assert seconds == sorted(seconds) and "--save-attention" in found[0].changes
    short = alternatives(llama_8b(), forecast(llama_8b(), setup(), 139.8), 139.8)
    assert "--no-checkpointing" in short[0].changes  # of 128K tokens all activations fit, with MLPs in chunks
    assert short[0].fits and short[0].seconds.total < seconds_of(llama_8b(), setup()).total
    assert alternatives(llama_8b(), forecast(llama_8b(), long, 8.0), 8.0) == []


def test_to_save_all_activations_is_advised_where_it_fits() -> None:
    """All of them, or with MLPs in chunks; beside it neither saved attention nor offloading has a use."""
    short = setup(tokens=8192, save_attention=True)
    fastest, *_ = alternatives(llama_8b(), forecast(llama_8b(), short, 139.8), 130.0)
    assert fastest.changes == ("--liger", "--keep-layers 32")
    assert fastest.seconds.total < 0.8 * seconds_of(llama_8b(), replace(short, liger=True)).total
    none = replace(short, save_attention=False, checkpointing=False, liger=True)
    assert (fastest.memory.total, fastest.seconds.total) == (
        memory_of(llama_8b(), none).total,
        seconds_of(llama_8b(), none).total,
    )
    alone = alternatives(llama_8b(), forecast(llama_8b(), replace(short, gpus=1), 139.8), 130.0)
    assert "--keep-layers 32" in alone[0].changes
    for tokens, memory in ((8192, 20.0), (2**17, 139.8)):
        row = setup(tokens=tokens, save_attention=True)
        for one in alternatives(llama_8b(), forecast(llama_8b(), row, memory), 0.93 * memory, 100):
            assert one.memory.total <= 0.93 * memory * GIB
            assert one.setup.checkpointing or not (one.setup.save_attention or one.setup.offload_above)


def test_quantized_weights_hide_no_setup_that_trains_the_same() -> None:
    """QLoRA alone makes it fit, as fast as other changes together, which train the user's own model."""
    short = setup(tokens=8192, gpus=1, shard="ddp")
    found = alternatives(llama_8b(), forecast(llama_8b(), short, 20.0), 20.0)
    assert {QLORA in one.changes for one in found} == {True, False}


def test_host_memory_is_a_limit_too() -> None:
    long = setup(tokens=2**20, mlp_tokens=16384, offload_above=0.0)
    limited = replace(long, gpu=replace(long.gpu, host_memory_gib=100.0))
    assert forecast(llama_8b(), long, 139.8).fits and not forecast(llama_8b(), limited, 139.8).fits
    without = forecast(llama_8b(), replace(limited, offload_above=None), 139.8)
    found = alternatives(llama_8b(), without, 139.8)
    assert found and all("--offload-above 38" in one.changes for one in found), "128 GiB of checkpoints less 90"
    assert longest(limited, 139.8) < longest(long, 139.8)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_longer_rows_are_the_longest_of_their_options(method: str) -> None:
    gpu = replace(setup().gpu, memory_gib=79.1, host_memory_gib=120.0)
    own = setup(method=method, gpu=gpu)
    own = replace(own, tokens=longest(own, 73.6))
    found = longer_rows(llama_8b(), forecast(llama_8b(), own, 73.6), 73.6)
    assert [len(one.changes) for one in found] == sorted({len(one.changes) for one in found}) and len(found) > 1
    before = own.tokens
    for one in found:
        assert one.fits and one.setup.tokens > 1.03 * before and one.setup.tokens % 4 == 0, one.changes
        before = one.setup.tokens
        host = sum(one.memory.host.values()) / GIB
        assert host <= 120 and not forecast(llama_8b(), replace(one.setup, tokens=2 * before), 73.6).fits
    if method == "full":
        assert any("--offload-params" in one.changes and one.setup.offload_above for one in found), "both on the host"
    assert QLORA not in {change for one in found for change in one.changes}


@pytest.mark.parametrize("host", [33.0, 61.0, 77.0])
def test_a_longer_row_is_the_longest_with_what_it_leaves_on_a_gpu(host: float) -> None:
    """--offload-above is in whole GiB: the row for which it was rounded is not the longest with it."""
    gpu = replace(setup().gpu, memory_gib=79.1, host_memory_gib=host)
    own = setup(gpu=gpu, tokens=longest(setup(gpu=gpu), 73.6))
    for one in longer_rows(llama_8b(), forecast(llama_8b(), own, 73.6), 73.6):
        assert one.setup.tokens == longest(one.setup, 73.6), one.changes


def test_parameters_on_the_host_are_fsdp2s() -> None:
    for shard, is_possible in (("ddp", False), ("fsdp2", True)):
        chosen = [("--offload-params", {"offload_params": True})]
        assert (search._changed(llama_8b(), setup(shard=shard), chosen) is not None) == is_possible


def test_the_longest_row_may_be_beyond_one_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a ring takes fewer heads at a time."""
    fits = {*range(1001), *range(1040, 1201)}
    monkeypatch.setattr(search, "_fits", lambda _memory, longer, _gib: longer.tokens in fits)
    assert longest(setup(), 80.0) == 1200


def test_a_row_that_nothing_makes_longer() -> None:
    all_of_them = {"liger": True, "offload_params": True, "optimizer": "adamw_8bit"}
    own = setup(mlp_tokens=16384, offload_above=0.0, **all_of_them)
    own = replace(own, tokens=longest(own, 139.8))
    assert longer_rows(llama_8b(), forecast(llama_8b(), own, 139.8), 139.8) == []


def test_saved_attention_is_in_the_budget_of_checkpoints() -> None:
    """128K tokens of a rank: a layer's input is 1 GiB, its attention's output 1 GiB, its log-sum-exp 16 MiB."""
    saved = setup(tokens=2**18, save_attention=True)
    model, one = llama_8b(), 1 + 1 + 16 / 1024
    for budget, stay, away in ((None, 32, 0), (0.0, 2, 32), (8.0, 3, 29), (8 * one, 8, 24)):
        memory = memory_of(model, replace(saved, offload_above=budget))
        here = memory.moments["loss"]
        assert here["layer checkpoints"] + here["saved attention"] == pytest.approx(stay * one * GIB)
        assert sum(memory.host.values()) == pytest.approx(away * one * GIB)
    limited = replace(saved, gpu=replace(saved.gpu, host_memory_gib=40.0))
    found = alternatives(model, forecast(model, limited, 60.0), 60.0)
    offloads = {change for one in found for change in one.changes if change.startswith("--offload-above")}
    assert found and offloads <= {"--offload-above 29", "--offload-above 0"}, "64.5 or 32 GiB less 36"


def test_the_network_is_slower_than_a_node() -> None:
    one_node = seconds_of(llama_8b(), setup(gpus=16, gpus_per_node=16))
    two_nodes = seconds_of(llama_8b(), setup(gpus=16, gpus_per_node=8))
    assert two_nodes.communication > 4 * one_node.communication


def test_a_ring_that_begins_inside_a_node_spans_two() -> None:
    """Two rings of 4 on nodes of 6: the second one has two GPUs on each node."""
    across, (attention,) = setup(gpus=12, ring=4, gpus_per_node=6), llama_8b().attentions
    assert not across.in_one_node and across.ranks_in_node == 2 and peer_bytes(attention, across) == 0
    within = setup(gpus=12, ring=3, gpus_per_node=6)
    assert within.in_one_node and within.ranks_in_node == 3
    assert [setup(gpus=16, ring=ring).ranks_in_node for ring in (4, 8, 16)] == [4, 8, 8]
