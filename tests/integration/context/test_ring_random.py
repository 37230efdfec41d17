"""Towers that draw random numbers: all ranks draw the same, however they were seeded; text models draw their own."""

from __future__ import annotations

import functools
import random
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.integration.context import ring_random
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs.comparison import Ranks, assert_equal_whole_answers
from tests.helpers.jobs.plain_jobs import Answer, Batch, Step, gradients_of, own_loss, ready
from tests.helpers.models.tiny_models import VISION
from tests.integration.model.test_sound import with_sound
from tests.integration.model.test_vision import with_images

PICTURES, SOUND = "gemma3 vision", "flamingo"
DROPS = {"vision_config": {**VISION[PICTURES][1]["vision_config"], "attention_dropout": 0.5}}
SKIPS = {
    "audio_config": {
        **VISION[SOUND][1]["audio_config"], "num_hidden_layers": 3, "encoder_layerdrop": 0.5, "dropout": 0.2,
        "activation_dropout": 0.2,
    },
}  # fmt: skip
STEPS = [
    Step(why="dropout of attention", model=PICTURES, config=DROPS, batch=with_images(PICTURES)),
    Step(why="layers skipped, dropout", model=SOUND, config=SKIPS, batch=with_sound(SOUND)),
    Step(why="layers skipped, checkpointing", model=SOUND, config=SKIPS, batch=with_sound(SOUND),
         checkpointing="recomputed"),
    Step(why="every generator", model=PICTURES, batch=with_images(PICTURES)),
]  # fmt: skip


def scaled(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    """A module's output times one number of each generator."""
    return output * (torch.rand(()) + 0.5) * (random.random() + 0.5) * (numpy.random.rand() + 0.5)


def drawing(step: Step, attention: str | None) -> Any:
    model = ready(step, attention).train()
    if step.why == "every generator":
        model.model.multi_modal_projector.register_forward_hook(scaled)
    return model


def seeded_otherwise() -> None:
    """As ranks are whose program seeds by rank."""
    ring_random.seed_all(5 + dist.get_rank())


def in_a_ring(step: Step) -> tuple[Answer, list[int]]:
    """As `plain_jobs.in_a_ring`; and what this rank was seeded with by the ring."""
    model, seeds, seed_all = drawing(step, "ring_fp32"), list[int](), ring_random.seed_all

    def watched(seed: int) -> None:
        seeds.append(seed)
        seed_all(seed)

    seeded_otherwise()
    with mock.patch.object(ring_random, "seed_all", watched):
        sharded = hf_ring_attn.shard(step.batch)
        with sharded:
            out = model(**sharded.inputs)
        out.loss.backward()
        sharded.reduce_gradients(model)
        gradients = gradients_of(model)
        with sharded:
            logits = sharded.gather(model(**sharded.inputs).logits)
        own_loss(logits, step.batch).backward()
        sharded.reduce_gradients(model)
    return Answer(sharded.reduce(out.loss), logits.detach(), gradients, gradients_of(model)), seeds


def by_itself(step: Step, first: int, second: int) -> Answer:
    """The same in one process, seeded so before each forward."""
    model = drawing(step, None)
    ring_random.seed_all(first)
    out = model(**step.batch, use_cache=False)
    out.loss.backward()
    gradients = gradients_of(model)
    ring_random.seed_all(second)
    logits = model(**step.batch, use_cache=False).logits
    own_loss(logits, step.batch).backward()
    return Answer(out.loss.detach(), logits.detach(), gradients, gradients_of(model))


@pytest.mark.turns
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.why)
def test_towers_draw_what_one_process_draws(ranks: Ranks, step: Step, world_size: int) -> None:
    """Each rank had dropped other features, and added the gradient of its own: no one process's."""
    answers = ranks(world_size).run(in_a_ring, step)
    seeds = answers[0][1]
    assert len(set(seeds)) == len(seeds) == 6  # before each forward, in each text model, and after it
    want = by_itself(step, seeds[0], seeds[3])
    for got, drawn in answers:
        assert [drawn[at] for at in (0, 2, 3, 5)] == [seeds[at] for at in (0, 2, 3, 5)]
        assert_equal_whole_answers(got, want, step.batch)
    assert len({drawn[at] for _, drawn in answers for at in (1, 4)}) == 2 * world_size, "each rank has other tokens"
    assert relative_error(by_itself(step, 1, 3).logits, want.logits) > 1e-3, "what is drawn must matter"


