"""Sharding a batch by name, and what follows from it: the loss of the whole batch, and whole sequences back."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ... import errors
from ...arguments import check_type
from ...attention.op import attentions
from ...comm.ring import Ring
from ...config import RingConfig
from ...kernels import in_score_mod
from ...layers.collectives import gather_sequence
from ...sharding.layout import Layout, note_balanced
from ...traffic import interruption_guard
from ..attention import masks
from ..context import batch_context, introspect, model_record, ring_random, shared_kv
from ..context.batch_context import BatchContext
from ..context.cut import cut
from ..context.mesh import find_ring
from ..context.shared_kv import SharedKV
from ..context.tracked_input import TrackedInputs, track
from ..context.trial_step import TrialStep
from ..context.whole_batch import tokens_of, whole_rows
from ..model import agreement, call_inputs, fsdp, replicas
from ..model.chunked import lazy_heads
from ..selfcheck import check, row
from . import compare
from .announce import announce

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(eq=False)
class Sharded:
    """A batch of which this rank holds its share. See `shard`.

    Attributes:
        inputs: what to pass to the model: ``model(**sharded.inputs)``.
        ring: the ring that shares the batch; layout: who holds which token.
    """

    inputs: dict[str, Any]
    context: BatchContext
    _context: AbstractContextManager[None] | None = field(default=None, repr=False)

    @property
    def ring(self) -> Ring:
        return self.context.ring

    @property
    def layout(self) -> Layout:
        return self.context.layout

    @property
    def positions(self) -> Tensor:
        """[T] int64: the place in the row of each token that this rank holds, in the order of ``inputs`` (with images
        and sound: in the order in which the text model gets them); places from S on are padding. It is right in every
        layout; `hf_ring_attn.positions` describes the zigzag alone."""
        return self.layout.positions()

    def __enter__(self) -> Sharded:
        self._context = ring_context(self.context)
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        context, self._context = self._context, None
        assert context is not None, "left a context that was not entered"
        context.__exit__(*error)

    def reduce(self, loss: Tensor) -> Tensor:
        """The loss of the whole batch from each rank's ``out.loss``: their mean, detached, the same on every rank."""
        self._refuse_unused("reduce")
        return replicas.mean_loss(loss.detach(), self.ring)

    def gather(self, x: Tensor) -> Tensor:
        """Whole sequences in their original order from every rank's share.

        Args:
            x: [B, T, ...], such as ``out.logits``.

        Returns:
            [B, S, ...] without the ring's padding, the same on every rank. Differentiable: a loss that every rank
            computes on it gives the right gradient once gradients are averaged over ranks. Memory: S x ... on each.
        """
        if x.dim() < 2 or x.shape[1] != self.layout.local_length:
            raise errors.BadShape("x", tuple(x.shape), f"it must be [B, {self.layout.local_length}, ...]")
        return gather_sequence(x, self.ring, self.layout)

    def reduce_gradients(self, model: nn.Module) -> None:
        """Averages gradients over the ring, in float32, for a model that neither DDP nor FSDP wraps.

        Call it after backward, before gradients are clipped and before optimizer.step(). Gradients that were scaled
        may be averaged, if every rank scaled them by the same factor.

        Raises:
            GradientsChanged: weights changed since the forward, or ranks scaled a gradient by different factors. One
                weight is looked at, the smallest; what clips other weights alone is not noticed.
        """
        self._refuse_unused("reduce_gradients")
        if self.ring.size > 1:
            replicas.average_gradients(model, self.context)

    def _refuse_unused(self, method: str) -> None:
        if self.ring.size > 1 and not self.context.log.entered:
            raise errors.NotEntered(f"sharded.{method}() was called")


