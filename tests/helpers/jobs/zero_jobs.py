"""What ranks run to test that the self-check sees branches that start at zero, and leaves weights as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hf_ring_attn
from hf_ring_attn import RingAttentionError, RingConfig
from hf_ring_attn.integration.selfcheck.row import SelfCheckState
from hf_ring_attn.integration.selfcheck.zeros import moved_from_zero
from tests.helpers.jobs.plain_jobs import tokens
from tests.helpers.jobs.self_check_jobs import local, shards
from tests.helpers.models.remote_models import remote

WRAPS: dict[str, Callable[[Any], Any]] = {"": lambda x: x, "DDP": DistributedDataParallel, "FSDP2": shards}


class Left(NamedTuple):
    """How a batch's forward ended, and how it left the model.

    Args:
        error: the refusal's class; "" if none. verdict: the self-check's.
        same_bits: every weight has the bits that it had, also those of -0.0.
        same_objects: each is the tensor that it was, in the same memory, with the same version and no gradient.
        logits: of a forward of the whole row after it, less those before it; None after a refusal.
    """

    error: str
    verdict: str
    same_bits: bool
    same_objects: bool
    logits: float | None


def left(planted: str, wrap: str = "", dtype: torch.dtype = torch.float32, frozen: bool = False) -> Left:
    """Runs one batch in the ring."""
    model: Any = remote(planted).to(dtype).train()
    with torch.no_grad():  # a zero with a sign, which arithmetic would lose
        model.norm.bias[3] = -0.0
    if frozen:
        model.layers[1].mix.requires_grad_(False)
    model = WRAPS[wrap](model)
    before = [(x, memory(x), versions(x), bits(x)) for x in model.parameters()]
    row = tokens(23)
    alone = whole(model, row) if wrap == "FSDP2" else None
    sharded, error = hf_ring_attn.shard(row), ""
    try:
        with sharded:
            model(**sharded.inputs)
    except RingAttentionError as raised:
        error = type(raised).__name__
    for part in model.modules():
        if hasattr(part, "reshard"):
            part.reshard()  # FSDP2 may leave gathered weights in its root
    after = list(model.parameters())
    return Left(
        error,
        sharded.context.state(SelfCheckState).verdict,
        all(torch.equal(bits(x), was) for x, (*_, was) in zip(after, before, strict=True)),
        all(
            x is one and memory(x) == where and versions(x) == counts and x.grad is None
            for x, (one, where, counts, _) in zip(after, before, strict=True)
        ),
        None if error or alone is None else float((whole(model, row) - alone).abs().max()),
    )


def whole(model: nn.Module, row: dict[str, Tensor]) -> Tensor:
    """The logits of a whole row, by whatever weights the model computes with."""
    with torch.no_grad():
        return model(**row).logits.clone()  # type: ignore[no-any-return]


def root_after_check() -> list[bool]:
    """FSDP2 keeps its root's gathered weights after a forward: True if the next one computes without the check's."""
    found = []
    for config in (RingConfig(), RingConfig(self_check=False)):
        model: Any = shards(remote().train())
        sharded = hf_ring_attn.shard(tokens(23), config=config)
        with sharded:
            model(**sharded.inputs)
        bias = model.norm.bias
        found.append(type(bias).__name__ != "DTensor" and not bool(bias.any()))
    return found


def root_in_check() -> tuple[str, bool]:
    """The class of a weight that FSDP2's root had gathered and kept, in the check, and True if it is not zero."""
    model: Any = shards(remote().eval())
    whole(model, tokens(23))
    assert type(model.norm.bias).__name__ != "DTensor", "the root keeps no gathered weights any more"
    with torch.no_grad(), moved_from_zero(model):
        bias = model.norm.bias
        return type(bias).__name__, bool(local(bias).any())


def replicas_of_shards() -> Tensor:
    """A bias that HSDP shards over two ranks and replicates over two, moved."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    layer: Any = fully_shard(nn.Linear(8, 8), mesh=mesh)
    nn.init.zeros_(layer.bias)
    with torch.no_grad(), moved_from_zero(layer):
        return local(layer.bias)


def memory(x: Tensor) -> int:
    return getattr(x, "_local_tensor", x).data_ptr()


def versions(x: Tensor) -> tuple[int, int]:
    return x._version, getattr(x, "_local_tensor", x)._version


def bits(x: Tensor) -> Tensor:
    return local(x.detach()).flatten().view(torch.uint8)