def dropped(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return nn.functional.dropout(output, 0.3)


def gradients_by(how: str, step: Step) -> dict[str, Tensor]:
    """With dropout in tower and text; ``how``: what is computed again in the backward."""
    model = drawing(step, "ring_fp32")
    text = model.get_decoder()
    for module in (model.model.multi_modal_projector, text.layers[0].mlp):
        module.register_forward_hook(dropped)
    warm = hf_ring_attn.shard(step.batch)
    with warm, torch.no_grad():  # the self-check's forwards
        model(**warm.inputs)
    seeded_otherwise()
    sharded = hf_ring_attn.shard(step.batch)
    if how == "text model":
        plain = type(text).__call__
        again = functools.partial(checkpoint, plain, use_reentrant=False)
        text.__class__ = type("Again", (type(text),), {"__call__": lambda self, *at, **by: again(self, *at, **by)})
    with sharded:
        if how == "model":
            loss = checkpoint(lambda: model(**sharded.inputs).loss, use_reentrant=False)
        else:
            loss = model(**sharded.inputs).loss
        loss.backward()
    sharded.reduce_gradients(model)
    return gradients_of(model)


@pytest.mark.parametrize("how", ["text model", "model"])
def test_what_is_computed_again_draws_the_same_again(ranks: Ranks, how: str) -> None:
    """Checkpointing puts generators back; that the text model began then must not put them elsewhere."""
    step = Step(why="", model=PICTURES, batch=with_images(PICTURES))
    for got, want in zip(*(ranks(2).run(gradients_by, way, step) for way in (how, "")), strict=True):
        assert got.keys() == want.keys()
        for name, x in want.items():
            torch.testing.assert_close(got[name], x, rtol=1e-9, atol=1e-9)


def own_numbers(batch: Batch, fails: bool) -> list[float]:
    """What a layer of the text model draws on this rank; what the program draws after it is what it would without."""
    model = ready(STEPS[0], "ring_fp32").train()
    hf_ring_attn.configure(model, RingConfig(self_check=False))  # which would run a changed model again
    found: list[float] = []

    def draws(*_: Any) -> None:
        found.append(float(torch.rand(())))
        if fails:
            raise KeyError

    group = dist.new_group()  # after an error it serves no other test
    sharded = hf_ring_attn.shard(batch, group)
    with sharded:  # the self-check's forwards
        model(**sharded.inputs)
    model.get_decoder().layers[1].register_forward_pre_hook(draws)
    seeded_otherwise()
    sharded = hf_ring_attn.shard(batch, group)
    try:
        with sharded:
            model(**sharded.inputs)
    except KeyError:
        assert fails
    numbers = [float(torch.rand(())), random.random(), float(numpy.random.rand())]
    seeded_otherwise()
    ring_random.draw_seed()
    assert numbers == [float(torch.rand(())), random.random(), float(numpy.random.rand())]
    return found


@pytest.mark.parametrize("fails", [False, True])
def test_all_else_draws_as_if_there_were_no_ring(ranks: Ranks, fails: bool) -> None:
    answers = ranks(2).run(own_numbers, with_images(PICTURES), fails)
    assert answers[0] != answers[1]


def numbers_after(batches: int) -> list[float]:
    """What a program draws after batches of a model that draws nothing; each batch had a seed of its own."""
    model, seeds = ready(STEPS[0], "ring_fp32").eval(), list[int]()
    seeded_otherwise()
    for _ in range(batches):
        sharded = hf_ring_attn.shard(STEPS[0].batch)
        seeds.append(ring_random.next_seed())
        with sharded, torch.no_grad():
            model(**sharded.inputs)
    assert len(set(seeds)) == batches
    return [float(torch.rand(())), random.random(), float(numpy.random.rand())]


def test_a_model_that_draws_nothing_leaves_the_programs_numbers(ranks: Ranks) -> None:
    for got, want in zip(*(ranks(2).run(numbers_after, batches) for batches in (2, 0)), strict=True):
        assert got == want
