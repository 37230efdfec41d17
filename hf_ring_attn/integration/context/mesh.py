"""The ring of accelerate's mesh: its process group, and if a config asks for one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate.state import AcceleratorState

from ...comm.ring import LOCAL, Ring, world_size
from ...config import launched_processes
from ..log import warn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

RING = "ring"
"""The cp_backend of a ring."""


def ring_enabled(config: Any) -> bool:
    """Returns True if a `ParallelismConfig` (or None) asks for a ring of more than one rank."""
    return config is not None and config.cp_size > 1 and config.cp_backend == RING


def ring_group(accelerator: Any = None) -> ProcessGroup | None:
    """The process group of the "cp" axis of accelerate's mesh; None if there is no such axis.

    Args:
        accelerator: None: the `Accelerator` of this process, if there is one; none is created.
    """
    if accelerator is not None:
        config, mesh = accelerator.parallelism_config, accelerator.torch_device_mesh
    else:
        config, mesh = _shared_state("parallelism_config"), _shared_state("device_mesh")
    if config is None or mesh is None or config.cp_size == 1:
        return None
    group: ProcessGroup = mesh["cp"].get_group()
    return group


def ring_of_process() -> Ring:
    """The ring of this process's `Accelerator`; a ring of one where none is enabled."""
    return Ring.of(ring_group()) if ring_enabled(parallelism_of_process()) else Ring(LOCAL)


def parallelism_of_process() -> Any:
    """The `ParallelismConfig` of this process's `Accelerator`; None without one."""
    return _shared_state("parallelism_config")


def mixed_precision() -> str:
    """The mixed precision of accelerate for a prepared model's forward; "no" without it."""
    return str(_shared_state("_mixed_precision") or "no")


def _shared_state(name: str) -> Any:
    """A value of the `Accelerator` of this process; None if there is none."""
    return AcceleratorState._shared_state.get(name)


def find_ring(group: ProcessGroup | DeviceMesh | Ring | None) -> Ring:
    """The ring over ``group``, maybe a mesh of one axis, or a ring itself; if None, over accelerate's "cp" axis, else
    the world, else a ring of one."""
    if isinstance(group, Ring):
        return group
    if launched_processes() > world_size() == 1:
        warn(_NOT_INITIALIZED.format(launched_processes()))
    return Ring.of(ring_group() if group is None else group)


def warn_without_ring() -> None:
    """Warns, once, that a ring_fp32 model trains whole rows on several processes."""
    group, processes = ring_group(), world_size()
    if group is not None:
        warn(_NOT_SHARED.format(group.size()), everywhere=False)
    elif processes > 1:
        warn(_WITHOUT_RING.format(processes), everywhere=False)
    elif launched_processes() > 1:
        warn(_NOT_INITIALIZED.format(launched_processes()))


_NOT_INITIALIZED = (
    "a launcher started {0} processes (WORLD_SIZE={0}), but this one has no process group, so there is no ring: each "
    "process computes whole rows by itself. Call torch.distributed.init_process_group(), or make an Accelerator, "
    "before hf_ring_attn.shard(batch)."
)
_NOT_SHARED = (
    "a ring_fp32 model trains in a ring of {0}, but its batch is not sharded: each rank computes whole rows. "
    "Losses and gradients are right, but no memory is saved, and accelerator.gather returns each row {0} times: "
    "compute metrics with gather_for_metrics. Shard each batch with "
    "accelerator.maybe_context_parallel(buffers=[...], buffer_seq_dims=[...]) around the forward, or with sharded = "
    "hf_ring_attn.shard(batch) and model(**sharded.inputs) inside `with sharded`."
)
_WITHOUT_RING = (
    "a ring_fp32 model trains on {0} processes without a ring: each computes whole rows, as in plain data parallelism. "
    "The numbers are right, but a ring would save memory. For a ring, give accelerate launch a config with "
    "parallelism_config_cp_size (the option alone has no effect), or Accelerator a "
    'ParallelismConfig(cp_size={0}, cp_backend="ring"), or shard each batch with hf_ring_attn.shard(batch).'
)
