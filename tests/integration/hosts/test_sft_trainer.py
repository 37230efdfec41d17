"""SFTTrainer in a ring is SFTTrainer in one process without the plugin; what would not be is refused in words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch
from trl.trainer.sft_trainer import SFTTrainer

from tests.helpers.jobs.comparison import LOSS, PARAMETER, Ranks, by_turns
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.sft_jobs import (
    NUMBERS,
    STEPS,
    Case,
    Focal,
    Penalised,
    Uncounted,
    half,
    losses_of_a_subclass,
    one_step,
    trained,
)
from tests.helpers.jobs.trl_runs import Outcome

PACKED = {"packing": True}
MIXTRAL = "MixtralForCausalLM"


def checkpointed(**how: bool) -> dict[str, Any]:
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": how}


CASES = [
    Case("padded rows: the mask hides the end of the shorter one"),
    Case("packed: a row holds several documents", PACKED),
    Case("packed and wrapped: documents are cut, and see each other", {**PACKED, "packing_strategy": "wrapped"}),
    Case("padding-free: a batch is one row of an odd length", {"padding_free": True, "max_length": None}),
    Case("completion only: a rank may hold no label at all", rows="completion"),
    Case("assistant only: labels come and go in a row", {"assistant_only_loss": True}, rows="chat"),
    Case("dft: each token's loss is weighted by its own probability", {"loss_type": "dft", "learning_rate": 0.5}),
    Case("LoRA", lora=True),
    Case("checkpointing, reentrant", checkpointed(use_reentrant=True)),
    Case("checkpointing, not reentrant, packed", {**PACKED, **checkpointed(use_reentrant=False)}),
    Case("accumulation: one count of tokens over several batches", {"gradient_accumulation_steps": 3}),
    Case("packed, but evaluated in padded rows", {**PACKED, "eval_packing": False}),
]
TWO_RANKS: list[Any] = [
    Case("TRL's selective checkpointing, packed", {**PACKED, **checkpointed(selective=True)}),
    Case("LoRA, checkpointed: inputs need gradients", checkpointed(use_reentrant=False), lora=True),
    Case(
        "tokens averaged on each data-parallel rank alone",
        {"average_tokens_across_devices": False, "gradient_accumulation_steps": 2},
    ),
    Case("packed and padded: each token of padding is a document", {**PACKED, "pad_to_multiple_of": 7}),
    Case("a stream, whose batches accelerate would dispatch", {"shuffle_dataset": False}, stream=True),
    Case("TRL moves activations to the host and back", {"activation_offloading": True}),
    Case(
        "TRL moves those of LoRA, packed, checkpointed",
        {**PACKED, **checkpointed(use_reentrant=False), "activation_offloading": True},
        lora=True,
    ),
    Case("metrics of logits and labels in whole rows", metrics=True),
    Case("no names of labels, which SFTTrainer does not ask for", {"label_names": []}, lora=True),
    Case("experts, without their auxiliary loss", {"router_aux_loss_coef": 0.0}, kind=MIXTRAL),
    pytest.param(
        Case("assistant only, packed", {"assistant_only_loss": True, **PACKED}, rows="chat"), marks=pytest.mark.full
    ),
    pytest.param(Case("LoRA, packed", PACKED, lora=True), marks=pytest.mark.full),
]


@cache
def in_one_process(ranks: Ranks, case: Case, mesh: Mesh) -> Outcome:
    return ranks(1).run(trained, case, mesh.alone)[0]


@pytest.mark.parametrize(("case", "mesh"), by_turns(CASES))
@pytest.mark.turns
def test_sft_in_a_ring_is_sft_in_one_process(ranks: Ranks, case: Case, mesh: Mesh) -> None:
    compare(ranks, case, mesh)


@pytest.mark.parametrize("case", TWO_RANKS, ids=lambda case: case.why)
@pytest.mark.turns
def test_on_two_ranks_as_well(ranks: Ranks, case: Case) -> None:
    compare(ranks, case, Mesh(cp=2))


def compare(ranks: Ranks, case: Case, mesh: Mesh) -> None:
    want = in_one_process(ranks, case, mesh)
    outcomes = ranks(mesh.size).run(trained, case, mesh)
    assert [outcome.ring_size for outcome in outcomes] == [mesh.cp] * mesh.size
    assert {outcome.refused for outcome in outcomes} == {""}
    assert len(want.steps) == STEPS
    assert any((want.after[name] - p).abs().max() > 1e-3 for name, p in want.before.items()), "nothing was learnt"
    got = outcomes[0]
    for number, (mine, theirs) in enumerate(zip(got.steps, want.steps, strict=True), 1):
        assert_close(f"step {number}", mine, theirs, NUMBERS)
    assert got.evaluation.keys() == want.evaluation.keys() > {"eval_loss", "eval_entropy", "eval_mean_token_accuracy"}
    assert_close("evaluation", got.evaluation, want.evaluation, want.evaluation)
    for name, parameter in want.after.items():
        assert (got.after[name] - parameter).abs().max() <= PARAMETER, name
    for other in outcomes[1:]:
        assert all(torch.equal(p, other.after[name]) for name, p in got.after.items())


def assert_close(what: str, got: dict[str, float], want: dict[str, float], names: Iterable[str]) -> None:
    for name in names:
        assert got[name] == pytest.approx(want[name], rel=LOSS), f"{what}: {name}"


EXPERTS = Case("experts", {"router_aux_loss_coef": 0.5, "gradient_accumulation_steps": 2}, kind=MIXTRAL)
MEANS = Case("each batch's mean", {"gradient_accumulation_steps": 2}, rows="completion", means=True)
ADDED = Case(  # by TRL alone: without it patched, gradients differed by 2e-5 here
    "experts whose model has no such loss", {"router_aux_loss_coef": 0.5, "learning_rate": 0.01},
    kind="AfmoeForCausalLM",
)  # fmt: skip
BOTH = Case("both", {"router_aux_loss_coef": 0.5, "gradient_accumulation_steps": 2}, kind=MIXTRAL, means=True)


@pytest.mark.parametrize(("case", "mesh"), by_turns([ADDED, EXPERTS, BOTH, MEANS], [Mesh(cp=2), Mesh(cp=4)]))
@pytest.mark.turns
def test_losses_that_are_no_sums_over_tokens(ranks: Ranks, case: Case, mesh: Mesh) -> None:
    """Without replicas: what they would average is not what one process has of all rows together."""
    compare(ranks, case, mesh)


ALONE = {"average_tokens_across_devices": False}
FEW_LABELS = [
    Case("experts", {**ALONE, "router_aux_loss_coef": 0.5, "learning_rate": 0.01}, kind=MIXTRAL, rows="end"),
    Case("each batch's mean", ALONE, rows="end", means=True),
]


@pytest.mark.turns
@pytest.mark.parametrize("case", FEW_LABELS, ids=lambda case: case.why)
@pytest.mark.slow
def test_fewer_labels_than_ranks_that_do_not_average(ranks: Ranks, case: Case) -> None:
    """Two labels and four ranks: a rank's share of the count is a half, which SFTTrainer takes for one."""
    compare(ranks, case, Mesh(cp=4))


