"""Marks functions that compilers call, but do not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(reason: str, alone: bool = False) -> Callable[[Function], Function]:
    """Decorates a function that torch.compile leaves out of its graphs: `torch.compiler.disable`, with types.

    Args:
        reason: why, for the compiler's log of graph breaks. alone: what the function calls may be compiled.
    """
    decorator: Callable[[Function], Function] = torch.compiler.disable(recursive=not alone, reason=reason)
    return decorator
