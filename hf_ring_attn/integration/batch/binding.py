"""The models that a sharded batch is bound to: admitted at their first call in its context, watched until it ends."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ... import errors
from ...attention.op import attentions
from ...comm.first_order import inside_transforms
from ...kernels import in_score_mod
from ...traffic import interruption_guard
from ..attention import masks
from ..context import batch_context, introspect, model_record
from ..context.batch_context import BatchContext
from ..context.introspect import TOKENS
from ..context.model_record import ModelRecord, Visits
from ..context.references import alive
from ..context.shared_kv import SharedKV
from ..context.trial_step import TrialStep
from ..gradients import ddp, fsdp, replicas
from ..gradients.same_weights import compare_weights
from ..memory import embedded_inputs, offloading
from ..model import agreement, call_inputs, liger, positions
from ..model.recurrent_ops import RUNNING
from ..model.ring_calls import in_ring
from ..model.whole_layers import AROUND
from ..patching.compiler import uncompiled
from ..selfcheck.suspected import check_suspected
from .announce import announce

STOPS_ALL = (errors.Refused, errors.HostMemoryFull)
"""Errors that all ranks raise at one place: no message is under way."""


_NAME_IT = "name the model that is compiled: hf_ring_attn.shard(batch, model=model)"


def admit(model: nn.Module, context: BatchContext, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Admits an outermost model before it runs in a ring. ``meanwhile``: see `agreement.admit`."""
    if context.ring.size > 1 and inside_transforms():
        raise errors.UnsupportedVmap(f"{introspect.name_of(model)} was called in a ring")
    record = agreement.admit(model, context, meanwhile)
    ddp.note_trained(model, context)
    fsdp.note_trained(model, context)
    compare_weights(model, context)  # before the self-check, which would find a difference without its cause
    check_suspected(model, context, record)
    positions.warn_of_rows_beyond(model, record, context)
    offloading.reserve(model, record, context)
    masks.prepare_masks(model, context)
    context.log.models.add(model)  # last: one that was refused is refused again
    context.log.admitted = True


@contextmanager
def ring_context(context: BatchContext) -> Iterator[None]:
    """Activates the ring of a sharded batch, and binds every model at its first call inside."""
    replicas.warn_if_not_reduced()
    context.log.entered = True
    with ExitStack() as undos:
        Binding(context, undos).start()
        undos.callback(context.state(SharedKV).clear)
        # After Ctrl-C torch calls no hook that would do the following.
        undos.callback(RUNNING.clear)
        undos.callback(AROUND.clear)
        text = context.text
        if text is not None:
            undos.callback(setattr, text, "running", False)
        if text is not None and text.random is not None:
            text.random.enter()
            undos.callback(text.random.leave)
        with batch_context.activate(context):
            yield
    announce(context)


class _Unregistered(list[weakref.ref[nn.Module]]):
    """Modules that a model calls, though it does not contain them: found in its first forward in a ring, in order."""

    searched = False


class _TextParts(dict[int, bool]):
    """Answers of `_reads_text` by the id of a part, for as long as the model has these parts.

    Finding out visits all modules of a part, and checkpointing calls each part by itself, in each backward.
    """


