"""A checkpoint that was cut short: a ring resumes from the last complete one, or says which to take."""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import Trainer, TrainerState

from hf_ring_attn import errors
from hf_ring_attn.integration.hosts import checkpoints
from hf_ring_attn.integration.hosts.checkpoints import is_complete, last_complete
from tests.helpers.jobs.comparison import Ranks, assert_equal_runs, without_ring
from tests.helpers.jobs.kinds_jobs import ADAM, Kind, trained
from tests.helpers.jobs.plain_jobs import attempt, told
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.jobs.trainer_jobs import train
from tests.helpers.live_ranks import RanksFailed

RUN = Run(
    why="saved at each step", rows=Rows(labelled="answers"), steps=3,
    arguments={"save_strategy": "steps", "save_steps": 1, "optim_args": "momentum=0.9"},
)  # fmt: skip
RING = Mesh(cp=2)
BEGUN = 2


def killed_while_saving(folder: str) -> None:
    """A run that ends by SIGKILL when the weights of its second checkpoint are written, and its optimizer is not."""

    def save(self: Trainer, _folder: str) -> None:
        if self.state.global_step == BEGUN:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, _folder)

    original = Trainer._save_optimizer_and_scheduler
    with mock.patch.object(Trainer, "_save_optimizer_and_scheduler", save):
        train(RUN, RING, folder)


SMALL = 100
"""Bytes of a file that a full disk still takes."""
FULL = {
    "the weights, on rank 0": (0, "_save"),
    "the optimizer, on rank 0": (0, "_save_optimizer_and_scheduler"),
    "the random state, on rank 1": (1, "_save_rng_state"),
    "the state, on rank 0": (0, "save_to_json"),
}


SHARDED = Kind(
    why="FSDP2, saved", fsdp={"state_dict_type": "FULL_STATE_DICT"},
    arguments={**ADAM, "save_strategy": "steps", "save_steps": 1},
)  # fmt: skip


