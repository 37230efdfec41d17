"""Trainer in a ring gives the losses, grad norms and parameters of Trainer without the plugin."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import ParallelismConfig

from hf_ring_attn import RingConfig
from tests.helpers.jobs.comparison import LOSS, Ranks, assert_equal_runs, by_turns, in_rings, without_ring
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.jobs.trainer_jobs import train
from tests.helpers.programs import REPOSITORY, start

PROMPTS = Rows(labelled="answers")
CHECKPOINTED = {"gradient_checkpointing": True}
REENTRANT = {**CHECKPOINTED, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
GATHERED = RingConfig(loss="gathered")

RUNS = [
    Run(why="plain", generates=True),
    Run(
        why="accumulation and clipping", rows=PROMPTS,
        arguments={"gradient_accumulation_steps": 3, "max_grad_norm": 0.3},
    ),
    Run(why="prompts without labels, odd length", rows=Rows(labelled="answers", length=23)),
    Run(why="labels at the end only: most ranks have none", rows=Rows(labelled="last")),
    Run(why="labels at the start only", rows=Rows(labelled="first", length=29)),
    Run(why="shorter than two tokens a rank", rows=Rows(length=5, labelled="last")),
    Run(why="padded on the right", rows=Rows(shortest=9, pad_to="right", labelled="all")),
    Run(why="padded on the left", rows=Rows(shortest=9, pad_to="left", labelled="all")),
    Run(
        why="grouped by length", rows=Rows(shortest=9, pad_to="right"),
        arguments={"train_sampling_strategy": "group_by_length"},
    ),
    Run(
        why="rows balanced by their cost, over rings", rows=Rows(shortest=9, pad_to="right", count=12),
        arguments={"train_sampling_strategy": "batch_rebalance", "gradient_accumulation_steps": 2},
    ),
    Run(why="streamed rows, which accelerate would deal out rank by rank", streamed=True),
    Run(why="packed rows", rows=Rows(packed=True, length=31)),
    Run(why="packed rows with a window", model="mistral", rows=Rows(packed=True)),
    Run(why="checkpointing", rows=PROMPTS, arguments=CHECKPOINTED),
    Run(why="checkpointing, reentrant", rows=PROMPTS, arguments=REENTRANT),
    Run(why="LoRA", lora=True, rows=PROMPTS),
    Run(why="LoRA with checkpointing", lora=True, rows=PROMPTS, arguments=CHECKPOINTED),
    Run(why="tokens not averaged over devices", rows=PROMPTS, arguments={"average_tokens_across_devices": False}),
    Run(why="sliding window", model="mistral", rows=PROMPTS),
    Run(why="softcap", model="gemma2", rows=PROMPTS),
    Run(why="a causal loss of tokens that see later ones", model="bert", rows=PROMPTS),
    Run(why="a window both ways", model="gemma3 both ways", rows=Rows(shortest=9, pad_to="left", labelled="all")),
    Run(why="sinks and experts", model="gpt_oss", rows=PROMPTS),
    Run(why="an indexer without gradients, decayed weights", model="deepseek_v32", arguments={"weight_decay": 0.5}),
    Run(why="LoRA in an indexer, too", model="glm_moe_dsa", lora="all-linear", rows=Rows(packed=True, length=31)),
    Run(
        why="experts with their auxiliary loss", model="mixtral", rows=Rows(shortest=9, pad_to="right"),
        arguments={"gradient_accumulation_steps": 2},
    ),
    Run(
        why="experts with their auxiliary loss, tokens not averaged over devices", model="mixtral", rows=PROMPTS,
        arguments={"average_tokens_across_devices": False},
    ),
    Run(why="learned biases", model="learned biases", rows=Rows(shortest=9, pad_to="left")),
    Run(why="backward by gather, head by head", rows=PROMPTS, ring=RingConfig(backward="gather", heads_per_gather=1)),
    Run(why="gathered loss", rows=Rows(labelled="answers", length=23), ring=GATHERED),
    Run(
        why="gathered loss, tokens not averaged over devices", rows=PROMPTS, ring=GATHERED,
        arguments={"average_tokens_across_devices": False, "gradient_accumulation_steps": 2},
    ),
    Run(
        why="label smoothing", rows=PROMPTS, ring=GATHERED,
        arguments={"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    ),
    Run(
        why="label smoothing in chunks", rows=PROMPTS,
        arguments={"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    ),
    Run(why="label smoothing in chunks, AdaLoRA", lora="ada", rows=PROMPTS, arguments={"label_smoothing_factor": 0.1}),
    Run(why="AdaLoRA", lora="ada", rows=PROMPTS, arguments={"gradient_accumulation_steps": 2}),
    Run(
        why="label smoothing in chunks, experts, tokens not averaged over devices", model="mixtral", rows=PROMPTS,
        arguments={"label_smoothing_factor": 0.1, "average_tokens_across_devices": False},
    ),
    Run(why="all logits of each rank's tokens", rows=PROMPTS, ring=RingConfig(loss="sharded")),
    Run(
        why="compute_loss_func", rows=PROMPTS, ring=GATHERED, loss_function=True,
        arguments={"gradient_accumulation_steps": 2},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("run", "mesh"), by_turns(RUNS))
@pytest.mark.turns
def test_a_ring_trains_as_one_process_does(ranks: Ranks, run: Run, mesh: Mesh) -> None:
    outcomes, want = in_rings(ranks, run, mesh), without_ring(ranks, run, mesh)
    assert_equal_runs(outcomes[0], want)
    assert outcomes[0].training_loss == pytest.approx(want.training_loss, rel=LOSS)
    assert outcomes[0].generated == want.generated
    assert len(want.generated) == (2 if run.generates else 0)
    for other in outcomes[1:]:  # replicas drift apart if one rank's gradients differ
        assert other.log == outcomes[0].log
        assert all(torch.equal(p, other.parameters[name]) for name, p in outcomes[0].parameters.items())


UNLOGGED = Run(
    why="no loss is logged", rows=Rows(labelled="last"),
    arguments={"logging_strategy": "no", "gradient_accumulation_steps": 2},
)  # fmt: skip


def test_the_loss_of_all_steps_is_that_of_the_rows_on_every_rank(ranks: Ranks) -> None:
    """Trainer does not average its `train_loss` over ranks, and here one of two has all labels."""
    want = without_ring(ranks, UNLOGGED, Mesh(cp=2))
    for outcome in in_rings(ranks, UNLOGGED, Mesh(cp=2)):
        assert outcome.training_loss == pytest.approx(want.training_loss, rel=LOSS)
        assert_equal_runs(outcome, want)


SHORT = replace(RUNS[0], steps=3)
NO_LAUNCH_CONFIG = {"ACCELERATE_USE_PARALLELISM_CONFIG": "false", "PARALLELISM_CONFIG_CP_SIZE": "1"}
OTHER_WAYS = {
    "TrainingArguments": ({"parallelism_config": ParallelismConfig(cp_size=2)}, NO_LAUNCH_CONFIG),
    "TrainingArguments that name the backend": (
        {"parallelism_config": ParallelismConfig(cp_size=2, cp_backend="ring")}, NO_LAUNCH_CONFIG
    ),
    "a launch config that names the backend": ({}, {"PARALLELISM_CONFIG_CP_BACKEND": "ring"}),
}  # fmt: skip


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_ways_to_ask_for_a_ring(ranks: Ranks, way: str) -> None:
    """All runs above ask for it as stock launch configs do, through the environment."""
    arguments, environment = OTHER_WAYS[way]
    outcome = ranks(2).run(train, replace(SHORT, arguments=arguments), Mesh(cp=2), **environment)[0]
    assert outcome.ring_size == 2
    assert_equal_runs(outcome, without_ring(ranks, SHORT, Mesh(cp=2)))


def test_a_rank_that_raises_ends_the_job(tmp_path: Path) -> None:
    """Rank 0 waits for rank 1 in a collective then; nobody waits for its timeout, and the cause is there to read."""
    job = REPOSITORY / "tests/helpers/jobs/failing_job.py"
    program = start(tmp_path, job, ranks=2, environment=Mesh(cp=2).launch_config())
    with pytest.raises(AssertionError) as failed:
        program.output()
    ended = time.time()
    cause = re.search(r"OSError: the disk of rank 1 is full at (\d+\.\d+)", str(failed.value))
    assert cause is not None, failed.value
    assert ended - float(cause[1]) < 30
