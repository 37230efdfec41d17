"""FlashAttention 2, torch's own or the flash-attn package, by name only: it rounds each contribution to a gradient.

The library returns each gradient in the inputs' dtype; these are summed in float32 here, so more calls make more error.
"auto" takes triton, which is faster. The package is imported only when it could serve a request.

Masks are flash-attn-4's (`flash4.calls`), with two exceptions (flash-attention's issue 895): a bound as wide as the
keys counts as no bound, and if only one side has a bound, the other gets one as wide as the keys. Both are wrong only
if a bound hides something and queries outnumber keys by two or more. Such tiles are cut in two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..sharding.mask import UNBOUNDED, Tile
from .base import Gradients, InOrder, Params, Request, aligned, products_in_place, reasons_of_flash, with_sinks
from .flash4.calls import Bounds, Dense, Packed, Rectangle, join_blocks, pack_call, read_tiles, rectangle

LARGEST_HEAD, UNIT, LOWEST_CAPABILITY, NO_DROPOUT = 256, 8, (8, 0), 0.0
TORCHES, PACKAGES = ("2.11.", "2.12.", "2.13."), ("2.7.", "2.8.")
"""The beginnings of known versions of torch and of flash-attn, whose private functions are called here."""
JOINED_AT_MOST, MOST_ENTRIES = 8, 65535
"""Most rectangles of a batch row that are joined, and most of a packed call (a dim of a CUDA grid)."""

Tokens = slice | Tensor


class How(NamedTuple):
    """Options of a packed call. ``lengths``: starts of rectangles in q and in k, [n + 1] int32, and both maxima."""

    params: Params
    bounds: Bounds
    lengths: tuple[Tensor, Tensor, int, int]


class Flash2(InOrder):
    """See the module. ``libraries``: fakes, for tests; by default torch's own, then the package."""

    name = "flash2"
    rounds_gradients = True

    def __init__(self, libraries: Sequence[Torch] = ()) -> None:
        self._fake, self._libraries = bool(libraries), libraries or (Torch(), Package())

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, params: Params, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        batch, tokens, heads, _ = q.shape
        out = q.new_zeros(batch, tokens, heads, v.shape[3]) if out is None else out.zero_()
        lse = q.new_full((batch, tokens, heads), -torch.inf, dtype=torch.float32)
        for call in plan(tiles.contiguous().numpy().tobytes(), tokens, k.shape[1], softmax=True):
            of_q, of_k, lengths = _entries(call, q.device)
            parts = (_read(x, at) for x, at in ((q, of_q), (k, of_k), (v, of_k)))
            part, sums = self._library(params).forward(How(params, call.bounds, lengths), *parts)
            assert sums.dtype == torch.float32, "FlashAttention 2 keeps its statistics in float32"
            _rows(out)[of_q], _rows(lse)[of_q] = part, sums.T
        return out, with_sinks(out, lse, params.sinks).transpose(1, 2).contiguous()

    def delta(self, dout: Tensor, out: Tensor) -> Tensor:
        return products_in_place(dout, out)  # the library makes its own

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, tiles: Tensor,
        params: Params, into: Gradients, out: Tensor | None = None,
    ) -> None:  # fmt: skip
        assert out is not None, "FlashAttention 2 makes delta itself, of out"
        for call in plan(tiles.contiguous().numpy().tobytes(), q.shape[1], k.shape[1]):
            of_q, of_k, lengths = _entries(call, q.device)
            pairs = (dout, of_q), (q, of_q), (k, of_k), (v, of_k), (out, of_q), (lse.transpose(1, 2), of_q)
            *parts, sums = (_read(x, at) for x, at in pairs)
            found = self._library(params).backward(How(params, call.bounds, lengths), *parts, sums.T.contiguous())
            for total, at, part in zip((into.dq, into.dk, into.dv), (of_q, of_k, of_k), found, strict=True):
                _rows(total)[at] += part

    def unsupported(self, request: Request) -> list[str]:
        reasons = reasons_of_flash(request)
        if request.head_dim != request.value_dim:
            reasons.append(f"keys and values must be of one width, got {request.head_dim} and {request.value_dim}")
        elif request.head_dim > LARGEST_HEAD or request.head_dim % UNIT:
            reasons.append(f"heads are a multiple of {UNIT} wide, {LARGEST_HEAD} at most, got {request.head_dim}")
        if request.device == "cuda" and not self._fake:
            reasons += _without_gpu()
        asked = () if reasons else self._libraries  # to ask the package is to import it
        why = {one.name: one.reasons(request.softcap, request.deterministic) for one in asked}
        return reasons + [f"{name}: {one}" for name, some in why.items() for one in some if all(why.values())]

    def _library(self, params: Params) -> Torch:
        return next(one for one in self._libraries if not one.reasons(params.softcap is not None, params.deterministic))


