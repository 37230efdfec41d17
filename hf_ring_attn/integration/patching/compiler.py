"""Marks functions that compilers call, but do not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(reason: str) -> Callable[[Function], Function]:
    """Decorates a function that torch.compile leaves out of its graphs: `torch.compiler.disable`, with types.

    Args:
        reason: why, for the compiler's log of graph breaks.
    """
    decorator: Callable[[Function], Function] = torch.compiler.disable(reason=reason)
    return decorator
