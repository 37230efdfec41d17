"""The loss without logits: in a sharded batch with labels a model's head returns lazy logits.

The head's own forward is replaced while a batch runs. So wrappers of the head (adapters, FSDP2) work as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint

from ... import errors
from ..context import batch_context
from ..context.attended_layers import AttendedLayers
from ..context.batch_context import BatchContext
from ..context.introspect import is_compiled, is_unit, loss_model_of, name_of, unwrapped
from ..context.local_batch import MadeInputs
from ..context.model_record import latest_record
from ..gradients.backward_end import BackwardEnd
from ..patching.modules import OwnForward, Replaced
from .head import ChunkedLoss, Head
from .lazy_logits import LazyLogits
from .local_logits import LocalLogits, held
from .origins import Origin
from .shifts import TargetsOfBatch
from .whole_counts import BatchCounts


@contextmanager
def lazy_heads(model: nn.Module, running: bool = False) -> Iterator[None]:
    """Lets the head of ``model`` return lazy logits inside, if the batch that runs asks for them.

    Args:
        running: the model is running already.
    """
    owner = loss_model_of(model)
    # A compiled part would trace what differs from call to call.
    parts = [*unwrapped(model), *(latest_record(model).modules() if latest_record(model).compiled else [])]
    compiled = [part for part in parts if is_compiled(part)]
    heads = [] if owner is None else heads_of(owner)
    heads = [head for head in heads if not isinstance(vars(head).get("forward"), _LazyForward)]
    heads = [head for head in heads if not any(head in part.modules() for part in compiled)]
    with ExitStack() as handles:
        for head in heads:
            handles.enter_context(Replaced(head, "forward", _LazyForward(head)))
        if heads:
            handles.enter_context(owner.register_forward_pre_hook(_begin))
            if running and owner is model:
                _begin(owner, ())
            handles.enter_context(owner.register_forward_hook(_check, prepend=True))  # before FSDP2 frees weights
        yield


class _LazyForward(OwnForward):
    """A head's forward while a batch runs."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given, context = args[0] if len(args) == 1 and not kwargs else None, batch_context.current()
        hidden = held(given)
        if context is None or not _wants(context) or not isinstance(hidden, Tensor) or not hidden.numel():
            return self.forward(*args, **kwargs)
        state = context.state(ChunkedLoss)
        # What calls the head alone may be computed again after the batch, where it gives ordinary logits.
        is_alone = not state.runs and _is_checkpointed()
        why = "a checkpoint calls its head" if is_alone else next(reasons(self.module), "")
        if not why:
            head = Head(self.module, self.forward, hidden, state)
            why = next(head.reasons(), "")
        if why:
            state.why = why
            return self.forward(given)
        if isinstance(given, LocalLogits):  # the program calls the head
            head.origin = given.origin if hidden.requires_grad else _follow(head, given.origin.anew())
        state.losses, state.ring = 0, context.ring if context.whole_head else None
        return LazyLogits.of(head, (), (*hidden.shape[:-1], head.vocabulary), head.dtype)


