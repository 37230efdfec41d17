"""A model's record: dropped when its structure changes, found again when it changes back."""

from __future__ import annotations

from hf_ring_attn.integration.context.model_record import latest_record, record_of
from tests.helpers.models.tiny_models import tiny


def test_an_adapter_that_is_switched_off_and_on_has_one_record_for_each() -> None:
    """Else each turn would be a new model, and checked anew."""
    model = tiny("llama", "ring_fp32")
    on = record_of(model)
    model.requires_grad_(False)
    off = record_of(model)
    assert off is not on
    assert latest_record(model) is off
    for _ in range(3):
        model.requires_grad_(True)
        assert record_of(model) is on
        assert latest_record(model) is on
        model.requires_grad_(False)
        assert record_of(model) is off


def test_only_the_latest_structures_are_remembered() -> None:
    model = tiny("llama", "ring_fp32")
    first = record_of(model)
    for weight in list(model.parameters())[:3]:
        weight.requires_grad_(False)
        record_of(model)
    model.requires_grad_(True)
    assert record_of(model) is not first
