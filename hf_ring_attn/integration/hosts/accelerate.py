"""Patches of accelerate's `Accelerator`: preparing models and loaders for a ring, and its context-parallel context.

A plain loop makes its `Accelerator` before its model. So `decide_by_models` decides in `Accelerator.prepare` if a
stock config with cp_size > 1 means a ring; for another model it raises accelerate's deferred refusals.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor, nn

from ... import errors
from ...comm.groups import any_ring
from ...comm.ring import Ring, set_timeout
from ..context import introspect, model_record
from ..context.introspect import uses_ring
from ..context.mesh import RING, ring_enabled, ring_group
from ..gradients import fsdp, weight_parts
from ..log import warn
from ..model import liger, quantized
from ..patching.changes import Original, Patch, around
from ..patching.modules import Replaced
from . import one_reader, parallelism_config, schedulers, shared_memory, streams, uneven_batches
from .buffers import prepared, sharded_buffers
from .gather_for_metrics import gather_once_per_ring
from .parallelism_config import constructing_for, is_undecided
from .rings_as_processes import RingsAsProcesses


def ask_timeout(accelerator: Any, timeout: timedelta) -> None:
    """Stores a Trainer's ddp_timeout, since Trainer drops it on the CPU. The default of 30 minutes is ignored."""
    if accelerator.init_handler is None and timeout != timedelta(minutes=30):
        accelerator.init_handler = InitProcessGroupKwargs(timeout=timeout)


def give_whole_rows(accelerator: Any, models: Sequence[object]) -> None:
    """Notes models that a host calls with whole rows, outside of the ring: they may have any attention."""
    accelerator._models_of_whole_rows = models


def decide_by_models(accelerator: Any, *objects: object) -> None:
    """Decides from the models among ``objects`` if the accelerator's cp_size means a ring. Idempotent.

    A ring_fp32 model promotes a stock config to cp_backend "ring". The ring's group gets the requested timeout.

    Raises:
        OneProcess, ModelIsNoRing, TorchContextParallelRefused, UntestedParallelism, DispatchedBatches.
        UnsupportedModel: ranks of the ring hold other parts of a model.
    """
    config = accelerator.parallelism_config
    others = [*map(id, getattr(accelerator, "_models_of_whole_rows", ()))]
    models = {obj: uses_ring(obj) for obj in objects if isinstance(obj, nn.Module) and id(obj) not in others}
    for model in (model for model, is_ring in models.items() if not is_ring):
        if model_record.options_of(model) is not model_record.DEFAULT:
            used = ", ".join(map(repr, parallelism_config.implementations(model)))
            warn(_OPTIONS_UNUSED.format(introspect.name_of(model), used))
    if any(models.values()):
        if config is None:
            parallelism_config.refuse_one_process(accelerator)
        parallelism_config.turn_into_ring(config)
    if config is None or not models:
        return
    if ring_enabled(config):
        parallelism_config.refuse_host(accelerator)
        if any(type(loader).__name__ == "DataLoaderDispatcher" for loader in accelerator._dataloaders):
            raise errors.DispatchedBatches("a DataLoader was prepared with dispatch_batches=True")
        if (group := ring_group(accelerator)) is not None:
            set_timeout(group, None if accelerator.init_handler is None else accelerator.init_handler.timeout)
            for model in (model for model, is_ring in models.items() if is_ring):
                # DDP would compare weights of other layers, and wait or end with the words of gloo.
                if reasons := [*weight_parts.untested(model.modules(), Ring.of(group))]:
                    raise errors.UnsupportedModel(introspect.name_of(model), reasons)
    for model, is_ring in models.items():
        names = parallelism_config.implementations(model)
        if ring_enabled(config) and names and not is_ring:
            raise errors.ModelIsNoRing(type(model).__name__, names, config.cp_size)
        if is_undecided(config) and (reasons := parallelism_config.torch_refusals(config, accelerator)):
            raise errors.TorchContextParallelRefused(type(model).__name__, names, reasons)


