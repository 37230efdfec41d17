"""Gemma 3n and 4: layers with keys and values of another layer, inputs of each layer's own, and AltUp's streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from hf_ring_attn.integration.model import loading
from hf_ring_attn.plan.attention_memory import qkv_numbers
from hf_ring_attn.plan.hardware import GPUS
from hf_ring_attn.plan.layer_memory import hidden_bytes
from hf_ring_attn.plan.memory import CHECKPOINTS, OWN_INPUTS, SHARED_KV, STREAMS, memory_of
from hf_ring_attn.plan.reading import shape_of
from hf_ring_attn.plan.seconds import seconds_of
from hf_ring_attn.plan.setup import Setup
from hf_ring_attn.plan.shape import AttentionShape, ModelShape
from tests.plan.saved_tensors import saved_bytes, train
from tests.plan.shapes import shape

KINDS = ["sliding_attention", "full_attention"]
TEXT = {
    "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 128, "pad_token_id": None, "hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 100,
    "num_kv_shared_layers": 2, "layer_types": KINDS * 3, "sliding_window": 8,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gemma3n": {
        **TEXT, "model_type": "gemma3n_text", "intermediate_size": [96] * 6, "activation_sparsity_pattern": [0.0] * 6,
    },
    "gemma4": {**TEXT, "model_type": "gemma4_text", "intermediate_size": 96, "global_head_dim": 32},
    "gemma4 wide": {
        **TEXT, "model_type": "gemma4_text", "intermediate_size": 96, "use_double_wide_mlp": True,
        "num_kv_shared_layers": 4,
    },
}  # fmt: skip
E2B = {
    "model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
    "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
    "layer_types": ["full_attention" if at % 5 == 4 else "sliding_attention" for at in range(35)],
}  # fmt: skip
"""The sizes of Gemma 4 E2B."""


def built(entries: dict[str, Any], **changes: Any) -> tuple[Any, Any]:
    values = {**entries, **changes}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    return config, AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "entries", [*MODELS.values(), {"model_type": "gemma3n_text"}, {"model_type": "gemma4_text"}, E2B],
    ids=[*MODELS, "gemma3n as transformers has it", "gemma4 as transformers has it", "E2B"],
)  # fmt: skip
def test_weights_are_those_of_the_model(entries: dict[str, Any]) -> None:
    values = dict(entries)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model: Any = loading.empty_model(config)
    found = shape_of(config, model)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert [x.parameters for x in found.layers] == [sum(p.numel() for p in x.parameters()) for x in model.model.layers]
    table = model.model.embed_tokens_per_layer.weight
    assert table.shape == (config.vocab_size_per_layer_input, sum(layer.own_input for layer in found.layers))
    others = dict(model.named_parameters())
    apart = [at for at in others if ".layers." in at or at.endswith("embed_tokens.weight") or "norm" in at]
    assert found.root == sum(p.numel() for at, p in others.items() if at not in apart) > table.numel()


def test_which_layers_have_their_own_keys_and_values() -> None:
    def roles(model: ModelShape) -> str:
        shapes = [x.attention for x in model.layers if isinstance(x.attention, AttentionShape)]
        return "".join("takes" if x.takes_kv else "makes" if x.makes_kv else "own " for x in shapes)

    for name, model in ((name, shape(entries)) for name, entries in MODELS.items()):
        own = 0 if name == "gemma4 wide" else 2
        assert roles(model) == "own " * own + "makes" * 2 + "takes" * (4 - own), name
        assert model.shares_kv and len({layer.window for layer in model.layers}) == 2
    one, other = (x.mlp for x in (shape(MODELS["gemma4 wide"]).layers[1], shape(MODELS["gemma4 wide"]).layers[2]))
    assert other == 2 * one
    last = shape(MODELS["gemma4"]).layers[-1].attention
    assert isinstance(last, AttentionShape) and last.key_width == 32
    assert qkv_numbers(last, Setup(gpus=1, tokens=64)) == 2 * 4 * 32, "queries and the output"
    lonely = shape({**MODELS["gemma4"], "num_kv_shared_layers": 0})
    assert not lonely.shares_kv and roles(lonely) == "own " * 4 + "makes" * 2, "transformers keeps them all the same"


def layer_bytes(entries: dict[str, Any], tokens: int, **changes: Any) -> int:
    """Counts what the last layer saves, without its inputs."""
    config, model = built(entries, **changes)
    block, width = model.model.layers[-1].train(), config.hidden_size
    train(block, "lora")
    streams = [config.altup_num_inputs] if config.model_type == "gemma3n_text" else []
    x = torch.randn(*streams, 1, tokens, width, dtype=torch.bfloat16, requires_grad=True)
    positions = model.model.rotary_emb(x, torch.arange(tokens)[None], KINDS[-1])
    inputs = torch.randn(1, tokens, 6, config.hidden_size_per_layer_input, dtype=torch.bfloat16, requires_grad=True)
    kv = torch.randn(2, 1, 2, tokens, positions[0].shape[-1], dtype=torch.bfloat16, requires_grad=True)
    shared = {KINDS[-1]: (kv[0], kv[1])}
    return saved_bytes(
        lambda: block(
            x, per_layer_input=inputs[:, :, 5], shared_kv_states=shared, position_embeddings=positions,
            attention_mask=None,
        ),
        [*block.parameters(), x, inputs, kv, *positions],
    )  # fmt: skip


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_a_layer_saves_three_numbers_of_each_of_its_inputs(name: str) -> None:
    few, many = (layer_bytes(MODELS[name], 96, hidden_size_per_layer_input=width) for width in (24, 56))
    assert many - few == 96 * 3 * (56 - 24) * 2
    of_both = [
        hidden_bytes(model, model.layers[-1], Setup(gpus=1, tokens=96))
        for model in (shape({**MODELS[name], "hidden_size_per_layer_input": width}) for width in (24, 56))
    ]
    assert of_both[1] - of_both[0] == many - few


def test_a_layer_saves_each_stream_once_more() -> None:
    """What AltUp's correction adds to each. Its coefficients are a few numbers, which the forecast leaves out."""
    two, four = (layer_bytes(MODELS["gemma3n"], 96, altup_num_inputs=count) for count in (2, 4))
    assert four - two == pytest.approx(2 * 96 * 64 * 2, rel=0.4)
    wide = {"hidden_size": 512}
    two, four = (layer_bytes(MODELS["gemma3n"], 96, altup_num_inputs=count, **wide) for count in (2, 4))
    assert four - two == pytest.approx(2 * 96 * 512 * 2, rel=0.06)
    models = [shape({**MODELS["gemma3n"], **wide, "altup_num_inputs": count}) for count in (2, 4)]
    of_two, of_four = (hidden_bytes(model, model.layers[-1], Setup(gpus=1, tokens=96)) for model in models)
    assert of_four - of_two == 2 * (2 * 96 * 512 * 2), "and its gradient"


