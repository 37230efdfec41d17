"""The interface of flash-attn-4 that is used, and a check of its version. `load` imports it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from ..base import Params
from .blocks import Table
from .calls import Bounds
from .disk_cache import use_disk_cache

PACKAGE, TESTED = "flash-attn-4", ("4.0.0b36",)
NEEDS = {"nvidia-cutlass-dsl": ("4.8.",), "quack-kernels": ("0.6.",)}
"""Its dependencies, and the beginnings of their tested versions."""


class Lengths(NamedTuple):
    """Entries of a packed call, [n + 1] or [n] int32 on the GPU, and the most tokens of an entry."""

    q_starts: Tensor
    q_lengths: Tensor
    k_starts: Tensor
    k_lengths: Tensor
    most_queries: int
    most_keys: int


class Library(Protocol):
    """The functions of flash-attn-4 that are used, in its conventions. Tests replace it by plain torch.

    Tensors are [B, T, heads, width], or [tokens, heads, width] with lengths; lse, lse_log2 and delta are [B, H, T] or
    [H, tokens]; accumulators as in `blocks`, with ``sides``.
    """

    sides: Table

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, params: Params, bounds: Bounds, reach: Bounds,
        lengths: Lengths | None,
    ) -> None:  # fmt: skip
        """Writes out and lse (natural, with sinks). ``reach``: the whole mask's bounds, which choose the tiles."""
        ...

    def delta(self, dout: Tensor, out: Tensor) -> Tensor:
        """Computes rowsum(dout * out) [B, H, T] in float32, of [B, T, H, Dv]."""
        ...

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse_log2: Tensor, delta: Tensor, dq: Tensor, dk: Tensor,
        dv: Tensor, params: Params, bounds: Bounds, lengths: Lengths | None,
    ) -> None:  # fmt: skip
        """Adds to dq, dk, dv, all unscaled. lse_log2 (lse * log2(e)) and delta are in the blocks of dq."""
        ...

    def finish(
        self, accumulator: Tensor, out: Tensor, scale: float, role: Literal["q", "k", "v"], widths: tuple[int, int],
        starts: Tensor | None, lengths: Tensor | None,
    ) -> None:  # fmt: skip
        """Writes scale * accumulator in 16 bits into ``out``, in the order of its tensor."""
        ...


@dataclass(frozen=True, eq=False)
class Loaded:
    """The library, or the reasons why it cannot be used."""

    library: Library | None
    reasons: tuple[str, ...]


@cache
def not_installed() -> tuple[str, ...]:
    """Lists installed packages that differ from the tested ones. Imports nothing."""
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        return (f"{PACKAGE} is not installed (tested with {', '.join(TESTED)})",)
    reasons = [] if found in TESTED else [f"{PACKAGE} {found} is not tested (tested: {', '.join(TESTED)})"]
    for package, beginnings in NEEDS.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            found = "missing"
        if not found.startswith(beginnings):
            reasons.append(f"{package} is {found} ({PACKAGE} is tested with {', '.join(beginnings)}x)")
    return tuple(reasons)


@cache
def load() -> Loaded:
    """Imports flash-attn-4, once, and compares it with the tested version."""
    use_disk_cache()
    try:
        library = import_module(".hopper", __package__).Hopper()
        reasons = tuple(library.differences())
    except Exception as error:  # noqa: BLE001  # a beta and its compiler may fail in any way; each is a reason
        return Loaded(None, (f"{PACKAGE} does not import: {type(error).__name__}: {error}",))
    return Loaded(None if reasons else library, reasons)
