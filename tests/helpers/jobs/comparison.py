"""Uses in a ring against the same without the plugin."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from hf_ring_attn.testing import relative_error
from tests.helpers.jobs import plain_jobs
from tests.helpers.jobs.plain_jobs import Answer, Batch, Step
from tests.helpers.jobs.runs import Mesh, Run
from tests.helpers.jobs.trainer_jobs import Outcome, train
from tests.helpers.live_ranks import LiveRanks

Ranks = Callable[[int], LiveRanks]

MESHES = (Mesh(cp=2), Mesh(dp=2, cp=2), Mesh(cp=4))
LOSS = 1e-5
"""Relative bound of losses, grad norms and metrics."""
IN_FLOAT64 = 1e-12
"""Relative or absolute bound of all numbers in float64; 5e-14 is what is found. A KL near 0 is a difference of sums of
log-probabilities, where float32 has steps of 8e-6 at 100: so float32's metrics have `LOSS` as an absolute bound too."""
PARAMETER = 1e-6
"""Absolute bound of parameters after four steps, which move them by 0.01 to 0.2; 1e-7 is what is found."""
UPDATE = 1e-3
"""Relative bound of how far the steps move each tensor: the smallest move by 1e-5, where float32 has steps of 1e-8."""


def by_turns(cases: Sequence[Any], meshes: Sequence[Mesh] = MESHES) -> list[Any]:
    """The parameters (case, mesh) of each case on each mesh; without --full on the first or the second, by turns."""
    return [
        pytest.param(case, mesh, id=f"{case.why}-{mesh}", marks=() if mesh is meshes[turn % 2] else pytest.mark.full)
        for turn, case in enumerate(cases) for mesh in meshes
    ]  # fmt: skip


def on_two_or_four(cases: Sequence[Any], often: Sequence[int] = ()) -> list[Any]:
    """The parameters (case, ring size) of each case on four ranks or on two, by turns; on both with --full.

    Args:
        often: ring sizes that every case has beside these.
    """
    return [
        pytest.param(
            case, size, id=f"{case.why}-{size}", marks=() if size in (*often, (4, 2)[turn % 2]) else pytest.mark.full
        )
        for turn, case in enumerate(cases) for size in (*often, 2, 4)
    ]  # fmt: skip


@cache
def without_ring(ranks: Ranks, run: Run, mesh: Mesh) -> Outcome:
    """The same run by transformers' own attention, without the plugin, once for all meshes with as many replicas."""
    return ranks(mesh.alone.size).run(train, run, mesh.alone)[0]


def in_rings(ranks: Ranks, run: Run, mesh: Mesh, is_refused: bool | None = False) -> list[Outcome]:
    """What every rank saw of a run whose rings are those of the mesh.

    Args:
        is_refused: the trial step refuses the loss of a rank's tokens, so whole rows take their place; None: it may.
    """
    outcomes = ranks(mesh.size).run(train, run, mesh)
    assert [outcome.ring_size for outcome in outcomes] == [mesh.cp] * mesh.size
    if is_refused is not None:
        assert {outcome.refused != "" for outcome in outcomes} == {is_refused}, outcomes[0].refused
    return outcomes


def assert_trains_as_without_ring(ranks: Ranks, run: Run, mesh: Mesh, is_refused: bool | None = False) -> None:
    """Every rank saw what there is without a ring, predictions too. ``is_refused``: as for `in_rings`."""
    want = without_ring(ranks, run, mesh)
    for got in in_rings(ranks, run, mesh, is_refused):
        assert_equal_runs(got, want)
        if want.predictions is not None:
            assert got.predictions is not None
            torch.testing.assert_close(got.predictions, want.predictions, rtol=1e-5, atol=1e-5)


