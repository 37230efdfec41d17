"""Checks of users' arguments: each refuses by the argument's name, before a later failure without one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

import torch
from torch import Tensor

from .errors import BadOption

MOST = 2**62


def check(holds: bool, name: str, got: object, need: str) -> None:
    """Checks a condition on an argument.

    Raises:
        BadOption: it does not hold.
    """
    if not holds:
        raise BadOption(name, got, need)


def check_type(name: str, value: object, kind: type | tuple[type, ...], need: str) -> None:
    check(isinstance(value, kind), name, value, need)


def check_flag(name: str, value: object, need: str = "True or False") -> None:
    check(isinstance(value, bool), name, value, need)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    check(isinstance(value, str) and value in choices, name, value, f"one of {choices}")


def is_whole(value: object, least: int = 0, most: int = MOST) -> bool:
    """A whole number from ``least`` to ``most``; a bool is none."""
    whole = type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
    return whole and least <= int(value) <= most  # type: ignore[call-overload]


def whole_number(name: str, value: object, need: str, least: int = 0, most: int = MOST) -> int:
    """Returns ``value`` as an int; refuses anything else."""
    check(is_whole(value, least, most), name, value, need)
    return int(value)  # type: ignore[call-overload, no-any-return]


def number(name: str, value: object, need: str, above: float = -math.inf, least: float = -math.inf) -> float:
    """Returns ``value`` as a float; refuses bools and all but finite numbers above ``above``, at least ``least``."""
    known = isinstance(value, Real) and not isinstance(value, bool)
    try:
        found = float(value) if known else math.nan  # type: ignore[arg-type]
    except OverflowError:  # a whole number of hundreds of digits
        found = math.inf
    check(above < found < math.inf and found >= least, name, value, need)
    return found


def check_dense(name: str, x: object) -> None:
    """Checks that ``x`` is a dense tensor with values."""
    check_type(name, x, Tensor, "a tensor")
    assert isinstance(x, Tensor)
    if x.layout != torch.strided or x.is_nested:  # before the words: it runs some twenty times a batch
        raise BadOption(f"{name}.layout", x.layout, "that of a dense tensor")
    if hasattr(x, "to_local"):
        raise BadOption(name, type(x).__name__, "this rank's part as an ordinary tensor: pass its .to_local()")
    if x.is_meta:
        raise BadOption(f"{name}.device", x.device, "one that holds values")


def check_tensor(name: str, x: object, dtypes: Sequence[torch.dtype], on: torch.device | None = None) -> None:
    """Checks that ``x`` is a dense tensor of one of these dtypes, on the device ``on`` if given."""
    check_dense(name, x)
    assert isinstance(x, Tensor)
    check(x.dtype in dtypes, f"{name}.dtype", x.dtype, " or ".join(map(str, dtypes)))
    check(on is None or x.device == on, f"{name}.device", x.device, f"{on}, as of q")