OF_WHOLE_ROWS = [
    Case("all by whole rows", {"gradient_accumulation_steps": 2}, rows="completion", loss="gathered"),
    Case("all by whole rows, packed, LoRA", PACKED, lora=True, loss="gathered"),
    Case("all by whole rows, dft", {"loss_type": "dft", "learning_rate": 0.5}, loss="gathered"),
    Case("all by whole rows, not averaged", {**ALONE, "gradient_accumulation_steps": 2}, loss="gathered"),
    Case("all by whole rows, metrics", metrics=True, loss="gathered"),
    Case("all by whole rows, experts", {"router_aux_loss_coef": 0.5}, kind=MIXTRAL, loss="gathered"),
    Case("labels smoothed", {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}),
    Case(
        "labels smoothed, LoRA, padding-free",
        {"label_smoothing_factor": 0.1, "padding_free": True, "max_length": None},
        lora=True,
    ),
    Case("a function of outputs", {"gradient_accumulation_steps": 2}, loss_function=True),
]


@pytest.mark.parametrize(("case", "mesh"), by_turns(OF_WHOLE_ROWS, [Mesh(cp=2), Mesh(cp=4)]))
@pytest.mark.turns
def test_losses_of_whole_rows(ranks: Ranks, case: Case, mesh: Mesh) -> None:
    """They were refused: TRL's fused head makes no logits."""
    compare(ranks, case, mesh)


REFUSED: list[tuple[Case, dict[str, Any], str]] = [
    (Case("compute_loss_func"), {"compute_loss_func": half, "loss": "chunked"}, "LossNotSharded: compute_loss_func"),
    (Case("smoothing", {"label_smoothing_factor": 0.1}), {"loss": "sharded"}, "LossNotSharded: label smoothing"),
]


@pytest.mark.parametrize(("case", "options", "text"), REFUSED, ids=[case.why for case, _, _ in REFUSED])
def test_it_is_refused_before_the_first_step(ranks: Ranks, case: Case, options: dict[str, Any], text: str) -> None:
    for said in ranks(2).run(one_step, case, Mesh(cp=2), **options):
        assert re.match(text, said), said


def test_the_trial_finds_nothing_against_the_fused_head(ranks: Ranks) -> None:
    """With the default loss, an error in the trial would only take whole rows in its place, and their memory."""
    assert set(ranks(2).run(one_step, Case("all that is tried"), Mesh(cp=2), loss="chunked")) == {"trained"}


@pytest.mark.turns(4)
@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize("kind", [Penalised, Focal, Uncounted])
def test_a_subclass_may_compute_its_loss_by_its_parent_s(ranks: Ranks, kind: type[SFTTrainer], averaged: bool) -> None:
    """The first one counts, and adds a penalty of its weights: neither moves by the trial step, and ranks agree on the
    latter. The loss was a rank's part, and without the count a mean of its own: the others were refused."""
    options = {"average_tokens_across_devices": averaged, "gradient_accumulation_steps": 2}
    case = Case("a subclass", options, rows="completion").with_args(max_steps=2)
    want = ranks(1).run(losses_of_a_subclass, case, Mesh(), kind)[0]
    for got in ranks(2).run(losses_of_a_subclass, case, Mesh(cp=2), kind):
        assert got == pytest.approx(want, rel=LOSS)
