"""The contract of a kernel: attention of tiles on one device. A kernel never sees a process group.

Shapes: q [B, T, H, D]; k [B, S, G, D]; v [B, S, G, Dv]; query head h reads key head h // (H / G).
lse [B, H, T], natural logarithm, -inf where a query sees no key. tiles: see `hf_ring_attn.sharding.mask.tiles`.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from ..dtypes import HALVES, accumulate_dtype
from .score_mods.score_mod import ScoreMod


def row_products(dout: Tensor, out: Tensor) -> Tensor:
    """delta [B, H, T] = rowsum(dout * out) of [B, T, H, Dv], in the accumulation dtype."""
    dtype = accumulate_dtype(out.dtype)
    return torch.einsum("bthd,bthd->bht", dout.to(dtype), out.to(dtype))


def products_in_place(dout: Tensor, out: Tensor) -> Tensor:
    """`row_products` with one copy in the wide dtype instead of two, for kernels that need it for sinks only."""
    return dout.to(accumulate_dtype(out.dtype), copy=True).mul_(out).sum(3).transpose(1, 2).contiguous()


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Adds sinks to a softmax: returns the new lse [B, T, H], and scales out [B, T, H, Dv] in place."""
    if sinks is None:
        return lse
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    share = torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0))
    out.copy_(out * share[..., None])
    return total


def reasons_of_flash(request: Request) -> list[str]:
    """Lists the reasons that all flash attention libraries in 16 bits share."""
    reasons = []
    if request.device != "cuda":
        reasons.append(f"needs an NVIDIA GPU, got tensors on {request.device}")
    if request.dtype not in HALVES:
        reasons.append(f"computes in bfloat16 or float16, got {request.dtype}")
    if request.score_mod:
        reasons.append("it has no score_mod")
    if request.holes:
        reasons.append("a document's keys must be one run, and here others or hidden keys are between them")
    return reasons


def aligned(x: Tensor) -> Tensor:
    """Returns ``x``, or a copy that flash attention can read: aligned to 16 bytes, no element twice."""
    unit = 16 // x.element_size()
    strides = [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    if x.data_ptr() % 16 == 0 and x.stride(-1) == 1 and all(stride and stride % unit == 0 for stride in strides[:-1]):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, eq=False)
