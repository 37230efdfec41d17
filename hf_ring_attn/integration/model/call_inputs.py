"""The call of a model: it must be given what `shard` made, what it is given must reach its attention, and the loss that
it returns must be of the whole row.

One rank's tokens do not tell their places, nor how many labels the whole batch has: a call that leaves these out, or
changes them, has an answer of its own on each rank. Some models do not hand a score_mod on; and some compute a loss of
other inputs than labels, which nobody shared out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ... import errors
from ..context import batch_context
from ..context.batch_context import BatchContext
from ..context.introspect import name_of, parameters_of, uses_ring
from ..context.tracked_input import TrackedInputs

Undo = Callable[[], None]

PLACES = ("position_ids", "attention_mask")
COUNTED = ("labels", "shift_labels", "num_items_in_batch")
"""Inputs that a model must be given as `shard` made them; the second ones, where it is to compute a loss."""
TOKENS = ("input_ids", "inputs_embeds")
KEPT = ("logits_to_keep", "num_logits_to_keep")
"""Arguments that choose tokens by their place among those that a model is given."""
_KEPT = "each rank would keep some of its own tokens. Leave it out, and choose from sharded.gather(out.logits)"


def refuse_outside(given: Sequence[Any], refusal: errors.Refused | None = None) -> None:
    """Refuses a model that runs in no ring, but with what `shard` made for one.

    Args:
        given: what its mask is about to be made of.
        refusal: what to raise; None: NotEntered.

    Raises:
        NotEntered: on every rank alike.
    """
    # Batches with images are not cut yet: what they hold is of the whole row, and may be the program's own.
    shares = [
        handed
        for context in batch_context.live_batches()
        if context.text is None
        for handed in context.state(TrackedInputs).values()
    ]
    if any(handed.same_memory(x) for handed in shares for x in given):
        raise refusal or errors.NotEntered("a model was called with what shard() made")


def _refuse_others(
    model: nn.Module, args: Sequence[Any], given: Mapping[str, Any], context: BatchContext, has_loss: bool
) -> None:
    """Refuses a call of ``model`` without what `shard` made, or with something else, on every rank alike.

    What a copy holds may differ on some ranks only, so they tell each other.

    Args:
        has_loss: whether the model returned one.
    """
    names = parameters_of(model, context.state(TrackedInputs))
    given = {**dict(zip(names, args, strict=False)), **given}
    for name in KEPT:
        if isinstance(x := given.get(name), Tensor) or x:
            raise errors.UnsupportedArgument(name_of(model), name, _KEPT, "was called in a ring with")
    counts = {name for name in COUNTED[:2] if given.get(name) is not None}
    counted = COUNTED[1:] if "labels" in counts else COUNTED[2:] if counts and has_loss else ()
    needed = {*PLACES, *counted}
    missing, other, copies = [], [], []
    for name, handed in context.state(TrackedInputs).items():
        x = given.get(name)
        if x is None:
            if name in needed and name in names:
                missing.append(name)
        elif name in needed or name in counts:
            same = handed.is_(x) if isinstance(x, (Tensor, float, int)) else True  # a mask made in this ring
            if same is False:
                other.append(name)
            elif same is None:
                copies.append(name)
    if missing or other:
        raise errors.OtherInputs(name_of(model), missing, other)
    if copies:
        other = [name for name in copies if not context.state(TrackedInputs)[name].equals(given[name])]
        refusal = errors.OtherInputs(name_of(model), [], other) if other else None
        device = next((x.device for x in given.values() if isinstance(x, Tensor)), torch.device("cpu"))
        try:
            context.ring.agree({}, context.ring.small_device(device), "", None if refusal is None else str(refusal))
        except errors.RefusedElsewhere as elsewhere:
            raise refusal or elsewhere from None


def _has_loss(output: Any) -> bool:
    """Whether a model's output is a loss or begins with one, or holds one by its name or under any other: a number that
    can be differentiated. The auxiliary loss of experts is of whole rows (`experts`)."""
    if isinstance(output, Mapping):
        others = (x for name, x in output.items() if name != "aux_loss" and _is_number(x))
        return output.get("loss") is not None or any(x.requires_grad for x in others)
    return _is_number(output[0] if isinstance(output, (tuple, list)) and output else output)


def _is_number(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 0 and x.is_floating_point()


_BY_HOST = "hf_ring_attn looks at what a model's call was given"


def watch(model: nn.Module, context: BatchContext, inside: bool = False) -> list[Undo]:
    """Refuses a call of ``model`` with other inputs than the sharded ones, one whose score_mod did not reach all of its
    attentions, and one that returns a loss though the batch has no labels. Returns what undoes it.

    All once the model has run: a call that was under way when it was met is seen then, too.

    Args:
        inside: it is in its call already.
    """
    began = [(context.log.plain, context.log.scored)]
    looks = context.ring.size > 1 and uses_ring(model)

    @torch.compiler.disable(reason=_BY_HOST)  # type: ignore[untyped-decorator]
    def before(_model: nn.Module, _args: Any) -> None:
        began[:] = [(context.log.plain, context.log.scored)]

    @torch.compiler.disable(reason=_BY_HOST)  # type: ignore[untyped-decorator]
    def after(_model: nn.Module, args: Any, given: dict[str, Any], output: Any) -> None:
        if looks and batch_context.current() is context:  # else the self-check's row, or another batch
            _refuse_others(model, args, given, context, _has_loss(output))
        if context.ring.size > 1 and not context.facts.has_labels and _has_loss(output):
            raise errors.LossWithoutLabels(name_of(model))
        if given.get("score_mod") is None:
            return
        plain, scored = context.log.plain - began[0][0], context.log.scored - began[0][1]
        if plain or not scored:
            raise errors.ScoreModDropped(name_of(model), scored, plain)

    compiled = model.__dict__.get("_compiled_call_impl")
    if compiled is not None and not inside:  # it would trace hooks, and compile anew for those of each batch

        def call(*args: Any, **given: Any) -> Any:
            before(model, args)
            output = compiled(*args, **given)
            after(model, args, given, output)
            return output

        model.__dict__["_compiled_call_impl"] = call
        return [partial(model.__dict__.__setitem__, "_compiled_call_impl", compiled)]
    # First: accelerate's loop leaves the context, and so takes these hooks away, in a hook after the forward.
    first = model.register_forward_hook(after, with_kwargs=True, prepend=True)
    return [model.register_forward_pre_hook(before).remove, first.remove]
