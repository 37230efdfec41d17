"""Checkpoints of a ring: one that was cut short, by a kill or a full disk, is passed over, or refused by name.

The state file, which is written last, says that a checkpoint is complete. So an older one is removed before its folder
is written again, and ranks agree that each has saved its part before the first of them writes it.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from ... import errors
from ...comm.ring import Ring
from ..log import warn
from ..patching.changes import Original, Patch
from . import trainer
from .rings_as_processes import processes_counted
from .trainer_facts import in_rings, refuse_trainer

STATE = "trainer_state.json"
"""The file that Trainer writes last, when every rank has saved its part of weights and optimizer."""
Checkpoint = str | os.PathLike[str] | bool
"""The types of Trainer's resume_from_checkpoint."""
_NAME = re.compile(r"^checkpoint-(\d+)$")


def is_complete(checkpoint: Path) -> bool:
    """Returns True if Trainer wrote all of ``checkpoint``."""
    try:
        return isinstance(json.loads((checkpoint / STATE).read_bytes()), dict)
    except (OSError, ValueError):
        return False


def last_complete(folder: Path) -> tuple[Path | None, list[Path]]:
    """The newest complete checkpoint in ``folder``, and the incomplete ones after it, the newest first."""
    found = [path for path in folder.iterdir() if _NAME.match(path.name) and path.is_dir()] if folder.is_dir() else []
    left_out: list[Path] = []
    for path in sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        if is_complete(path):
            return path, left_out
        left_out.append(path)
    return None, left_out


def checkpoint_to_resume(asked: Checkpoint, folder: str) -> Checkpoint:
    """The checkpoint to resume from; for True the last complete one in ``folder``. Warns if others are newer.

    Raises:
        IncompleteCheckpoint: a path was asked for, and its checkpoint is not complete; or no checkpoint is.
    """
    if isinstance(asked, bool):
        path, left_out = last_complete(Path(folder))
        if path is None and left_out:
            raise errors.IncompleteCheckpoint(str(left_out[0]), None)
        if path is None:
            return asked  # Trainer says that there is none
        for other in left_out:
            warn(f"{other} is incomplete: saving it was interrupted. Resuming from {path}", everywhere=False)
        return str(path)
    path = Path(asked)
    if path.is_dir() and _NAME.match(path.name) and not is_complete(path):
        other_path, _ = last_complete(path.parent)
        raise errors.IncompleteCheckpoint(str(path), None if other_path is None else str(other_path))
    return asked


@in_rings
def _train(original: Original, self: Any, resume_from_checkpoint: Any = None, *others: Any, **named: Any) -> Any:
    refuse_trainer(self)  # a copy of a trainer begins without functions for its own methods
    if resume_from_checkpoint:
        folder = self.args.output_dir
        resume_from_checkpoint = _chosen_by_all(resume_from_checkpoint, folder, self.is_fsdp_enabled)
    return original(self, resume_from_checkpoint, *others, **named)


def _chosen_by_all(asked: Checkpoint, folder: str, by_fsdp: bool) -> Checkpoint:
    """Calls `checkpoint_to_resume`, and checks that all ranks of the job chose the same.

    Raises:
        OtherCheckpoint: FSDP is to read it, and did not write it; or the other way round.
        RefusedElsewhere: on a rank that could resume, if another cannot. RanksDiffer: ranks chose other checkpoints.
    """
    world = Ring.of(None)
    failure, found = None, asked
    try:
        found = checkpoint_to_resume(asked, folder)
        if not isinstance(found, bool) and _reads_other(Path(found), by_fsdp):
            raise errors.OtherCheckpoint(str(found), not by_fsdp)
    except errors.Refused as error:
        failure = error
    facts = {"the checkpoint to resume from": str(found) if isinstance(found, bool) else Path(found).name}
    world.agree(facts, world.small_device(), TODO, failure, doing="chose a checkpoint")
    return found


def _reads_other(checkpoint: Path, by_fsdp: bool) -> bool:
    """Returns True if the other kind of run saved a checkpoint's optimizer: without FSDP, or by it."""
    of_ddp = (checkpoint / "optimizer.pt").exists()
    of_fsdp = (checkpoint / "optimizer.bin").exists() or (checkpoint / "optimizer_0").is_dir()
    return of_ddp if by_fsdp else of_fsdp and not of_ddp


TODO = "Copy the same checkpoint to all nodes, or name one that all have by resume_from_checkpoint."

# ---- saving ----


@in_rings
def _save_checkpoint(original: Original, self: Any, model: Any, trial: Any) -> None:
    folder = _folder(self, trial, self.state.global_step)
    failure: Exception | None = None
    if self.args.should_save:
        try:
            (folder / STATE).unlink(missing_ok=True)
        except OSError as error:  # raised below: Trainer exchanges numbers while it saves
            failure = error
    vars(self).pop(_AGREED, None)
    try:
        original(self, model, trial)
    except errors.CheckpointNotSaved:
        raise
    except Exception as error:
        # FSDP's ranks exchange shards while they save: an agreement in between would match none of their messages.
        if self.is_fsdp_enabled and _AGREED not in vars(self):
            raise
        failure = error
    _agree(folder, failure)
    # Trainer looks for the best one while the first rank may not have made its folder yet.
    step = self.state.best_global_step
    if step and (best := _folder(self, trial, step)).exists():
        self.state.best_model_checkpoint = str(best)


@in_rings
def _save_rng_state(original: Original, self: Any, output_dir: str) -> None:
    """The last part that every rank saves."""
    failure: Exception | None = None
    try:
        with processes_counted(self):  # each rank has a file of its own
            original(self, output_dir)
    except Exception as error:  # noqa: BLE001  raised below, on every rank
        failure = error
    _agree(Path(output_dir), failure)
    vars(self)[_AGREED] = True


def _folder(self: Any, trial: Any, step: int) -> Path:
    return Path(self._get_output_dir(trial=trial)) / f"checkpoint-{step}"


def _agree(folder: Path, failure: Exception | None) -> None:
    """Compares among all ranks of the job if they saved their parts.

    Raises:
        CheckpointNotSaved: on every rank, with each failure.
    """
    world = Ring.of(None)
    failed = world.numbers(int(failure is not None), world.small_device(), "saved a checkpoint")
    if not any(failed):
        return
    text = None if failure is None else f"{type(failure).__name__}: {failure}".splitlines()[0]
    found = {rank: each for rank, each in enumerate(world.objects(text)) if each is not None}
    complete, _ = last_complete(folder.parent)
    raise errors.CheckpointNotSaved(str(folder), found, None if complete is None else str(complete)) from failure


_AGREED = "_hf_ring_attn_saved_parts"
"""Trainer attribute, set once all ranks saved their part of this checkpoint."""

_TRAIN = "(self, resume_from_checkpoint=, trial=, ignore_keys_for_eval=)"
PATCHES = (
    Patch(f"{trainer.TRAINER}.train", _TRAIN, _train),
    Patch(f"{trainer.TRAINER}._save_checkpoint", "(self, model, trial)", _save_checkpoint),
    Patch(f"{trainer.TRAINER}._save_rng_state", "(self, output_dir)", _save_rng_state),
)
