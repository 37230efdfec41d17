"""Restores random numbers at another ring size: ring n's first rank takes the states that ring n's first rank saved.

Trainer saves each process's states under its number, and processes of a ring have other numbers if rings have another
size. Results depend on what a first rank draws (GRPO's completions). All ranks of a ring draw the same (random masks),
so ranks beyond the saved ring's size take its last rank's. accelerate's `save_state` puts its count of batches into the
same files: a rank without a file averaged gradients at other batches than the others, which waited for it.
"""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import gather
from torch import Tensor

from ..context.mesh import ring_of_process
from ..log import warn
from ..patching.changes import Original, Patch, around
from . import trainer, trainer_facts

_NUMBERED = re.compile(r"^(?:rng_state_(\d+)\.pth|random_states_(\d+)\.pkl)$")
"""The file of one of several processes: Trainer's, accelerate's."""
_OF_ONE = "rng_state.pth"
"""The file of a single process."""
_LOST = (
    "{0} has no random state of this ring, since {1} processes saved it, and there are {2} rings: completions and "
    "dropout differ from those of a run without a break"
)


@trainer_facts.in_rings
def _load(original: Original, self: Any, checkpoint: str | None) -> Any:
    if checkpoint is None:
        return original(self, checkpoint)
    host, folder, ring_size = self.accelerator, Path(checkpoint), trainer_facts.group_of(self).size()
    saved = _processes(folder, host.device, host.gather)
    if saved == host.num_processes:
        return original(self, checkpoint)
    process = _saved_by(host.process_index, ring_size, host.num_processes, max(saved, 1))
    path = folder / (f"rng_state_{process}.pth" if saved else _OF_ONE)
    if saved == 0 and not path.is_file():  # the checkpoint has no random states (save_only_model)
        return original(self, checkpoint)
    if process is not None and path.is_file():
        _restore(path, process)
    elif host.process_index % ring_size == 0:
        warn(_LOST.format(folder, max(saved, 1), host.num_processes // ring_size))
    return None


def _saved_by(process: int, ring_size: int, processes: int, saved: int) -> int | None:
    """The number of the process whose states a process takes; None if ``saved`` processes are no whole rings."""
    ring, rank = divmod(process, ring_size)
    size, left = divmod(saved, processes // ring_size)
    return None if left else ring * size + min(rank, size - 1)


def _processes(folder: Path, device: Any, gather: Callable[[Tensor], Any] = gather) -> int:
    """The number of processes that saved numbered states, on any node: one may have those of its own processes only."""
    found = [int(match[1] or match[2]) for path in folder.glob("*") if (match := _NUMBERED.match(path.name))]
    return int(gather(torch.tensor(1 + max(found, default=-1), device=device)).max())


@around
def _load_accelerate(
    original: Original, input_dir: Any, models: Any, optimizers: Any, schedulers: Any, dataloaders: Any,
    process_index: int, *given: Any, **named: Any,
) -> Any:  # fmt: skip
    """Patches the loading of accelerate's `load_state`, whose process_index names the file of random states alone."""
    ring, state = ring_of_process(), AcceleratorState()
    if ring.size > 1 and (saved := _processes(Path(input_dir), state.device)) not in (0, state.num_processes):
        process = _saved_by(process_index, ring.size, state.num_processes, saved)
        process_index = min(process_index, saved - 1) if process is None else process
    return original(input_dir, models, optimizers, schedulers, dataloaders, process_index, *given, **named)


def _restore(path: Path, process: int) -> None:
    """Restores the states that process number ``process`` saved: of the host, and of the GPU that it had."""
    host: Any = importlib.import_module("transformers.trainer")
    with host.safe_globals():
        states = torch.load(path, map_location="cpu", weights_only=True)
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    gpus = states.get("cuda")
    if gpus is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(gpus if isinstance(gpus, Tensor) else gpus[process % len(gpus)])


_LOADED = (
    "(input_dir, models, optimizers, schedulers, dataloaders, process_index, scaler=, map_location=, load_kwargs=, "
    "**load_model_func_kwargs)"
)
PATCHES = (
    Patch(f"{trainer.TRAINER}._load_rng_state", "(self, checkpoint)", _load),
    Patch("accelerate.accelerator:load_accelerator_state", _LOADED, _load_accelerate),
)
