"""A checkpoint that was cut short: a ring resumes from the last complete one, or says which to take."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from unittest import mock

import pytest
from transformers import Trainer

from hf_ring_attn.integration.hosts.checkpoints import is_complete
from tests.helpers.jobs.comparison import Ranks, assert_equal_runs, without_ring
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
