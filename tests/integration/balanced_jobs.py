"""What ranks run of packed rows whose documents are balanced: shards, accelerate's loop, Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

import hf_ring_attn
from hf_ring_attn import RingConfig, balance
from hf_ring_attn.integration import rows
from hf_ring_attn.layout import Layout
from jobs import Outcome, launched, train
from runs import Mesh, Run
from tiny_models import tiny

Batch = dict[str, Tensor]


@contextmanager
def chunks_forced(count: int) -> Iterator[None]:
    """Packed rows are dealt so many chunks, of any size, where that is better than a zigzag; 0 leaves all as it is."""
    new = {"CHUNKS": (count,), "LEAST_CHUNK": 1, "ACCEPTABLE_PERCENT": 100} if count else {}
    with ExitStack() as stack:
        for name, value in new.items():
            stack.enter_context(mock.patch.object(balance, name, value))
        yield


def share(batch: Batch, chunks: int, config: RingConfig = RingConfig()) -> tuple[dict[str, Any], Tensor, int, Tensor]:
    """This rank's inputs, their places, how many chunks they are, and the whole row from all ranks' position_ids."""
    with chunks_forced(chunks):
        sharded = hf_ring_attn.shard(batch, config=config)
    whole = sharded.gather(sharded.inputs["position_ids"].double())
    return sharded.inputs, sharded.positions, sharded.layout.chunks, whole


def unlike(batch: Batch) -> str:
    """What is said where one rank would deal other chunks than another, as another version of the package might."""
    with chunks_forced(4 if dist.get_rank() else 8):
        try:
            hf_ring_attn.shard(batch)
        except hf_ring_attn.errors.RanksDiffer as error:
            return str(error)
    return ""


def trained(run: Run, mesh: Mesh, chunks: int) -> tuple[Outcome, int]:
    """A run of Trainer, and how many of its batches had another layout than the zigzag."""
    dealt: list[Layout] = []

    def watched(*given: Any) -> Layout:
        dealt.append(balance.balanced(*given))
        return dealt[-1]

    with chunks_forced(chunks), mock.patch.object(rows, "balanced", watched):
        outcome = train(run, mesh)
    return outcome, sum(bool(layout.owners) for layout in dealt)


def compiled(batches: list[Batch], chunks: int) -> list[Any]:
    """`plain_jobs.compiled` of batches that may be dealt so many chunks."""
    from plain_jobs import compiled as answers  # which imports from here

    with chunks_forced(chunks):
        return answers(batches)


def squares(logits: Tensor, labels: Tensor) -> Tensor:
    """A sum over tokens, each weighed by its label."""
    return (logits.double().square().sum(-1) * (labels + 1)).sum()


def own_loss_of_buffers(batch: Batch) -> tuple[Tensor, Tensor]:
    """accelerate's loop with a loss of the program's own, from the buffers that it gave; the same in one process."""
    with launched(Mesh(cp=2)), chunks_forced(4):
        accelerator = Accelerator()
        model = accelerator.prepare(tiny("llama", "ring_fp32").double())
        inputs = {name: x.clone() for name, x in batch.items()}
        with accelerator.maybe_context_parallel(buffers=list(inputs.values()), buffer_seq_dims=[1] * len(inputs)):
            loss = squares(model(**inputs).logits, inputs["labels"])
    dist.all_reduce(loss)
    out = tiny("llama", None).double()(**batch, use_cache=False)
    return loss.detach(), squares(out.logits, batch["labels"]).detach()
