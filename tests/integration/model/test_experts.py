"""The auxiliary loss of experts: what it is made of, and which functions are known. Training: test_plain_loop.py."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MixtralForCausalLM

import hf_ring_attn
from hf_ring_attn.integration.hosts.prediction import whole_sequences
from hf_ring_attn.integration.model import experts
from hf_ring_attn.integration.model.experts import FUNCTION, SHARED, balancing_loss, is_known_balance
from tests.helpers.contexts import alone
from tests.helpers.jobs.plain_jobs import Batch, padded
from tests.helpers.live_ranks import LiveRanks
from tests.helpers.models.tiny_models import SIZES, build, tiny

HALVES = [torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(n), dtype=torch.float32) for n in range(2)]
WEIGHTS = torch.tensor([1.0, 1, 1, 0, 1, 1])
MIXTRALS = getattr(importlib.import_module(SHARED), FUNCTION)


def of(model: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), FUNCTION)


def test_sums_of_shares_make_the_loss_of_all_tokens() -> None:
    """Which is not the mean of the shares' losses: each has choices and probabilities of its own."""
    logits = tuple(half.reshape(12, 5) for half in HALVES)
    mask = torch.stack([torch.ones(6), WEIGHTS])
    want = MIXTRALS(logits, 5, 2, mask)
    shares = [tuple(half[row] for half in HALVES) for row in range(2)]
    sums: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        sums.append(x)
        return x

    alone = [balancing_loss(share, 5, 2, weights, note) for share, weights in zip(shares, mask, strict=True)]
    got = balancing_loss(shares[0], 5, 2, mask[0], lambda x: x + sums[1])
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert abs(float(sum(alone) / 2 - want)) > 1e-3


@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe", "gpt_oss", "olmoe", "granitemoe", "jamba"])
def test_transformers_has_one_function_for_most_models(model: str) -> None:
    assert is_known_balance(of(model))


def spoiled(gate_logits: Any, num_experts: int, top_k: int, attention_mask: Any, how: str) -> Any:
    loss = MIXTRALS(gate_logits, num_experts, top_k, None if how == "no mask" else attention_mask)
    if how == "another gradient":
        return loss.detach() + 0 * gate_logits[0].sum()
    return loss * 1.01 if how == "another factor" else loss


@pytest.mark.parametrize("how", ["no mask", "another gradient", "another factor"])
def test_a_function_that_computes_anything_else_is_not_known(how: str) -> None:
    assert not is_known_balance(partial(spoiled, how=how))


@pytest.mark.parametrize("model", ["doge", "switch_transformers"])
def test_others_are_not_known(model: str) -> None:
    assert not is_known_balance(of(model))


def of_whole_rows(batch: Batch) -> tuple[Tensor, list[Tensor]]:
    model = tiny("mixtral", "ring_fp32")
    sharded = hf_ring_attn.shard(batch)
    with sharded, torch.no_grad():
        out: Any = model(**sharded.inputs)
    return whole_sequences(sharded, "aux_loss", out.aux_loss), whole_sequences(
        sharded, "router_logits", list(out.router_logits)
    )


def test_outputs_are_those_of_whole_rows(ranks: Callable[[int], LiveRanks]) -> None:
    batch = padded(24, left=4, right=6)
    with torch.no_grad():
        want: Any = tiny("mixtral")(**batch)
    real = batch["attention_mask"].bool().flatten()
    for loss, logits in ranks(2).run(of_whole_rows, batch):
        torch.testing.assert_close(loss, want.aux_loss, rtol=1e-5, atol=0)
        # One for each layer: the self-check leaves no hooks behind that would collect them twice.
        for mine, theirs in zip(logits, want.router_logits, strict=True):
            torch.testing.assert_close(mine[real], theirs[real], rtol=1e-4, atol=1e-5)


def test_a_function_that_is_not_known_is_left_as_it_is_outside_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """With parameters of its own, which the one in its place hands on."""
    home = ModuleType("home_of_five")
    home.load_balancing_loss_func = lambda a, b, c, d, e: (a, b, c, d, e)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, home.__name__, home)
    kind = type("OfFive", (MixtralForCausalLM,), {"__module__": home.__name__})
    model = tiny("mixtral")
    model.__class__ = kind
    try:
        experts.prepare(model, alone())
        assert home.load_balancing_loss_func(1, 2, 3, d=4, e=5) == (1, 2, 3, 4, 5)
        assert hasattr(home.load_balancing_loss_func, "__wrapped__")
    finally:
        hf_ring_attn.uninstall()
        hf_ring_attn.install()


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("Qwen3MoeForCausalLM", [SHARED, "transformers.models.qwen3_moe.modeling_qwen3_moe"]),
        ("AfmoeForCausalLM", [SHARED]),  # has no such loss itself: each rank added that of its own tokens
    ],
)
def test_trls_fused_head_takes_mixtrals_for_every_model(
    monkeypatch: pytest.MonkeyPatch, kind: str, changed: list[str]
) -> None:
    hf_ring_attn.uninstall()
    hf_ring_attn.install()
    assert not hasattr(getattr(sys.modules[SHARED], FUNCTION), "__wrapped__")
    monkeypatch.setitem(sys.modules, "trl", ModuleType("trl"))
    config: dict[str, Any] = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    try:
        experts.prepare(build(kind, **config), alone())
        assert all(hasattr(getattr(sys.modules[name], FUNCTION), "__wrapped__") for name in changed)
    finally:
        hf_ring_attn.uninstall()
        hf_ring_attn.install()
