"""FlashAttention 2, torch's own or the flash-attn package: gradients leave it in 16 bits, contribution by contribution.

Both passes are whole calls of the library over contiguous ranges of keys. What each call adds to a gradient is rounded
to the inputs' dtype there, and summed in float32 here: more error than with the other kernels, and the more of it the
more calls there are. Nothing of the package is imported before a request could be served.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ..base import Gradients, InOrder, Params, Request, aligned, products_in_place, reasons_of_flash, with_sinks
from ..flash4.calls import Call, Dense, Packed
from .calls import plan
from .libraries import Lengths, Library, Package, Torch
from .trial import fails

LARGEST_HEAD, UNIT = 256, 8
LOWEST_CAPABILITY = (8, 0)


class Flash2(InOrder):
    """See the module.

    Args:
        libraries: fakes, for tests; otherwise torch's own where it can, and else the package.
        tried: each library is tried on a small attention before it serves.
    """

    name = "flash2"

    def __init__(self, libraries: Sequence[Library] = (), tried: bool = True) -> None:
        self._fake = bool(libraries)
        self._libraries = libraries or (Torch(), Package())
        self._tried = tried
        self._trials: dict[tuple[Library, bool, bool], tuple[str, ...]] = {}
        self._places: weakref.WeakKeyDictionary[Packed, dict[torch.device, Where]] = weakref.WeakKeyDictionary()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, params: Params, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As in the contract; ``out`` is where out is written, some heads of a tensor of more, or None."""
        library = self._library(params)
        batch, tokens, heads, _ = q.shape
        calls, once = plan(tiles, tokens, k.shape[1])
        assert once, "a query met two tiles: unsupported() should have refused holes"
        out = q.new_zeros(batch, tokens, heads, v.shape[3]) if out is None else out.zero_()
        lse = q.new_full((batch, tokens, heads), -torch.inf, dtype=torch.float32)
        for call in calls:
            where = self._where(call, q.device)
            part, sums = library.forward(
                where.q.read(q), where.k.read(k), where.k.read(v), params, call.bounds, where.lengths
            )
            assert sums.dtype == torch.float32, "FlashAttention 2 keeps its statistics in float32"
            where.q.write(out, part)
            where.q.write(lse, sums.transpose(-1, -2))
        return out, with_sinks(out, lse, params.sinks).transpose(1, 2).contiguous()

    def delta(self, dout: Tensor, out: Tensor) -> Tensor:
        return products_in_place(dout, out)  # the library makes its own

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, tiles: Tensor,
        params: Params, into: Gradients, out: Tensor | None = None,
    ) -> None:  # fmt: skip
        assert out is not None, "FlashAttention 2 makes delta itself, of out"
        library = self._library(params)
        for call in plan(tiles, q.shape[1], k.shape[1]).calls:
            where = self._where(call, q.device)
            of_q, of_k = where.q, where.k
            sums = of_q.read(lse.transpose(1, 2), in_place=True).transpose(-1, -2).contiguous()
            parts = library.backward(
                of_q.read(dout), of_q.read(q), of_k.read(k), of_k.read(v), of_q.read(out), sums, params, call.bounds,
                where.lengths,
            )  # fmt: skip
            for place, total, part in zip((of_q, of_k, of_k), (into.dq, into.dk, into.dv), parts, strict=True):
                place.add(total, part)

    def unsupported(self, request: Request) -> list[str]:
        reasons = reasons_of_flash(request)
        if request.head_dim != request.value_dim:
            reasons.append(f"keys and values must be of one width, got {request.head_dim} and {request.value_dim}")
        elif request.head_dim > LARGEST_HEAD or request.head_dim % UNIT:
            reasons.append(f"heads are a multiple of {UNIT} wide, {LARGEST_HEAD} at most, got {request.head_dim}")
        if request.device == "cuda" and not self._fake:
            reasons += _without_gpu()
        return reasons or self._refusals(request.softcap, request.deterministic)

    def rounds_gradients(self, request: Request) -> bool:
        return True

    def _library(self, params: Params) -> Library:
        softcap, deterministic = params.softcap is not None, params.deterministic
        for library in self._libraries:
            if not self._why_not(library, softcap, deterministic):
                return library
        raise AssertionError("unsupported() has reasons")

    def _refusals(self, softcap: bool, deterministic: bool) -> list[str]:
        """Every library's reasons, or none where one of them can."""
        reasons: list[str] = []
        for library in self._libraries:
            why = self._why_not(library, softcap, deterministic)
            if not why:
                return []
            reasons += (f"{library.name}: {reason}" for reason in why)
        return reasons

    def _why_not(self, library: Library, softcap: bool, deterministic: bool) -> Sequence[str]:
        why = library.reasons(softcap, deterministic)
        if why or not self._tried:
            return why
        key = library, softcap, deterministic
        if key not in self._trials:
            self._trials[key] = fails(Flash2((library,), tried=False), softcap, deterministic)
        return self._trials[key]

    def _where(self, call: Call, device: torch.device) -> Where:
        if isinstance(call, Dense):
            rows = slice(*call.rows)
            return Where(Block(rows, slice(*call.at[:2])), Block(rows, slice(*call.at[2:])), None)
        by_device = self._places.setdefault(call, {})
        if device not in by_device:
            starts = [
                torch.tensor([0, *accumulate(numbers)], dtype=torch.int32, device=device)
                for numbers in (call.q_lengths, call.k_lengths)
            ]
            of_q = Listed.of(call.q_starts, call.q_lengths, device)
            of_k = Listed.of(call.k_starts, call.k_lengths, device)
            lengths = Lengths(starts[0], starts[1], max(call.q_lengths), max(call.k_lengths))
            by_device[device] = Where(of_q, of_k, lengths)
        return by_device[device]


