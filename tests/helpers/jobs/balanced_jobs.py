"""What ranks run of packed rows whose documents are balanced: shards, accelerate's loop, Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.integration.context import whole_batch
from hf_ring_attn.sharding import balance, layout
from hf_ring_attn.sharding.layout import Layout
from tests.helpers.jobs.runs import Mesh, Run
from tests.helpers.jobs.trainer_jobs import Outcome, launched, train
from tests.helpers.models.tiny_models import tiny

Batch = dict[str, Tensor]


@contextmanager
def chunks_forced(count: int) -> Iterator[None]:
    """Packed rows are dealt so many chunks, of any size, where that is better than a zigzag; 0 leaves all as it is."""
    new = {"CHUNKS": (count,), "LEAST_CHUNK": 1, "ACCEPTABLE_PERCENT": 100} if count else {}
    with ExitStack() as stack:
        for name, value in new.items():
            stack.enter_context(mock.patch.object(balance, name, value))
        yield


BALANCED = RingConfig(layout="balanced")


def share(batch: Batch, chunks: int, config: RingConfig = BALANCED) -> tuple[dict[str, Any], Tensor, int, Tensor]:
    """This rank's inputs, their places, how many chunks they are, and the whole row from all ranks' position_ids."""
    with chunks_forced(chunks):
        sharded = hf_ring_attn.shard(batch, config=config)
    whole = sharded.gather(sharded.inputs["position_ids"].double())
    return sharded.inputs, sharded.positions, sharded.layout.chunks, whole


def unlike(batch: Batch) -> str:
    """What is said where one rank would deal other chunks than another, as another version of the package might."""
    with chunks_forced(4 if dist.get_rank() else 8):
        try:
            hf_ring_attn.shard(batch, config=BALANCED)
        except hf_ring_attn.errors.RanksDiffer as error:
            return str(error)
    return ""


@contextmanager
def without_batches() -> Iterator[None]:
    """This process holds no batch yet; nor, afterwards, those that it held meanwhile."""
    with mock.patch.object(layout, "_BALANCED", {}):
        yield


def attempted(*acts: Callable[[], object]) -> str:
    """What the last of these raised, as its class's name and its text, in a process that holds no batch yet."""
    with without_batches(), chunks_forced(4):
        for act in acts[:-1]:
            act()
        try:
            acts[-1]()
        except hf_ring_attn.Refused as error:
            return f"{type(error).__name__}: {error}"
    return ""


def asked() -> object:
    """Zigzag places of this rank."""
    return hf_ring_attn.positions(97, rank=dist.get_rank(), world_size=dist.get_world_size())


def by_zigzag_after_balanced(batch: Batch) -> list[str]:
    """While there is such a batch, and once there is none."""
    held: list[Any] = []

    def dealt() -> None:
        held[:] = [hf_ring_attn.shard(batch, config=BALANCED)]

    return [attempted(dealt, asked), attempted(dealt, held.clear, asked)]


def balanced_after_positions(batch: Batch) -> list[bool]:
    """Which of two batches are in the zigzag layout, where every rank asks for its places between them."""
    found = []
    for _ in range(2):
        with without_batches(), chunks_forced(4):
            found.append(hf_ring_attn.shard(batch, config=BALANCED).layout.owners == ())
            layout._BALANCED.clear()
            asked()
    return found


def of_a_zigzag(batch: Batch) -> list[str]:
    """What becomes of programs that index by zigzag places and have nothing else."""
    held = Layout(97, dist.get_world_size(), dist.get_rank()).held()
    q = torch.zeros(1, held, 1, 4)
    return [
        attempted(asked, lambda: hf_ring_attn.shard(batch), asked),
        attempted(lambda: hf_ring_attn.ring_attention(q, q, q), lambda: hf_ring_attn.shard(batch, config=BALANCED)),
    ]


def trained(run: Run, mesh: Mesh, chunks: int) -> tuple[Outcome, int]:
    """A run of Trainer, and how many of its batches had another layout than the zigzag."""
    dealt: list[Layout] = []

    def watched(*given: Any) -> Layout:
        dealt.append(balance.balanced(*given))
        return dealt[-1]

    with chunks_forced(chunks), mock.patch.object(whole_batch, "balanced", watched):
        outcome = train(run, mesh)
    return outcome, sum(bool(layout.owners) for layout in dealt)


def compiled(batches: list[Batch], chunks: int) -> list[Any]:
    """`plain_jobs.compiled` of batches that may be dealt so many chunks."""
    from tests.helpers.jobs.plain_jobs import compiled as answers  # which imports from here

    with chunks_forced(chunks):
        return answers(batches, BALANCED)


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