def shard(
    batch: Mapping[str, Any],
    group: ProcessGroup | None = None,
    *,
    config: RingConfig | None = None,
    model: nn.Module | None = None,
) -> Sharded:
    """This rank's share of a batch, and the context in which a model computes it.

    >>> sharded = hf_ring_attn.shard(batch)
    >>> with sharded:
    ...     out = model(**sharded.inputs)
    >>> out.loss.backward()                       # DDP or FSDP averages gradients; else sharded.reduce_gradients(model)
    >>> loss = sharded.reduce(out.loss)           # of the whole batch

    Every entry of shape [B, S, ...] is padded to a multiple of 2 * W and cut to this rank's T tokens. Documents are
    read from the restarts of position_ids, if there is no attention_mask; cu_seq_lens_q must tell the same ones. With
    RingConfig(layout="balanced"), where a zigzag gives some rank much more work than others, ranks hold other chunks
    (`Sharded.positions` shows which). A batch with images or sound keeps the zigzag and is cut later, where the text
    model inside begins: towers see all on every rank. In its context ranks draw the same random numbers, but for that
    text model. With labels, shift_labels are made from the whole row before it is cut, and num_items_in_batch is the
    batch's own or the number of labelled tokens of the whole batch, over W, so that out.loss is this rank's share times
    W; a Python number, unless a ``model`` is given that is not under FSDP2 (which would round a tensor).

    Args:
        batch: what the model would get, whole: input_ids or inputs_embeds, and any of labels, shift_labels,
            attention_mask [B, S], position_ids [B, S], num_items_in_batch (of all the batches that a step adds up) ...
            The same on every rank of the ring; it is not changed.
        group: the process group of the ring; None: accelerate's "cp" axis, else the world.
        config: options; None: those set on the model (`configure`), else the defaults.
        model: the model that will run; only needed where it is compiled as a whole, to prepare it without hooks.

    Raises:
        BadBatch, UnevenLength: on every rank, if any rank's batch cannot be sharded exactly.
        RanksDiffer: on every rank, if the ranks hold different batches.
        LeftHalfway: an error ended an earlier attention of this ring half-way.
    """
    sharded = shard_for(batch, group, config, model)
    counted = track(sharded.inputs, call_inputs.COUNTED)  # not in trainers, which count by themselves
    sharded.context.state(TrackedInputs).update(counted)
    return sharded


def shard_for(
    batch: Mapping[str, Any],
    group: ProcessGroup | None,
    config: RingConfig | None,
    model: nn.Module | None,
    whole_loss: bool = False,
    step: TrialStep | None = None,
) -> Sharded:
    """`shard`, for hosts.

    Args:
        whole_loss: the caller keeps labels from the model, and computes the loss by `loss.gathered`.
        step: how the caller computes its loss, which the self-check tries; None: the model's own loss.
    """
    check_type("batch", batch, Mapping, "a dict of the model's inputs")
    check_type("model", model, (nn.Module, type(None)), "a torch.nn.Module, or None")
    check_type("config", config, (RingConfig, type(None)), "a RingConfig, or None")
    ring = find_ring(group)
    interruption_guard(ring).check()  # what is compared below would be taken for the rest of that attention
    if config is None:
        options = RingConfig() if model is None else model_record.options_of(model)
    else:
        options = config
    refusal: errors.Refused | None = None
    facts = compare.empty_facts(options, batch)
    device = torch.device("cpu")
    try:
        tokens = tokens_of(batch)
        device = tokens.device
        facts.update(rows=tokens.shape[0], tokens=tokens.shape[1])
        if ring.size > 1:
            facts.update(compare.inputs_of(batch, tokens))
        whole = whole_rows(batch, tokens, Layout(tokens.shape[1], ring.size, ring.rank), options)
        facts["layout"] = whole.layout.owners
    except errors.Refused as error:
        refusal = error
    why = None if refusal is None else str(refusal)
    try:
        (compiled,) = ring.agree(
            facts, ring.small_device(device), compare.todo(batch), why, [shared_kv.compiled_here()]
        )
    except errors.RefusedElsewhere as elsewhere:
        raise elsewhere from refusal
    if refusal is not None:
        raise refusal
    if compiled:
        shared_kv.go_by_bits()

    sharded = Sharded(*cut(batch, whole, ring, options, model is None or fsdp.is_sharded(model)))
    context = sharded.context
    context.keeps_labels = whole_loss
    if step is not None:
        vars(context.state(TrialStep)).update(vars(step))
    context.learn(explicit=config is not None)
    context.state(TrackedInputs).update(track(sharded.inputs, (*call_inputs.PLACES, *call_inputs.TOKENS)))
    batch_context.LIVE.add(context)
    if whole.layout.owners:
        note_balanced(context, ring.size)
    if context.text is not None and ring.size > 1:
        seeds = ring.numbers(ring_random.drawn(), ring.small_device(device), "told its seed")
        context.text.random = ring_random.RingRandomness(seeds[0], ring.rank)
    context.state(row.SelfCheckState).sample = row.Sample.of(batch, whole, context)
    if model is not None:
        _admit(model, context)
    return sharded


