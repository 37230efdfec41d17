"""accelerate's `ParallelismConfig` and the backend "ring": what it means, when it is chosen, what it refuses.

The class is patched in place, not subclassed, so that a pickled TrainingArguments loads without this package. With
cp_backend "ring", ``cp_enabled`` is False: every special case for torch's context parallelism turns itself off, while
``cp_size`` keeps accelerate's mesh, its same batch for all ranks of a ring, and its counts of tokens and batches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ... import errors
from ...config import several_asked_for
from ..context.introspect import configs_of, uses_ring
from ..context.mesh import RING, ring_enabled
from ..patching.changes import Patch

constructing_for: list[nn.Module | None] = []
"""Models for which an `Accelerator` is constructed: see `deferring_cp_checks`."""


def undecided(config: Any) -> bool:
    """Whether a `ParallelismConfig` (or None) asks for context parallelism by torch, as every stock launch config does.

    It is promoted to a ring once a ring_fp32 model is seen.
    """
    return config is not None and config.cp_size > 1 and config.cp_backend != RING


def promote(config: Any) -> bool:
    """Turns a stock config with cp_size > 1 into one with cp_backend "ring", in place; call it for a ring_fp32 model.

    Args:
        config: a `ParallelismConfig`, or None.

    Returns:
        Whether it was changed: False for None, for cp_size=1 and for what is a ring already.

    Raises:
        UntestedParallelism: for tensor or sequence parallelism beside the ring.
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
    """Says for which model an `Accelerator` is constructed, if that is known already.

    Inside, a stock config with cp_size > 1 is promoted for a ring_fp32 model; for another model accelerate refuses at
    once what it always refuses. With None, and outside of this context, accelerate's refusals for torch's context
    parallelism wait until `settle` sees the model.
    """
    constructing_for.append(model)
    try:
        yield
    finally:
        constructing_for.pop()


def decide(config: Any) -> bool:
    """Promotes or refuses by the model of `deferring_cp_checks`; returns False if no model is known."""
    model = constructing_for[-1] if constructing_for else None
    if model is None:
        return False
    if uses_ring(model):
        promote(config)
    elif _is_ddp_x_cp(config):
        raise errors.TorchContextParallelRefused(type(model).__name__, implementations(model), torch_refusals(config))
    return True


def implementations(model: nn.Module) -> list[str]:
    """Every attn_implementation in ``model``, wrappers looked through; [] for a model that is not of transformers."""
    return sorted({str(config._attn_implementation) for config in configs_of(model)})


def torch_refusals(config: Any, accelerator: Any = None) -> list[str]:
    """What accelerate itself refuses about torch's context parallelism, and would have refused at construction."""
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


def refuse_host(accelerator: Any) -> None:
    """Refuses what a ring was never tested with, by name.

    Raises:
        UntestedParallelism: for DeepSpeed, FSDP1, Megatron-LM and XLA.
    """
    others = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "XLA": "XLA"}
    kind = accelerator.distributed_type.name
    if kind in others:
        raise errors.UntestedParallelism(others[kind], "use FSDP2 (fsdp_version: 2) or DDP")
    if is_fsdp1(accelerator):
        raise errors.UntestedParallelism("FSDP1", "set fsdp_version: 2 in the launch config, or use DDP")


def refuse_one_process(accelerator: Any) -> None:
    """Refuses a single process where a ring, or several processes, were asked for and no config arrived.

    Raises:
        OneProcess: with what was found in the environment.
    """
    if accelerator.num_processes > 1:
        return
    found = several_asked_for()
    if found is not None:
        raise errors.OneProcess(*found)


def is_fsdp1(accelerator: Any) -> bool:
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return accelerator.distributed_type.name == "FSDP" and plugin is not None and plugin.fsdp_version == 1


def _is_ddp_x_cp(config: Any) -> bool:
    """accelerate refuses cp_size with pure data parallelism; for a ring it is as good as any mesh."""
    sizes = (config.dp_shard_size, config.tp_size, config.cp_size > 1, config.dp_replicate_size > 1)
    return bool(sizes == (1, 1, True, True))