def _is_checkpointed() -> bool:
    """Returns True inside a checkpoint's forward or recompute."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__module__


def _wants(context: BatchContext) -> bool:
    return context.config.loss in ("auto", "chunked") and context.facts.has_labels and not context.gathers_logits


def _begin(_owner: nn.Module, _args: Any) -> None:
    if (context := batch_context.current()) is not None:
        context.state(ChunkedLoss).runs = True


def _check(owner: nn.Module, _args: Any, output: Any) -> None:
    """Makes the logits after a forward that computed no loss of them, while the head has its weights."""
    context = batch_context.current()
    if context is None:
        return
    state = context.state(ChunkedLoss)
    state.runs, state.ring = False, None  # from now on a rank may compute a loss alone
    if not _wants(context):
        return
    logits = output.get("logits") if isinstance(output, Mapping) else None
    if state.losses:
        return
    if isinstance(logits, LazyLogits) and output.get("loss") is None:
        state.why = state.why or "the model got no labels"
        with logits.head.unsharded():
            logits.tensor("forward")
    elif state.smoothing and logits is not None:
        raise errors.LossNotSharded("label smoothing (label_smoothing_factor)", gathers=True)
    elif context.config.loss == "chunked" and logits is not None:
        raise errors.LossNotChunked(name_of(owner), state.why or "it computes no cross entropy of them")


def heads_of(owner: Any) -> list[nn.Module]:
    """The modules that may make the logits: the head, and its trained copies (PEFT's modules_to_save)."""
    head = owner.get_output_embeddings() if hasattr(owner, "get_output_embeddings") else None
    copies = getattr(head, "modules_to_save", None)
    if head is None or not isinstance(copies, nn.ModuleDict):
        return [] if head is None else [head]
    return [head.original_module, *copies.values()]


def reasons(head: nn.Module) -> Iterator[str]:
    """Yields the reasons why a head must not be called on a part of the tokens at a time."""
    if not isinstance(getattr(head, "base_layer", head), nn.Linear):  # else an adapter around a linear layer
        yield f"its head is {type(head).__name__}, no linear layer"
    for part in head.modules():
        if isinstance(part, _DropoutNd) and part.training and part.p > 0:
            yield "its head has dropout, which draws other numbers in each call"
        if part is not head and is_unit(part):
            yield "its head has parts that FSDP2 shards each by itself"
    if functional.cross_entropy.__module__ != functional.__name__:  # it may be given to a kernel, which sees no values
        yield f"torch.nn.functional.cross_entropy is {functional.cross_entropy.__module__}'s"


def _follow(head: Head, origin: Origin) -> Origin:
    """Follows what a program computes from a head's logits."""
    head.origin = origin
    origin.begin_at(next((x for x in (head.hidden, *head.weights) if x.requires_grad), head.hidden))
    return origin


def _is_of_tokens(x: Tensor, context: BatchContext) -> bool:
    rows, tokens = context.local_shape
    return x.shape[:2] == (rows, tokens) or (x.dim() == 2 and tokens > 1 and len(x) == rows * tokens)


def hand_out(output: Any, context: BatchContext, without_loss: bool = False, is_last: bool = True) -> Any:
    """Marks what a model returns for each token as that of one rank's tokens (`local_logits`).

    Args:
        output: of these, [B, T, ...] or [B * T, ...] are marked.
        without_loss: they are logits of which the model computed no loss. is_last: no others follow in a tuple. Of
            all layers' states, ranks always compare the last: a message for each layer would cost 10 ms a step.
    """
    if context.whole_head:
        return output
    if isinstance(output, MutableMapping):
        alone = output.get("loss") is None
        for name, x in list(output.items()):
            if (marked := hand_out(x, context, alone and name == "logits")) is not x:
                output[name] = marked
    if type(output) in (tuple, list):
        return type(output)(hand_out(x, context, is_last=at == len(output)) for at, x in enumerate(output, start=1))
    if not isinstance(output, Tensor) or not output.is_floating_point() or not _is_of_tokens(output, context):
        return output
    origin = _origin(context)
    if isinstance(output, LazyLogits):
        _follow(output.head, origin)
        if output.made is not None and without_loss:
            origin.read(output.made)
    elif type(output) is Tensor:
        if without_loss:
            origin.read(output)
        origin.on_some_ranks = is_last and not without_loss
        origin.begin_at(output)
        return LocalLogits.of(output, origin)
    return output


def _origin(context: BatchContext) -> Origin:
    """The origin of an output of a batch's model."""
    inputs, layout, rows = context.state(MadeInputs), context.layout, context.facts.rows
    own, shifted = inputs.labels.value, inputs.shifted.value
    labels = None if own is None or own.shape != context.local_shape else (own, shifted)
    items = inputs.get("num_items_in_batch")
    return Origin(
        context.ring, rows, layout.local_length, layout.padding, labels,
        partial(context.state(TargetsOfBatch).of, inputs, rows, layout),
        arrives=context.state(BackwardEnd).expect,
        batch=None if items is None else BatchCounts(items, rows, layout.length),
        layers=context.state(AttendedLayers),
    )  # fmt: skip
