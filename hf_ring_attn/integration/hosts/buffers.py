"""accelerate's own loop, `with accelerator.maybe_context_parallel(buffers, ...)`, on a ring.

That interface shards unnamed tensors in place. When a prepared model is called inside the context, its arguments are
matched with the buffers by identity, which gives their names, and the whole rows go through `batch.shard`.

A call may pass num_items_in_batch: the count of labels, or count / cp_size, by which a rank divides under torch's
context parallelism. Sums over several batches are ambiguous (two batches of n labels on two ranks give n again), and
are refused; `shard` defines the number as the whole count.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ... import errors
from ...comm.ring import Ring
from ...config import RingConfig
from ...sharding.layout import Layout
from ..batch import shard
from ..context import batch_context, model_record
from ..context.introspect import bound_by_name
from ..context.mesh import ring_group
from ..context.tracked_input import TrackedInput, version_of
from ..context.whole_batch import IGNORED
from ..patching.compiler import uncompiled
from ..patching.modules import Arguments, attach

prepared: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""ring_fp32 models returned by `Accelerator.prepare`."""


def shard_buffers_in_place(
    buffers: Sequence[Tensor], dims: Sequence[int], layout: Layout, no_restore: Collection[Tensor] = ()
) -> Callable[[], None]:
    """Shards each buffer in place: the same tensor object, with new memory for this rank's zigzag shard.

    Other views of the old memory do not change.

    Args:
        buffers: tensors without gradient, each ``layout.length`` long along its sequence dimension, which ``dims`` has.
        no_restore: the buffers that stay sharded.

    Returns:
        A function that restores the buffers.

    Raises:
        UnevenLength: the length is no multiple of 2 * W. BadBuffers: buffers that do not fit together.
    """
    if layout.padded != layout.length:
        raise errors.UnevenLength(layout.length, layout.world_size, pads=False)
    for index, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not -buffer.dim() <= dim < buffer.dim() or buffer.shape[dim] != layout.length:
            raise errors.BadBuffers(
                f"buffer {index} of shape {tuple(buffer.shape)} with sequence dimension {dim}",
                f"all buffers must have the {layout.length} tokens of buffer 0 along theirs",
            )
        if buffer.requires_grad:
            raise errors.BadBuffers(f"buffer {index} that requires a gradient", "it cannot be sharded in place")
    stay = {id(buffer) for buffer in no_restore}
    wholes: dict[int, tuple[Tensor, Tensor]] = {}

    def restore(stay: Collection[int] = stay) -> None:
        with torch.no_grad():
            for key, (buffer, whole) in wholes.items():
                if key not in stay:
                    buffer.set_(whole)  # type: ignore[call-overload]

    try:
        with torch.no_grad():
            for buffer, dim in zip(buffers, dims, strict=True):
                if id(buffer) not in wholes:  # a tensor may be given twice, such as input_ids as labels
                    wholes[id(buffer)] = buffer, buffer.detach()
                    buffer.set_(layout.shard(buffer, dim))  # type: ignore[call-overload]
    except BaseException:  # memory that ran out, perhaps
        restore(())
        raise
    return restore


