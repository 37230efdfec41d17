"""What ranks run that hold parts of a model's weights: experts, heads, layers, or shards of another mesh than a ring's.

Rings are rows of a mesh [replicas, ring]. Replica i of a ring trains on batch i.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import hf_ring_attn
from hf_ring_attn.comm.ring import Ring
from tests.helpers.jobs.plain_jobs import gradients_of, tokens
from tests.helpers.jobs.runs import Mesh, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, loaded_by_ranks, numbers, trainer_of
from tests.helpers.models.tiny_models import tiny

Make = Callable[[Any, Any, Any], Any]
"""Takes a model, the mesh of the ring and the one across rings; returns the model to call."""


def as_it_is(model: Any, _ring: Any, _across: Any) -> Any:
    return model


@dataclass(frozen=True, eq=False, kw_only=True)
class Parts:
    """A model of which each rank holds parts.

    Args:
        model: of `tiny_models`. loaded: what DistributedConfig is given; None: all of it is loaded. make: splits it.
        ring: the ring's size. same_rows: ranks across rings have the same rows: they hold other parts of each layer.
        by_hand: the loop calls `reduce_gradients`, too.
    """

    why: str
    model: str = "llama"
    loaded: dict[str, int] | None = None
    make: Make = as_it_is
    world: int = 4
    ring: int = 2
    same_rows: bool = False
    by_hand: bool = False
    config: dict[str, Any] = field(default_factory=dict)


def distributed(**sizes: int) -> Any:
    return import_module("transformers.distributed").DistributedConfig(**sizes)


def in_rings(parts: Parts) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of this rank's rows, and the gradients of whole weights."""
    # Ranks of one ring are neighbours, unless ranks with the same rows are.
    sizes = (parts.ring, parts.world // parts.ring)
    if parts.same_rows:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("ring", "across"))
    else:
        mesh = init_device_mesh("cpu", sizes[::-1], mesh_dim_names=("across", "ring"))
    ring, across = mesh["ring"], mesh["across"]
    whole: Any = tiny(parts.model, "ring_fp32", **parts.config)
    loaded: Any = whole
    if parts.loaded is not None:
        loaded = loaded_by_ranks(whole, distributed_config=distributed(**parts.loaded))
    model = parts.make(loaded.train(), ring, across)
    replica = 0 if parts.same_rows else across.get_local_rank()
    sharded = hf_ring_attn.shard(tokens(24, seed=replica), group=ring.get_group())
    with sharded:
        loss = model(**sharded.inputs).loss
    loss.backward()
    if parts.by_hand:
        sharded.reduce_gradients(loaded)
    found = gradients_of(loaded)
    whole_ones = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}
    return sharded.reduce(loss), whole_ones


