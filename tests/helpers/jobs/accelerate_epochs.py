"""Checks of accelerate_ranks.py on epochs: shuffles, states that are loaded, and rings with fewer batches."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import broadcast_object_list
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader

import hf_ring_attn
from hf_ring_attn import errors
from tests.helpers.jobs.accelerate_batches import CP, Rows, batch, model


def ranks_shuffle_alike_without_a_seed(accelerator: Any) -> None:
    """A program that sets no seed was refused in one ring, since only several processes share a generator."""
    _, loader = accelerator.prepare(model(), DataLoader(Rows(), batch_size=2, shuffle=True))
    torch.manual_seed(accelerator.process_index)
    for batches in (loader, accelerator.skip_first_batches(loader, 3)):
        for rows in batches:
            seen = accelerator.gather(rows["input_ids"][:, 0]).view(-1, CP, 2)
            assert torch.equal(seen[:, 0], seen[:, 1])


def a_state_of_fewer_processes_is_loaded_on_each_rank(accelerator: Any) -> None:
    """Ranks without a file of their own averaged at other batches: the others waited for them."""
    accelerator.prepare(model())
    folder = broadcast_object_list([tempfile.mkdtemp()])[0]
    accelerator.step = 3
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    saved = accelerator.num_processes // CP
    if accelerator.process_index >= saved:
        Path(folder, f"random_states_{accelerator.process_index}.pkl").unlink()
    accelerator.wait_for_everyone()
    accelerator.step = 0
    torch.manual_seed(accelerator.process_index)
    accelerator.load_state(folder)
    assert accelerator.step == 3
    drawn = accelerator.gather(torch.rand(1)).view(-1, CP)
    assert torch.equal(drawn[:, 0], drawn[:, 1])
    accelerator.wait_for_everyone()
    shutil.rmtree(folder, ignore_errors=True)


def uneven_rings_are_refused(accelerator: Any) -> None:
    """Rings waited for one without a batch. One ring is one process: accelerate found no even_batches to set."""
    net, loader = accelerator.prepare(model(), DataLoader(Rows(), batch_size=2))
    assert loader.batch_sampler.even_batches
    sharded = hf_ring_attn.shard(batch(accelerator))
    several = accelerator.num_processes > CP
    refused: Any = pytest.raises(errors.UnsupportedArgument, match="equally many") if several else nullcontext()
    with refused, Join([net]), sharded:
        net(**sharded.inputs).loss.backward()


def batches_may_be_a_list(accelerator: Any) -> None:
    """torch takes a list of rows' numbers, which has no attributes: it failed with an AttributeError."""
    if accelerator.num_processes == CP:  # accelerate cannot deal such batches out to several rings
        loader = DataLoader(Rows(), batch_sampler=[[0, 1], [2], [3, 0, 1]])
        _, loader = accelerator.prepare(model(), loader)
        assert [len(rows["input_ids"]) for rows in loader] == [2, 1, 3]


EPOCHS = (
    ranks_shuffle_alike_without_a_seed, a_state_of_fewer_processes_is_loaded_on_each_rank, uneven_rings_are_refused,
    batches_may_be_a_list,
)  # fmt: skip
