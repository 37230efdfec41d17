"""Liger's kernels in a ring: its norms, RoPE and gated MLPs, with the ring's own loss, by trainers and in loops."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from hf_ring_attn.integration.hosts.liger_arguments import leave_loss_to_ring
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs import liger_jobs
from tests.helpers.jobs.chunked_jobs import Step
from tests.helpers.jobs.comparison import LOSS, PARAMETER, Ranks, assert_equal_runs, without_ring
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.jobs.sft_jobs import NUMBERS, Case, one_step
from tests.helpers.jobs.sft_jobs import trained as sft_trained

pytestmark = pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
LIGER = {"use_liger_kernel": True}
CHOSEN = {**LIGER, "liger_kernel_config": {"swiglu": False}}
RUNS = [
    Run(why="Liger", arguments=LIGER),
    Run(why="LoRA, some of its kernels", lora=True, arguments=CHOSEN, rows=Rows(labelled="answers")),
    Run(why="label smoothing", arguments={**LIGER, "label_smoothing_factor": 0.1}),
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.why)
@pytest.mark.turns
def test_a_trainer_with_liger_trains_as_without(ranks: Ranks, run: Run) -> None:
    arguments = {name: x for name, x in run.arguments.items() if "liger" not in name}
    want = without_ring(ranks, replace(run, arguments=arguments), Mesh(cp=2))
    for found in ranks(2).run(liger_jobs.trained, run, Mesh(cp=2)):
        assert_equal_runs(found.outcome, want)
        assert found.calls["norm"] and found.calls["rope"]
        assert bool(found.calls["gated"]) == ("liger_kernel_config" not in run.arguments)
        assert not found.calls["fused loss"] and not found.calls["loss"]


@pytest.mark.turns
@pytest.mark.parametrize("way", ["use_liger_kernel", "the class"])
def test_sft_with_liger(ranks: Ranks, way: str) -> None:
    want, by_class = ranks(1).run(sft_trained, Case("without"), Mesh())[0], way == "the class"
    case = Case("Liger", {} if by_class else LIGER)
    for found in ranks(2).run(liger_jobs.trained, case, Mesh(cp=2), by_class):
        assert found.calls["norm"] and not found.calls["fused loss"]
        for mine, theirs in zip(found.outcome.steps, want.steps, strict=True):
            assert [mine[name] for name in NUMBERS] == pytest.approx([theirs[name] for name in NUMBERS], rel=LOSS)
        for name, parameter in want.after.items():
            assert (found.outcome.after[name] - parameter).abs().max() <= PARAMETER, name


EXACT = 1e-7
"""In float64, but for transformers' own norms and RoPE, which are in float32."""
ON_HEAD = {"target_modules": ["q_proj", "lm_head"]}
LOOPS = [
    Step(why="a loop"),
    Step(why="an adapter of the head, which Liger's loss leaves out", lora=ON_HEAD),
    Step(why="DDP", wrap="DDP"),
    Step(why="FSDP2, a head by itself, which Liger's loss cannot read", wrap="by itself"),
]


@pytest.mark.parametrize("step", LOOPS, ids=lambda step: step.why)
def test_a_loop_with_liger_s_forward(ranks: Ranks, step: Step) -> None:
    liger = "class" if step.wrap == "DDP" else "model"
    for got, want, calls in ranks(2).run(liger_jobs.both, step, liger):
        assert (got.losses, calls["fused loss"]) == (1, 0), got.why
        assert calls["norm"] and calls["rope"] and calls["gated"]
        assert_equal(got, want)


def test_liger_s_cross_entropy_gets_all_logits(ranks: Ranks) -> None:
    """It stands in for torch's, and its kernel would read the memory of logits that were not made."""
    for got, want, calls in ranks(2).run(liger_jobs.both, Step(why="", model="granite"), "model"):
        assert got.losses == 0 and calls["loss"] > 0
        assert got.why == "torch.nn.functional.cross_entropy is liger_kernel.transformers.functional's"
        assert_equal(got, want)
    for said in ranks(2).run(liger_jobs.refused_by_name):
        assert re.match(r"LossNotChunked: .*functional\.cross_entropy is liger_kernel", said), said


def assert_equal(got: Any, want: Any) -> None:
    assert relative_error(got.loss, want.loss) < EXACT
    assert got.gradients.keys() == want.gradients.keys()
    for name, gradient in want.gradients.items():
        assert relative_error(got.gradients[name], gradient) < 10 * EXACT, name


def test_a_model_that_runs_before_it_is_known_is_refused(ranks: Ranks) -> None:
    for (raised,) in ranks(2).run(liger_jobs.unnamed):
        assert raised[0] == "UnsupportedModel"
        assert "its forward, which is Liger's" in raised[1] and "shard(batch, model=model)" in raised[1]


@pytest.mark.parametrize("name", ["fused_linear_cross_entropy", "cross_entropy"])
def test_liger_s_losses_are_refused_by_name(ranks: Ranks, name: str) -> None:
    case = Case("asked for by name", {**LIGER, "liger_kernel_config": {name: True}})
    for said in ranks(2).run(one_step, case, Mesh(cp=2)):
        assert said.startswith(f"UnsupportedOption: liger_kernel_config={{{name!r}: True}} is not possible"), said


def test_liger_s_losses_are_turned_off_and_the_rest_is_left() -> None:
    """Both: Granite's has cross_entropy by default, which would make all logits."""
    arguments = SimpleNamespace(use_liger_kernel=True, liger_kernel_config={"swiglu": False})
    for _ in range(2):
        leave_loss_to_ring(arguments)
        off = {"fused_linear_cross_entropy": False, "cross_entropy": False}
        assert arguments.liger_kernel_config == {"swiglu": False, **off}