def in_accelerate_s_loop(parts: Parts, interface: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The same in a loop that gives the split model to `Accelerator.prepare`.

    Args:
        interface: by which it shards a batch: "shard" or "maybe_context_parallel".
    """
    replicas = parts.world // parts.ring
    with launched(Mesh(dp=replicas, cp=parts.ring)):
        accelerator: Any = Accelerator()
        mesh = init_device_mesh("cpu", (replicas, parts.ring), mesh_dim_names=("across", "ring"))
        model: Any = tiny(parts.model, "ring_fp32", **parts.config)
        if parts.loaded is not None:
            model = loaded_by_ranks(model, distributed_config=distributed(**parts.loaded))
        model = parts.make(model.train(), mesh["ring"], mesh["across"])
        prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        batch = tokens(24, seed=mesh["across"].get_local_rank())
        if interface == "shard":
            sharded = hf_ring_attn.shard(batch)
            with sharded:
                loss = prepared(**sharded.inputs).loss
        else:
            buffers = list(batch.values())
            with accelerator.maybe_context_parallel(buffers=buffers, buffer_seq_dims=[1] * len(buffers)):
                loss = prepared(**batch).loss
        accelerator.backward(loss)
        found = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in gradients_of(model).items()}
        return Ring.of(mesh["ring"].get_group()).mean(loss.detach()), found


def alone(parts: Parts) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The loss of each replica's rows in this process, and the gradients of their mean."""
    model: Any = tiny(parts.model, None, **parts.config).train()
    replicas = 1 if parts.same_rows else parts.world // parts.ring
    losses = [model(**tokens(24, seed=replica), use_cache=False).loss for replica in range(replicas)]
    (torch.stack(losses).mean()).backward()
    return [x.detach() for x in losses], gradients_of(model)


# ---- ways to split a model -------------------------------------------------------------------------------------------


def _sharded(model: Any, mesh: Any) -> Any:
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    return model


def by_heads(model: Any, _ring: Any, across: Any) -> Any:
    """Tensor parallelism by torch; nothing averages the gradients of its parts."""
    names = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            plan = {name: ColwiseParallel() for name in names if hasattr(part, name)}
            last = "o_proj" if hasattr(part, "o_proj") else "down_proj"
            parallelize_module(part, across, {**plan, last: RowwiseParallel()})
    return model


def by_heads_and_words(model: Any, ring: Any, across: Any) -> Any:
    """The same, and each rank makes the logits of some words, which a hook on the head gathers."""
    return parallelize_module(
        by_heads(model, ring, across), across, {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    )


def experts_by_torch(model: Any, ring: Any, _across: Any) -> Any:
    """Torch's way to expert parallelism, as torchtitan has it: each rank holds some experts, and gets their tokens."""

    def shard_experts(_name: str, module: nn.Module, mesh: Any) -> None:
        for name, weight in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)])))

    for layer in model.model.layers:
        distribute_module(layer.mlp.experts, ring, shard_experts)
    return model


def by_fsdp2(model: Any, _ring: Any, _across: Any) -> Any:
    return _sharded(model, None)


def layers_by_fsdp2(model: Any, _ring: Any, _across: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer)
    return model


def by_heads_and_fsdp2(model: Any, ring: Any, across: Any) -> Any:
    return _sharded(by_heads(model, ring, across), ring)


def _divided(model: Any, mesh: Any, factor: float) -> Any:
    _sharded(model, mesh).set_gradient_divide_factor(factor)
    for layer in model.model.layers:
        layer.set_gradient_divide_factor(factor)
    return model


def summed_by_fsdp2(model: Any, ring: Any, _across: Any) -> Any:
    return _divided(model, ring, 1.0)


def divided_by_ranks(model: Any, ring: Any, _across: Any) -> Any:
    return _divided(model, ring, float(ring.size()))


def over_replicas_by_fsdp2(model: Any, _ring: Any, across: Any) -> Any:
    return _sharded(model, across)


def over_rings_by_fsdp2(model: Any, ring: Any, _across: Any) -> Any:
    return _sharded(model, ring)


def over_replicas_by_ddp(model: Any, _ring: Any, across: Any) -> Any:
    return DistributedDataParallel(model, process_group=across.get_group())


def by_hand(model: Any, ring: Any, _across: Any) -> Any:
    """One weight as a DTensor, which each rank reads as its own tensor."""
    linear = model.model.layers[0].mlp.down_proj
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), ring, [Replicate()]))
    linear.forward = lambda x: nn.functional.linear(x, linear.weight.to_local())
    return model


# ---- Trainer ---------------------------------------------------------------------------------------------------------


def trained(run: Run, model: str, loaded: dict[str, int] | None) -> tuple[Any, Tensor]:
    """What Trainer logged, and all weights afterwards. ``loaded``: by DistributedConfig; None: in one process."""
    mesh = Mesh() if loaded is None else Mesh(cp=dist.get_world_size())
    with launched(mesh), a_folder(None) as folder:
        made: Any = tiny(model, "sdpa" if loaded is None else "ring_fp32", output_router_logits=False)
        if loaded is not None:
            made = loaded_by_ranks(made, distributed_config=distributed(**loaded))
        trainer: Any = trainer_of(run, mesh, folder, made)
        trainer.train()
        weights = [x.detach() for x in trainer.model.parameters()]
        whole = [x.full_tensor() if isinstance(x, DTensor) else x for x in weights]
        return numbers(trainer.state.log_history), torch.cat([x.flatten() for x in whole])
