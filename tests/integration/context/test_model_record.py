"""A model's record: dropped when its structure changes, found again when it changes back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.integration.context.model_record import configured, latest_record, options_of, visit
from tests.helpers.models.tiny_models import tiny


def test_an_adapter_that_is_switched_off_and_on_has_one_record_for_each() -> None:
    """Else each turn would be a new model, and checked anew."""
    model = tiny("llama", "ring_fp32")
    on = visit(model)[0]
    model.requires_grad_(False)
    off = visit(model)[0]
    assert off is not on
    assert latest_record(model) is off
    for _ in range(3):
        model.requires_grad_(True)
        assert visit(model)[0] is on
        assert latest_record(model) is on
        model.requires_grad_(False)
        assert visit(model)[0] is off


def test_only_the_latest_structures_are_remembered() -> None:
    model = tiny("llama", "ring_fp32")
    first = visit(model)[0]
    for weight in list(model.parameters())[:3]:
        weight.requires_grad_(False)
        visit(model)
    model.requires_grad_(True)
    assert visit(model)[0] is not first


def test_a_module_in_the_memory_of_one_that_is_gone_is_another_module() -> None:
    model = tiny("llama", "ring_fp32")
    model.extra = nn.Identity()
    first, place = visit(model)[0], id(model.extra)
    del model.extra
    others: list[nn.Module] = []  # alive, so that each has another address
    while not others or (id(others[-1]) != place and len(others) < 1000):
        others.append(nn.Identity())
    model.extra = others[-1]
    if id(model.extra) != place:
        pytest.skip("Python put no new module in the old one's memory")
    assert visit(model)[0] is not first


def test_a_forward_in_the_memory_of_one_that_is_gone_is_another_forward() -> None:
    """Python puts a new function there at once, if the old one was deleted before. It ran unchecked."""
    model: Any = tiny("llama", "ring_fp32")
    mlp = model.model.layers[1].mlp
    plain, places, records = mlp.forward, set(), []
    for shift in range(8):
        mlp.forward = lambda x, shift=shift: plain(x) + x.roll(shift, 1)
        places.add(id(mlp.forward))
        records.append(visit(model)[0])
        assert visit(model)[0] is records[-1]
        del mlp.forward
    if len(places) == len(records):
        pytest.skip("Python put no new function in an old one's memory")
    assert len(set(map(id, records))) == len(records)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: copy.deepcopy(model).model])
def test_a_copy_of_a_model_has_its_options(copied: Callable[[Any], Any]) -> None:
    model: Any = tiny("llama", "ring_fp32")
    options = RingConfig(deterministic=True)
    hf_ring_attn.configure(model, options)
    other = copied(model)
    assert options_of(other) == options
    assert configured(visit(copied(model))[0].configs) == options
    hf_ring_attn.configure(other, RingConfig())
    assert options_of(model) == options
    del model
    assert options_of(copy.deepcopy(other)) == RingConfig()


def test_options_are_not_saved_with_a_model() -> None:
    """A pickled model can be loaded where this package is not installed."""
    model = tiny("llama", "ring_fp32")
    hf_ring_attn.configure(model, RingConfig(deterministic=True))
    found = pickle.dumps({**model.__dict__, "_modules": None, "_parameters": None})
    assert b"hf_ring_attn" not in found