def _sizes(config: Any) -> dict[str, int]:
    names = ("dp_replicate", "dp_shard", "cp", "sp", "tp")  # the order of accelerate's mesh
    return {name: getattr(config, f"{name}_size") for name in names}


def _refuse_mismatch(config: Any, processes: int) -> None:
    if config.total_size != processes:
        raise errors.MeshMismatch(_sizes(config), processes)


# ---- the patches ---------------------------------------------------------------------------------------------------


def _post_init(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def __post_init__(self: Any) -> None:
        handler = self.cp_handler
        try:
            original(self)
            return
        except (ValueError, KeyError):
            # accelerate fills every field from its environment variables before it judges any of them.
            filled = None not in _sizes(self).values() and self.cp_backend is not None
            if not filled or not (self.cp_backend == RING or _is_ddp_x_cp(self)):
                raise
        is_ring, replicas = self.cp_backend == RING, self.dp_replicate_size
        if is_ring and self.cp_size > 1:
            if handler is not None:
                raise errors.TorchHandlerWithRing(handler)
            promote(self)
        self.cp_backend, self.cp_handler = "torch", handler
        self.dp_replicate_size = 1 if _is_ddp_x_cp(self) else replicas
        original(self)
        self.dp_replicate_size = self._sizes["dp_replicate"] = replicas
        if is_ring:
            self.cp_backend, self.cp_handler = RING, None

    return __post_init__


def _dimensions(original: property) -> property:
    """The names of mesh dimensions follow cp_size, not cp_enabled."""

    def names(self: Any) -> list[str]:
        dims: list[str] = original.__get__(self)
        return [*dims, "cp"] if ring_enabled(self) else dims

    return property(names, doc=original.__doc__)


def _cp_enabled(original: property) -> property:
    return property(lambda self: original.__get__(self) and self.cp_backend != RING, doc=original.__doc__)


def _build_device_mesh(original: Callable[..., Any]) -> Callable[..., Any]:
    def build_device_mesh(self: Any, device_type: str) -> Any:
        # Before torch, which says it without the sizes. PartialState is only read: making one starts process groups.
        state = sys.modules["accelerate.state"].PartialState._shared_state
        if self.cp_size > 1 and "num_processes" in state:
            _refuse_mismatch(self, state["num_processes"])
        return original(self, device_type)

    return build_device_mesh


def _refuse_cpu(config: Any, accelerator: Any) -> None:
    """Says of a known model on the CPU which attention it has: accelerate's own refusal names the device alone."""
    model = constructing_for[-1] if constructing_for else None
    if undecided(config) and model is not None and accelerator.distributed_type.name == "MULTI_CPU":
        reasons = torch_refusals(config, accelerator)
        raise errors.TorchContextParallelRefused(type(model).__name__, implementations(model), reasons)


def _validate_accelerator(original: Callable[..., None]) -> Callable[..., None]:
    def _validate_accelerator(self: Any, accelerator: Any) -> None:
        if self.cp_size > 1:
            _refuse_mismatch(self, accelerator.num_processes)
        waits = undecided(self) and not decide(self)
        if ring_enabled(self):
            refuse_host(accelerator)
        elif not (waits and torch_refusals(self, accelerator)):
            _refuse_cpu(self, accelerator)
            original(self, accelerator)

    return _validate_accelerator


CONFIG = "accelerate.parallelism_config:ParallelismConfig."
PATCHES = (
    Patch(CONFIG + "__post_init__", "(self)", _post_init),
    Patch(CONFIG + "ring_enabled", None, lambda _: property(ring_enabled, doc="Whether cp_backend is a ring.")),
    Patch(CONFIG + "cp_enabled", "(self)", _cp_enabled),
    Patch(CONFIG + "non_dp_dim_names", "(self)", _dimensions),
    Patch(CONFIG + "dp_shard_cp_dim_names", "(self)", _dimensions),
    Patch(CONFIG + "dp_cp_dim_names", "(self)", _dimensions),
    Patch(CONFIG + "build_device_mesh", "(self, device_type)", _build_device_mesh),
    Patch(CONFIG + "_validate_accelerator", "(self, accelerator)", _validate_accelerator),
)
