"""A score_mod that the call of a model is given must reach its attention: some models do not hand on what they get."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .. import errors
from .active import Scope

_BY_HOST = "hf_ring_attn looks at what a model's call was given"


def watch(model: nn.Module, scope: Scope) -> list[RemovableHandle]:
    """Hooks that refuse a call of ``model`` whose score_mod did not reach all of its attentions.

    None on a model that compiles itself: its compiler would trace them, and compile anew for those of each batch.
    """
    if model.__dict__.get("_compiled_call_impl") is not None:
        return []
    began = [(scope.plain, scope.scored)]  # it may be inside its call already

    @torch.compiler.disable(reason=_BY_HOST)  # type: ignore[untyped-decorator]
    def before(_model: nn.Module, _args: Any) -> None:
        began[:] = [(scope.plain, scope.scored)]

    @torch.compiler.disable(reason=_BY_HOST)  # type: ignore[untyped-decorator]
    def after(_model: nn.Module, _args: Any, given: dict[str, Any], _output: Any) -> None:
        if given.get("score_mod") is None:
            return
        plain, scored = scope.plain - began[0][0], scope.scored - began[0][1]
        if plain or not scored:
            raise errors.ScoreModDropped(type(model).__name__, scored, plain)

    # First: accelerate's loop leaves the context, and so takes these hooks away, in a hook after the forward.
    first = model.register_forward_hook(after, with_kwargs=True, prepend=True)
    return [model.register_forward_pre_hook(before), first]
