"""Towers that draw random numbers: all ranks draw the same, however they were seeded; text models draw their own."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_ring_attn
from comparison import Ranks, assert_equal_whole_answers
from hf_ring_attn.integration import randomness
from hf_ring_attn.testing import relative_error
from plain_jobs import Answer, Batch, Step, gradients_of, own_loss, ready
from test_sound import with_sound
from test_vision import with_images
from tiny_models import VISION

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
    randomness.seed_all(5 + dist.get_rank())


def in_a_ring(step: Step) -> tuple[Answer, list[int]]:
    """As `plain_jobs.in_a_ring`; and what this rank was seeded with by the ring."""
    model, seeds, seed_all = drawing(step, "ring_fp32"), list[int](), randomness.seed_all

    def watched(seed: int) -> None:
        seeds.append(seed)
        seed_all(seed)

    seeded_otherwise()
    with mock.patch.object(randomness, "seed_all", watched):
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
    randomness.seed_all(first)
    out = model(**step.batch, use_cache=False)
    out.loss.backward()
    gradients = gradients_of(model)
    randomness.seed_all(second)
    logits = model(**step.batch, use_cache=False).logits
    own_loss(logits, step.batch).backward()
    return Answer(out.loss.detach(), logits.detach(), gradients, gradients_of(model))


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.why)
def test_towers_draw_what_one_process_draws(ranks: Ranks, step: Step, world_size: int) -> None:
    """Each rank had dropped other features, and added the gradient of its own: no one process's."""
    answers = ranks(world_size).run(in_a_ring, step)
    seeds = answers[0][1]
    assert len(set(seeds)) == len(seeds) == 4  # before each forward, and after each text model
    want = by_itself(step, seeds[0], seeds[2])
    for got, drawn in answers:
        assert drawn == seeds
        assert_equal_whole_answers(got, want, step.batch)
    assert relative_error(by_itself(step, 1, 3).logits, want.logits) > 1e-3, "what is drawn must matter"


def own_numbers(batch: Batch, fails: bool) -> tuple[list[float], list[float]]:
    """What a layer of the text model and the program draw on this rank in a ring, and what they would draw without."""
    model = ready(STEPS[0], "ring_fp32").train()
    found: list[float] = []

    def draws(*_: Any) -> None:
        found.append(float(torch.rand(())))
        if fails:
            raise KeyError

    sharded = hf_ring_attn.shard(batch)
    with sharded:  # the self-check's forwards
        model(**sharded.inputs)
    model.get_decoder().layers[1].register_forward_pre_hook(draws)
    seeded_otherwise()
    sharded = hf_ring_attn.shard(batch)
    try:
        with sharded:
            model(**sharded.inputs)
    except KeyError:
        assert fails
    numbers = [float(torch.rand(())), random.random(), float(numpy.random.rand())]
    seeded_otherwise()
    randomness.drawn()
    want = [float(torch.rand(())), float(torch.rand(())), random.random(), float(numpy.random.rand())]
    return [*found, *numbers], want


@pytest.mark.parametrize("fails", [False, True])
def test_all_else_draws_as_if_there_were_no_ring(ranks: Ranks, fails: bool) -> None:
    answers = ranks(2).run(own_numbers, with_images(PICTURES), fails)
    assert all(got == want for got, want in answers)
    assert answers[0] != answers[1]