def assert_equal_runs(got: Outcome, want: Outcome) -> None:
    assert len(got.log) == len(want.log)
    for at, (one, other) in enumerate(zip(got.log, want.log, strict=True)):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert one[name] == pytest.approx(value, rel=LOSS), f"{name}, log entry {at}"
    assert got.parameters.keys() == want.parameters.keys()
    for name, parameter in want.parameters.items():
        assert float((got.parameters[name] - parameter).abs().max()) < PARAMETER, name
        moves = float(want.updates[name].abs().max()) > ROUNDING
        assert relative_error(got.updates[name], want.updates[name]) < UPDATE or not moves, name


ROUNDING = 1e-7
"""A bias that a softmax does not see has a gradient of rounding alone: of keys, and of spans."""
WITH_TOWERS = 3e-6
"""Relative bound of all that a model with towers gives: transformers keeps RMS norms, RoPE and the loss in float32,
whatever the model's dtype."""

alone = cache(plain_jobs.by_itself)


def assert_towers_change_nothing(ranks: Ranks, world_size: int, step: Step) -> None:
    for got in ranks(world_size).run(plain_jobs.in_a_ring, step):
        assert_equal_whole_answers(got, alone(step), step.batch)


def assert_equal_outcomes(
    got: Any, want: Any, metrics: float = LOSS, parameters: float = PARAMETER, but: Collection[tuple[int, str]] = ()
) -> None:
    """Two outcomes of a TRL trainer: steps, evaluation and parameters.

    Args:
        metrics: bound, relative and absolute.
        parameters: bound, absolute.
        but: metrics that may differ, with the number of their step; the evaluation comes after the last.
    """
    assert not got.refused, "whole rows took the place of a rank's tokens"
    for number, (mine, theirs) in enumerate(
        zip([*got.steps, got.evaluation], [*want.steps, want.evaluation], strict=True), 1
    ):
        assert mine.keys() == theirs.keys()
        for name, x in theirs.items():
            if (number, name) not in but:
                assert mine[name] == pytest.approx(x, rel=metrics, abs=metrics), f"step {number}: {name}"
    for name, parameter in want.after.items():
        assert float((got.after[name] - parameter).abs().max()) <= parameters, name


def assert_rings_learn_alike(
    outcomes: Sequence[Any],
    want: Any,
    mesh: Mesh,
    steps: int,
    moves: float = 1e-3,
    but: Collection[tuple[int, str]] = (),
) -> None:
    """Each rank's outcome is ``want``, which has learnt, and all ranks have the same bits.

    Args:
        steps: that a run makes. moves: some weight moves by more. but: as for `assert_equal_outcomes`.
    """
    assert [outcome.ring_size for outcome in outcomes] == [mesh.cp] * mesh.size
    assert len(want.steps) == steps
    assert any((want.after[name] - p).abs().max() > moves for name, p in want.before.items()), "nothing was learnt"
    for got in outcomes:
        assert_equal_outcomes(got, want, but=but)
        for name, parameter in got.after.items():
            assert torch.equal(parameter, outcomes[0].after[name])


def assert_equal_in_float64(got: Any, want: Any, bound: float = IN_FLOAT64) -> None:
    """Two outcomes of a TRL trainer whose models are in float64."""
    assert {parameter.dtype for parameter in want.after.values()} == {torch.float64}
    assert_equal_outcomes(got, want, bound, bound)


def assert_equal_whole_answers(got: Answer, want: Answer, batch: Batch, exact: float = WITH_TOWERS) -> None:
    """Of a model with towers: these may have weights without a gradient, which a ring gives zeros."""
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    assert relative_error(got.loss, want.loss) < exact
    assert relative_error(got.logits[real], want.logits[real]) < exact
    for kind in ("gradients", "exact"):
        found, expected = getattr(got, kind), getattr(want, kind)
        assert all(name in expected or not gradient.any() for name, gradient in found.items())
        for name, gradient in expected.items():
            # The bias of keys has no gradient but rounding, since a softmax does not see it.
            nothing = max(float(found[name].abs().max()), float(gradient.abs().max())) < 1e-14
            assert relative_error(found[name], gradient) < 2 * exact or nothing, (kind, name)
