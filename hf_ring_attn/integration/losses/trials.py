"""Trials of functions that a program calls on its tokens: is each token's result its own, or made of others, too?

A function is called on a few tokens, and on either half of them, once for each kind of call: with random numbers in
float64 on the CPU. If f(all) is f(first half) beside f(second half), each token's result is its own. If it is their sum
or mean, f is linear (less what f adds the tokens to: its result of zeros). So torch's functions need no list here, and
new ones are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

HALF = 32
"""The largest number of tokens of either half."""
LARGEST = 2**21
"""The most values of an argument."""
MOST = 4096
"""The most calls that are remembered."""
ORDERS = {"sort", "msort"}
UNTRIED = {
    "__getitem__", "__setitem__", "index_select", "masked_select", "gather", "take", "take_along_dim", "narrow",
    "select", "split", "chunk", "tensor_split", "unbind", "view", "view_as", "reshape", "reshape_as", "flatten",
    "unflatten", "ravel", "expand", "expand_as", "repeat", "tile", "repeat_interleave", "cat", "concat", "stack",
    "hstack", "vstack", "flip", "dropout", "detach", "clone", "to", "float", "double", "cpu", "cuda", "contiguous",
    "squeeze", "unsqueeze", "numpy", "backward", "retain_grad", "register_hook",
}  # fmt: skip
"""Functions that take tokens, or change the shape of tensors."""
ARITHMETIC = {
    "add", "radd", "sub", "subtract", "rsub", "mul", "multiply", "rmul", "div", "divide", "true_divide", "truediv",
    "rtruediv", "rdiv", "pow", "rpow", "eq", "ne", "gt", "ge", "lt", "le", "clamp", "neg", "abs",
}  # fmt: skip
"""Functions of each number by itself, if their other arguments are Python numbers, which may be new in each step."""
_known: dict[Any, str] = {}


def tried(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], shape: torch.Size, axis: int) -> str:
    """Returns how a function treats tokens.

    Args:
        args, kwargs: as it got them. shape: of the numbers of tokens among them. axis: that of the tokens.

    Returns:
        "summed": it makes sums or means of all tokens; "reduced": something else of them; "mixed": a token's result is
        made of others, too; "ordered": it sorts them; "": none of these, or unknown.
    """
    name, tokens = function.__name__, shape[axis]
    # A custom operator may count its calls, or talk to other ranks.
    is_operator = isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    is_foreign = is_operator and not str(function).startswith("aten.")
    if name in UNTRIED or "out" in kwargs or "generator" in kwargs or is_foreign:
        return ""
    if name.strip("_") in ARITHMETIC and sum(isinstance(x, Tensor) for x in (*args, *kwargs.values())) == 1:
        return ""
    try:
        count = min(tokens, 2 * HALF + 1)  # a trial of few tokens may say nothing of more
        key = (function, count, axis, _kind(args, tokens), _kind(kwargs, tokens))
        if key not in _known:
            if len(_known) >= MOST:
                _known.clear()
            _known[key] = _tried(function, args, kwargs, shape, axis)
        return _known[key]
    except TypeError:  # a key that cannot be hashed
        return ""


def _kind(x: Any, tokens: int) -> Any:
    if isinstance(x, Tensor):
        return x.dtype, tuple("tokens" if size == tokens else size for size in x.shape)
    if isinstance(x, (tuple, list)):
        return type(x), *(_kind(part, tokens) for part in x)
    if isinstance(x, Mapping):
        return tuple((name, _kind(part, tokens)) for name, part in x.items())
    return type(x) if isinstance(x, float) else x


def _tried(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], shape: torch.Size, axis: int) -> str:
    tokens = shape[axis]
    leaves, spec = tree_flatten((args, dict(kwargs)))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if any(type(x) not in (Tensor, nn.Parameter) or x.is_complex() for x in tensors):
        return ""
    each = max(x.numel() // (tokens if tokens in x.shape else LARGEST) for x in tensors)
    half = min(HALF, tokens // 2, LARGEST // max(2 * each, 1))
    drawn = torch.Generator().manual_seed(0)
    given = [_few(x, shape, axis, 2 * half, drawn) for x in leaves]
    if half < 2 or any(x is None and leaf is not None for x, leaf in zip(given, leaves, strict=True)):
        return ""

    def called(start: int, stop: int, zeros: bool = False) -> Tensor | None:
        inputs = [_part(x, start, stop, zeros) for x in given]
        args, kwargs = tree_unflatten(inputs, spec)
        found = function(*args, **kwargs)
        found = found[0] if isinstance(found, (tuple, list)) else found
        return found.detach().cpu().double() if isinstance(found, Tensor) else None

    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            whole, again = called(0, 2 * half), called(0, 2 * half)
            first, second = called(0, half), called(half, 2 * half)
            of_zeros = [called(0, 2 * half, zeros=True), called(0, half, zeros=True)]
    except Exception:  # noqa: BLE001  any: a function may need other tokens
        return ""
    if whole is None or again is None or first is None or second is None or not _same(whole, again):
        return ""
    return _compared(whole, first, second, of_zeros, function.__name__)


def _few(x: Any, shape: torch.Size, axis: int, few: int, drawn: torch.Generator) -> Any:
    """An argument for a trial: (tensor, dim of its tokens), a tensor without tokens, or what it is; None: unknown."""
    if not isinstance(x, Tensor):
        return x
    dims = [dim for dim, size in enumerate(x.shape) if size == shape[axis]]
    if len(dims) > 1 and x.shape == shape:  # hidden states may be as wide as a rank has tokens
        dims = [axis]
    if len(dims) > 1 or not (dims or x.numel() <= LARGEST):
        return None
    x = x.detach()
    if not dims:
        return x.to("cpu", torch.float64 if x.is_floating_point() else x.dtype, copy=True)
    x = x.narrow(dims[0], 0, few).cpu()
    if x.is_floating_point():
        x = 0.1 + 0.8 * torch.rand(x.shape, generator=drawn, dtype=torch.float64, device="cpu")
    return x, dims[0]


def _part(x: Any, start: int, stop: int, zeros: bool) -> Any:
    """An argument of one call, which may write to it."""
    if not isinstance(x, tuple):
        return x.clone() if isinstance(x, Tensor) else x
    part = x[0].narrow(x[1], start, stop - start).clone()
    return part.zero_() if zeros and part.is_floating_point() else part


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.allclose(x, y, rtol=1e-4, atol=1e-6, equal_nan=True)


def _compared(whole: Tensor, first: Tensor, second: Tensor, of_zeros: list[Tensor | None], name: str) -> str:
    if first.shape != second.shape or first.dim() != whole.dim():
        return ""
    grown = [dim for dim in range(whole.dim()) if whole.shape[dim] != first.shape[dim]]
    if not grown:
        added_to, to_half = (0.0 if x is None or not x.isfinite().all() else x for x in of_zeros)
        made, parts = whole - added_to, first + second - 2 * to_half
        if made.any() and any(_same(made, parts / number) for number in (1, 2)):
            return "summed"
        return "" if any(_same(whole, (first + second) / number) for number in (1, 2)) else "reduced"
    if len(grown) == 1 and _same(whole, torch.cat([first, second], grown[0])):
        return ""
    return "ordered" if name in ORDERS else "mixed"