@dataclass(frozen=True)
class Block:
    """Tokens of a dense call in tensors [B, T, ...]."""

    rows: slice
    tokens: slice

    def read(self, x: Tensor, in_place: bool = False) -> Tensor:
        """``in_place``: a view will do, however it lies in memory."""
        part = x[self.rows, self.tokens]
        return part if in_place else aligned(part)

    def write(self, x: Tensor, part: Tensor) -> None:
        x[self.rows, self.tokens] = part

    def add(self, x: Tensor, part: Tensor) -> None:
        x[self.rows, self.tokens].add_(part)


@dataclass(frozen=True, eq=False)
class Listed:
    """Tokens of a packed call, each once, in tensors [B, T, ...] whose rows lie one after the other."""

    index: slice | Tensor

    @classmethod
    def of(cls, starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> Listed:
        """The runs of tokens that start there; one slice where they follow each other."""
        stops = [start + length for start, length in zip(starts, lengths, strict=True)]
        if list(starts[1:]) == stops[:-1]:
            return cls(slice(starts[0], stops[-1]))
        runs = [torch.arange(start, stop) for start, stop in zip(starts, stops, strict=True)]
        return cls(torch.cat(runs).to(device))

    def read(self, x: Tensor, in_place: bool = False) -> Tensor:
        rows = x.flatten(0, 1)
        if isinstance(self.index, Tensor):
            return rows.index_select(0, self.index)
        return rows[self.index] if in_place else aligned(rows[self.index])

    def write(self, x: Tensor, part: Tensor) -> None:
        rows = x.view(-1, *x.shape[2:])
        if isinstance(self.index, Tensor):
            rows.index_copy_(0, self.index, part)
        else:
            rows[self.index] = part

    def add(self, x: Tensor, part: Tensor) -> None:
        rows = x.view(-1, *x.shape[2:])
        if isinstance(self.index, Tensor):
            rows.index_add_(0, self.index, part.to(x.dtype))
        else:
            rows[self.index].add_(part)


@dataclass(frozen=True, eq=False)
class Where:
    """Where the queries and the keys of a call lie, and the lengths of a packed one."""

    q: Block | Listed
    k: Block | Listed
    lengths: Lengths | None


def _without_gpu() -> list[str]:
    if torch.version.hip is not None:
        return ["needs an NVIDIA GPU, and this build of torch is for AMD's"]
    if not torch.cuda.is_available():
        return ["needs an NVIDIA GPU, and torch finds none"]
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < LOWEST_CAPABILITY:
        return [f"needs compute capability 8.0 or later, got {major}.{minor}"]
    return []
