"""save_attention: a checkpointed layer's recompute neither gathers nor attends again, and gradients keep their bits."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

import hf_ring_attn
from hf_ring_attn import RingConfig, errors
from hf_ring_attn.attention.op import attentions
from hf_ring_attn.comm.ring import Ring
from hf_ring_attn.integration import log
from hf_ring_attn.integration.memory import checkpointing
from hf_ring_attn.testing import relative_error
from tests.helpers.contexts import alone
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import attempt, tokens
from tests.helpers.models.tiny_models import tiny

NON_REENTRANT = {"use_reentrant": False}
Found = tuple[int, dict[str, torch.Tensor]]


def trained(kwargs: dict[str, Any] | None, save: bool) -> Found:
    """How often keys and values were sent in a step, and the gradients."""
    model: Any = tiny("llama", "ring_fp32").train()
    if kwargs is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    hf_ring_attn.configure(model, RingConfig(save_attention=save, self_check=False))
    sharded = hf_ring_attn.shard(tokens(23), model=model)
    sent: list[str] = []
    gather = Ring.gather

    def counted(self: Ring, tensor: torch.Tensor, doing: str = "gathered keys and values") -> Any:
        sent.append(doing)
        return gather(self, tensor, doing)

    with mock.patch.object(Ring, "gather", counted):
        with sharded:
            loss = model(**sharded.inputs).loss
        loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return sent.count("gathered keys and values"), gradients


@pytest.mark.parametrize("size", [2, 4])
def test_a_recompute_does_not_gather_again(ranks: Ranks, size: int) -> None:
    plain = ranks(size).run(trained, None, False)
    again = ranks(size).run(trained, NON_REENTRANT, False)
    kept = ranks(size).run(trained, NON_REENTRANT, True)
    for (once, want), (twice, _), (count, got) in zip(plain, again, kept, strict=True):
        assert once > 0 and (twice, count) == (2 * once, once)
        assert want.keys() == got.keys()
        assert all(torch.equal(got[name], gradient) for name, gradient in want.items())


def told(kwargs: dict[str, Any] | None) -> list[str]:
    # Another test may have had this warning in this process, which warns once.
    with mock.patch.object(log.logger, "warning") as warning, mock.patch.object(log, "_said", set()):
        trained(kwargs, True)
    return [str(call.args[0]) for call in warning.call_args_list]


def test_reentrant_checkpointing_is_told_that_it_gathers_again(ranks: Ranks) -> None:
    for texts in ranks(2).run(told, {"use_reentrant": True}):
        assert [text for text in texts if text.startswith("save_attention=True has no effect under reentrant")]


def test_a_policy_of_ones_own_is_kept() -> None:
    def mine() -> Any:
        return checkpointing.contexts()

    model: Any = tiny("llama", "ring_fp32").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={**NON_REENTRANT, "context_fn": mine})
    with mock.patch.object(checkpointing, "warn") as warn:
        checkpointing.prepare(model, alone(RingConfig(save_attention=True)))
    assert "no effect beside another context_fn" in warn.call_args.args[0]
    layer = model.model.layers[0]
    assert layer._gradient_checkpointing_func.keywords["context_fn"] is mine


def test_without_checkpointing_it_is_told_that_nothing_is_saved() -> None:
    model: Any = tiny("llama", "ring_fp32")
    model.eval()
    with mock.patch.object(checkpointing, "warn") as warn:
        checkpointing.prepare(model, alone(RingConfig(save_attention=True)))
        assert not warn.called, "nothing is computed again in evaluation"
        checkpointing.prepare(model.train(), alone(RingConfig(save_attention=True)))
        assert "nothing checkpoints a layer of the model" in warn.call_args.args[0]
        warn.reset_mock()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=NON_REENTRANT)
        checkpointing.prepare(model, alone(RingConfig(save_attention=True)))
        checkpointing.prepare(model, alone(RingConfig(save_attention=True)))
    assert not warn.called
    assert model.model.layers[0]._gradient_checkpointing_func.keywords["context_fn"] is checkpointing.contexts


def test_it_can_be_switched_off_again() -> None:
    model: Any = tiny("llama", "ring_fp32").train()
    layers = model.config.num_hidden_layers
    assert [step_of(model, again=False, save_attention=save)[1] for save in (True, False, True)] == [
        layers, 2 * layers, layers,
    ]  # fmt: skip


def step_of(model: Any, again: bool = True, **options: Any) -> tuple[list[float], int]:
    """The gradients of one step in a ring of one, and how often it attended. ``again``: by a second backward, too."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=NON_REENTRANT)
    config = RingConfig(self_check=False, **options)
    before = attentions()
    with (sharded := hf_ring_attn.shard(tokens(23), config=config, model=model)):
        loss = model(**sharded.inputs).loss
    loss.backward(retain_graph=again)
    once = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    ran = attentions() - before
    if again:
        loss.backward()
    for name, gradient in once.items():
        found = model.get_parameter(name).grad
        assert torch.equal(found, 2 * gradient if again else gradient), "a second backward takes the same results"
    return [float(gradient.double().norm()) for gradient in once.values()], ran


