"""Hooks and attributes on modules of a model: they come off in any order, once, and `uninstall` leaves none."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from torch import nn

import hf_ring_attn
from hf_ring_attn.integration.patching import modules
from hf_ring_attn.integration.patching.modules import Replaced, attach, attached, replace
from tests.helpers.checks import Ranks
from tests.helpers.hosts import checkpoint
from tests.helpers.jobs.plain_jobs import tokens
from tests.helpers.models.tiny_models import tiny


def mine(x: Any) -> Any:
    return x


def other(*_: Any) -> None:
    pass


@pytest.fixture
def layer() -> Iterator[nn.Module]:
    yield nn.Linear(2, 2)
    modules.remove_all()


@pytest.mark.parametrize("before", [None, mine])
def test_a_replaced_attribute_comes_back_also_after_ctrl_c(layer: nn.Module, before: Any) -> None:
    if before is not None:
        layer.forward = before
    with suppress(KeyboardInterrupt), Replaced(layer, "forward", other), Replaced(layer, "forward", lambda _x: 0):
        raise KeyboardInterrupt
    assert layer.__dict__.get("forward") is before


def test_an_attribute_that_a_program_replaced_since_stays(layer: nn.Module) -> None:
    handle = Replaced(layer, "forward", other)
    layer.forward = mine
    handle.remove()
    assert layer.__dict__["forward"] is mine


def test_a_handle_is_removed_once(layer: nn.Module) -> None:
    handle = Replaced(layer, "forward", other)
    handle.remove()
    layer.forward = mine
    handle.remove()
    assert layer.__dict__["forward"] is mine


def test_a_value_that_is_replaced_again_is_not_what_comes_back(layer: nn.Module) -> None:
    layer.forward = mine
    replace(layer, "forward", other)
    replace(layer, "forward", lambda _x: 0)
    modules.remove_all()
    assert layer.__dict__["forward"] is mine


def test_hooks_are_added_once_for_each_key(layer: nn.Module) -> None:
    for key in ("one", "two", "one"):
        attach(layer, key, mine, other)
    assert len(layer._forward_pre_hooks) == len(layer._forward_hooks) == 2


def test_handles_of_a_copy_are_its_own(layer: nn.Module) -> None:
    attach(layer, "one", mine)
    replace(layer, "role", 1)
    copied = copy.deepcopy(layer)
    assert attached(copied, "one")
    modules.remove_all()
    for one in (layer, copied):
        assert not one._forward_pre_hooks
        assert "role" not in one.__dict__


def of_modules(model: nn.Module) -> list[dict[str, Any]]:
    """The attributes of each module that a host or this package sets: forwards, hooks, and private ones."""
    return [
        {
            key: list(x.values()) if isinstance(x, dict) else x
            for key, x in vars(part).items()
            if key[0] == "_" and key != "_buffers"  # hosts write frequencies of RoPE there
        }
        | {"forward": vars(part).get("forward")}
        for part in model.modules()
    ]


def left_after_uninstall(name: str, options: dict[str, Any]) -> list[str]:
    """The attributes of a model's modules that training in a ring changed, after `uninstall`."""
    model: Any = tiny(name, "ring_fp32").train()
    checkpoint(model)
    hf_ring_attn.configure(model, hf_ring_attn.RingConfig(self_check=False, **options))
    before = of_modules(model)
    sharded = hf_ring_attn.shard(tokens(23))
    with sharded:
        loss = model(**sharded.inputs).loss
    loss.backward()
    assert of_modules(model) != before
    hf_ring_attn.uninstall()
    hf_ring_attn.install()
    pairs = zip(before, of_modules(model), strict=True)
    return [key for was, now in pairs for key in now if key not in was or was[key] != now[key]]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"mlp_tokens": 3, "save_attention": True, "offload_above": 0.0}),
        ("gemma3n", {"save_attention": True}),
        ("llama4", {}),
        ("longrope", {}),
        ("qwen3_5", {}),
    ],
)
def test_uninstall_leaves_nothing_on_a_model(ranks: Ranks, name: str, options: dict[str, Any]) -> None:
    """Checkpoint functions, roles of layers and notes of hooks stayed: a pickled model needed this package."""
    assert ranks(2).run(left_after_uninstall, name, options) == [[], []]
