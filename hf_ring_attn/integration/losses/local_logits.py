"""Numbers of one rank's tokens, as a program gets them: tensors that are followed through torch's functions.

What happens to them on the way to a loss is noted at their origin, the model's output (`origins`).
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .calls import NOTHING, Call, Past
from .origins import Origin
from .shifts import refuse_shift
from .steps import look_at


class LocalLogits(Tensor):
    """Logits of one rank's tokens, or what was computed from them. It has no memory, but holds a tensor.

    A subclass with memory would not do: compiled functions fail at such inputs (torch 2.13).
    """

    held: Tensor
    origin: Origin
    past: Past

    @staticmethod
    def of(x: Tensor, origin: Origin, past: Past = NOTHING) -> LocalLogits:
        """Makes them of an ordinary tensor. Gradients reach it through either."""
        local: LocalLogits = _Hold.apply(x)  # type: ignore[no-untyped-call]
        local.held, local.origin, local.past = x, origin, past
        return local

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        lists = (x if isinstance(x, (tuple, list)) else (x,) for x in (*args, *kwargs.values()))
        local = [x for x in chain.from_iterable(lists) if isinstance(x, LocalLogits)]
        given = next((x for x in local if held(x).requires_grad), local[0] if local else None)
        # What a function of the program's own made has its gradient from that function.
        statistics = [() if _is_attached(x) else vars(x)["past"].statistics for x in local]
        args, kwargs = tuple(map(_all_held, args)), {name: _all_held(x) for name, x in kwargs.items()}
        if given is None:
            return function(*args, **kwargs)
        x, origin = held(given), vars(given)["origin"]
        each_once = {id(one): one for several in statistics for one in several}
        past = vars(given)["past"]._replace(statistics=tuple(each_once.values()))
        return followed(function(*args, **kwargs), Call(origin, function, args, kwargs, x, past), origin)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub has no class
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """For code that calls torch below `__torch_function__`."""
        args, kwargs = tree_map(lambda x: held(x).detach() if isinstance(x, LocalLogits) else x, (args, kwargs or {}))
        return function(*args, **kwargs)


def held(x: Any) -> Any:
    """The tensor that local logits hold; anything else as it is."""
    if not isinstance(x, LocalLogits):
        return x
    return _Read.apply(x) if _is_attached(x) else vars(x)["held"]  # type: ignore[no-untyped-call]


def _all_held(x: Any) -> Any:
    """`held`, also of what is in a list; most arguments are in none, and functions are many."""
    return tree_map(held, x) if isinstance(x, (tuple, list, dict)) else held(x)


def _is_attached(x: LocalLogits) -> bool:
    """Returns True if a function of the program's own made these: they have a gradient, what they hold has none."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.requires_grad and torch.is_grad_enabled() and not vars(x)["held"].requires_grad


class Same(torch.autograd.Function):
    """A function whose result has the values of its input."""

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor | None) -> Tensor | None:
        return gradient


class _Hold(Same):
    """A tensor -> one of no memory in its graph."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        made: Tensor = Tensor._make_wrapper_subclass(
            LocalLogits, x.shape, strides=x.stride(), dtype=x.dtype, device=x.device
        )
        return made


class _Read(Same):
    """Local logits -> the tensor that they hold, in their graph."""

    @staticmethod
    def forward(_ctx: Any, x: LocalLogits) -> Tensor:
        tensor: Tensor = vars(x)["held"]
        return tensor.detach()


def followed(result: Any, call: Call, origin: Origin) -> Any:
    """Follows what a function computed from numbers of tokens, and notes facts about it.

    Raises:
        ShiftedByHand: it took all tokens but the first or the last one.
    """
    if call.x.requires_grad or not origin.trains:  # else it is detached, as for a log
        refuse_shift(call)
    # Not an attribute, but a transpose; nor what a compiler traces.
    is_attribute = call.name == "__get__" and call.function.__self__.__name__ not in ("T", "mT")
    return result if is_attribute or torch.compiler.is_compiling() else _local(result, call, origin)


def _local(result: Any, call: Call, origin: Origin) -> Any:
    if isinstance(result, (tuple, list)):
        parts: Any = [_local(part, call, origin) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    if type(result) is not Tensor:
        return result
    trains = result.requires_grad and torch.is_grad_enabled() and result.is_floating_point()
    if not (trains or origin.trains or torch.is_grad_enabled()):  # of a frozen model, in an evaluation
        return result
    facts, past = look_at(call, result, trains)
    if not trains:  # detached: a view made without gradients, as in a function's own forward, says that it has one
        return LocalLogits.of(result.detach(), origin, past)
    begins = not call.x.requires_grad
    if begins:
        origin = origin.anew()
    origin.used = True
    origin.note(facts, result)
    if begins:  # after the facts are noted: hooks run in their order
        origin.begin_at(result)
    return LocalLogits.of(result, origin, past)
