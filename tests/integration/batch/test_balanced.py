"""Packed rows in other chunks than the zigzag's: what ranks hold, and that every way of use gives what it gave."""

from __future__ import annotations

import pytest
import torch

import tests.helpers.jobs.balanced_jobs as jobs
from hf_ring_attn import RingConfig, errors
from hf_ring_attn.sharding.layout import positions
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs import compile_jobs
from tests.helpers.jobs.comparison import Ranks, assert_equal_runs, without_ring
from tests.helpers.jobs.compile_jobs import Compiled
from tests.helpers.jobs.plain_jobs import Step, by_itself, packed, tokens
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.integration.batch.test_plain_loop import LONGER

PADDING = {"labels": -100, "shift_labels": -100}


@pytest.mark.parametrize("chunks", [2, 4, 8, 16])
@pytest.mark.parametrize("world_size", [2, 4])
def test_inputs_are_the_tokens_at_the_positions(ranks: Ranks, world_size: int, chunks: int) -> None:
    shifted = torch.nn.functional.pad(LONGER["labels"][:, 1:], (0, 1), value=-100)
    held = []
    for inputs, places, count, whole in ranks(world_size).run(jobs.share, LONGER, chunks):
        assert count == chunks
        assert torch.equal(whole, LONGER["position_ids"].double())
        held += places.tolist()
        for name, row in {**LONGER, "shift_labels": shifted}.items():
            more = row[:, -1:] if name == "input_ids" else torch.tensor([[PADDING.get(name, 0)]])
            longer = torch.cat([row, more.expand(len(row), 200)], 1)
            assert torch.equal(inputs[name], longer[:, places]), name
    assert sorted(held) == list(range(len(held))) and 97 <= len(held) < 97 + world_size * chunks


def test_a_zigzag_may_be_demanded(ranks: Ranks) -> None:
    for _, places, count, _ in ranks(2).run(jobs.share, LONGER, 4, RingConfig(layout="zigzag")):
        assert (count, len(places)) == (2, 50)
    text = r"layout='best' is not possible: it must be one of \('auto', 'zigzag', 'balanced'\)"
    with pytest.raises(errors.BadOption, match=text):
        RingConfig(layout="best")  # type: ignore[arg-type]


def test_a_loop_of_ones_own_keeps_the_zigzag(ranks: Ranks) -> None:
    """It may index something of its own by `positions`, and no shape would tell that these are other tokens."""
    for rank, (_, places, _, _) in enumerate(ranks(2).run(jobs.share, LONGER, 4, RingConfig())):
        assert torch.equal(places[places < 97], positions(97, rank=rank, world_size=2))


TWO_LAYOUTS = (
    "TwoLayouts: positions() describes the zigzag layout, but this process holds a batch of a ring of 2 in the "
    "balanced layout, where ranks hold other tokens. Use sharded.positions of that batch, or "
    "RingConfig(layout='zigzag') in configure() or shard()."
)


def test_zigzag_places_are_not_told_beside_other_rows(ranks: Ranks) -> None:
    """For as long as there is such a batch; a program that has done with it may go on by zigzag places."""
    assert ranks(2).run(jobs.by_zigzag_after_balanced, LONGER) == [[TWO_LAYOUTS, ""]] * 2


def test_positions_changes_nothing(ranks: Ranks) -> None:
    """It is a question: batches that come after it are balanced as before."""
    assert ranks(2).run(jobs.balanced_after_positions, LONGER) == [[False, False]] * 2


def test_zigzag_places_alone_are_not_refused(ranks: Ranks) -> None:
    assert ranks(2).run(jobs.of_a_zigzag, LONGER) == [["", ""]] * 2


def test_short_rows_keep_the_zigzag(ranks: Ranks) -> None:
    assert all(count == 2 for _, _, count, _ in ranks(2).run(jobs.share, LONGER, 0))


