"""A ring that resumes at another size takes the random numbers of its own first rank, or warns that they are lost."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch import Tensor

from hf_ring_attn.integration.hosts import random_states, trainer_facts

TRAINER_S = "Trainer's own"
TABLE = [
    # files, of all nodes, processes, ring size, number: what it reads
    ("012345", 6, 4, 2, 0, 0),
    ("012345", 6, 4, 2, 2, 3),  # the first rank of the second ring, which had three ranks
    ("012345", 6, 4, 2, 3, 4),
    ("0123", 4, 8, 4, 4, 2),
    ("0123", 4, 8, 4, 6, 3),  # a rank that was none draws as its ring's last
    ("01", 2, 4, 2, 2, 1),  # of two processes without a ring
    ("", 0, 2, 2, 0, ""),  # of one process
    ("", 0, 2, 2, 1, ""),
    ("0123", 4, 4, 2, 2, TRAINER_S),
    ("0123", 8, 8, 2, 2, TRAINER_S),  # of a node that has the files of its own processes only
    ("0123", 8, 4, 2, 2, "lost"),
    ("012", 3, 4, 2, 2, "lost"),
    ("012", 3, 4, 2, 1, None),
    ("-", 0, 4, 2, 0, TRAINER_S),  # a checkpoint without states (save_only_model)
]


@pytest.mark.parametrize(("files", "saved", "world", "size", "process", "want"), TABLE)
def test_a_rank_reads_the_states_of_its_rings_rank(
    tmp_path: Path, files: str, saved: int, world: int, size: int, process: int, want: Any
) -> None:
    names = [f"rng_state_{number}.pth" for number in files.strip("-")]
    for name in names if files else ["rng_state.pth"]:
        (tmp_path / name).touch()
    accelerator = SimpleNamespace(
        num_processes=world, process_index=process, device="cpu",
        gather=lambda mine: torch.stack([mine, torch.tensor(saved)]),
    )  # fmt: skip
    read: list[Any] = []
    with (
        mock.patch.object(trainer_facts, "group_of", return_value=SimpleNamespace(size=lambda: size)),
        mock.patch.object(random_states, "_restore", lambda path, number: read.append((path.name, number))),
        mock.patch.object(random_states, "warn", lambda text: read.append(text)),
    ):
        trainer = SimpleNamespace(accelerator=accelerator)
        random_states._load(lambda _self, _checkpoint: read.append(TRAINER_S))(trainer, str(tmp_path))
    if want == "lost":
        (text,) = read
        assert text.endswith(
            f"no random state of this ring, since {saved} processes saved it, and there are 2 rings: completions and "
            "dropout differ from those of a run without a break"
        )
    else:
        file = "rng_state.pth" if want == "" else f"rng_state_{want}.pth"
        assert read == {None: [], TRAINER_S: [TRAINER_S]}.get(want, [(file, want or 0)])


@pytest.mark.parametrize("alone", [True, False], ids=["of one process", "of several"])
def test_all_generators_go_on(tmp_path: Path, alone: bool) -> None:
    """A process of several saves the states of all its node's GPUs: the fifth's own is the second of three."""
    gpus = [torch.tensor([number]) for number in range(3)]
    states = {"python": random.getstate(), "numpy": numpy.random.get_state(), "cpu": torch.get_rng_state()}
    torch.save({**states, "cuda": gpus[1] if alone else gpus}, tmp_path / "states")
    drawn = [float(torch.rand(())), random.random(), numpy.random.random()]
    put: list[Tensor] = []
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "set_rng_state", put.append),
    ):
        random_states._restore(tmp_path / "states", 4)
    assert [float(torch.rand(())), random.random(), numpy.random.random()] == drawn
    assert put == [gpus[1]]
