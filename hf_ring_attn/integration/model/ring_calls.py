"""Calls of a model in a ring, from within: what a program need not pass, and the value of the loss that it gets.

`shard` makes inputs that a program for one process does not know of: places, labels that were shifted on the whole row,
their count. A call that leaves them out gets them here.

The loss that the model returns has the value of the whole batch's on every rank, and the gradient of this rank's part,
times W. So any function of it is that of one process (a clamp, a ratio to a running mean, a log line), and so is the
mean of its gradients over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...comm.ring import Ring
from ..context import batch_context, introspect
from ..context.attended_layers import AttendedLayers
from ..context.batch_context import BatchContext
from ..context.introspect import TOKENS
from ..context.local_batch import CACHE, MadeInputs
from ..context.whole_batch import LOSS_INPUTS
from ..gradients import ddp, loss_gradients
from ..gradients.backward_end import BackwardEnd
from ..losses import loss_function
from ..losses.changed_labels import shifted_anew
from ..losses.chunked import lazy_heads
from ..patching.compiler import uncompiled
from ..patching.modules import Arguments, Replaced
from .call_inputs import FilledIn, is_number


@contextmanager
def in_ring(model: nn.Module, running: bool = False, as_one: bool = False) -> Iterator[None]:
    """Completes the inputs and the loss of calls of ``model`` inside. Its head makes logits only if they are read
    (`chunked`).

    Args:
        running: the model is running already.
        as_one: treat the model like one that is compiled as a whole: the loss that it returns gets the batch's value,
            and no loss inside it does.
    """
    loss_gradients.finish()  # of the batch before, if no optimizer stepped since
    # A compiler would trace hooks of a part of what it compiles, and compile anew for those of each batch.
    compiled_whole = introspect.compiled_part(model)
    whole = model if compiled_whole is None and as_one else compiled_whole
    owners = introspect.loss_models_of(model)  # several in a module of a program's own
    with lazy_heads(model, running), ExitStack() as handles:
        for called in owners if whole is None else [whole] * bool(owners):
            # The call of a model that is running has begun, so only hooks see its loss.
            compiled = not running and introspect.compiled_call(called) is not None
            traced = whole is not None or introspect.is_compiled(called)
            is_called = running and called is model
            if compiled:
                handles.enter_context(_around_compiled(called))
            else:
                wrapper = ddp.wrapper_of(called, model) if whole is None else None
                _hook(called, wrapper, traced, is_called, handles)
        context = batch_context.current()
        # If a forward changes its labels, the self-check's whole row must have the loss of the changed ones, as in one
        # process. A compiler that traces the loss hides them in the ring's row, so the two differ.
        if as_one and context is not None and context.ring.size == 1:
            for owner in owners:
                handles.enter_context(loss_function.Computed().watch(owner))
        yield


def _hook(model: nn.Module, wrapper: nn.Module | None, traced: bool, is_called: bool, hooks: ExitStack) -> None:
    """Hooks a model, until ``hooks`` closes.

    Args:
        wrapper: the DDP around it. traced: a compiler traces its forward. is_called: now.
    """

    @uncompiled(_BY_HOST)
    def note(_model: nn.Module, _args: Any) -> None:
        context = batch_context.current()
        if context is not None and context.ring.size > 1:
            ddp.note_call(wrapper, context.ring)

    def uncalled(*call: Any) -> Any:
        if wrapper is not None:
            note(model, None)
        return _uncalled(*call)

    computed = loss_function.Computed(is_called, uncalled)

    @uncompiled(_BY_HOST)
    def before(model: nn.Module, args: Any, given: dict[str, Any] | None = None) -> Any:
        if given is None:  # removed while torch calls a model's hooks, by a garbage collection that ends the context
            return None
        computed.begin()
        return _complete(model, args, given) if traced else _fill_in(model, args, given)

    @uncompiled(_BY_HOST)
    def after(_model: nn.Module, _args: Any, output: Any) -> Any:
        try:
            return _after(output, computed)
        finally:
            computed.end()

    hooks.enter_context(model.register_forward_pre_hook(before, with_kwargs=True))
    hooks.enter_context(model.register_forward_hook(after, prepend=True))  # before FSDP2's, which hooks the backward
    if not traced:
        hooks.enter_context(computed.watch(model))
    if wrapper is not None:
        hooks.enter_context(model.register_forward_pre_hook(note))


def _around_compiled(model: nn.Module) -> Replaced:
    compiled = introspect.compiled_call(model)

    def call(*args: Any, **given: Any) -> Any:
        args, given = _complete(model, args, given)
        return _after(compiled(*args, **given), loss_function.Computed())

    return Replaced(model, "_compiled_call_impl", call)


_BY_HOST = "hf_ring_attn completes the inputs of a model's call, and its loss"


# ---- inputs ----------------------------------------------------------------------------------------------------------


@uncompiled(_BY_HOST)
def _fill_in(model: nn.Module, args: Any, given: dict[str, Any]) -> Arguments | None:
    """Adds the inputs that `shard` made and this call leaves out."""
    context = batch_context.current()
    made = None if context is None else context.state(MadeInputs)
    if context is None or not made:
        return None
    alone = context.ring.size == 1  # then the rows are whole
    missing = [name for name in made if given.get(name) is None and (name == CACHE or not alone)]
    names = introspect.parameters_of(model, made) if missing else []  # slow, and most calls have all inputs, by name
    every = introspect.by_name(names, args, given)
    wanted = [n for n in missing if n in names and every.get(n) is None and _fits(n, every, made, context)]
    context.state(FilledIn)[model] = set(wanted)  # also if there are none: an earlier call may have got some
    if not wanted:
        return None
    return args, {**given, **{name: made[name] for name in wanted}}


def _complete(model: nn.Module, args: Any, given: dict[str, Any]) -> Arguments:
    """The inputs of a compiled model, whose loss function cannot be watched: with what belongs to its labels."""
    args, given = _fill_in(model, args, given) or (args, given)
    takes_all = {*introspect.parameters_of(model, LOSS_INPUTS)}.issuperset(LOSS_INPUTS)
    return args, shifted_anew(model, getattr(model, "loss_function", None), (), given) if takes_all else given


def _fits(name: str, given: Mapping[str, Any], made: MadeInputs, context: BatchContext) -> bool:
    """Returns True if a call with these inputs is of the batch, as far as this input is concerned."""
    if name in LOSS_INPUTS:  # of other labels the shifted ones would be others, too
        labels = given.get("labels")
        return labels is not None and made.labels.is_(labels) is True
    tokens = next((given[one] for one in TOKENS if given.get(one) is not None), None)
    return isinstance(tokens, Tensor) and tokens.shape[:2] == context.local_shape


# ---- the loss --------------------------------------------------------------------------------------------------------


class _OfBatch(torch.autograd.Function):
    """A rank's loss with the mean over the ring as its value.

    Args:
        end: what comes at the end of its backward.
        layers: ranks compare them, and the gradient; None: they do not. factor: see `loss_function`.
    """

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, ring: Ring, end: BackwardEnd, layers: AttendedLayers | None,
        factor: float | Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.ring, ctx.end, ctx.layers, ctx.factor = ring, end, layers, factor
        return ring.mean(loss).clone()  # a program may change it in place, which a view refuses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        ctx.end.expect()
        if ctx.layers is not None:
            loss_gradients.start(gradient, ctx.ring, ctx.factor, ctx.layers)
        return gradient, None, None, None, None


@uncompiled(_BY_HOST)
def _after(output: Any, computed: loss_function.Computed) -> Any:
    """Gives the loss of a model's output the value of the batch's. ``computed``: the losses inside its forward."""
    context = batch_context.current()
    if context is None:
        return output
    if isinstance(output, dict):
        if _is_loss(output.get("loss")):
            output["loss"] = with_value_of_batch(output["loss"], context, computed)
        return output
    if isinstance(output, tuple) and output and _is_loss(output[0]):
        every = (with_value_of_batch(output[0], context, computed), *output[1:])
        return output._make(every) if hasattr(output, "_make") else every
    return with_value_of_batch(output, context, computed) if _is_loss(output) else output


@uncompiled(_BY_HOST)
def _uncalled(loss_function: Callable[..., Any], args: Any, given: dict[str, Any]) -> Any:
    """Computes the loss of a ``forward`` that a program called itself, past the hooks, as that of a call."""
    context, loss = batch_context.current(), loss_function(*args, **given)
    return with_value_of_batch(loss, context) if context is not None and _is_loss(loss) else loss


def with_value_of_batch(loss: Tensor, context: BatchContext, computed: loss_function.Computed | None = None) -> Tensor:
    """Gives a rank's part of a loss the value of the batch's, unless it has that already."""
    if context.ring.size == 1 or context.whole_head or context.gathers_logits or not context.facts.has_labels:
        return loss
    layers = context.state(AttendedLayers) if context.config.self_check else None
    factor = computed.factor_of(loss) if computed is not None and layers is not None else None
    found: Tensor = _OfBatch.apply(loss, context.ring, context.state(BackwardEnd), layers, factor)  # type: ignore[no-untyped-call]
    return found


def _is_loss(x: Any) -> bool:
    return is_number(x) and not introspect.is_dtensor(x)
