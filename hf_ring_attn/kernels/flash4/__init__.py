"""flash-attn-4 (CuTe DSL, Hopper) with float32 accumulators that we own.

Forward: its kernel over contiguous ranges of keys, so a query's bits do not depend on how a ring cuts the row.
Backward: its main kernel adds to our accumulators, in its own block order. They are sent in that order, and its last
kernel rounds them once, on the owner's rank. The package is imported only when it could serve a request.
"""

from __future__ import annotations

import math
import weakref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..base import Gradients, Params, Place, Request, aligned, reasons_of_flash
from .accumulators import finish, in_blocks
from .blocks import HOPPER, Blocks
from .calls import Call, Dense, Packed, backward_calls, forward_calls
from .library import Lengths, Library, load, not_installed

SINKS = (torch.bfloat16, torch.float16, torch.float32)
TESTED = (9, 0)
"""The compute capability on which this ran: Hopper."""


class Flash4:
    """See the module.

    Args:
        library: a fake, for tests.
    """

    name = "flash4"
    rounds_gradients = False
    two_streams = True

    def __init__(self, library: Library | None = None) -> None:
        self._given = library
        self._lengths: weakref.WeakKeyDictionary[Packed, dict[torch.device, Lengths]] = weakref.WeakKeyDictionary()
        self._kept = WeakIdKeyDictionary()  # by delta: the steps of a ring ask for the same

    @property
    def library(self) -> Library:
        library = self._given if self._given is not None else load().library
        assert library is not None, "unsupported() has reasons"
        return library

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, params: Params, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        batch, tokens, heads, _ = q.shape
        calls, whole, reach = forward_calls(tiles, batch, tokens, k.shape[1])
        sinks = params.sinks
        if sinks is not None and sinks.dtype not in SINKS:
            sinks = sinks.float()
        params = Params(params.scale, params.softcap, sinks, params.deterministic)
        packed = any(isinstance(call, Packed) for call in calls)
        out = q.new_empty(batch, tokens, heads, v.shape[3]) if out is None else out
        # A packed call takes [H, tokens of all rows].
        lse = q.new_empty((heads, batch, tokens) if packed else (batch, heads, tokens), dtype=torch.float32)
        rows_first = lse.transpose(0, 1) if packed else lse
        if not whole:
            out.zero_()
            rows_first.copy_((q.new_full((heads,), -math.inf) if sinks is None else sinks)[None, :, None])
        for call in calls:
            if isinstance(call, Dense):
                rows, queries, keys = slice(*call.rows), slice(*call.at[:2]), slice(*call.at[2:])
                self.library.forward(
                    q[rows, queries], k[rows, keys], v[rows, keys], out[rows, queries], lse[rows, :, queries], params,
                    call.bounds, reach, None,
                )  # fmt: skip
            else:
                self.library.forward(
                    q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), out.flatten(0, 1), lse.flatten(1), params,
                    call.bounds, reach, self._lengths_of(call, q.device),
                )  # fmt: skip
        return out, rows_first.contiguous()

    def delta(self, dout: Tensor, out: Tensor) -> Tensor:
        return self.library.delta(aligned(dout), aligned(out))

    def new_gradient(self, chunk: Tensor, place: Place | None = None) -> Tensor:
        assert place is not None, "flash4's accumulators are arranged by the place they are for"
        _, _, heads, width = place.shape
        shape = Blocks.of(place, self.library.sides[place.widths]).shape(heads, width)
        return torch.zeros(shape, dtype=torch.float32, device=chunk.device)

    def of_heads(self, accumulator: Tensor, heads: slice) -> Tensor:
        return accumulator[..., heads, :]

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, tiles: Tensor,
        params: Params, into: Gradients, out: Tensor | None = None,
    ) -> None:  # fmt: skip
        assert into.places is not None, "flash4's accumulators are arranged by the places they are for"
        sides = self.library.sides[into.places[0].widths]
        of_q, of_k = (Blocks.of(place, sides) for place in into.places[:2])
        calls = backward_calls(tiles, of_q, of_k)
        if not calls:
            return
        statistics = self._statistics(lse, delta, of_q)
        queries, keys = q, k
        q, k, v, dout = (aligned(x) for x in (q, k, v, dout))
        if any(isinstance(call, Packed) for call in calls):  # it takes all rows as one
            q, k, v, dout = (_joinable(x) for x in (q, k, v, dout))
        if q is not queries or k is not keys:
            # The backward may read these copies before they are written; a launch in between waits for them.
            torch.zeros(1, device=q.device)
        for call in calls:
            (qs, ks, vs, dos), (lse_log2, deltas, dq, dk, dv) = _parts(
                call, (q, k, v, dout), (*statistics, into.dq, into.dk, into.dv), of_q, of_k
            )
            lengths = self._lengths_of(call, q.device) if isinstance(call, Packed) else None
            self.library.backward(qs, ks, vs, dos, lse_log2, deltas, dq, dk, dv, params, call.bounds, lengths)

    def finish(
        self, accumulator: Tensor, dtype: torch.dtype, place: Place | None = None, out: Tensor | None = None
    ) -> Tensor:
        assert place is not None, "flash4's accumulators are arranged by the place they are for"
        out = torch.empty(place.shape, dtype=dtype, device=accumulator.device) if out is None else out
        return finish(self.library, accumulator, out, place)

    def unsupported(self, request: Request) -> list[str]:
        reasons = self._unfit(request)
        if self._given is None:
            reasons += not_installed()
            if not reasons:
                reasons += load().reasons
        return reasons

    def lacks(self, request: Request) -> list[str]:
        return [] if self._unfit(request) else self.unsupported(request)

    def _unfit(self, request: Request) -> list[str]:
        """The reasons of `unsupported` that no installation would change."""
        reasons = reasons_of_flash(request)
        capability = _capability() if self._given is None else TESTED
        if (request.head_dim, request.value_dim) not in HOPPER:
            widths = ", ".join(str(d) if d == dv else f"{d}/{dv}" for d, dv in HOPPER)
            got = f"{request.head_dim}/{request.value_dim}"
            reasons.append(f"heads are {widths} wide (keys/values), got {got}")
        if request.device == "cuda" and capability[0] != TESTED[0]:
            reasons.append(f"was tried on Hopper (compute capability 9.0) alone, got {capability[0]}.{capability[1]}")
        return reasons

    def _statistics(self, lse: Tensor, delta: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """Computes lse * log2(e) and delta in blocks; cached, since the next step has the same tensors."""
        of_lse, of_blocks, lse_log2, placed = self._kept.get(delta, (None, None, None, None))
        if of_lse is None or of_lse() is not lse or of_blocks is not blocks:
            lse_log2, placed = in_blocks(lse, delta, blocks)
            # An entry that referred to its own key would never be freed.
            placed = None if placed is delta else placed
            self._kept[delta] = weakref.ref(lse), blocks, lse_log2, placed
        return lse_log2, delta if placed is None else placed

    def _lengths_of(self, call: Packed, device: torch.device) -> Lengths:
        by_device = self._lengths.setdefault(call, {})
        if device not in by_device:
            q_starts, q_lengths, k_starts, k_lengths = (
                torch.tensor(numbers, dtype=torch.int32, device=device)
                for numbers in ((*call.q_starts, 0), call.q_lengths, (*call.k_starts, 0), call.k_lengths)
            )
            most = max(call.q_lengths), max(call.k_lengths)
            by_device[device] = Lengths(q_starts, q_lengths, k_starts, k_lengths, *most)
        return by_device[device]


def _joinable(x: Tensor) -> Tensor:
    """x [B, T, heads, width], copied unless `flatten(0, 1)` makes a view of it."""
    return x if x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1) else x.contiguous()


