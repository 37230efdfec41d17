"""A model's record: dropped when its structure changes, found again when it changes back."""

from __future__ import annotations

from torch import nn

from hf_ring_attn.integration.context.model_record import latest_record, visit
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
    others = []  # alive, so that each has another address
    while not others or (id(others[-1]) != place and len(others) < 1000):
        others.append(nn.Identity())
    model.extra = others[-1]
    assert id(model.extra) == place, "no module has its address"
    assert visit(model)[0] is not first
