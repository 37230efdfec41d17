"""A forward that an error ended on one rank: that rank is refused what the others would take for the rest of it."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_ring_attn
from hf_ring_attn.attention.kernel_choice import kernel_for
from hf_ring_attn.comm.ring import Ring
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import attempt, tokens
from tests.helpers.models.tiny_models import tiny
from tests.integration.model.test_vision import with_images


class Failing(Exception):
    """Raised by a program."""


def failed_in(where: str, error: type[Exception], caught_inside: bool) -> tuple[int, Any]:
    """Of the next batch after a forward that failed: how many messages left, and what was raised."""
    group, armed = dist.new_group(), False
    model: Any = tiny("llama", "ring_fp32")
    modules: dict[str, nn.Module] = {
        "before attention": model.model.embed_tokens,
        "an MLP": model.model.layers[0].mlp,
        "the head": model.lm_head,
    }

    def fail(*_: Any) -> None:
        if armed:
            raise error

    modules[where].register_forward_pre_hook(fail)
    for armed in (False, True):  # noqa: B007  the hook reads it
        sharded = hf_ring_attn.shard(tokens(23), group)
        # All ranks fail, which none of them knows.
        with suppress(error), sharded, suppress(*[error] * caught_inside):
            model(**sharded.inputs)
    return _next(group)


def _next(group: Any) -> tuple[int, Any]:
    left, rows = 0, Ring.start_rows

    def counted(*args: Any) -> Any:
        nonlocal left
        left += 1
        return rows(*args)

    Ring.start_rows = counted  # type: ignore[method-assign, assignment]
    try:
        raised = attempt(hf_ring_attn.shard, tokens(23), group)
    finally:
        Ring.start_rows = rows  # type: ignore[method-assign]
    return left, raised and raised[0]


@pytest.mark.parametrize(
    ("where", "caught_inside"),
    [("before attention", False), ("an MLP", False), ("an MLP", True), ("the head", False), ("the head", True)],
)
def test_no_batch_is_compared_after_a_forward_that_ran_out_of_memory(
    ranks: Ranks, where: str, caught_inside: bool
) -> None:
    for found in ranks(2).run(failed_in, where, torch.OutOfMemoryError, caught_inside):
        assert found == (0, "LeftHalfway")


def test_other_errors_count_from_the_first_attention_on(ranks: Ranks) -> None:
    assert ranks(2).run(failed_in, "an MLP", Failing, False) == [(0, "LeftHalfway")] * 2
    assert ranks(2).run(failed_in, "before attention", Failing, False) == [(1, None)] * 2


def interrupted_in_llama4(uninstalls: bool) -> bool:
    """Returns True if a model that Ctrl-C ended in a ring still tunes its temperature, with another attention."""
    model: Any = tiny("llama4", "ring_fp32")
    ids, armed = tokens(23)["input_ids"], False

    def interrupt(*_: Any) -> None:
        if armed:
            raise KeyboardInterrupt

    model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(interrupt)
    for armed in (False, True):  # noqa: B007  the hook reads it
        with suppress(KeyboardInterrupt), torch.no_grad(), hf_ring_attn.shard(tokens(23)) as sharded:
            model(**sharded.inputs)
    armed = False
    if uninstalls:
        hf_ring_attn.uninstall()
    model.set_attn_implementation("sdpa")
    try:
        return torch.equal(model(ids).logits, tiny("llama4", "sdpa")(ids).logits)
    finally:
        hf_ring_attn.install()


@pytest.mark.parametrize("uninstalls", [False, True])
def test_a_temperature_is_tuned_again_after_ctrl_c(ranks: Ranks, uninstalls: bool) -> None:
    """torch calls no hook after it, so the layer stayed without: the next answer was wrong, or every one."""
    assert ranks(2).run(interrupted_in_llama4, uninstalls) == [True] * 2


def losses_around_ctrl_c() -> list[float]:
    """The losses of a batch with images, before Ctrl-C ended a call of its text model and after that."""
    model: Any = tiny("gemma3 vision", "ring_fp32")
    armed, losses = False, []

    def interrupt(*_: Any) -> None:
        if armed:
            raise KeyboardInterrupt

    model.get_decoder().layers[1].mlp.register_forward_pre_hook(interrupt)
    sharded = hf_ring_attn.shard(with_images("gemma3 vision"), model=model)
    for armed in (False, True, False):  # noqa: B007  the hook reads it
        with suppress(KeyboardInterrupt), sharded:
            losses.append(float(sharded.reduce(model(**sharded.inputs).loss)))
    return losses


def test_a_batch_with_images_is_entered_again_after_ctrl_c(ranks: Ranks) -> None:
    """Its tower counted as a part of the text model, and was refused."""
    for before, after in ranks(2).run(losses_around_ctrl_c):
        assert after == before


def at_another_place() -> tuple[str, str] | None:
    """One rank has a batch, while the other one calls a layer of its own."""
    q = torch.randn(1, 8, 2, 8)
    kernel_for.cache_clear()  # on every rank: later calls compare their choices again
    if dist.get_rank():
        return attempt(hf_ring_attn.shard, tokens(16))
    return attempt(partial(hf_ring_attn.ring_attention, length=16), q, q, q)


def test_ranks_at_different_places_are_told_by_what_they_do(ranks: Ranks) -> None:
    """Both said that they compared batches, and one was refused for its kernel: "reference", not a RingConfig."""
    for error in ranks(2).run(at_another_place):
        assert error is not None and error[0] == "RanksDiffer"
        assert "rank 0: chose a kernel, rank 1: compared its batch with the other ranks" in error[1]