_OPTIONS_UNUSED = (
    "configure() set options of {0}, but they have no effect, since its attention is {1}. Load it with "
    "attn_implementation='ring_fp32', or call model.set_attn_implementation('ring_fp32') before training."
)


def _state_init(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # also of each reference to the one state, often
        given: Any = signature.bind(self, *args, **kwargs).arguments.get("parallelism_config")
        if not is_undecided(given) or parallelism_config.decide(given):
            original(self, *args, **kwargs)
        else:
            # cp_enabled only triggers refusals of torch's context parallelism here; the mesh comes later.
            with Replaced(given, "cp_backend", RING):
                original(self, *args, **kwargs)
        if given is not None and given.cp_size > 1:
            parallelism_config.refuse_mismatch(given, self.num_processes)
            if not constructing_for:  # a Trainer steps its own scheduler
                schedulers.mark_process_counts(self)

    return __init__


@around
def _prepare_model(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Patches `prepare_model`, which `prepare` calls, too: DDP cannot wrap a model that FSDP2 shards already."""
    model, _, evaluates = (*args, *(None,) * 3)[:3]
    model = kwargs.get("model", model)
    decide_by_models(self, model)
    if not kwargs.get("evaluation_mode", evaluates) and _needs_no_ddp(self, model):
        args, kwargs["evaluation_mode"] = args[:2], True
    return _prepared(original, self, *args, **kwargs)


def _needs_no_ddp(accelerator: Any, model: nn.Module) -> bool:
    """Returns True for a model whose weights are DTensors and whose gradients all processes average without DDP.

    Raises:
        UnsupportedModel: some weights' gradients they do not.
    """
    if not (ring_enabled(accelerator.parallelism_config) and uses_ring(model)) or accelerator.is_fsdp2:
        return False
    if not any(map(introspect.is_dtensor, model.parameters())):
        return False
    if reasons := [*weight_parts.not_averaged_by_all(model, Ring.of(ring_group(accelerator)))]:
        raise errors.UnsupportedModel(introspect.name_of(model), reasons)
    return True


def _prepared(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls `prepare` or `prepare_model`; a program may call either."""
    decide_by_models(self, *args, *kwargs.values())
    if not ring_enabled(self.parallelism_config):
        return original(self, *args, **kwargs)
    fsdp.keep_float32(self)
    given = [obj for obj in (*args, *kwargs.values()) if isinstance(obj, nn.Module)]
    ties = [fsdp.ties(model) for model in given]
    with fsdp.wrapping_layers_it_has(given), shared_memory.keeping(given, self.device, self.is_fsdp2):
        result = original(self, *args, **kwargs)
    several = result if isinstance(result, (tuple, list)) else (result,)  # FSDP2's way returns a list
    modules = [obj for obj in several if isinstance(obj, nn.Module)]
    for obj in several:
        fsdp.check_optimizer(self, obj)
    models = [model for model in modules if uses_ring(model)]
    for model, before in zip(modules, ties, strict=False):
        fsdp.refuse_new_ties(model, before)
    prepared.update(models)
    for model in models:
        liger.prepare(model)
        quantized.gather_bytes(model)  # a program may generate before its first batch
    return result


_prepare = around(_prepared)


@around
def _prepare_data_loader(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    options, config = self.dataloader_config, self.parallelism_config
    given = args[0] if args else kwargs.get("data_loader")
    is_new = not getattr(given, "_is_accelerate_prepared", False)
    if ring_enabled(config) and is_new:
        _seed_workers_by_ring(given, config.cp_size)
    if not (ring_enabled(config) or (is_undecided(config) and not self._models)):
        return original(self, *args, **kwargs)
    if getattr(given, "in_order", True) is False:
        # Batches in the order in which workers finish them (dataloader_in_order) differ among the ranks of a ring.
        given.in_order = True  # type: ignore[union-attr]
    if options.dispatch_batches and ring_enabled(config) and is_new:
        one_reader.check(given, RingsAsProcesses(self).num_processes, options)
        with Replaced(options, "dispatch_batches", False):
            return one_reader.read_once(_as_of_several(original(self, *args, **kwargs), self))
    if options.dispatch_batches is not None:
        return _as_of_several(original(self, *args, **kwargs), self)
    # accelerate dispatches an IterableDataset by default, and its dispatcher ignores the "cp" axis.
    with Replaced(options, "dispatch_batches", False):
        prepared_loader = original(self, *args, **kwargs)
    return streams.deal_as_dispatched(_as_of_several(prepared_loader, self), given, self, options.split_batches)


def _as_of_several(loader: Any, accelerator: Any) -> Any:
    """Gives the batches of one ring the option that `join_uneven_inputs` sets for those of several processes.

    Warns of a loader of which several rings get unequal numbers.
    """
    uneven_batches.warn_of(loader, accelerator)
    batches: Any = getattr(loader, "batch_sampler", None)
    if hasattr(batches, "__dict__") and not hasattr(batches, "even_batches"):  # torch takes a list of batches, too
        batches.even_batches = accelerator.dataloader_config.even_batches
    return loader


def _seed_workers_by_ring(loader: Any, ring_size: int) -> None:
    """Gives the workers of a Trainer's loader the seeds of their ring: random masks must match on its ranks."""
    seeded: Any = getattr(loader, "worker_init_fn", None)
    if getattr(getattr(seeded, "func", None), "__name__", "") == "seed_worker" and "rank" in seeded.keywords:
        ring = seeded.keywords["rank"] // ring_size  # "cp" is the innermost axis of the mesh
        loader.worker_init_fn = functools.partial(seeded.func, *seeded.args, **{**seeded.keywords, "rank": ring})


@around
@contextmanager
def _maybe_context_parallel(
    original: Original, self: Any, buffers: list[Tensor] | None = None, buffer_seq_dims: list[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
) -> Iterator[None]:  # fmt: skip
    config = self.parallelism_config
    if is_undecided(config) and not self._models:
        raise errors.ModelNotPrepared()
    context = sharded_buffers if ring_enabled(config) else original
    with context(self, buffers, buffer_seq_dims, no_restore_buffers):
        yield


@around
def _gather_for_metrics(original: Original, self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
    if ring_enabled(self.parallelism_config):
        return gather_once_per_ring(self, input_data, use_gather_object)
    return original(self, input_data, use_gather_object)


@around
def _should_reduce_batch_size(original: Original, exception: Exception) -> Any:
    """Patches accelerate's search for a batch size: a rank that tries again hangs, since the others wait for it."""
    found = original(exception)
    if found and any_ring():
        raise errors.NoSmallerBatch(str(exception)) from exception
    return found


_STATE = (
    "(self, mixed_precision=, cpu=, dynamo_plugin=, deepspeed_plugin=, fsdp_plugin=, torch_tp_plugin=, "
    "megatron_lm_plugin=, parallelism_config=, _from_accelerator=, **kwargs)"
)
_LOADER = "(self, data_loader, device_placement=, slice_fn_for_dispatch=)"
_BUFFERS = "(self, buffers=, buffer_seq_dims=, no_restore_buffers=)"
_ACCELERATOR = "accelerate.accelerator:Accelerator."

PATCHES = (
    *parallelism_config.PATCHES,
    *schedulers.PATCHES,
    *streams.PATCHES,
    Patch("accelerate.state:AcceleratorState.__init__", _STATE, _state_init),
    Patch(_ACCELERATOR + "prepare", "(self, *args, device_placement=)", _prepare),
    Patch(_ACCELERATOR + "prepare_model", "(self, model, device_placement=, evaluation_mode=)", _prepare_model),
    Patch(_ACCELERATOR + "prepare_data_loader", _LOADER, _prepare_data_loader),
    Patch(_ACCELERATOR + "maybe_context_parallel", _BUFFERS, _maybe_context_parallel),
    Patch("accelerate.utils.memory:should_reduce_batch_size", "(exception)", _should_reduce_batch_size),
    Patch(_ACCELERATOR + "gather_for_metrics", "(self, input_data, use_gather_object=)", _gather_for_metrics),
)
"""The changes to accelerate."""