class Kept(torch.autograd.Function):
    """Saves a layer's inputs, as its checkpoint does."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return inputs[0].clone()

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> Any:
        raise AssertionError("only its forward runs")


class Checkpoint(nn.Module):
    def forward(self, hidden: Tensor, *others: Any, per_layer_input: Tensor | None = None, **_more: Any) -> Tensor:
        given = (*others, per_layer_input)
        inputs = [x for x in given if isinstance(x, Tensor) and x.shape[:-1] == hidden.shape[-3:-1]]
        kept: Tensor = Kept.apply(hidden, *inputs)  # type: ignore[no-untyped-call]
        return kept


def outside_bytes(entries: dict[str, Any], method: str, **changes: Any) -> int:
    """Counts what a model saves outside of its layers, and their checkpoints, of 96 tokens."""
    _, model = built(entries, **changes)
    model.model.layers = nn.ModuleList(Checkpoint() for _ in range(6))
    train(model, method)
    model.model.embed_tokens.register_forward_hook(lambda _module, _args, out: out.requires_grad_(True))  # as for LoRA
    tokens = torch.randint(0, 100, (1, 96))
    return saved_bytes(lambda: model.model(input_ids=tokens, use_cache=False), [*model.parameters(), tokens])


def waiting(entries: dict[str, Any], method: str, moment: str) -> dict[str, float]:
    return memory_of(shape(entries), Setup(gpus=1, tokens=96, shard="ddp", method=method)).moments[moment]


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_inputs_of_all_layers_wait_for_the_whole_backward(name: str, method: str) -> None:
    few, many = ({**MODELS[name], "hidden_size_per_layer_input": width} for width in (24, 56))
    counted = outside_bytes(many, method) - outside_bytes(few, method)
    more, less = (waiting(one, method, "loss")[OWN_INPUTS] for one in (many, few))
    assert more - less == 96 * 6 * (56 - 24) * (2 + 4 + 4 * (method == "full"))
    assert counted == pytest.approx(more - less, rel=0.002), "beside the weights of a norm"
    backward = waiting(few, method, "backward of the first layer's MLP")[OWN_INPUTS]
    assert backward == less + 2 * 96 * 6 * 24 * 2, "their gradients' sum, and a layer's"


def test_streams_are_in_each_checkpoint_and_wait_outside() -> None:
    """Outside of layers: each other stream before and after it is scaled, and the same of the last layer's."""
    two, four = ({**MODELS["gemma3n"], "altup_num_inputs": count} for count in (2, 4))
    counted = outside_bytes(four, "lora") - outside_bytes(two, "lora")
    parts = [waiting(one, "lora", "loss") for one in (four, two)]
    names = CHECKPOINTS, STREAMS, "hidden states of the head"
    forecast = [sum(part[name] for name in names) for part in parts]
    assert forecast[0] - forecast[1] == pytest.approx(counted, rel=0.05)
    assert parts[0][CHECKPOINTS] == 6 * 96 * 4 * 64 * 2


def test_keys_and_values_wait_for_the_layers_that_take_them() -> None:
    model, setup = shape(E2B), Setup(gpus=4, tokens=131072, gpu=GPUS["h200"])
    memory = memory_of(model, setup)
    kv = 32768 * 2 * (256 + 512) * 2
    assert memory.moments["loss"][SHARED_KV] == kv
    assert memory.moments["backward of the last layer's MLP"][SHARED_KV] == 2 * kv
    assert memory.moments["loss"]["gathered weights"] > model.root * 2, "the table of the layers' inputs"
    lonely = shape({**E2B, "num_kv_shared_layers": 0})
    assert not lonely.shares_kv and seconds_of(model, setup).communication < seconds_of(lonely, setup).communication


def test_full_fine_tuning_ends_with_the_gradient_of_the_table() -> None:
    model = shape(E2B)
    memory = memory_of(model, Setup(gpus=2, tokens=8192, method="full", gpu=GPUS["h200"]))
    assert memory.moment == "backward of the embeddings"
    assert memory.parts["gathered weights"] == model.root * (2 + 2 + 4) and model.root > 2e9
    assert "backward of the embeddings" not in memory_of(model, Setup(gpus=2, tokens=8192)).moments
