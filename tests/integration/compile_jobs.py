"""What ranks run compiled: a model, or its layers one by one, in a loop over batches, beside the same uncompiled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.testing import relative_error
from plain_jobs import CHECKPOINTING, Batch, gradients_of
from tiny_models import tiny


@dataclass(frozen=True, eq=False, kw_only=True)
class Compiled:
    """A model of `tiny_models` and how it is compiled, without breaks in its graph.

    Args:
        layers: each layer by itself; else the model as a whole, loss included.
        named: the model is named to `shard`.
    """

    why: str
    batches: list[Batch]
    model: str = "llama"
    layers: bool = False
    named: bool = True
    backend: str = "eager"
    checkpointing: str = ""
    dtype: torch.dtype = torch.float64
    ring: RingConfig = RingConfig()


@dataclass
class Found:
    """For each batch, how far the loss and the gradients are from those of the uncompiled model, relatively; how many
    graphs there were after it."""

    away: list[float] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)


def step(model: Any, batch: Batch, case: Compiled, named: bool) -> dict[str, Tensor]:
    """The loss of the whole batch, and the gradients."""
    sharded = hf_ring_attn.shard(batch, model=model if named else None, config=case.ring)
    with sharded:
        loss = model(**sharded.inputs).loss
    loss.backward()
    sharded.reduce_gradients(model)
    return {"loss": sharded.reduce(loss), **gradients_of(getattr(model, "_orig_mod", model))}


def ready(case: Compiled) -> Any:
    model: Any = tiny(case.model, "ring_fp32").to(case.dtype).train()
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING[case.checkpointing])
    return model


def compiled(case: Compiled) -> Found:
    """Forward and backward of all batches, one after the other."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(case.backend)
    plain, fast, found = ready(case), ready(case), Found()
    if case.layers:
        parts: list[nn.Module] = list(fast.model.layers)
        for layer in parts:
            layer.compile(fullgraph=True, backend=counter)
    else:
        fast = torch.compile(fast, fullgraph=True, backend=counter)
    for batch in case.batches:
        want, got = step(plain, batch, case, named=False), step(fast, batch, case, case.named)
        assert got.keys() == want.keys()
        found.away.append(max(relative_error(got[name], x) for name, x in want.items()))
        found.graphs.append(counter.frame_count)
    return found