def _without_gpu() -> list[str]:
    if torch.version.hip is not None or not torch.cuda.is_available():
        return ["needs an NVIDIA GPU, and torch finds none"]
    got = torch.cuda.get_device_capability()
    return [] if got >= LOWEST_CAPABILITY else [f"needs compute capability 8.0 or later, got {got[0]}.{got[1]}"]


@lru_cache(maxsize=64)
def _entries(call: Packed, device: torch.device) -> tuple[Tokens, Tokens, tuple[Tensor, Tensor, int, int]]:
    """Computes the tokens of a call's queries and keys in tensors [B * T, ...], and its lengths."""
    of_q, of_k = (call.q_starts, call.q_lengths), (call.k_starts, call.k_lengths)
    q, k = (torch.tensor([0, *accumulate(some)], dtype=torch.int32).to(device) for _, some in (of_q, of_k))
    return _tokens(*of_q, device), _tokens(*of_k, device), (q, k, max(call.q_lengths), max(call.k_lengths))


def _tokens(starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tokens:
    first, stop = starts[0], starts[-1] + lengths[-1]
    if sum(lengths) == stop - first:
        return slice(first, stop)
    return torch.cat([torch.arange(a, a + n) for a, n in zip(starts, lengths, strict=True)]).to(device)


def _read(x: Tensor, tokens: Tokens) -> Tensor:
    return aligned(x.flatten(0, 1)[tokens])


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, *x.shape[2:])  # never a copy: it is written to


@lru_cache(maxsize=1024)
def plan(table: bytes, queries: int, keys: int, softmax: bool = False) -> tuple[Packed, ...]:
    """Converts a table to calls for batch rows of these sizes; no call has a token twice."""
    tiles = sorted(read_tiles(table))
    twice = any(a.row == b.row and a.q_offset + a.q_length > b.q_offset for a, b in pairwise(tiles))
    assert not (softmax and twice), "a query met two tiles: unsupported() should have refused holes"
    by_row: dict[int, list[Dense]] = {}
    for tile in tiles:
        for at, bounds in map(rectangle, _cut(tile)):
            by_row.setdefault(tile.row, []).append(Dense((0, 1), at, bounds, at.q_start, at.k_start))
    few = all(len(dense) <= JOINED_AT_MOST for dense in by_row.values())
    calls: dict[Bounds, list[list[Rectangle]]] = {}
    for row, dense in by_row.items():
        if few:
            dense = join_blocks([one._replace(bounds=_binding(one.bounds, [one.at])) for one in dense], 1, 1)
        for one in dense:
            (q_start, q_stop, k_start, k_stop), q, k = one.at, row * queries, row * keys
            at, some = Rectangle(q_start + q, q_stop + q, k_start + k, k_stop + k), calls.setdefault(one.bounds, [])
            for call in some:
                if call[-1].q_stop <= at.q_start and call[-1].k_stop <= at.k_start and len(call) < MOST_ENTRIES:
                    call.append(at)
                    break
            else:
                some.append([at])
    made = ((_binding(bounds, call), call) for bounds, some in calls.items() for call in some)
    return tuple(pack_call(bounds, dict(enumerate(call))) for bounds, call in made)


def _binding(bounds: Bounds, call: Sequence[Rectangle]) -> Bounds:
    """Drops bounds that hide nothing: without any it is faster."""
    left, right = bounds
    queries, keys = max(at.q_stop - at.q_start for at in call), max(at.k_stop - at.k_start for at in call)
    return Bounds(None if (left or 0) >= keys - 1 else left, None if (right or 0) >= queries - 1 else right)