_NAME_IT = "name the model that is compiled: hf_ring_attn.shard(batch, model=model)"


def _admit(model: nn.Module, context: BatchContext) -> None:
    """Everything that is done with an outermost model before it runs in a ring."""
    record = agreement.admit(model, context)
    replicas.compare(model, context)  # before the self-check, which would find a difference without its cause
    check.check(model, context, record)
    masks.prepare_masks(model, context)


@contextmanager
def ring_context(context: BatchContext) -> Iterator[None]:
    """The context of a sharded batch: makes its ring active, and binds every model at its first call inside."""

    handles: list[RemovableHandle] = []
    watched: list[call_inputs.Undo] = []
    lazy = ExitStack()

    # Not compiled: a model that is compiled in place, and not named to `shard`, would trace them.
    @torch.compiler.disable(reason=_NAME_IT)  # type: ignore[untyped-decorator]
    def before(module: nn.Module, _inputs: Any) -> None:
        # A module without weights is no model: the activation that a layer makes anew for each call, a loss. Nor is
        # what a score_mod is made of.
        known = id(module) in context.log.seen or in_score_mod()
        if not known and next(module.parameters(), None) is not None:
            _admit(module, context)
            replicas.note_trained(module, context)
            watched.extend(call_inputs.watch(module, context, inside=True))
            watched.append(_note_failure(module, context))
            lazy.enter_context(lazy_heads(module))
            if _holds_compiled(module):  # which would trace the hook, and compile anew for that of each batch
                handles.pop().remove()
                handles.append(module.register_forward_hook(after, always_call=True))

    @torch.compiler.disable(reason=_NAME_IT)  # type: ignore[untyped-decorator]
    def after(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        handles.pop().remove()
        watch()

    def watch() -> None:
        handles.append(torch.nn.modules.module.register_module_forward_pre_hook(before))

    replicas.warn_if_not_reduced()
    context.log.entered = True
    if not context.log.seen:  # a model that was bound by name needs no hooks
        watch()
    for model in context.log.models:
        replicas.note_trained(model, context)
        watched.extend(call_inputs.watch(model, context))
        watched.append(_note_failure(model, context))
        lazy.enter_context(lazy_heads(model))
    random = None if context.text is None else context.text.random
    if random is not None:
        random.enter()
    try:
        with batch_context.activate(context):
            yield
    finally:
        if random is not None:
            random.leave()
        context.state(SharedKV).clear()
        for handle in handles:
            handle.remove()
        lazy.close()
        for undo in watched:
            undo()
    announce(context)


def _note_failure(model: nn.Module, context: BatchContext) -> call_inputs.Undo:
    """Notes a forward of ``model`` that an error ends, though the program may catch it. Returns what undoes it."""

    @torch.compiler.disable(reason=_NAME_IT)  # type: ignore[untyped-decorator]
    def after(_model: nn.Module, _args: Any, output: Any) -> None:
        error = sys.exc_info()[1] if output is None else None  # a hook that is always called has no other sign
        # Refusals are those of all ranks, and so are mostly errors before the first attention: bad arguments.
        alone = attentions() > context.log.before or isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if error is not None and alone and not isinstance(error, errors.Refused):
            interruption_guard(context.ring).abandon()

    if "_compiled_call_impl" in model.__dict__ or context.ring.size == 1 or not introspect.uses_ring(model):
        return lambda: None
    return model.register_forward_hook(after, always_call=True, prepend=True).remove


def _holds_compiled(model: nn.Module) -> bool:
    """Whether torch.compile was called on ``model`` or on a part of it."""
    return any(
        module.__dict__.get("_compiled_call_impl") is not None or "_orig_mod" in module._modules
        for module in model.modules()
    )
