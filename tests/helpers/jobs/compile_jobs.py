"""What ranks run compiled: a model, or its layers one by one, in a loop over batches, beside the same uncompiled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hf_ring_attn
from hf_ring_attn import RingConfig, Sharded
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs.balanced_jobs import chunks_forced
from tests.helpers.jobs.plain_jobs import CHECKPOINTING, Batch, attempt, gradients_of
from tests.helpers.jobs.runs import Mesh, Run
from tests.helpers.jobs.trainer_jobs import Outcome, train
from tests.helpers.models.tiny_models import tiny


@dataclass(frozen=True, eq=False, kw_only=True)
class Compiled:
    """A model of `tiny_models` and how it is compiled.

    Args:
        what: each layer by itself; the model as a whole, loss included; or that by its own method compile().
        graphs: how many there may be after each batch, and none may break; None: they may break, in any number.
        named: the model is named to `shard`.
    """

    why: str
    batches: list[Batch]
    graphs: list[int] | None
    what: Literal["layers", "whole", "in place"] = "whole"
    model: str = "llama"
    named: bool = True
    backend: str = "eager"
    checkpointing: str = ""
    dtype: torch.dtype = torch.float64
    ring: RingConfig = RingConfig()
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class Found:
    """For each batch, how far the loss and the gradients are from those of the uncompiled model, relatively; how many
    graphs there were after it."""

    away: list[float] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)


def ready(case: Compiled) -> Any:
    model: Any = tiny(case.model, "ring_fp32", **case.config)
    model.to(case.dtype).train()
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING[case.checkpointing])
    return model


def fast(case: Compiled, backend: Any) -> Any:
    model, options = ready(case), {"fullgraph": case.graphs is not None, "backend": backend}
    if case.what == "whole":
        return torch.compile(model, **options)
    for part in model.model.layers if case.what == "layers" else [model]:
        part.compile(**options)
    return model


def step(model: Any, batch: Batch, case: Compiled, named: bool) -> dict[str, Tensor]:
    """The loss of the whole batch, and the gradients."""
    return backward(model, *forward(model, batch, case, named))


def forward(model: Any, batch: Batch, case: Compiled, named: bool) -> tuple[Sharded, Tensor]:
    """The shard, and this rank's loss."""
    sharded = hf_ring_attn.shard(batch, model=model if named else None, config=case.ring)
    with sharded:
        return sharded, model(**sharded.inputs).loss


def backward(model: Any, sharded: Sharded, loss: Tensor) -> dict[str, Tensor]:
    """What `step` returns."""
    loss.backward()
    sharded.reduce_gradients(model)
    return {"loss": sharded.reduce(loss), **gradients_of(getattr(model, "_orig_mod", model))}


def compiled(*cases: Compiled) -> Found:
    """Forward and backward of all batches of all cases, one after the other."""
    torch._dynamo.reset()
    counter, found = CompileCounterWithBackend(cases[0].backend), Found()
    for case in cases:
        plain, quick = ready(case), fast(case, counter)
        for batch in case.batches:
            want, got = step(plain, batch, case, named=False), step(quick, batch, case, case.named)
            assert got.keys() == want.keys()
            found.away.append(max(relative_error(got[name], x) for name, x in want.items()))
            found.graphs.append(counter.frame_count)
    return found


def with_chunks(case: Compiled, chunks: int) -> Found:
    """`compiled`, where packed rows may be dealt so many chunks."""
    with chunks_forced(chunks):
        return compiled(case)


def refused(case: Compiled) -> str:
    """What the first batch raised."""
    torch._dynamo.reset()
    try:
        raised = attempt(step, fast(case, case.backend), case.batches[0], case, case.named)
    except torch._dynamo.exc.Unsupported as error:
        return f"Unsupported: {error}"
    return "nothing" if raised is None else f"{raised[0]}: {raised[1]}"


def rows_that_were_not_cut(case: Compiled) -> str:
    """What a model raises that was compiled for shards and is given whole rows."""
    torch._dynamo.reset()
    model = fast(case, case.backend)
    step(model, case.batches[0], case, named=True)
    sharded = hf_ring_attn.shard(case.batches[1], model=model)
    mask = torch.ones_like(case.batches[1]["input_ids"])

    def run() -> None:
        with sharded:
            model(**{**sharded.inputs, **case.batches[1], "attention_mask": mask})

    raised = attempt(run)
    return "nothing" if raised is None else f"{raised[0]}: {raised[1]}"


def layers_under_fsdp2(case: Compiled, steps: int) -> tuple[list[Tensor], dict[str, Tensor], int]:
    """Loss of each step, and the parameters after them, whole; how many graphs there are."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(case.backend)
    model = fast(case, counter)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        sharded = hf_ring_attn.shard(case.batches[0])
        with sharded:
            loss = model(**sharded.inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sharded.reduce(loss))
    return losses, {name: p.full_tensor() for name, p in model.named_parameters()}, counter.frame_count


def trained(run: Run, mesh: Mesh, **environment: str) -> tuple[Outcome, int, list[str]]:
    """A run of Trainer that compiles; how many graphs it took, and why any of them ended early."""
    torch._dynamo.reset()
    counters.clear()
    outcome = train(run, mesh, **environment)
    return outcome, counters["stats"]["unique_graphs"], list(counters["graph_break"])
