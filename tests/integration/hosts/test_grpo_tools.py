"""Tools and environments of GRPO and distillation in a ring: each is called once, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.jobs.comparison import Ranks, assert_equal_outcomes
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.tool_jobs import refused, trained


@pytest.mark.parametrize("what", ["tools", "environments", "distillation"])
@pytest.mark.parametrize("mesh", [Mesh(cp=2), pytest.param(Mesh(dp=2, cp=2), marks=pytest.mark.full)], ids=str)
@pytest.mark.turns
def test_tools_are_called_once_in_a_ring(ranks: Ranks, what: str, mesh: Mesh) -> None:
    alone = ranks(mesh.dp).run(trained, what, mesh.alone)
    want, calls, made = alone[0]
    assert sum(step["tools/call_frequency"] for step in want.steps) > 0
    assert any((want.after[name] - p).abs().max() > 1e-3 for name, p in want.before.items()), "nothing was learnt"
    found = ranks(mesh.size).run(trained, what, mesh)
    for number, (got, called, environments) in enumerate(found):
        first = number % mesh.cp == 0
        assert_equal_outcomes(got, want)
        assert called == (alone[number // mesh.cp][1] if first else []), "each ring calls what its replica calls"
        assert environments == (made if first else int(what == "environments")), "the trainer looks at one"
    assert calls


@pytest.mark.turns
def test_tools_whose_results_are_other_ones_on_each_rank(ranks: Ranks) -> None:
    found = ranks(2).run(trained, "random", Mesh(cp=2))
    (mine, calls, _), (theirs, none, _) = found
    assert mine.steps == theirs.steps
    assert calls.count("search") > 4 and not none
    for name, parameter in mine.after.items():
        assert torch.equal(parameter, theirs.after[name])


def test_a_result_that_cannot_be_sent_ends_the_job_on_every_rank(ranks: Ranks) -> None:
    for said in ranks(2).run(refused, "unsendable", Mesh(cp=2)):
        assert said.startswith("UnsupportedOption: a tool's list of such objects is not possible"), said
        assert "cannot pickle" in said
