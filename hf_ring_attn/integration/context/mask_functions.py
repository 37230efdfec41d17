"""Recognises the mask functions of transformers' masking_utils by reading their closures.

A mask function becomes an expression of bands of distances, groups (documents, chunks, blocks), and their unions and
intersections. Probing some indices would prove nothing about others. A function from elsewhere is known only if its
code equals that of one in this file.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import masking_utils

from ... import errors
from ...sharding.mask import BIDIRECTIONAL, CAUSAL, UNBOUNDED, Band, Term, Terms, both, either


@dataclass(frozen=True)
class SameGroup:
    """A query sees the keys of its group: its document, its chunk of ``size`` positions, or its block.

    Args:
        tensor: ids [B, T] of documents or blocks (-1: none), or the left padding [B] of chunks, of one rank's shard.
        positions: [B, T], the positions by which chunks are counted, if not the indices in the row.
    """

    kind: Literal["documents", "chunks", "blocks"]
    size: int = 0
    tensor: Tensor | None = field(default=None, compare=False)
    positions: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Combined:
    """The intersection or the union of several parts."""

    how: Literal["all", "any"]
    parts: tuple[MaskExpr, ...]


MaskExpr = Band | SameGroup | Combined


def parts_of(seen: MaskExpr) -> list[Band | SameGroup]:
    """The bands and groups of an expression."""
    return [part for inner in seen.parts for part in parts_of(inner)] if isinstance(seen, Combined) else [seen]


def terms_of(seen: MaskExpr, alike: Callable[[SameGroup], Terms]) -> Terms:
    """The expression as terms; ``alike`` gives those of groups."""
    if isinstance(seen, Band):
        return (Term(seen),)
    if isinstance(seen, SameGroup):
        return alike(seen)
    return functools.reduce(both if seen.how == "all" else either, (terms_of(part, alike) for part in seen.parts))


def recognise(function: Callable[..., Any], positions: Tensor | None = None) -> MaskExpr:
    """The expression of a mask function, by its qualified name in masking_utils, or by its code.

    Args:
        positions: [B, T], to which an enclosing function maps the indices.

    Raises:
        UnknownMask: for any other function, by name.
    """
    name = getattr(function, "__qualname__", repr(function))
    reader = _READERS.get(name) if getattr(function, "__module__", "") == masking_utils.__name__ else None
    reader = reader or next((read for known, read in _OWN if _same(function, known)), None)
    # Blocks are looked up by index in the row; masking_utils would use the position in the document.
    if reader is None or (positions is not None and reader is _blocks):
        raise errors.UnknownMask(f"{getattr(function, '__module__', '?')}.{name}", sorted(_READERS))
    code = getattr(function, "__code__", None)
    names = code.co_freevars if code is not None else ()
    cells = getattr(function, "__closure__", None) or ()
    return reader({key: cell.cell_contents for key, cell in zip(names, cells, strict=True)}, positions)


Closure = dict[str, Any]


def _joined(how: Literal["all", "any"], closure: Closure, positions: Tensor | None) -> MaskExpr:
    parts = [recognise(function, positions) for function in closure["mask_functions"]]
    bands = [part for part in parts if isinstance(part, Band)]
    if how == "all" and len(bands) == len(parts):
        return functools.reduce(lambda a, b: a & b, bands)
    # The widest band, if it contains the others: a union with causal is the wider one.
    widest = Band(min(band.lo for band in bands), max(band.hi for band in bands)) if bands else None
    if how == "any" and len(bands) == len(parts) and widest in bands:
        return bands[bands.index(widest)]
    return Combined(how, tuple(parts))


def _blocks(closure: Closure, _: Tensor | None) -> MaskExpr:
    return SameGroup("blocks", tensor=closure["block_sequence_ids"])


_READERS: dict[str, Callable[[Closure, Tensor | None], MaskExpr]] = {
    "causal_mask_function": lambda _, __: CAUSAL,
    "bidirectional_mask_function": lambda _, __: BIDIRECTIONAL,
    # Positions count up by one inside a document, so distances are those of the row.
    "sliding_window_overlay.<locals>.inner_mask": lambda c, _: Band(-UNBOUNDED, c["sliding_window"] - 1),
    "sliding_window_bidirectional_overlay.<locals>.inner_mask": lambda c, _: Band(
        -c["sliding_window"], c["sliding_window"]
    ),
    "chunked_overlay.<locals>.inner_mask": lambda c, at: SameGroup("chunks", c["chunk_size"], c["left_padding"], at),
    "blockwise_overlay.<locals>.inner_mask": _blocks,
    "packed_sequence_mask_function.<locals>.inner_mask": lambda c, _: SameGroup(
        "documents", tensor=c["packed_sequence_mask"]
    ),
    "and_masks.<locals>.and_mask": functools.partial(_joined, "all"),
    "or_masks.<locals>.or_mask": functools.partial(_joined, "any"),
    "remap_positions_for_packed_sequence.<locals>.inner_mask": lambda c, _: recognise(
        c["mask_function"], c["position_ids"]
    ),
}


# ---- functions that models write themselves --------------------------------------------------------------------------


def _window_both_ways(sliding_window: int) -> Callable[..., Any]:
    """The mask of Gemma 3's local layers (and similar models) with use_bidirectional_attention."""

    def inner_mask(batch_idx: int, head_idx: int, q_idx: int, kv_idx: int) -> bool:
        return abs(q_idx - kv_idx) < sliding_window

    return inner_mask


_OWN: list[tuple[Callable[..., Any], Callable[[Closure, Tensor | None], MaskExpr]]] = [
    (lambda *args: torch.tensor(True, dtype=torch.bool), lambda _, __: BIDIRECTIONAL),
    (_window_both_ways(0), lambda c, _: Band(1 - c["sliding_window"], c["sliding_window"] - 1)),
]


def _same(function: Any, known: Callable[..., Any]) -> bool:
    """Returns True for functions with the same instructions, parameters, globals and types in closures."""
    code, other = getattr(function, "__code__", None), known.__code__
    stars = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    if code is None or code.co_argcount != other.co_argcount or code.co_flags & stars != other.co_flags & stars:
        return False
    if code.co_varnames[: code.co_argcount] != other.co_varnames[: other.co_argcount]:
        return False
    if _instructions(code) != _instructions(other) or _enclosed(function) != _enclosed(known):
        return False
    names = [argval for opname, argval in _instructions(code) if opname == "LOAD_GLOBAL"]
    return all(_looked_up(function, name) is _looked_up(known, name) for name in names)


def _enclosed(function: Any) -> list[type]:
    return [type(cell.cell_contents) for cell in function.__closure__ or ()]


@functools.cache
def _instructions(code: Any) -> list[tuple[str, Any]]:
    values, constants = code.co_consts, {"LOAD_CONST", "KW_NAMES"}  # by value: a docstring shifts their indices
    return [(i.opname, values[i.arg] if i.opname in constants else i.argval) for i in dis.get_instructions(code)]


def _looked_up(function: Any, name: str) -> Any:
    return function.__globals__.get(name, getattr(builtins, name, None))