class Params:
    """Parameters that are the same for every tile.

    Args:
        scale: factor of q k^T, above 0.
        softcap: cap * tanh(score / cap) is applied to the scaled scores; None for none.
        sinks: [H], one logit per query head that joins the softmax without a value; None for none.
        deterministic: the same bits from run to run.
        score_mod: applied to the scaled and capped scores; None for none.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    deterministic: bool = False
    score_mod: ScoreMod | None = None

    def of_heads(self, heads: slice) -> Params:
        """These parameters for a slice of the query heads."""
        sinks = None if self.sinks is None else self.sinks[heads]
        mod = None if self.score_mod is None else self.score_mod.of_heads(heads)
        return replace(self, sinks=sinks, score_mod=mod)


@dataclass(frozen=True, eq=False)
class Place:
    """Describes the tensor of an accumulator, for kernels whose accumulators have an order other than the tensor's.

    A segment is a run of tokens of one document at consecutive positions. An accumulator ordered by blocks may be cut
    only between segments. Accumulators are sent to other ranks, so they have one size on all ranks.

    Args:
        of: the tensor whose gradient it holds.
        shape: [B, T, heads, width] of that tensor.
        widths: D and Dv.
        segments: [N, 3] int64 on the CPU: batch row, offset and length of each segment, in that order, the same N for
            the tensors of all ranks, with empty segments as padding.
        shared: every batch row, and every rank's tensor, has the same segments; the table is that of one row.
        scale: the gradient is this factor times the sum.
    """

    of: Literal["q", "k", "v"]
    shape: tuple[int, ...]
    widths: tuple[int, int]
    segments: Tensor
    shared: bool
    scale: float


@dataclass(eq=False)
class Gradients:
    """Accumulators from `Kernel.new_gradient`, added to in place; opaque to everyone but their kernel.

    ``places``: of dq, dk and dv. ``extra``: gradients of the tensors that ``Params.score_mod`` captures, by the names
    of its `new_gradients` (this rank's share, as for any weight).
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    places: tuple[Place, Place, Place] | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Part:
    """A small part of an attention, to try a kernel on. Every pair visible here is visible in the whole.

    Args:
        rows, queries, keys: numbers of batch rows, queries and keys.
        forward: tiles of all the queries and keys.
        backward: the same keys in several pieces: start, stop and tiles of each.
    """

    rows: int
    queries: int
    keys: int
    forward: Tensor
    backward: tuple[tuple[int, int, Tensor], ...]


PART = "part"
"""The key in `ScoreMod.cache` of a function that makes the `Part`."""


@dataclass(frozen=True)
class Asked:
    """A score_mod in a request; equal to another of the same code and graph, whatever their tensors hold.

    Args:
        graph: the text of its graph, or the reason why it has none.
        code: of the function, by `code_of`: a graph does not show that gradients are switched off or made by hand.
        scale, softcap: of the scores that it gets.
        mod: the function; gone once its call of attention is over, since requests are cached.
    """

    graph: str
    code: tuple[object, ...]
    scale: float
    softcap: float | None
    mod: weakref.ref[ScoreMod] = field(compare=False)

    def function(self) -> ScoreMod:
        mod = self.mod()
        assert mod is not None, "a function is asked about while its call lasts"
        return mod

    def part(self) -> Part:
        """The part that the function may be tried on: its tensors may have nothing for other positions."""
        made: Part = self.function().cache[PART]()
        return made


@dataclass(frozen=True)
class Request:
    """Describes an attention, so that a kernel can say if it supports it.

    ``holes``: some document's keys are in several runs, so a query may meet several tiles of one row of keys.
    ``asked``: the score_mod, for kernels that inspect it; None with ``score_mod``: any function.
    """

    device: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    softcap: bool
    sinks: bool
    deterministic: bool
    holes: bool = False
    score_mod: bool = False
    asked: Asked | None = None


class InOrder:
    """Accumulators in the order of their tensors, for kernels that need no other order."""

    two_streams = False
    rounds_gradients = False

    def lacks(self, request: Request) -> list[str]:
        return []

    def new_gradient(self, chunk: Tensor, place: Place | None = None) -> Tensor:
        return torch.zeros(chunk.shape, dtype=accumulate_dtype(chunk.dtype), device=chunk.device)

    def of_heads(self, accumulator: Tensor, heads: slice) -> Tensor:
        return accumulator[:, :, heads]

    def finish(
        self, accumulator: Tensor, dtype: torch.dtype, place: Place | None = None, out: Tensor | None = None
    ) -> Tensor:
        return accumulator.to(dtype) if out is None else out.copy_(accumulator)


class Kernel(Protocol):
    """The contract of a kernel. `kernels.reference` is the definition the others are tested against.

    Attributes:
        rounds_gradients: each contribution to a gradient is rounded to the inputs' dtype before it is added.
        two_streams: it is faster if calls for different heads overlap on two streams, and its caches are safe then.
    """

    name: str
    rounds_gradients: bool
    two_streams: bool

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, params: Params, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One softmax over all keys that the tiles show: out [B, T, H, Dv] in q's dtype, lse [B, H, T]; contiguous.

        Args:
            out: the buffer for out, a view of some heads of a larger tensor; None: a new tensor.
        """
        ...

    def delta(self, dout: Tensor, out: Tensor) -> Tensor:
        """Computes `row_products`; a kernel may do it without copies in the accumulation dtype."""
        ...

    def new_gradient(self, chunk: Tensor, place: Place | None = None) -> Tensor:
        """Allocates a zeroed, contiguous accumulator for the gradient of ``chunk``, in the kernel's memory order."""
        ...

    def of_heads(self, accumulator: Tensor, heads: slice) -> Tensor:
        """Some heads of an accumulator, as a view."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, tiles: Tensor,
        params: Params, into: Gradients, out: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Adds the gradients of these tiles into ``into``, given delta [B, H, T] = rowsum(dout * out).

        ``out`` is the forward's, for libraries that compute delta themselves.
        """
        ...

    def finish(
        self, accumulator: Tensor, dtype: torch.dtype, place: Place | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Converts an accumulator to the gradient in ``dtype``, in its tensor's order: the single rounding.

        Args:
            out: the buffer, a view of some heads of a larger tensor in ``dtype``; None: a new tensor.
        """
        ...

    def unsupported(self, request: Request) -> list[str]:
        """Lists every reason why this kernel cannot serve ``request``; empty if it can."""
        ...

    def lacks(self, request: Request) -> list[str]:
        """Lists what an installation lacks, for a request that this kernel could serve on this GPU; else nothing."""
        ...