@pytest.mark.turns
def test_a_compiled_model_saves_its_attention_too() -> None:
    model: Any = tiny("llama", "ring_fp32").train()
    (want, twice), (got, once) = step_of(model), step_of(tiny("llama", "ring_fp32").train(), save_attention=True)
    assert got == want and twice == 2 * once == 2 * model.config.num_hidden_layers
    compiled: Any = tiny("llama", "ring_fp32").train()
    compiled.compile(backend="aot_eager")
    got, count = step_of(compiled, again=False, save_attention=True)
    assert got == pytest.approx(want, rel=1e-6) and count == once


def test_no_op_of_a_layer_goes_through_python() -> None:
    """As it does under a policy of selective checkpointing, at half of the host's time of a layer."""
    modes: list[Any] = []
    model: Any = tiny("llama", "ring_fp32").train()
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: modes.append(_get_current_dispatch_mode()))
    step_of(model, save_attention=True)
    assert modes == [None] * 3, "in the forward and in two recomputes"


def test_an_output_of_attention_that_is_changed_in_place_is_refused() -> None:
    model: Any = tiny("llama", "ring_fp32").train()
    layer = model.model.layers[1].self_attn.o_proj
    layer.register_forward_pre_hook(lambda _, args: (args[0].mul_(2), *args[1:]))
    with pytest.raises(errors.SavedAttentionChanged, match="in place"):
        step_of(model, save_attention=True)


def test_attention_with_a_score_mod_is_saved_too() -> None:
    model: Any = tiny("llama", "ring_fp32").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=NON_REENTRANT)
    slopes = torch.zeros(model.config.num_attention_heads, requires_grad=True)

    def gradient(save: bool) -> tuple[torch.Tensor, int]:
        before, config = attentions(), RingConfig(self_check=False, save_attention=save)
        with (sharded := hf_ring_attn.shard(tokens(23), config=config, model=model)):
            loss = model(**sharded.inputs, score_mod=lambda s, b, h, q, k: s + slopes[h] * (q - k)).loss
        loss.backward()
        assert slopes.grad is not None
        found, slopes.grad = slopes.grad, None
        return found, attentions() - before

    (want, twice), (got, once) = gradient(False), gradient(True)
    assert torch.equal(got, want) and twice == 2 * once


# ---- RoPE by the longest position ------------------------------------------------------------------------------------


class Numbers(nn.Module):
    """A layer that a program checkpoints: it makes its RoPE inside, from position_ids that it copies."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, states: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        def run(x: torch.Tensor) -> Any:
            places = position_ids.clone()
            kwargs["position_embeddings"] = self.rotary(x, places)
            return self.layer(x, position_ids=places, **kwargs)

        found: torch.Tensor = checkpoint(run, states, use_reentrant=False)
        return found


def gradient_with_copied_positions(inside: bool) -> torch.Tensor:
    """``inside``: the backward runs in the batch's context."""
    model: Any = tiny("dynamic rope", "ring_fp32").train()
    model.model.layers = nn.ModuleList(Numbers(layer, model.model.rotary_emb) for layer in model.model.layers)
    sharded = hf_ring_attn.shard(tokens(18))
    with sharded if inside else nullcontext():
        with sharded:
            loss = model(**sharded.inputs).loss
        loss.backward()
    sharded.reduce_gradients(model)
    gradient: torch.Tensor = model.model.embed_tokens.weight.grad
    return gradient


def test_positions_that_a_recompute_makes_are_those_of_its_batch(ranks: Ranks) -> None:
    want = gradient_with_copied_positions(True)
    for gradient in ranks(2).run(gradient_with_copied_positions, True):
        assert relative_error(gradient, want) < 1e-5


def test_positions_that_a_recompute_makes_outside_are_refused(ranks: Ranks) -> None:
    """It took a rank's longest position for the row's, without a word."""
    for raised in ranks(2).run(partial(attempt, partial(gradient_with_copied_positions, False))):
        assert raised is not None, "not refused"
        assert raised[0] == "RopeOutsideRing"
        assert raised[1].startswith("LlamaRotaryEmbedding computes RoPE by the longest position of a batch")
