"""Weights of which ranks hold parts: by FSDP2, by tensor, expert and pipeline parallelism, or by hand.

FSDP2 averages gradients over its mesh, and experts that get tokens by all-to-all see those of all ranks. Both are exact
in a ring. Ranks of tensor parallelism must hold the same tokens, so they must be in different rings.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from types import FrameType
from typing import Any

from torch import nn

from ...comm.ring import Ring
from ..context import introspect
from ..context.batch_context import BatchContext
from ..context.model_record import latest_record
from .fsdp_units import groups_of

UNTESTED = {
    "FullyShardedDataParallel": (
        "FSDP1 is not tested: use FSDP2 (fsdp_version: 2; Lightning: ModelParallelStrategy) or DDP"
    ),
    "DeepSpeedEngine": "DeepSpeed is not tested: use FSDP2 or DDP",
}
PIPELINE = "pipeline parallelism gives each rank other layers: load the model without pp_size, and use FSDP2 or DDP"
SAME_TOKENS = (
    "tensor parallelism needs the same tokens on its ranks, and these are ranks of one ring: give shard() a group "
    "across them, or load the model without tp_plan and tp_size, and use FSDP2 or DDP"
)
DISTRIBUTED = (
    "torch's distribute_module, or parallelize_module, split its {} over ranks of one ring, which hold other tokens: "
    "split it over ranks of different rings, load experts by DistributedConfig(fsdp_size=N, ep_size=N), or use FSDP2 "
    "or DDP alone"
)
NOT_AVERAGED = (
    "its weight {} is a DTensor of which nothing averages the gradient over the ring: call fully_shard on the model, "
    "over a mesh that holds all ranks of the ring"
)

NOT_BY_ALL = (
    "its weights are DTensors, which DDP cannot wrap, and nothing averages the gradient of {} over all processes: call "
    "fully_shard on the whole model, over a mesh of all processes, or on none of it"
)
OTHER_ROWS = (
    "accelerate gives each ring other rows, and ranks of tensor parallelism need the same: use a loop without "
    "accelerate, or load the model without tp_plan and tp_size"
)
SUMMED = (
    "its gradients are divided by {:g} (set_gradient_divide_factor), and the mean over a ring of {} needs at least "
    "that: leave the factor out, or multiply it by the size of the ring"
)


def unsupported(model: nn.Module, context: BatchContext) -> Iterator[str]:
    """Yields the wrappers in a model, or around this call, that are not exact."""
    if context.ring.size > 1:
        yield from untested(model.modules(), context.ring)


def untested(given: Iterable[nn.Module] = (), ring: Ring | None = None) -> Iterator[str]:
    """Yields what cannot be exact of some modules and of those around this call: a forward may shard a batch.

    Args:
        ring: its ranks; None: they are not known.
    """
    modules = [*given, *_called_around()]
    yield from (UNTESTED[kind] for kind in sorted({type(module).__name__ for module in modules} & UNTESTED.keys()))
    if any("_pp_stage" in module.__dict__ for module in modules):
        yield PIPELINE
    split = [module for module in modules if is_split(module)]
    if ring is not None:
        split = [module for module, ranks in _ranks_of_parts(split, modules) if len(ranks & ring.ranks()) > 1]
    reasons = (DISTRIBUTED.format(introspect.class_of(x)) if _is_distributed(x) else SAME_TOKENS for x in split)
    yield from islice(reasons, 1)


def is_split(module: nn.Module) -> bool:
    """Returns True for a model that transformers loaded in parts, and for a module of torch's `parallelize_module`."""
    return (module.__dict__.get("_tp_size") or 1) > 1 or _is_distributed(module)


def _is_distributed(module: nn.Module) -> bool:
    return "_distribute_module_applied" in module.__dict__


def _ranks_of_parts(split: Iterable[nn.Module], modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, set[int]]]:
    """Yields the ranks that hold parts of the weights of ``split`` in a forward, when FSDP2 has gathered its own."""
    axes_of_fsdp = {id(x): axes for x, axes in _sharded_by_fsdp(modules)}  # the first ones
    for module in split:
        meshes = [(x.device_mesh, axes_of_fsdp.get(id(x), 0)) for x in _dtensors(module.parameters(recurse=False))]
        if not _is_distributed(module):  # transformers' model
            mesh: Any = module.__dict__["_device_mesh"]
            meshes = [(mesh["tp"] if mesh.ndim > 1 else mesh, 0)]
        for mesh, first in meshes:
            yield from ((module, Ring.of(mesh.get_group(axis)).ranks()) for axis in range(first, mesh.ndim))