def test_without_padding_by_the_ring(ranks: Ranks) -> None:
    """Chunks that do not divide the row are not taken, though they would be better."""
    batch = packed(61, 5, 5, 5, 5, 5, 9, 1)  # 96 = 3 * 32
    for wanted, got in ((16, 16), (32, 2)):
        for _, places, count, _ in ranks(2).run(jobs.share, batch, wanted, RingConfig(layout="balanced", pad=False)):
            assert (count, len(places)) == (got, 48)


def test_ranks_that_would_deal_otherwise_all_raise(ranks: Ranks) -> None:
    for text in ranks(2).run(jobs.unlike, LONGER):
        assert "the ranks of one ring must hold the same layout, but got rank 0: " in text


RUNS = [
    Run(why="balanced rows", rows=Rows(packed=True, length=61), evaluated=Rows(packed=True, length=61, count=5)),
    Run(
        why="balanced rows, a gathered loss and predictions", rows=Rows(packed=True, length=62),
        evaluated=Rows(packed=True, length=61, count=5), ring=RingConfig(loss="gathered"), predicts="labelled",
        steps=4,
    ),
]  # fmt: skip


MESHES = [(Mesh(cp=2), 4), (Mesh(cp=4), 8), (Mesh(cp=4), 4), (Mesh(cp=2), 8)]


@pytest.mark.parametrize(
    ("run", "mesh", "chunks"),
    [  # each run on two ranks and on four, with four chunks and with eight
        pytest.param(run, *one, id=f"{run.why}-{one[0]}-{one[1]}", marks=() if at // 2 == turn else pytest.mark.full)
        for turn, run in enumerate(RUNS) for at, one in enumerate(MESHES)
    ],
)  # fmt: skip
@pytest.mark.turns
def test_trainer_gives_what_it_gives_in_one_process(ranks: Ranks, run: Run, mesh: Mesh, chunks: int) -> None:
    want = without_ring(ranks, run, mesh)
    for got, dealt in ranks(mesh.size).run(jobs.trained, run, mesh, chunks):
        assert dealt >= 4
        assert_equal_runs(got, want)
        if want.predictions is not None:
            torch.testing.assert_close(got.predictions, want.predictions, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.turns
def test_a_compiled_model_takes_batches_of_other_chunks(ranks: Ranks) -> None:
    batches = [LONGER, tokens(97), packed(13, 84)]
    for answers in ranks(2).run(jobs.compiled, batches, 4):
        for got, batch in zip(answers, batches, strict=True):
            want = by_itself(Step(why="", batch=batch))
            assert relative_error(got.logits, want.logits) < 1e-11
            assert all(relative_error(got.gradients[n], gradient) < 1e-6 for n, gradient in want.gradients.items())


@pytest.mark.turns
@pytest.mark.slow
def test_other_chunks_need_no_other_graph(ranks: Ranks) -> None:
    """Llama 4's layers read where their tokens are: a compiler keeps numbers, so these are in a tensor."""
    documents = [
        (61, 5, 5, 5, 5, 5, 10), (5, 61, 5, 5, 5, 5, 10), (5, 5, 61, 5, 5, 5, 10), (10, 5, 5, 5, 5, 5, 61), (48, 48),
    ]  # fmt: skip
    batches = [packed(*lengths) for lengths in documents]
    case = Compiled(
        why="", model="llama4", what="layers", batches=batches, graphs=None, dtype=torch.float32, ring=jobs.BALANCED,
    )  # fmt: skip
    for found in ranks(2).run(compile_jobs.with_chunks, case, 4):
        assert found.graphs[1:] == [found.graphs[1]] * (len(documents) - 1), found.graphs
        assert max(found.away) < 2e-5


def test_buffers_of_accelerates_loop_stay_in_the_zigzag(ranks: Ranks) -> None:
    """A program's own loss reads labels that were cut before documents were known: logits must be of those tokens."""
    for got, want in ranks(2).run(jobs.own_loss_of_buffers, packed(61, 5, 5, 5, 5, 5, 9, 1)):
        assert relative_error(got, want) < 1e-12
