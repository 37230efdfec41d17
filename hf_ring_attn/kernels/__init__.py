"""The kernels, one a file or folder, and the choice among them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ..config import kernel_from_environment
from ..errors import BadOption, UnsupportedAttention
from .base import PART, Asked, Gradients, Kernel, Params, Part, Place, Request
from .flash2 import Flash2
from .flash4 import Flash4
from .flex import Flex
from .reference import Reference
from .score_mods.function_code import code_of
from .score_mods.graph import text_of
from .score_mods.score_mod import ScoreFunction, ScoreMod, in_score_mod
from .triton import Triton

KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (Flash4(), Triton(), Flash2(), Flex(), Reference())}
"""Every kernel by name, the preferred one first; the reference, which can do all that the others can, is last."""

BY_NAME_ONLY = {"flash2"}
"""Kernels that "auto" never takes: flash2 rounds each contribution to a gradient, and triton is faster."""

__all__ = [
    "BY_NAME_ONLY", "KERNELS", "Gradients", "Kernel", "Params", "Part", "Place", "Request", "ScoreFunction",
    "ScoreMod", "asking", "choose", "in_score_mod", "kernels_named", "text_of",
]  # fmt: skip


def kernels_named(name: str) -> dict[str, Kernel]:
    """Looks up kernels by name. "auto": the kernel that the environment names, else all but those by name only.

    Raises:
        BadOption: there is no kernel of that name.
    """
    if name == "auto":
        name = kernel_from_environment() or "auto"
    if name == "auto":
        return {name: kernel for name, kernel in KERNELS.items() if name not in BY_NAME_ONLY}
    if name not in KERNELS:
        raise BadOption("kernel", name, f"'auto' or one of {tuple(KERNELS)}")
    return {name: KERNELS[name]}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def asking(request: Request, mod: ScoreMod, scale: float, softcap: float | None, part: Callable[[], Part]) -> Request:
    """Adds a score_mod to a request, if a kernel that inspects functions could serve the rest of it.

    Args:
        part: makes the part of the attention that the function may be tried on.
    """
    flex = KERNELS["flex"]
    assert isinstance(flex, Flex)
    if flex.unsupported(request) and KERNELS["triton"].unsupported(request):
        return request
    graph = mod.text or text_of(mod) + flex.text(mod, request.dtype, scale, softcap)
    mod.once(PART, lambda: part)
    return replace(request, asked=Asked(graph, code_of(mod.function), scale, softcap, weakref.ref(mod)))


@torch.compiler.disable(reason="hf_ring_attn probes versions and GPUs")  # type: ignore[untyped-decorator]
def choose(
    name: str, request: Request, fails: Callable[[str, Request], Sequence[str]] = lambda _name, _request: ()
) -> Kernel:
    """Chooses the kernel for a request.

    Args:
        name: "auto" takes the first that supports the request; any other name takes that kernel alone.
        fails: lists what a kernel computes wrong here although it supports the request.

    Raises:
        BadOption: there is no kernel of that name.
        UnsupportedAttention: with every reason of every kernel.
    """
    reasons: dict[str, list[str]] = {}
    for kernel in kernels_named(name).values():
        why = kernel.unsupported(request) or list(fails(kernel.name, request))
        if not why:
            return kernel
        reasons[kernel.name] = why
    others = KERNELS.keys() - reasons.keys() - BY_NAME_ONLY if len(kernels_named(name)) == 1 else set()
    raise UnsupportedAttention(
        reasons, [one for one in KERNELS if one in others and not KERNELS[one].unsupported(request)]
    )
