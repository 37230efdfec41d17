"""GRPOTrainer and RLOOTrainer whose completions come from a stand-in for vLLM: in a ring as in one process."""

from __future__ import annotations

import pytest

from tests.helpers.jobs.comparison import Ranks, assert_rings_learn_alike
from tests.helpers.jobs.grpo_jobs import BATCH, STEPS, Case
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.vllm_jobs import trained

SERVER = {"use_vllm": True, "vllm_mode": "server", "learning_rate": 0.05}
ENGINES = {**SERVER, "vllm_mode": "colocate"}
TWO = {"vllm_tensor_parallel_size": 2}
CASES = [
    Case("a server", {**SERVER, "gradient_accumulation_steps": 2}, fixed=False),
    Case(
        "a server, ratios of sequences",
        {**SERVER, "vllm_importance_sampling_mode": "sequence_truncate"}, fixed=False,
    ),
    Case("a server under FSDP2", SERVER, fixed=False, fsdp=True),
    Case("a server for RLOO", {**SERVER, "learning_rate": 0.003}, fixed=False, rloo=True),
    Case("colocated", ENGINES, fixed=False),
    Case("colocated, LoRA", ENGINES, fixed=False, lora=True),
    Case("colocated for RLOO", {**ENGINES, "learning_rate": 0.003}, fixed=False, rloo=True),
]  # fmt: skip


def compare(ranks: Ranks, case: Case, mesh: Mesh, more: Case | None = None) -> list[list[int]]:
    """Compares a ring's run with one process; gives the prompts of each generation of each rank."""
    want, _ = ranks(mesh.alone.size).run(trained, case, mesh.alone)[0]
    outcomes = ranks(mesh.size).run(trained, more or case, mesh)
    assert_rings_learn_alike([outcome for outcome, _ in outcomes], want, mesh, STEPS)
    return [asked for _, asked in outcomes]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.why)
@pytest.mark.turns
def test_a_ring_trains_on_the_same_completions(ranks: Ranks, case: Case) -> None:
    asked = compare(ranks, case, Mesh(cp=2))
    if case.args["vllm_mode"] == "server":
        prompts = BATCH * case.args.get("gradient_accumulation_steps", 1) // 2
        assert asked[0][:1] == [prompts], "each prompt is sent once"
        assert asked[1] == []
    else:
        assert asked[0][:STEPS] == asked[1][:STEPS] == [BATCH // 2] * STEPS, "a ring shares its prompts"


@pytest.mark.turns
def test_engines_of_two_ranks_too(ranks: Ranks) -> None:
    case = Case("", ENGINES, fixed=False)
    asked = compare(ranks, case, Mesh(cp=2), case.with_args(**TWO))
    assert asked[0] == asked[1]
    assert asked[0][0] == BATCH


@pytest.mark.full
@pytest.mark.parametrize("mesh", [Mesh(cp=4), Mesh(dp=2, cp=2)], ids=str)
@pytest.mark.parametrize("mode", ["server", "colocate"])
def test_on_four_ranks_as_well(ranks: Ranks, mode: str, mesh: Mesh) -> None:
    # A batch of four shared by four ranks would be single rows, and a group has two.
    size = 2 * BATCH if mode == "colocate" else BATCH
    args = {**SERVER, "vllm_mode": mode, "per_device_train_batch_size": size, "per_device_eval_batch_size": size}
    compare(ranks, Case("", args, fixed=False), mesh)