def not_averaged(model: nn.Module, context: BatchContext) -> Iterator[str]:
    """Yields the reason against a weight in parts whose gradient would not be the mean over the ring.

    Args:
        model: with its wrappers, which FSDP2 may shard in its place.
    """
    ring = context.ring
    if ring.size == 1 or "DTensor" not in latest_record(model).classes or not introspect.may_train(model):
        return
    sharded = [*_sharded_by_fsdp(model.modules())]
    averaged = {id(x) for x, axes in sharded if not axes or ring.ranks() <= introspect.mesh_ranks(x)}
    trained = {id(x): name for name, x in model.named_parameters() if x.requires_grad and introspect.is_dtensor(x)}
    across = introspect.split_across(model.parameters(), ring.ranks()) - {id(x) for x, _ in sharded}  # see `replicas`
    names = [name for number, name in trained.items() if number not in averaged | across]
    yield from (NOT_AVERAGED.format(name) for name in names[:1])
    factors = [factor for factor in _divide_factors(model.modules()) if factor < ring.size]
    yield from (SUMMED.format(factor, ring.size) for factor in factors[:1])


def _divide_factors(modules: Iterable[nn.Module]) -> Iterator[float]:
    """Yields what a program divides gradients by in the place of FSDP2, which takes the number of ranks."""
    groups = (group for module in modules if introspect.is_unit(module) for group in groups_of(module))
    return (group.gradient_divide_factor for group in groups if group.gradient_divide_factor is not None)


def not_averaged_by_all(model: nn.Module, ring: Ring) -> Iterator[str]:
    """Yields the reason against a model whose gradients are not averaged over all processes without DDP.

    Those of bare weights are averaged over their ring.
    """
    if any(map(is_split, model.modules())):
        yield OTHER_ROWS
        return
    every = Ring.of(None).ranks()
    has_one_ring = every <= ring.ranks()
    meshes = {id(x): introspect.mesh_ranks(x) for x, _ in _sharded_by_fsdp(model.modules())}
    trained = ((name, x) for name, x in model.named_parameters() if x.requires_grad)
    for name, x in trained:
        if not (every <= meshes.get(id(x), set()) or (has_one_ring and not introspect.is_dtensor(x))):
            yield NOT_BY_ALL.format(name)
            return


def sharding_of(model: nn.Module) -> tuple[Ring, ...]:
    """The groups of ranks that hold parts of a model's weights, along each axis of their meshes.

    All of these ranks run each of its forwards. Those of replicas do not.
    """
    return latest_record(model).once(_groups_of_parts, model)


def _groups_of_parts(model: nn.Module) -> tuple[Ring, ...]:
    found: dict[frozenset[int], Ring] = {}
    for x in _dtensors(latest_record(model).weights()):
        for axis, placement in enumerate(x.placements):
            if not placement.is_replicate() and x.device_mesh.size(axis) > 1:
                group = Ring.of(x.device_mesh.get_group(axis))
                found.setdefault(frozenset(group.ranks()), group)
    return tuple(found.values())


def _sharded_by_fsdp(modules: Iterable[nn.Module]) -> Iterator[tuple[Any, int]]:
    """Yields the weights of which FSDP2 has shards, and how many axes of their mesh are its own: 0 for a gathered one.

    They are read from their modules: a host that loads weights into a sharded model replaces them.
    """
    units = [module for module in modules if introspect.is_unit(module)]
    for weight in (weight for unit in units for group in groups_of(unit) for weight in group.fsdp_params):
        place = weight._module_info
        x = place.module._parameters[place.param_name]
        yield x, 0 if x is getattr(weight, "_unsharded_param", None) else weight.mesh_info.mesh.ndim


def _dtensors(weights: Iterable[Any]) -> list[Any]:
    return [x for x in weights if introspect.is_dtensor(x)]


def _called_around() -> Iterator[nn.Module]:
    """The modules in whose ``forward`` this is called."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(owner, nn.Module):
            yield owner
        frame = frame.f_back
