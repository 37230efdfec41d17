"""The backend "ring" of accelerate's `ParallelismConfig`: its meaning, its choice and its refusals.

The class is patched in place, so that a pickled TrainingArguments loads without this package. With cp_backend "ring",
``cp_enabled`` is False, which disables every special case for torch's context parallelism. ``cp_size`` still defines
the mesh, the same batch on all ranks of a ring, and the counts of tokens and batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ... import errors
from ...config import several_asked_for
from ..context.introspect import configs_of, uses_ring
from ..context.mesh import RING, ring_enabled
from ..patching.changes import Original, Patch, around

constructing_for: list[nn.Module | None] = []
"""Models whose `Accelerator` is being constructed: see `deferring_cp_checks`."""


def is_undecided(config: Any) -> bool:
    """Returns True for a stock config with cp_size > 1, which becomes a ring's for a ring_fp32 model."""
    return config is not None and config.cp_size > 1 and config.cp_backend != RING


def turn_into_ring(config: Any) -> bool:
    """Turns a `ParallelismConfig` with cp_size > 1 into a ring's, in place. Returns True if it was changed.

    Raises:
        UntestedParallelism: tensor or sequence parallelism together with the ring.
    """
    if config is None:
        return False
    if config.sp_size > 1:
        raise errors.UntestedParallelism(
            f"sequence parallelism by DeepSpeed (sp_size={config.sp_size})", "set sp_size=1, and cp_size instead"
        )
    if config.cp_size == 1:
        return False
    if config.tp_size > 1:
        raise errors.UntestedParallelism(f"tensor parallelism (tp_size={config.tp_size})", "set tp_size=1")
    if config.cp_backend == RING:
        return False
    config.cp_backend, config.cp_handler = RING, None
    return True


@contextmanager
def deferring_cp_checks(model: nn.Module | None = None) -> Iterator[None]:
    """Names the model for which an `Accelerator` is constructed, so that `decide` knows it at once.

    With None, and outside this context, `decide_by_models` decides when it gets the model.
    """
    constructing_for.append(model)
    try:
        yield
    finally:
        constructing_for.pop()


def decide(config: Any, accelerator: Any = None) -> bool:
    """Promotes or refuses by the model of `deferring_cp_checks`; returns False if no model is known.

    accelerate's errors name only device or mesh; this one adds the model's attention.
    """
    model = constructing_for[-1] if constructing_for else None
    if model is None:
        return False
    if uses_ring(model):
        turn_into_ring(config)
    elif reasons := torch_refusals(config, accelerator):
        raise errors.TorchContextParallelRefused(type(model).__name__, implementations(model), reasons)
    return True


def implementations(model: nn.Module) -> list[str]:
    """Every attn_implementation in ``model``; [] for a model not of transformers."""
    return sorted({str(config._attn_implementation) for config in configs_of(model)})


def torch_refusals(config: Any, accelerator: Any = None) -> list[str]:
    """The refusals of torch's context parallelism that accelerate would raise at construction."""
    reasons = []
    if _is_ddp_x_cp(config):
        reasons.append("cp_size > 1 with dp_replicate_size > 1 needs dp_shard_size > 1 too")
    if accelerator is not None:
        kind = accelerator.distributed_type.name
        if is_fsdp1(accelerator):
            reasons.append("cp_size > 1 needs FSDP2, but the fsdp_plugin is FSDP1")
        elif kind == "MULTI_CPU":
            reasons.append("ParallelismConfig is not compatible with distributed_type MULTI_CPU")
        elif kind.startswith("MULTI_"):
            reasons.append(f"cp_size > 1 needs an fsdp_plugin (FSDP2), but distributed_type is {kind}")
    return reasons


def untested_host(accelerator: Any) -> str | None:
    """The name of what trains in place of DDP and FSDP2: DeepSpeed, FSDP1, Megatron-LM or XLA; None if those do."""
    others = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "XLA": "XLA"}
    return "FSDP1" if is_fsdp1(accelerator) else others.get(accelerator.distributed_type.name)


