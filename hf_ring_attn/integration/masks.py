"""transformers' masks as data: a mask function is recognised, never probed, and becomes a `MaskSpec`.

masking_utils calls the registered function once per kind of mask and forward, and passes what it returns on to every
attention layer untouched. Ours returns a spec that carries the ring, the layout and the tables of tiles, so nothing
that a backward or a recompute needs lives in a global.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import sdpa_mask

from .. import errors
from ..comm import LOCAL, Ring, world_size
from ..layout import Layout
from ..mask import BIDIRECTIONAL, CAUSAL, UNBOUNDED, Band, Mask
from ..ring import Plan
from . import active, models
from .active import MaskSpec


# Not compiled: it reads closures, and makes tables on the host.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def ring_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    config: Any = None,
    **kwargs: Any,
) -> MaskSpec | Tensor | None:
    """The mask function registered for "ring_fp32": a spec, or transformers' own mask for cached decoding.

    Raises:
        Refused: for a mask or a model that a ring cannot do exactly, before any attention is computed.
    """
    scope = active.current()
    whole = q_length == kv_length and _is_zero(q_offset) and _is_zero(kv_offset)
    if scope is None:
        if not whole:
            # An explicit mask, also where it would be plain causal: softcap and sinks take the model's own eager code.
            kwargs["allow_is_causal_skip"] = False
            return sdpa_mask(
                batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
                kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask, config=config,
                **kwargs,
            )  # fmt: skip
        if torch._C._current_graph_task_id() != -1 and world_size() > 1:
            raise errors.MaskOutsideRing()
        return _local_spec(batch_size, q_length, mask_function, attention_mask, config)
    if not whole or q_length != scope.layout.local_length:
        raise errors.UnshardedInput(q_length, kv_length, scope.layout.local_length, scope.layout.length)
    models.refuse(config, scope)
    seen = recognise(mask_function)
    scope.admit()
    if seen.band == BIDIRECTIONAL or seen.band.lo < 0:
        scope.refuse_labels_of_bidirectional()
    return scope.spec(seen.band, batch_size, functools.partial(_spec, scope))


def _is_zero(offset: int | Tensor) -> bool:
    return isinstance(offset, int) and offset == 0


def _spec(scope: active.Scope, band: Band, batch: int) -> MaskSpec:
    mask = Mask.of(band, batch, scope.layout.padded, scope.documents, scope.hidden)
    return MaskSpec(_plan(scope.ring.name, scope.layout, mask), scope.layout, band, scope.config, scope)


@functools.lru_cache(maxsize=128)
def _plan(ring: str, layout: Layout, mask: Mask) -> Plan:
    return Plan.of(Ring(ring), layout, mask)


def _local_spec(
    batch: int, length: int, mask_function: Callable[..., Any], attention_mask: Tensor | None, config: Any
) -> MaskSpec:
    """The spec of a ring of one for a whole, unsharded batch: documents and padding come from this call alone."""
    seen = recognise(mask_function)
    hidden = None
    if attention_mask is not None:
        hidden = ~attention_mask[:, :length].to("cpu", torch.bool)
        hidden = hidden if hidden.any() else None
    documents = None if seen.documents is None else seen.documents.to("cpu", torch.int64)
    layout = Layout(length, 1, 0)
    mask = Mask.of(seen.band, batch, length, documents, hidden)
    return MaskSpec(_plan(LOCAL, layout, mask), layout, seen.band, models.ring_config(config), None)


# ---- recognition -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Recognised:
    """A mask function as data. ``documents`` [B, T] are those that masking_utils found in position_ids, if any."""

    band: Band = BIDIRECTIONAL
    documents: Tensor | None = None

    def __and__(self, other: Recognised) -> Recognised:
        documents = self.documents if self.documents is not None else other.documents
        return Recognised(self.band & other.band, documents)


def recognise(function: Callable[..., Any]) -> Recognised:
    """The band and documents of a mask function made by transformers' masking_utils.

    Functions are told apart by the place where masking_utils defines them, and what they close over is read, not
    guessed: trying indices out proves nothing about the others.

    Raises:
        UnknownMask: for any other function, by name.
    """
    name = getattr(function, "__qualname__", repr(function))
    reader = _READERS.get(name) if getattr(function, "__module__", "") == masking_utils.__name__ else None
    if reader is None:
        raise errors.UnknownMask(f"{getattr(function, '__module__', '?')}.{name}", sorted(_READERS))
    code = getattr(function, "__code__", None)
    names = code.co_freevars if code is not None else ()
    cells = getattr(function, "__closure__", None) or ()
    return reader({key: cell.cell_contents for key, cell in zip(names, cells, strict=True)})


def _all_of(closure: dict[str, Any]) -> Recognised:
    return functools.reduce(lambda a, b: a & b, map(recognise, closure["mask_functions"]))


_READERS: dict[str, Callable[[dict[str, Any]], Recognised]] = {
    "causal_mask_function": lambda _: Recognised(CAUSAL),
    "bidirectional_mask_function": lambda _: Recognised(BIDIRECTIONAL),
    "sliding_window_overlay.<locals>.inner_mask": lambda c: Recognised(Band(-UNBOUNDED, c["sliding_window"] - 1)),
    "sliding_window_bidirectional_overlay.<locals>.inner_mask": lambda c: Recognised(
        Band(-c["sliding_window"], c["sliding_window"])
    ),
    "and_masks.<locals>.and_mask": _all_of,
    "packed_sequence_mask_function.<locals>.inner_mask": lambda c: Recognised(documents=c["packed_sequence_mask"]),
    # Positions count up by one inside a document, so distances are those of the row.
    "remap_positions_for_packed_sequence.<locals>.inner_mask": lambda c: recognise(c["mask_function"]),
}
