"""What the call of a model is given must reach its attention, and the loss that it returns must be of the whole row.

Some models do not hand a score_mod on; and some compute a loss of other inputs than labels, which nobody shared out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import errors
from .active import Scope
from .models import name_of

Undo = Callable[[], None]


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


def watch(model: nn.Module, scope: Scope, inside: bool = False) -> list[Undo]:
    """Refuses a call of ``model`` whose score_mod did not reach all of its attentions, and one that returns a loss
    though the batch has no labels. Returns what undoes it.

    Args:
        inside: it is in its call already.
    """
    began = [(scope.plain, scope.scored)]

    @torch.compiler.disable(reason=_BY_HOST)  # type: ignore[untyped-decorator]
    def before(_model: nn.Module, _args: Any) -> None:
        began[:] = [(scope.plain, scope.scored)]

    @torch.compiler.disable(reason=_BY_HOST)  # type: ignore[untyped-decorator]
    def after(_model: nn.Module, _args: Any, given: dict[str, Any], output: Any) -> None:
        if scope.ring.size > 1 and not scope.has_labels and _has_loss(output):
            raise errors.LossWithoutLabels(name_of(model))
        if given.get("score_mod") is None:
            return
        plain, scored = scope.plain - began[0][0], scope.scored - began[0][1]
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