@contextmanager
def sharded_buffers(
    accelerator: Any,
    buffers: Sequence[Tensor] | None = None,
    dims: Sequence[int] | None = None,
    no_restore: Collection[Tensor] | None = None,
) -> Iterator[None]:
    """Implements `Accelerator.maybe_context_parallel` for a ring: shards buffers, runs prepared models in the ring.

    Raises:
        UnevenLength, BadBuffers, UnclearCount (an ambiguous num_items_in_batch), and the errors of `batch.shard`.
    """
    buffers, dims, no_restore = list(buffers or ()), list(dims or ()), no_restore or set()
    if not buffers or len(buffers) != len(dims):
        raise errors.BadBuffers(
            f"{len(buffers)} buffers and {len(dims)} sequence dimensions",
            "it needs the tensors of the batch, input_ids among them, and one buffer_seq_dims entry for each",
        )
    if not {id(buffer) for buffer in no_restore} <= {id(buffer) for buffer in buffers}:
        raise errors.BadBuffers("no_restore_buffers that are no buffers", "they must be some of the buffers")
    if any(map(_is_left, buffers)):
        raise errors.BadBuffers("buffers that an earlier maybe_context_parallel left sharded", _WHOLE)
    ring = Ring.of(ring_group(accelerator))
    first, dim = buffers[0], dims[0]
    length = first.shape[dim] if -first.dim() <= dim < first.dim() else 0
    layout = Layout(length, ring.size, ring.rank)
    wholes = {id(buffer): buffer.detach() for buffer in buffers}
    models = {id(part): part for model in prepared for part in _whole_models(model)}.values()
    with ExitStack() as stack:
        stack.callback(_leave_sharded, no_restore, models)
        stack.callback(shard_buffers_in_place(buffers, dims, layout, no_restore))
        stack.enter_context(batch_context.activate(_Unnamed(ring, layout, RingConfig())))
        calls = _Calls(accelerator, wholes, length)
        stack.callback(calls.leave, None)
        for module in models:
            stack.enter_context(module.register_forward_pre_hook(calls.before, with_kwargs=True, prepend=True))
            stack.enter_context(module.register_forward_hook(calls.after, always_call=True))
        yield


_left: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Buffers that stay sharded (no_restore_buffers), with their version counters: one that is written since is another."""
_WHOLE = "it must be whole rows: a new batch, or buffers that are not among no_restore_buffers, which stay sharded"


def _is_left(x: Any) -> bool:
    return any(TrackedInput(buffer, version).is_(x) for buffer, version in _left.items())


def _leave_sharded(buffers: Collection[Tensor], models: Collection[nn.Module]) -> None:
    """Notes the buffers that stay sharded: outside of the context a model would take their tokens for whole rows."""
    _left.update((buffer, version_of(buffer)) for buffer in buffers)
    for module in models if buffers else ():
        attach(module, "buffers left sharded", _refuse_left)


@uncompiled("hf_ring_attn refuses buffers that stayed sharded")
def _refuse_left(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if batch_context.current() is None and any(map(_is_left, (*args, *kwargs.values()))):
        raise errors.BadBuffers("a model call with buffers that stayed sharded, after their context", _WHOLE)


class _Unnamed(batch_context.BatchContext):
    """The context while no prepared model runs; it refuses masks, which would take a shard for a whole row."""

    def admit(self) -> NoReturn:
        raise errors.BadBuffers(
            "a call of a model whose arguments are not among its buffers, or that accelerate did not prepare",
            "it must be a model that accelerator.prepare returned, called with the buffers themselves (input_ids=...)",
        )


class _Calls:
    """Hooks of prepared models: they shard the whole rows by name, and activate the ring during each call."""

    def __init__(self, accelerator: Any, wholes: dict[int, Tensor], length: int) -> None:
        self.accelerator, self.wholes, self.length = accelerator, wholes, length
        self.running: tuple[nn.Module, shard.Sharded] | None = None
        self.whole_count: tuple[Any, int] | None = None

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Arguments | None:
        # A submodule of the running model; or this hook was removed, by a garbage collection while torch calls hooks.
        if self.running is not None or kwargs is None:
            return None
        named = bound_by_name(self.accelerator.unwrap_model(module).forward, args, kwargs)
        if not any(id(value) in self.wholes for value in named.values()):
            return None
        whole = {name: self.wholes.get(id(value), value) for name, value in named.items()}
        tokens = whole.get("input_ids", whole.get("inputs_embeds"))
        if not isinstance(tokens, Tensor) or tokens.dim() < 2 or tokens.shape[1] != self.length:
            raise errors.BadBuffers(
                f"a model call whose tokens are no buffer of {self.length} tokens",
                "input_ids (or inputs_embeds) must be one of the buffers itself, not a copy of it",
            )
        count, times = whole.get("num_items_in_batch"), 1
        if count is not None:
            labels, times = self._reading(whole, float(count))
            whole["num_items_in_batch"] = count * times
        # A program's loss may read the buffers, which were sharded before the documents were known.
        config = replace(model_record.options_of(module), layout="zigzag")
        sharded = shard.shard(whole, ring_group(self.accelerator), config=config, model=module)
        if not times:  # `shard` has already refused numbers that differ between ranks
            raise errors.UnclearCount(count, labels, sharded.ring.size, "it is neither")
        self.whole_count = (count, labels) if count is not None and times == 1 else None
        if self.whole_count and _adds_up(module):
            raise errors.UnclearCount(count, labels, sharded.ring.size, _SEVERAL)
        known = {*_before_all(), *module._forward_pre_hooks}
        sharded.__enter__()
        self.running = module, sharded
        return _call_added(module, known, {**named, **sharded.inputs})

    def after(self, module: nn.Module, _args: Any, output: Any) -> None:
        if self.running is not None and self.running[0] is module:
            ring = self.running[1].ring
            self.leave(output)
            loss = getattr(output, "loss", None)
            if self.whole_count and isinstance(loss, Tensor) and loss.requires_grad:
                loss.register_hook(functools.partial(self._refuse_multiplied, *self.whole_count, ring.size))

    def leave(self, output: Any) -> None:
        """Leaves the ring after a call; ``output`` is None if it failed."""
        if self.running is not None:
            (_, sharded), self.running = self.running, None
            sharded.__exit__(RuntimeError if output is None else None, None, None)

    def _reading(self, whole: dict[str, Any], count: float) -> tuple[int, int]:
        """Returns the number of labels, and the factor from ``count`` to the whole count; 0: ambiguous."""
        labels, shifted = whole.get("labels"), whole.get("shift_labels")
        if shifted is None and labels is not None:
            shifted = labels[:, 1:]
        size = self.accelerator.parallelism_config.cp_size
        counts = {int((x != IGNORED).sum()) for x in (labels, shifted) if x is not None}
        if not counts:  # no loss uses it
            return 0, 1
        is_whole = any(math.isclose(count, n, rel_tol=1e-6) for n in counts)
        is_share = any(math.isclose(count, n / size, rel_tol=1e-6) or count == n // size for n in counts)
        return max(counts), 0 if is_whole == is_share else 1 if is_whole else size

    def _refuse_multiplied(self, count: Any, labels: int, size: int, gradient: Tensor) -> None:
        """Refuses a loss multiplied by the number of processes: for a whole count, only torch's own CP needs that."""
        accelerator = self.accelerator
        scale = 1.0 if accelerator.scaler is None else accelerator.scaler.get_scale()
        if float(gradient) * accelerator.gradient_accumulation_steps / scale == accelerator.num_processes:
            raise errors.UnclearCount(count, labels, size, _MULTIPLIED)