def _cut(tile: Tile) -> Iterator[Tile]:
    """Cuts a tile so that no part is an exception: at most one query more than keys, or no bounds at all."""
    if tile.q_length <= tile.k_length + 1:
        yield tile
        return
    # From the first cut on queries see the last key; from the second on they no longer see the first.
    for cut in (tile.k_position + tile.k_length + tile.lo, tile.k_position + 1 + tile.hi):
        count = cut - tile.q_position
        if 0 < count < tile.q_length:
            rest = tile._replace(q_offset=tile.q_offset + count, q_length=tile.q_length - count, q_position=cut)
            for part in (tile._replace(q_length=count), rest):
                yield from _cut(part)
            return
    yield tile._replace(lo=-UNBOUNDED, hi=UNBOUNDED)


class Torch:
    """torch's own: nothing to install. Tensors are [tokens, heads, D]; lse is [H, tokens], natural, without sinks."""

    name = "torch's own"

    def reasons(self, softcap: bool, deterministic: bool) -> Sequence[str]:
        """Reasons why it cannot serve this; none if it can."""
        active = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
        reasons = {
            "this build of torch has none": not torch.backends.cuda.is_flash_attention_available(),
            f"torch {torch.__version__} is not one of {TORCHES}": not torch.__version__.startswith(TORCHES),
            "it has no softcap": softcap,
            "it is deterministic only if the whole process is (torch.use_deterministic_algorithms)": deterministic,
            f"torch uses {active} in its place (restore_flash_attention_impl() undoes it)": active,
        }
        return [reason for reason, counts in reasons.items() if counts]

    def forward(self, how: How, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Returns out and lse."""
        options = *how.lengths, NO_DROPOUT, how.bounds.causal, False
        return tuple(torch.ops.aten._flash_attention_forward(q, k, v, *options, **self._named(how))[:2])

    def backward(self, how: How, *dout_q_k_v_out_lse: Tensor) -> tuple[Tensor, ...]:
        """Returns dq, dk and dv."""
        lse = dout_q_k_v_out_lse[-1]
        no_random = torch.zeros(2, dtype=torch.uint64, device=lse.device), lse.new_empty(0)
        options = *how.lengths, NO_DROPOUT, how.bounds.causal, *no_random
        return tuple(torch.ops.aten._flash_attention_backward(*dout_q_k_v_out_lse, *options, **self._named(how)))

    def _named(self, how: How) -> dict[str, Any]:
        left, right = (None, None) if how.bounds.causal else how.bounds
        return {"scale": how.params.scale, "window_size_left": left, "window_size_right": right}


class Package(Torch):
    """The flash-attn package: also softcap and deterministic gradients."""

    name = "the flash-attn package"

    def reasons(self, softcap: bool, deterministic: bool) -> Sequence[str]:
        return _package()[1]

    def forward(self, how: How, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return tuple(_package()[0][0](q, k, v, *how.lengths, *self._options(how), False)[:2])

    def backward(self, how: How, *dout_q_k_v_out_lse: Tensor) -> tuple[Tensor, ...]:
        found = tuple(x.new_empty(x.shape) for x in dout_q_k_v_out_lse[1:4])
        _package()[0][1](*dout_q_k_v_out_lse, *found, *how.lengths, *self._options(how), how.params.deterministic)
        return found

    def _options(self, how: How) -> tuple[Any, ...]:
        left, right = (-1 if bound is None or how.bounds.causal else bound for bound in how.bounds)
        return NO_DROPOUT, how.params.scale, how.bounds.causal, left, right, how.params.softcap or 0.0, None


@cache
def _package() -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """The package's forward and backward, or why they cannot be used. Imports it, once, if its version is known."""
    try:
        found = version("flash-attn")
    except PackageNotFoundError:
        return (), ("it is not installed",)
    if not found.startswith(PACKAGES):
        return (), (f"version {found} is not known here ({', '.join(PACKAGES)}x are)",)
    try:
        interface = import_module("flash_attn.flash_attn_interface")
        return (interface._wrapped_flash_attn_varlen_forward, interface._wrapped_flash_attn_varlen_backward), ()
    except Exception as error:  # noqa: BLE001  # compiled for another torch it may fail in any way; each is a reason
        return (), (f"it does not import: {type(error).__name__}: {error}",)
