"""A score_mod that the call of a model is given must reach its attention: some models do not hand on what they get."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from .. import errors
from .active import Scope
from .models import name_of

Undo = Callable[[], None]

_BY_HOST = "hf_ring_attn looks at what a model's call was given"


def watch(model: nn.Module, scope: Scope, inside: bool = False) -> list[Undo]:
    """Refuses a call of ``model`` whose score_mod did not reach all of its attentions. Returns what undoes it.

    Args:
        inside: it is in its call already.
    """
    began = [(scope.plain, scope.scored)]

    @torch.compiler.disable(reason=_BY_HOST)  # type: ignore[untyped-decorator]
    def before(_model: nn.Module, _args: Any) -> None:
        began[:] = [(scope.plain, scope.scored)]

    @torch.compiler.disable(reason=_BY_HOST)  # type: ignore[untyped-decorator]
    def after(_model: nn.Module, _args: Any, given: dict[str, Any], _output: Any) -> None:
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