def refuse_host(accelerator: Any) -> None:
    """Raises UntestedParallelism for DeepSpeed, FSDP1, Megatron-LM and XLA."""
    name = untested_host(accelerator)
    if name == "FSDP1":
        raise errors.UntestedParallelism(name, "set fsdp_version: 2 in the launch config, or use DDP")
    if name is not None:
        raise errors.UntestedParallelism(name, "use FSDP2 (fsdp_version: 2) or DDP")


def refuse_one_process(accelerator: Any) -> None:
    """Raises OneProcess in a single process if the environment asks for a ring or for several processes."""
    found = several_asked_for() if accelerator.num_processes == 1 else None
    if found is not None:
        raise errors.OneProcess(*found)


def is_fsdp1(accelerator: Any) -> bool:
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return accelerator.distributed_type.name == "FSDP" and plugin is not None and plugin.fsdp_version == 1


def _is_ddp_x_cp(config: Any) -> bool:
    """Returns True for cp_size with pure data parallelism: accelerate refuses it, a ring supports it."""
    sizes = (config.dp_shard_size, config.tp_size, config.cp_size > 1, config.dp_replicate_size > 1)
    return bool(sizes == (1, 1, True, True))


def _sizes(config: Any) -> dict[str, int]:
    names = ("dp_replicate", "dp_shard", "cp", "sp", "tp")  # the order of accelerate's mesh
    return {name: getattr(config, f"{name}_size") for name in names}


def refuse_mismatch(config: Any, processes: int) -> None:
    """Raises MeshMismatch before torch or accelerate, whose errors lack the sizes."""
    if config.total_size != processes:
        raise errors.MeshMismatch(_sizes(config), processes)


@around
def _post_init(original: Original, self: Any) -> None:
    handler = self.cp_handler
    try:
        original(self)
        return
    except (ValueError, KeyError):
        # accelerate fills every field from environment variables before it checks any.
        filled = None not in _sizes(self).values() and self.cp_backend is not None
        if not filled or not (self.cp_backend == RING or _is_ddp_x_cp(self)):
            raise
    is_ring, replicas = self.cp_backend == RING, self.dp_replicate_size
    if is_ring and self.cp_size > 1:
        if handler is not None:
            raise errors.TorchHandlerWithRing(handler)
        turn_into_ring(self)
    self.cp_backend, self.cp_handler = "torch", handler
    self.dp_replicate_size = 1 if _is_ddp_x_cp(self) else replicas
    original(self)
    self.dp_replicate_size = self._sizes["dp_replicate"] = replicas
    if is_ring:
        self.cp_backend, self.cp_handler = RING, None


def _dimensions(original: property) -> property:
    """Names mesh dimensions by cp_size, not by cp_enabled."""

    def names(self: Any) -> list[str]:
        dims: list[str] = original.__get__(self)
        return [*dims, "cp"] if ring_enabled(self) else dims

    return property(names, doc=original.__doc__)


def _cp_enabled(original: property) -> property:
    return property(lambda self: original.__get__(self) and self.cp_backend != RING, doc=original.__doc__)


@around
def _validate_accelerator(original: Original, self: Any, accelerator: Any) -> None:
    waits = is_undecided(self) and not decide(self, accelerator)
    if ring_enabled(self):
        refuse_host(accelerator)
    elif not (waits and torch_refusals(self, accelerator)):
        original(self, accelerator)


CONFIG = "accelerate.parallelism_config:ParallelismConfig."
PATCHES = (
    Patch(CONFIG + "__post_init__", "(self)", _post_init),
    Patch(CONFIG + "cp_enabled", "(self)", _cp_enabled),
    Patch(CONFIG + "non_dp_dim_names", "(self)", _dimensions),
    Patch(CONFIG + "dp_shard_cp_dim_names", "(self)", _dimensions),
    Patch(CONFIG + "dp_cp_dim_names", "(self)", _dimensions),
    Patch(CONFIG + "_validate_accelerator", "(self, accelerator)", _validate_accelerator),
)
