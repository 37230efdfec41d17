"""A model's record: dropped when its structure changes, found again when it changes back."""

from __future__ import annotations

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
