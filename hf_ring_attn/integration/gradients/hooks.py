"""Refuses hooks on weights whose change of a gradient does not pass through an average, such as clipping.

A weight's hook (`register_hook`, `register_post_accumulate_grad_hook`) gets the gradient of its rank's tokens, before
the ranks average. A factor, a mask or an added term is the same before and after; a clipped, normalised or noisy
gradient is not, nor is a step. So each hook is called with pairs of gradients of many sizes, and with their average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..context.batch_context import BatchContext
from ..context.introspect import is_dtensor, may_train, modules_of
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
    """Yields a reason for each kind of such hooks on trained weights, or for hooks that do so together."""
    if context.ring.size == 1 or not may_train(model):
        return
    every = list(_hooked(model))
    refused = [one for one in _one_of_each_kind(every) if _passes_through_average([one], model) is False]
    if not refused and every:  # one may scale by a norm that another one takes
        together = _smallest(every)
        passes = {_passes_through_average(order, model) for order in (together, together[::-1])}
        refused = together[:1] if False in passes or passes == {None} else []
    for name, _, hook, _ in refused:
        function = getattr(code_of(hook), "co_qualname", type(hook).__name__)
        yield (
            f"a hook on the gradient of {name} ({function}) gets that of a rank's tokens, and would change their "
            "average otherwise, by itself or with other hooks (it clips, normalises, steps ...); change gradients "
            "after the backward, in Trainer in on_pre_optimizer_step"
        )


Call = Callable[[Tensor], Any]


class _Hooked(NamedTuple):
    """A hook of a weight, and a call of it with a gradient."""

    name: str
    weight: Tensor
    hook: Call
    call: Call


def _hooked(model: nn.Module) -> Iterator[_Hooked]:
    """The program's hooks on trained weights, in the model's order."""
    for name, x in model.named_parameters():
        # FSDP2 sets gradients of its shards without hooks.
        if not x.requires_grad or is_dtensor(x) or x.is_meta or x.numel() > MOST_VALUES:
            continue
        yield from (_Hooked(name, x, hook, call) for hook, call in _hooks_of(x) if not is_ours(hook))


def _one_of_each_kind(every: list[_Hooked]) -> list[_Hooked]:
    """The hook of the smallest weight for each kind of hook, known by its code."""
    found: dict[object, _Hooked] = {}
    for one in every:
        kind = code_of(one.hook)
        if kind not in found or one.weight.numel() < found[kind].weight.numel():
            found[kind] = one
    return list(found.values())


def _smallest(every: list[_Hooked]) -> list[_Hooked]:
    """The hooks of the smallest weights, up to `MOST_VALUES` together, in the model's order."""
    total, chosen = 0, set[int]()
    for one in sorted(every, key=lambda one: one.weight.numel()):
        total += 0 if id(one.weight) in chosen else one.weight.numel()
        if total > MOST_VALUES:
            break
        chosen.add(id(one.weight))
    return [one for one in every if id(one.weight) in chosen]


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


def _passes_through_average(together: list[_Hooked], model: nn.Module) -> bool | None:
    """Returns True if the average of what hooks make of two sets of gradients is what they make of their averages.

    Each call begins with the program's state as it is. None: a hook raised an error, perhaps since it needs another's.
    """
    weights = {id(one.weight): one.weight for one in together}
    devices = {x.device for x in weights.values() if x.device.type == "cuda"}
    hooks, modules = [one.hook for one in together], list(modules_of(model))
    generator = torch.Generator().manual_seed(0)

    def changed(gradients: dict[int, Tensor]) -> dict[int, Tensor]:
        given = {at: x.to(weights[at].dtype, copy=True) for at, x in gradients.items()}  # a hook may write to it
        with preserved_objects(hooks, modules):
            for one in together:
                result = one.call(given[id(one.weight)])
                given[id(one.weight)] = given[id(one.weight)] if result is None else result
        return {at: x.to(torch.float64) for at, x in given.items()}

    with torch.random.fork_rng(list(devices)), torch.no_grad():
        changes = False
        for number, size in enumerate(SIZES):
            pairs = {at: _pair(x, size, generator) for at, x in weights.items()}
            try:
                first, second = (changed({at: pair[part] for at, pair in pairs.items()}) for part in (0, 1))
                got = changed({at: pair.mean(0) for at, pair in pairs.items()})
            except _Taken:
                return False
            except Exception:  # noqa: BLE001  a program's own hook may raise anything
                return None
            for at, pair in pairs.items():
                want = (first[at] + second[at]) / 2
                close = max(ROUNDING, 8 * torch.finfo(weights[at].dtype).eps) * float(want.norm())
                if float((got[at] - want).norm()) > close:
                    return False
                changes |= float((want - pair.mean(0)).norm()) > close
            if number == 1 and not changes:
                break
    return True


def _pair(weight: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """Two random gradients [2, ...] of a weight, in float64."""
    both = torch.randn(2, *weight.shape, generator=generator, dtype=torch.float64)
    return (both * both.new_tensor([size, size / 10]).view(2, *[1] * weight.dim())).to(weight.device)