def with_a_full_disk(folder: str, rank: int, part: str, sharded: bool = False) -> str:
    """A run whose second checkpoint meets a limit for the size of files, at one part on one rank; what it raised."""

    def limited(write: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        step = self.global_step if isinstance(self, TrainerState) else self.state.global_step
        with file_limit(SMALL) if dist.get_rank() == rank and step == BEGUN else nullcontext():
            return write(self, *args, **kwargs)

    owner: Any = TrainerState if part == "save_to_json" else Trainer
    original = getattr(owner, part)
    if part == "_save_rng_state":  # ours is around it
        patch: Any = mock.patch("torch.save", cut_off(rank))
    else:
        patch = mock.patch.object(owner, part, lambda self, *args, **kwargs: limited(original, self, *args, **kwargs))
    with patch:
        raised = attempt(trained, SHARDED, RING, folder) if sharded else attempt(train, RUN, RING, folder)
    return "nothing" if raised is None else f"{raised[0]}: {raised[1]}"


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Files of this process get no larger, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def cut_off(rank: int) -> Any:
    """torch.save, which finds the disk full when one rank writes the random state of the second checkpoint."""
    save = torch.save

    def saved(x: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        full = dist.get_rank() == rank and f"checkpoint-{BEGUN}/rng_state" in str(file)
        with file_limit(SMALL) if full else nullcontext():
            save(x, file, *args, **kwargs)

    return saved


@pytest.mark.parametrize("part", FULL)
@pytest.mark.turns
def test_a_full_disk_on_one_rank_stops_all(ranks: Ranks, tmp_path: Path, part: str) -> None:
    rank, name = FULL[part]
    first, begun = tmp_path / "checkpoint-1", tmp_path / f"checkpoint-{BEGUN}"
    for said in ranks(2).run(with_a_full_disk, str(tmp_path), rank, name):
        words = rf"CheckpointNotSaved: {begun} was not saved \(rank {rank}: \w+: .*; a resume takes {first}"
        assert re.match(words, said), said
    assert last_complete(tmp_path) == (first, [begun])


def test_an_old_state_that_cannot_go_stops_all(ranks: Ranks, tmp_path: Path) -> None:
    """The first rank failed before it saved, and the others waited for it."""
    begun = tmp_path / f"checkpoint-{BEGUN}"
    (begun / "trainer_state.json").mkdir(parents=True)  # no file: unlinking it raises
    for raised in ranks(2).run(attempt, train, RUN, RING, str(tmp_path)):
        assert raised is not None and raised[0] == "CheckpointNotSaved"
        assert f"{begun} was not saved (rank 0: " in raised[1], raised[1]


@pytest.mark.parametrize("part", [part for part in FULL if "state" in part])
@pytest.mark.turns
def test_fsdp2_stops_on_all_ranks_if_the_last_parts_fail(ranks: Ranks, tmp_path: Path, part: str) -> None:
    """Before them its ranks exchange shards: there an error ends one rank, and with it the others."""
    rank, name = FULL[part]
    for said in ranks(2).run(with_a_full_disk, str(tmp_path), rank, name, sharded=True):
        assert said.startswith("CheckpointNotSaved: ") and f"(rank {rank}: " in said, said
    assert last_complete(tmp_path) == (tmp_path / "checkpoint-1", [tmp_path / f"checkpoint-{BEGUN}"])


def saved_again(folder: str) -> None:
    """A run that ends in the middle of its first save, in a folder with an older checkpoint of that name."""
    ends = mock.patch.object(Trainer, "_save_optimizer_and_scheduler", side_effect=KeyboardInterrupt)
    with ends, suppress(KeyboardInterrupt):
        train(RUN, RING, folder)


def test_an_older_checkpoint_that_is_written_again_is_incomplete_until_its_end(ranks: Ranks, tmp_path: Path) -> None:
    first = tmp_path / "checkpoint-1"
    first.mkdir()
    (first / "trainer_state.json").write_text("{}")
    assert is_complete(first)
    ranks(2).run(saved_again, str(tmp_path))
    assert not is_complete(first) and (first / "model.safetensors").exists()


def resumed_apart(folder: str) -> str:
    """Resumes where the ranks, on two nodes, have other checkpoints; what that raised."""
    mine = Path(folder) / f"node-{dist.get_rank()}"
    for step in range(1, 3 - dist.get_rank()):
        (mine / f"checkpoint-{step}").mkdir(parents=True)
        (mine / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    raised = attempt(train, RUN, RING, str(mine), True)
    return "nothing" if raised is None else f"{raised[0]}: {raised[1]}"


def test_ranks_that_would_resume_from_other_checkpoints_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks(2).run(resumed_apart, str(tmp_path)):
        assert said.startswith("RanksDiffer: ") and "checkpoint-2" in said and "checkpoint-1" in said, said


@pytest.mark.parametrize("by_fsdp", [True, False])
@pytest.mark.parametrize(
    ("optimizer", "saved_by_fsdp"), [("optimizer.pt", False), ("optimizer.bin", True), ("optimizer_0/shard", True)]
)
def test_fsdp_and_others_read_their_own_checkpoints(
    tmp_path: Path, optimizer: str, saved_by_fsdp: bool, by_fsdp: bool
) -> None:
    """FSDP's ranks would fail one after another: the first misses a file, the others wait for it."""
    checkpoint = tmp_path / "checkpoint-2"
    (checkpoint / optimizer).parent.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    (checkpoint / optimizer).touch()
    for asked in (True, str(checkpoint)):
        if by_fsdp is saved_by_fsdp:
            assert checkpoints._chosen_by_all(asked, str(tmp_path), by_fsdp) == str(checkpoint)
        else:
            saved = "by FSDP, and a run without" if saved_by_fsdp else "without FSDP, and a run with"
            with pytest.raises(errors.OtherCheckpoint, match=saved):
                checkpoints._chosen_by_all(asked, str(tmp_path), by_fsdp)


def refused(folder: str) -> str:
    raised = attempt(train, RUN, RING, folder, folder + f"/checkpoint-{BEGUN}")
    return "nothing" if raised is None else f"{raised[0]}: {raised[1]}"


def warned(folder: str) -> list[str]:
    return told(train, RUN, RING, folder, True)


@pytest.mark.slow
def test_a_ring_that_was_killed_while_saving_resumes(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed):
        ranks(2).run(killed_while_saving, str(tmp_path))
    first, begun = tmp_path / "checkpoint-1", tmp_path / f"checkpoint-{BEGUN}"
    assert (begun / "model.safetensors").exists() and (is_complete(first), is_complete(begun)) == (True, False)
    for said in ranks(2).run(refused, str(tmp_path)):
        assert re.match(rf"IncompleteCheckpoint: {begun} is incomplete: .* Resume from {first}\.", said), said
    after = ranks(2).run(train, RUN, RING, str(tmp_path), True)[0]
    assert after.steps == 2
    assert_equal_runs(after, without_ring(ranks, RUN, RING))
    assert is_complete(begun)


def test_a_full_disk_leaves_a_state_that_is_cut_off(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(train, RUN, RING, str(tmp_path))
    state = tmp_path / "checkpoint-3" / "trainer_state.json"
    state.write_bytes(state.read_bytes()[:100])
    said, _ = ranks(2).run(warned, str(tmp_path))
    assert [text for text in said if "incomplete" in text] == [
        f"{state.parent} is incomplete: saving it was interrupted. Resuming from {tmp_path / 'checkpoint-2'}"
    ]
    for left in tmp_path.glob("checkpoint-*/trainer_state.json"):
        left.unlink()
    for said_there in ranks(2).run(refused, str(tmp_path)):
        assert "No complete one is beside it: train from the start." in said_there
