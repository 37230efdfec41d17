"""Branches that start at zero: the self-check moves their weights from zero, and puts them back."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.jobs import self_check_jobs, zero_jobs
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.models.remote_models import FROM_ZERO


@pytest.mark.parametrize("planted", FROM_ZERO)
def test_a_branch_that_starts_at_zero_is_refused_before_a_step(ranks: Ranks, planted: str) -> None:
    """It passed, and the training was wrong once its weight had moved."""
    for error, text, steps in ranks(2).run(self_check_jobs.refused, planted):
        assert (error, steps) == ("SelfCheckFailed", 0), text
        assert "The first difference is made by its module 'layers.1.mix' (Zero" in text


@pytest.mark.parametrize("planted", FROM_ZERO)
def test_it_is_refused_in_bfloat16_too(ranks: Ranks, planted: str) -> None:
    for error, text, steps in ranks(2).run(self_check_jobs.refused, planted, torch.bfloat16):
        assert (error, steps) == ("SelfCheckFailed", 0), text


@pytest.mark.parametrize("wrap", ["DDP", "FSDP2", "compiled"])
def test_it_is_refused_in_wrapped_models_too(ranks: Ranks, wrap: str) -> None:
    for error, text, steps in ranks(2).run(self_check_jobs.refused, "gate from zero", wrap=wrap):
        assert (error, steps) == ("SelfCheckFailed", 0), text


@pytest.mark.parametrize("wrap", ["", "DDP", "FSDP2"])
@pytest.mark.parametrize(("planted", "error"), [("", ""), ("mean from zero", "SelfCheckFailed")])
def test_weights_are_as_they_were(ranks: Ranks, wrap: str, planted: str, error: str) -> None:
    """Their bits, memory and version counters, also after a refusal."""
    for found in ranks(2).run(zero_jobs.left, planted, wrap):
        assert found.error == error
        assert found.same_bits and found.same_objects
        assert found.logits in (None, 0.0)


def test_fsdp2_computes_with_the_weights_as_they_were(ranks: Ranks) -> None:
    """Its root's gathered weights stay after a forward, so the step would have computed with those of the check."""
    assert ranks(2).run(zero_jobs.root_after_check) == [[True, True]] * 2


def test_fsdp2_computes_the_check_with_moved_weights(ranks: Ranks) -> None:
    """After an evaluation the root's gathered weights were still zero in the check."""
    assert ranks(2).run(zero_jobs.root_in_check) == [("DTensor", True)] * 2


def test_replicas_of_a_shard_get_the_same_values(ranks: Ranks) -> None:
    first, second, *replicas = ranks(4).run(zero_jobs.replicas_of_shards)
    assert torch.equal(first, replicas[0]) and torch.equal(second, replicas[1])
    assert not torch.equal(first, second)
    assert all(0.125 <= abs(value) <= 0.375 for value in (*first.tolist(), *second.tolist()))


def test_a_frozen_branch_at_zero_passes(ranks: Ranks) -> None:
    """It stays zero."""
    for found in ranks(2).run(zero_jobs.left, "mean from zero", frozen=True):
        assert (found.error, found.verdict) == ("", "passed")