class Binding:
    """The hooks that bind models to a batch. Nothing that it holds refers to it, so the batch is freed by counting.

    Args:
        undos: removes the hooks at the end of the batch's context.
    """

    def __init__(self, context: BatchContext, undos: ExitStack) -> None:
        self.context, self.undos = context, undos
        self.running: nn.Module | None = None
        self.handle: RemovableHandle | None = None
        """The hook before every module, while there is one."""
        self.leaving = ExitStack()
        """Removes the hooks that the model that runs has for this call."""
        self.watched: weakref.WeakKeyDictionary[nn.Module, ExitStack] = weakref.WeakKeyDictionary()
        """Removes the hooks that each model has until the end of the batch's context."""

    def start(self) -> None:
        """Watches the models that are known, and every module between their calls: it may be another model."""
        context = self.context
        self.undos.callback(self.end)
        self.watch_all()
        for model in context.log.models:
            compare_weights(model, context)  # it may train only since `shard`
            self.watch(model)

    def watch_all(self) -> None:
        """Hooks every module, to find the models."""
        _silence_compiled_modules()
        self.handle = torch.nn.modules.module.register_module_forward_pre_hook(self.before)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Removes the hook before every module while inside: a model compiled in place would trace it."""
        handle, self.handle = self.handle, None
        if handle is not None:
            handle.remove()
        try:
            yield
        finally:
            if handle is not None and batch_context.is_active(self.context):
                self.watch_all()

    def end(self) -> None:
        """Removes the hooks."""
        if self.handle is not None:
            self.handle.remove()
        self.leaving.close()

    def bind(self, model: nn.Module, running: bool = True) -> None:
        """Admits a model that is being called, and watches it. ``running``: by a call, not by its ``forward``."""
        admit(model, self.context, partial(replicas.note_trained, model, self.context))
        self.watch(model, running)
        self.context.state(Visits).clear()

    def watch(self, model: nn.Module, running: bool = False) -> None:
        """Watches a model's calls until the end of the batch's context."""
        undos = self.watched[model] = self.undos.enter_context(ExitStack())
        undos.enter_context(in_ring(model, running))
        call_inputs.watch(model, self.context, undos, self.paused, inside=running)
        _note_failure(model, self.context, undos)
        embedded_inputs.free_embeddings(model, running, undos)

    def forget_parts(self, model: nn.Module) -> None:
        """Unbinds parts of a model that the program called before the model itself, such as its embeddings."""
        log = self.context.log
        inner = {id(module) for module in introspect.modules_of(model)} if [*log.models] else set()
        for part in [part for part in log.models if id(introspect.inside(part)) in inner]:
            log.models.remove(part)
            self.watched.pop(part, ExitStack()).close()

    # Not compiled: a model that is compiled in place, and not given to `shard`, would trace them.
    @uncompiled(_NAME_IT)
    def before(self, module: nn.Module, _inputs: Any) -> None:
        """The hook before every module."""
        if batch_context.current() is not self.context:  # another batch's, or the self-check's
            return
        record = self._record_of(module)
        known = record is not None
        # Not a model: modules without weights (a loss, an activation made in a call), and parts of a score_mod.
        if (known and self.running is not None) or in_score_mod() or next(module.parameters(), None) is None:
            return
        if self.running is not None:
            self.bind(module)
            model_record.latest_record(self.running).state(_Unregistered).append(weakref.ref(module))
            return
        if not known and self._is_no_model(module):
            return
        if self._is_before_images_model(module):
            replicas.note_trained(module, self.context)
            return
        self.running, self.context.log.ran = module, True
        try:
            searched = known or self._bind_running(module)
        except BaseException:
            self.running = None
            raise
        # The hook before every module (32 layers have 400) is removed once all are known, and from a compiled model,
        # which would trace it and compile again for each batch.
        compiled = introspect.compiled_part(module) is not None or model_record.latest_record(module).compiled
        if self.handle is not None and (searched or compiled):
            self.handle.remove()
            self.handle = None
        if self._is_text_part(module, record or self._record_of(module)):
            call_inputs.watch(module, self.context, self.leaving, self.paused, inside=True)
        self.leaving.enter_context(module.register_forward_hook(self.after, always_call=True))

    def _record_of(self, module: nn.Module) -> ModelRecord | None:
        """The record of the admitted model which ``module`` is, in wrappers or not, or of which it is a part."""
        inner = introspect.inside(module)
        records = (model_record.latest_record(model) for model in self.context.log.models)
        return next((record for record in records if record.holds(inner)), None)

    def _is_text_part(self, module: nn.Module, record: ModelRecord | None) -> bool:
        """Returns True for a text model in a known model of this record. A call of it alone may have other inputs."""
        inner, context = introspect.inside(module), self.context
        if context.text is not None or any(introspect.inside(model) is inner for model in context.log.models):
            return False
        if record is None:
            return _reads_text(inner)
        parts = record.state(_TextParts)
        if id(inner) not in parts:
            parts[id(inner)] = _reads_text(inner)
        return parts[id(inner)]

    def _is_no_model(self, module: nn.Module) -> bool:
        """Returns True for a module around a named model, and for one beside a host's, whose own loss was tried."""
        log = self.context.log
        if any(part is model for part in introspect.modules_of(module) for model in log.named):
            return True
        is_hosts = self.context.state(TrialStep).loss is not None
        return bool([*log.models]) and is_hosts and not introspect.uses_ring(module)

    def _is_before_images_model(self, module: nn.Module) -> bool:
        """Returns True for embeddings or a tower that are called before any model: of whole rows, on every rank."""
        context = self.context
        is_first = not [*context.log.models] and context.before_text and not context.whole_head
        return is_first and not _reads_text(module)

    def _bind_running(self, module: nn.Module) -> bool:
        """Admits a model that begins to run. Returns True if all modules that it calls are known."""
        model = _forward_around(module) or module
        liger.refuse_running(model, self.context)
        self.forget_parts(model)
        self.bind(model, running=model is module)
        others = model_record.latest_record(model).state(_Unregistered)
        for other in alive(others):
            self.bind(other)
        searched, others.searched = others.searched, True
        return searched

    @uncompiled(_NAME_IT)
    def after(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        """The hook after a model's call: the next may be another model's."""
        self.running = None
        self.leaving.close()
        if self.handle is None and batch_context.is_active(self.context):  # a hook of the program may have left it
            self.watch_all()


def _reads_text(module: nn.Module) -> bool:
    """Returns True if the transformers model that ``module`` is, or holds, reads text."""
    model = next((one for one in introspect.modules_of(module) if isinstance(one, PreTrainedModel)), None)
    names = set() if model is None else {*introspect.parameters_of(model)}
    return "position_ids" in names and not names.isdisjoint(TOKENS)


def _forward_around(module: nn.Module) -> nn.Module | None:
    """The model whose ``forward`` a program called itself, past the hook before it, if that calls ``module``."""
    found, frame = None, sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        name = frame.f_code.co_name
        owner = frame.f_locals.get("self") if name in ("forward", "_call_impl") else None
        if name == "_call_impl" and owner is found:  # a call, inside of which the batch is sharded
            found = None
        elif isinstance(owner, nn.Module) and owner is not module and "loss_type" in vars(owner):
            found = owner if any(part is module for part in introspect.modules_of(owner)) else found
    return found


@cache
def _silence_compiled_modules() -> None:
    """Stops torch's warning that a module of torch.compile has the hook, too: `Binding.before` expects that.

    Once a process: each change of the filters makes Python show other warnings again.
    """
    warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")


def _note_failure(model: nn.Module, context: BatchContext, hooks: ExitStack) -> None:
    """Hooks ``model`` to note a forward that an error ends, though the program may catch it, until ``hooks`` closes."""

    @uncompiled(_NAME_IT)
    def after(_model: nn.Module, _args: Any, output: Any) -> None:
        error = sys.exc_info()[1] if output is None else None  # the only sign in a hook that is always called
        # All ranks raise refusals, and mostly errors before the first attention (bad arguments), too.
        alone = attentions() > context.log.before or isinstance(error, (MemoryError, torch.OutOfMemoryError))
        # Checkpointing ends the forward that it runs again by an exception, on every rank.
        ended = isinstance(error, STOPS_ALL) or type(error).__module__ == "torch.utils.checkpoint"
        if error is not None and alone and not ended:
            interruption_guard(context.ring).abandon()

    if introspect.compiled_call(model) is not None or context.ring.size == 1:
        return
    if model_record.latest_record(model).uses_ring():
        hooks.enter_context(model.register_forward_hook(after, always_call=True, prepend=True))
