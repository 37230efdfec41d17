"""Resuming in a ring: a checkpoint that was cut short, by a kill or a full disk, is passed over, or refused by name."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ... import errors
from ..log import warn
from ..patching.changes import Patch
from . import trainer

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
    """The newest complete checkpoint in ``folder``, and those after it, which are not, the newest first."""
    found = [path for path in folder.iterdir() if _NAME.match(path.name) and path.is_dir()] if folder.is_dir() else []
    left_out: list[Path] = []
    for path in sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        if is_complete(path):
            return path, left_out
        left_out.append(path)
    return None, left_out


def chosen(asked: Checkpoint, folder: str) -> Checkpoint:
    """The checkpoint to resume from: for True the last complete one in ``folder``, with a warning if others are newer.

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


def _train(original: Callable[..., Any]) -> Callable[..., Any]:
    def train(
        self: Any, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        if resume_from_checkpoint and trainer.group_of(self) is not None:
            resume_from_checkpoint = chosen(resume_from_checkpoint, self.args.output_dir)
        return original(self, resume_from_checkpoint, trial, ignore_keys_for_eval)

    return train


PATCHES = (Patch(f"{trainer.TRAINER}.train", "(self, resume_from_checkpoint=, trial=, ignore_keys_for_eval=)", _train),)