def _parts(
    call: Call, inputs: tuple[Tensor, ...], sums: tuple[Tensor, ...], q: Blocks, k: Blocks
) -> tuple[list[Tensor], list[Tensor]]:
    """Slices q, k, v, dout, and the blocks of lse_log2, delta, dq, dk, dv, for a call."""
    if isinstance(call, Packed):
        return [x.flatten(0, 1) for x in inputs], list(sums)
    rows, queries, keys = slice(*call.rows), slice(*call.at[:2]), slice(*call.at[2:])
    read = [x[rows, part] for x, part in zip(inputs, (queries, keys, keys, queries), strict=True)]
    width, value_width = inputs[0].shape[3], inputs[2].shape[3]
    # q and k may be the same object.
    of_queries, of_keys = (q, call.q_block, queries), (k, call.k_block, keys)
    places = (*((of_queries, each) for each in (1, 1, width)), (of_keys, width), (of_keys, value_width))
    used = []
    for x, ((blocks, start, part), each) in zip(sums, places, strict=True):
        count = -(-(part.stop - part.start) // blocks.side)
        there = slice(start * blocks.side * each, (start + count) * blocks.side * each)
        used.append(x[rows, :, there] if blocks.shared else x[None, :, there])
    return read, used


def _capability() -> tuple[int, int]:
    """The compute capability of the current device; Hopper's without a GPU, (0, 0) if it is not CUDA's."""
    if not torch.cuda.is_available():
        return TESTED
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability()
