"""Refuses hooks on weights whose change of a gradient does not pass through an average, such as clipping.

A weight's hook (`register_hook`, `register_post_accumulate_grad_hook`) gets the gradient of its rank's tokens, before
the ranks average. A factor, a mask or an added term is the same before and after; a clipped, normalised or noisy
gradient is not, nor is a step. So each hook is called with pairs of gradients of many sizes, and with their average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..context.batch_context import BatchContext
from ..context.introspect import is_dtensor, modules_of
from ..context.model_record import code_of
from ..context.program_states import preserved_objects
from ..patching.modules import is_ours

SIZES = (1e4, 1e-6, 1e-4, 1e-2, 1.0, 1e2)
"""Sizes of gradients. The first two show a hook that changes nothing, which is then called no more: it may log."""
MOST_VALUES = 1 << 24
"""The most values of a weight whose hooks are called."""
ROUNDING = 1e-4
"""The relative error of a sum in float32 that a hook may make, and more."""


def unsupported(model: nn.Module, context: BatchContext) -> Iterator[str]:
    """Yields a reason for each kind of such hooks on trained weights."""
    if context.ring.size == 1 or not model.training:
        return
    for name, weight, hook, call in _one_of_each_kind(model):
        if not _passes_through_average(hook, call, weight, model):
            function = getattr(code_of(hook), "co_qualname", type(hook).__name__)
            yield (
                f"a hook on the gradient of {name} ({function}) gets that of a rank's tokens, and would change their "
                "average otherwise (it clips, normalises, steps ...); change gradients after the backward, in Trainer "
                "in on_pre_optimizer_step"
            )


Call = Callable[[Tensor], Any]


def _one_of_each_kind(model: nn.Module) -> Iterator[tuple[str, Tensor, Call, Call]]:
    """The smallest weight for each kind of hook, known by its code; the hook, and a call of it with a gradient."""
    found: dict[object, tuple[str, Tensor, Call, Call]] = {}
    for name, x in model.named_parameters():
        # FSDP2 sets gradients of its shards without hooks.
        if not x.requires_grad or is_dtensor(x) or x.is_meta or x.numel() > MOST_VALUES:
            continue
        for hook, call in _hooks_of(x):
            kind = code_of(hook)
            if not is_ours(hook) and (kind not in found or x.numel() < found[kind][1].numel()):
                found[kind] = (name, x, hook, call)
    yield from found.values()


def _hooks_of(weight: Any) -> Iterator[tuple[Call, Call]]:
    """The hooks of a weight, each with a call that maps a gradient to the changed one (None: it has not changed)."""
    for hook in (weight._backward_hooks or {}).values():
        yield hook, hook
    for hook in (weight._post_accumulate_grad_hooks or {}).values():
        yield hook, partial(_accumulated, hook, weight)


class _Taken(Exception):
    """A hook took the gradient away, or stepped."""


def _accumulated(hook: Call, weight: Any, gradient: Tensor) -> Any:
    """Calls a hook that reads ``weight.grad``, as after a backward. Raises _Taken."""
    before, value = weight.grad, weight.detach().clone()
    weight.grad = gradient
    try:
        hook(weight)
        is_same = torch.allclose(weight, value, rtol=0, atol=0, equal_nan=True)  # .data has no version
        if weight.grad is None or not is_same:
            raise _Taken
        return weight.grad
    finally:
        weight.grad = before
        weight.data.copy_(value)


def _passes_through_average(hook: Call, call: Call, weight: Tensor, model: nn.Module) -> bool:
    """Returns True if the average of what ``hook`` makes of two gradients is what it makes of their average."""
    device = weight.device
    generator, close = torch.Generator().manual_seed(0), max(ROUNDING, 8 * torch.finfo(weight.dtype).eps)
    devices = [device] if device.type == "cuda" else []

    def changed(gradient: Tensor) -> Tensor:
        given = gradient.to(weight.dtype)  # a copy: a hook may write to it
        result = call(given)
        return (given if result is None else result).to(torch.float64)

    with preserved_objects([hook], modules_of(model)), torch.random.fork_rng(devices), torch.no_grad():
        changes = False
        for number, size in enumerate(SIZES):
            both = torch.randn(2, *weight.shape, generator=generator, dtype=torch.float64)
            first, second = (both * both.new_tensor([size, size / 10]).view(2, *[1] * weight.dim())).to(device)
            try:
                want, got = (changed(first) + changed(second)) / 2, changed((first + second) / 2)
            except _Taken:
                return False
            if float((got - want).norm()) > close * float(want.norm()):
                return False
            changes |= float((want - (first + second) / 2).norm()) > close * float(want.norm())
            if number == 1 and not changes:
                break
    return True
