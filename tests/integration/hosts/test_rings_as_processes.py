"""A trainer in a method of whole rows: it counts rings, and so do its arguments."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accelerate import PartialState
from transformers import TrainingArguments

from hf_ring_attn.integration.hosts.rings_as_processes import RingsCounted, processes_counted, rings_as_processes


def a_trainer(args: Any, processes: int) -> Any:
    """In rings of two."""
    config = SimpleNamespace(cp_size=2, cp_backend="ring")
    accelerator = SimpleNamespace(num_processes=processes, parallelism_config=config)
    return SimpleNamespace(accelerator=accelerator, args=args)


def test_it_counts_rings_and_the_processes_inside() -> None:
    trainer = a_trainer(SimpleNamespace(distributed_state=SimpleNamespace(num_processes=8)), 8)

    def counted() -> tuple[int, int]:
        return trainer.accelerator.num_processes, trainer.args.distributed_state.num_processes

    with rings_as_processes(trainer):
        assert counted() == (4, 4) and trainer.get_cp_size() == 1
        with rings_as_processes(trainer, RingsCounted):
            assert counted() == (4, 4)
        with processes_counted(trainer):
            assert counted() == (8, 8) and not hasattr(trainer, "get_cp_size")  # that of its class
        other = a_trainer(trainer.args, 8)  # a teacher's, with the same arguments
        with rings_as_processes(other):
            assert (other.accelerator.num_processes, *counted()) == (4, 4, 4) and other.get_cp_size() == 1
        assert counted() == (4, 4)
    assert counted() == (8, 8)


def test_arguments_are_copied_and_saved_as_they_are(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    state = vars(args)["distributed_state"]
    with rings_as_processes(a_trainer(args, 2)):
        assert type(vars(args)["distributed_state"]) is RingsCounted
        for other in (copy.deepcopy(args), copy.copy(pickle.loads(pickle.dumps(args)))):
            assert type(vars(other)["distributed_state"]) is PartialState
    assert vars(args)["distributed_state"] is state