def _before_all() -> dict[int, Any]:
    return torch.nn.modules.module._global_forward_pre_hooks


def _call_added(module: nn.Module, known: Collection[int], given: dict[str, Any]) -> Arguments:
    """Calls the hooks that are new before a module, whose call runs already: torch would begin with the next call."""
    args: tuple[Any, ...] = ()
    for number, hook in [*_before_all().items(), *module._forward_pre_hooks.items()]:
        if number not in known and number in module._forward_pre_hooks_with_kwargs:
            args, given = hook(module, args, given) or (args, given)
        elif number not in known:
            hook(module, args)
    return args, given


_SEVERAL = "this step adds up several batches"
_MULTIPLIED = "the loss is multiplied by accelerator.num_processes"
_written: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""Version counters of a model's weights at its last call with the whole count."""


def _adds_up(model: nn.Module) -> bool:
    """Returns True if ``model`` has gradients of an earlier call with a count, and made no step since."""
    if not torch.is_grad_enabled():
        return False
    trained = [x for x in model.parameters() if x.requires_grad]
    writes, before = sum(x._version for x in trained), _written.get(model)
    _written[model] = writes
    return before == writes and any(x.grad is not None for x in trained)


def _whole_models(model: nn.Module) -> Iterator[nn.Module]:
    """The model and its wrapped models: a program may call any of them."""
    part: nn.Module | None = model
    while part is not None:
        yield part
        if "_orig_mod" in part._modules:  # compiled: hooks inside would be traced
            return
        inner = (part._modules.get(name) for name in ("module", "base_model", "model"))
        part = next((module for module in inner if module is not None), None)
