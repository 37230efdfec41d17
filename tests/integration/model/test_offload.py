"""Checkpoints in host memory, and the switches of transformers and accelerate for checkpointing, change no answer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.jobs import activation_jobs as jobs
from tests.helpers.jobs.activation_jobs import LORA, Step
from tests.helpers.jobs.comparison import Ranks
from tests.integration.model.test_mlp_chunks import assert_equal

FOUR = {"num_hidden_layers": 4}
INPUT = 2 * 23 * 32 * 8
"""Bytes of a layer's input in one process."""


def stock(reentrant: bool = False, **more: Any) -> dict[str, Any]:
    return {"activation_checkpointing_kwargs": {"use_reentrant": reentrant}, **more}


def offloading(gib: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"offload_above": gib, **more}


# Of four layers: inputs that are offloaded, and those of them that are prefetched.
STEPS = [
    (Step(why="all", ring=offloading(), checkpointing=stock()), (4, 3)),
    (Step(why="a budget of one layer", ring=offloading(INPUT / 2**30), checkpointing=stock()), (3, 2)),
    (Step(why="a budget of all", ring=offloading(1.0), checkpointing=stock()), (0, 0)),
    (Step(why="reentrant", ring=offloading(), checkpointing=stock(True)), (4, 3)),
    (Step(why="every second layer", ring=offloading(), checkpointing=stock(every_n_layers=2)), (2, 1)),
    (Step(why="every second layer, a budget", ring=offloading(INPUT / 2**30), checkpointing=stock(every_n_layers=2)),
     (1, 0)),
    (Step(why="transformers' offload", ring={}, checkpointing=stock(offload=True)), (4, 3)),
    (Step(why="transformers' offload, a budget", ring=offloading(INPUT / 2**30), checkpointing=stock(offload=True)),
     (3, 2)),
    (Step(why="transformers' offload, every second", ring={}, checkpointing=stock(every_n_layers=2, offload=True)),
     (2, 1)),
    (Step(why="with saved attention", ring=offloading(save_attention=True), checkpointing=stock()), (4, 3)),
    (Step(why="transformers' offload, saved attention", ring={"save_attention": True},
          checkpointing=stock(offload=True)), (4, 3)),
    (Step(why="with MLPs in chunks", ring=offloading(mlp_tokens=3, save_attention=True), checkpointing=stock(),
          lora=LORA), (4, 3)),
    (Step(why="FSDP's checkpoints", ring={"save_attention": True, "mlp_tokens": 3}, fsdp="checkpoint"), (0, 0)),
    (Step(why="FSDP's checkpoints, our offload", ring=offloading(), fsdp="checkpoint"), (4, 3)),
    (Step(why="FSDP's offload", ring={}, fsdp="offload"), (4, 3)),
    (Step(why="FSDP's offload, a budget", ring=offloading(INPUT / 2**30), fsdp="offload"), (3, 2)),
]  # fmt: skip
SHARDED = [
    Step(why="FSDP2", ring=offloading(mlp_tokens=3), checkpointing=stock(), wrap="tail"),
    Step(why="FSDP2, LoRA, saved", ring=offloading(save_attention=True), checkpointing=stock(), wrap="tail", lora=LORA),
    Step(why="FSDP2 and its offload", ring={"mlp_tokens": 3}, fsdp="offload", wrap="tail"),
    Step(why="DDP", ring=offloading(), checkpointing=stock(), wrap="DDP"),
]


def with_four_layers(step: Step) -> Step:
    return Step(**{**vars(step), "config": FOUR})


@pytest.mark.parametrize(("step", "offloaded"), STEPS, ids=lambda x: x.why if isinstance(x, Step) else "")
def test_a_step_is_that_without_checkpoints(step: Step, offloaded: tuple[int, int]) -> None:
    got, want = jobs.both(with_four_layers(step))
    assert_equal(got, want, step.exact)
    assert (got.offloaded, want.offloaded) == (offloaded, (0, 0))


@pytest.mark.parametrize("step", [*(step for step, _ in STEPS), *SHARDED], ids=lambda step: step.why)
@pytest.mark.turns
def test_a_step_in_a_ring_is_that_without_checkpoints(ranks: Ranks, step: Step) -> None:
    for got, want in ranks(2).run(jobs.both, with_four_layers(step)):
        assert_equal(got, want, step.exact)
