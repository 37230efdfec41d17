"""Masks as data: bands and documents become tiles.

Every mask here is a few disjoint terms "same document, and lo <= q_position - k_position <= hi" (nearly always one).
Between two contiguous runs of tokens a term is a rectangle with a band, so a whole mask is one small table of integers.
No S x S tensor exists anywhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import check, check_tensor, check_type, is_whole, whole_number
from ..dtypes import INTEGERS
from ..errors import BadShape, CrossedDocuments
from .layout import Run

UNBOUNDED = 2**62
"""No bound, in a table of tiles: larger than any distance, and safe to compare with."""


class Band(NamedTuple):
    """lo <= q_position - k_position <= hi. Causal is (0, UNBOUNDED)."""

    lo: int = -UNBOUNDED
    hi: int = UNBOUNDED

    def __and__(self, other: Band) -> Band:
        return Band(max(self.lo, other.lo), min(self.hi, other.hi))

    def within(self, length: int) -> Band:
        """The same band for the pairs of a row of ``length`` tokens, without bounds that none of them reaches.

        So a window as long as the row costs what no window does, and bounds fit a kernel's 32-bit integers.
        """
        far = max(1, length - 1)
        return Band(-UNBOUNDED if self.lo <= -far else self.lo, UNBOUNDED if self.hi >= far else self.hi)


CAUSAL = Band(lo=0)
BIDIRECTIONAL = Band()


class Segment(NamedTuple):
    """Tokens start <= position < stop of one document."""

    start: int
    stop: int
    document: int


class Tile(NamedTuple):
    """A rectangle of the mask: queries [q_position, +q_length) against keys [k_position, +k_length) of a batch row.

    ``q_offset`` and ``k_offset`` are its indices in the tensors of queries and keys; positions are absolute, and
    the pair (i, j) is visible iff lo <= (q_position + i) - (k_position + j) <= hi.
    """

    row: int
    q_offset: int
    q_length: int
    q_position: int
    k_offset: int
    k_length: int
    k_position: int
    lo: int
    hi: int


Segments = tuple[Segment, ...]


@dataclass(frozen=True, eq=False)
class Term:
    """Pairs of a query and a key whose distance is in the band and whose tokens have the same id, which is not -1.

    Args:
        ids: [B, S] int64 on the CPU, such as documents; None: all the same.
    """

    band: Band = BIDIRECTIONAL
    ids: Tensor | None = None


Terms = tuple[Term, ...]
"""The pairs that are in any of these terms; no pair is in two of them."""


def both(a: Terms, b: Terms) -> Terms:
    """The pairs that are in ``a`` and in ``b``."""
    met = [(x.band & y.band, x.ids, y.ids) for x in a for y in b]
    return tuple(
        Term(band, _joint(i, j) if i is not None and j is not None else j if i is None else i)
        for band, i, j in met
        if band.lo <= band.hi
    )


def either(a: Terms, b: Terms) -> Terms:
    """The pairs that are in ``a`` or in ``b``.

    Raises:
        CrossedDocuments: tokens of one id in ``b`` have different ids in ``a``, which a few terms cannot express.
    """
    rest = list(b)
    for known in a:
        rest = [part for term in rest for part in _beyond(term, known)]
    return (*a, *rest)


def _beyond(term: Term, known: Term) -> Iterable[Term]:
    """The pairs of ``term`` that are not in ``known``: the rest of a band, since the ids of one refine the other's."""
    if not _keeps_to(term.ids, known.ids):
        raise CrossedDocuments()
    for rest in (Band(hi=known.band.lo - 1), Band(lo=known.band.hi + 1)):
        band = term.band & rest
        if band.lo <= band.hi:
            yield Term(band, term.ids)


def _keeps_to(ids: Tensor | None, others: Tensor | None) -> bool:
    """Returns True if tokens with equal ``ids`` have equal ``others``, none of them -1."""
    if others is None:
        return True
    mine = torch.zeros_like(others) if ids is None else ids
    joint = _joint(mine, others)
    kept = torch.equal(mine >= 0, joint >= 0)
    return kept and all(len(a.unique()) == len(b.unique()) for a, b in zip(mine, joint, strict=True))


def _joint(a: Tensor, b: Tensor) -> Tensor:
    """Ids that are equal where both inputs are equal; -1 where either is negative."""
    joint = a * (int(b.max()) + 1 if b.numel() else 1) + b
    return joint.masked_fill((a < 0) | (b < 0), -1)


Rows = tuple[tuple[Segments, Segments], ...]


@dataclass(frozen=True)
class Mask:
    """Bands, each with the segments of the queries and of the keys of each batch row. Hashable, so plans can be cached.

    A query sees the keys of its own document inside the band, in any of the terms, which have no pair in common; a
    token in no segment sees, or is seen by, none.
    """

    terms: tuple[tuple[Band, Rows], ...]

    @property
    def holes(self) -> bool:
        """True if a query may meet several tiles in one row: its document's keys have several segments, or the mask
        several terms."""
        return len(self.terms) > 1 or any(
            len({key.document for key in keys}) < len(keys) for _, rows in self.terms for _, keys in set(rows)
        )

    @property
    def one_document(self) -> bool:
        """True if every row has at most one document, from the row's start; only its end may differ."""
        sides = {side for _, rows in self.terms for row in rows for side in row}
        return all(len(side) <= 1 and (not side or side[0].start == 0) for side in sides)

    @classmethod
    def of(
        cls, band: Band, batch: int, length: int, documents: Tensor | None = None, hidden: Tensor | None = None
    ) -> Mask:
        """The mask of ``batch`` rows of ``length`` tokens.

        Args:
            documents: [B, S] integers, tokens with equal ids see each other, -1 sees and is seen by none; None: one
                document. Read once, on the host.
            hidden: [B, S] bool, keys that no query sees, though their own queries see others: a 2-D padding mask in
                transformers. None: no key is hidden.
        """
        check_type("band", band, Band, "a Band of integers")
        check(all(is_whole(x, -UNBOUNDED) for x in band), "band", band, "a Band of integers")
        return cls.of_terms((Term(band, documents),), batch, length, hidden)

    @classmethod
    def of_terms(cls, terms: Terms, batch: int, length: int, hidden: Tensor | None = None) -> Mask:
        """The mask of several terms; otherwise as `of`. Without terms no query sees a key."""
        whole_number("batch", batch, "a number of rows, 0 or more")
        whole_number("length", length, "a number of tokens, 0 or more")
        for name, x in (("documents", [term.ids for term in terms]), ("hidden", [hidden])):
            _check_rows(name, x, (batch, length))
        terms = terms or (Term(Band(lo=1, hi=0)),)
        found = [(term.band, _rows(term.ids, batch, length, hidden)) for term in terms]
        # Not the row's length: it counts padding, of which each ring size has another number of tokens.
        stops = [segment.stop for _, rows in found for queries, _ in set(rows) for segment in queries[-1:]]
        return cls(tuple((band.within(max(stops, default=0)), rows) for band, rows in found))


def _check_rows(name: str, rows: Iterable[object], shape: tuple[int, int]) -> None:
    for x in rows:
        if x is not None:
            check_tensor(name, x, (torch.bool,) if name == "hidden" else INTEGERS)
            assert isinstance(x, Tensor)
            if x.shape != shape:
                raise BadShape(name, tuple(x.shape), f"it must be {list(shape)}")


def _rows(ids: Tensor | None, batch: int, length: int, hidden: Tensor | None) -> Rows:
    """The segments of queries and keys by batch row."""
    if ids is None and hidden is None:
        whole = (Segment(0, length, 0),) if length else ()
        return ((whole, whole),) * batch
    if ids is None:
        ids = torch.zeros(batch, length, dtype=torch.int64, device="cpu")
    queries = [_segments(row) for row in ids]
    if hidden is None:
        return tuple((row, row) for row in queries)
    keys = [_segments(row) for row in ids.masked_fill(hidden, -1)]
    return tuple(zip(queries, keys, strict=True))


def _segments(documents: Tensor) -> Segments:
    """The runs of equal ids in [S], without those of -1."""
    ids, counts = torch.unique_consecutive(documents, return_counts=True)
    stops = counts.cumsum(0).tolist()
    starts = [0, *stops][: len(stops)]
    return tuple(Segment(a, b, d) for a, b, d in zip(starts, stops, ids.tolist(), strict=True) if d >= 0)


def tiles(mask: Mask, queries: Sequence[Run], keys: Sequence[Run], key_block: int = 1) -> Tensor:
    """The mask between two sets of runs.

    Args:
        mask: of the padded row.
        queries: the runs in the tensor of queries; keys: likewise.
        key_block: a rectangle's keys begin a multiple of this after the first key of their document in their run, so
            that a kernel's key blocks are the same for every cut of the queries.

    Returns:
        [N, 9] int64 on the CPU, one `Tile` a row; rectangles in which nothing is visible are left out and the others
        are cut to what can be visible. Sorted by batch row, then query, then key.
    """
    # Rows of a batch usually share their segments: compute each distinct row once.
    known: dict[tuple[tuple[Segments, Segments], ...], list[tuple[int, ...]]] = {}
    bands = [band for band, _ in mask.terms]
    table: list[tuple[int, ...]] = []
    for row, segments in enumerate(zip(*(rows for _, rows in mask.terms), strict=True)):
        if segments not in known:
            parts = [
                _row_tiles(band, both_sides, queries, keys, key_block)
                for band, both_sides in zip(bands, segments, strict=True)
            ]
            known[segments] = list(parts[0]) if len(parts) == 1 else sorted(tile for part in parts for tile in part)
        table.extend((row, *rest) for rest in known[segments])
    return torch.tensor(table, dtype=torch.int64, device="cpu").reshape(-1, len(Tile._fields))


def segments(mask: Mask, runs: Sequence[Run], keys: bool) -> Tensor:
    """The segments of a tensor: its runs, cut where a document begins or ends.

    Args:
        keys: of a tensor of keys rather than of queries; they differ where keys are hidden.

    Returns:
        [N, 3] int64 on the CPU: batch row, offset, length, in that order. Without holes both kinds list the same
        documents in the same order: one whose keys are all hidden is an empty segment. A mask of several terms (it has
        holes) gives those of the first.
    """
    table: list[tuple[int, int, int]] = []
    for row, (of_queries, of_keys) in enumerate(mask.terms[0][1]):
        for document, part in _parts(of_queries, runs):
            seen = [part] if not keys else [cut for same, cut in _parts(of_keys, [part]) if same == document]
            table.extend((row, run.offset, run.length) for run in seen or [Run(part.offset, part.position, 0)])
    return torch.tensor(table, dtype=torch.int64, device="cpu").reshape(-1, 3)


def _row_tiles(
    band: Band, segments: tuple[Segments, Segments], queries: Sequence[Run], keys: Sequence[Run], key_block: int
) -> Iterable[tuple[int, ...]]:
    of_queries, of_keys = segments
    key_parts: dict[int, list[Run]] = {}
    for document, part in _parts(of_keys, keys):
        key_parts.setdefault(document, []).append(part)
    for document, query in _parts(of_queries, queries):
        for key in key_parts.get(document, ()):
            tile = _clip(band, query, key, key_block)
            if tile is not None:
                yield tile


def _parts(segments: Sequence[Segment], runs: Sequence[Run]) -> Iterable[tuple[int, Run]]:
    """Cuts the runs at segment borders; yields each piece with its segment's document. Segments are in order."""
    for run in runs:
        end = run.position + run.length
        for at in range(bisect_right(segments, run.position, key=attrgetter("stop")), len(segments)):
            start, stop, document = segments[at]
            if start >= end:
                break
            first, last = max(start, run.position), min(stop, end)
            if first < last:
                yield document, Run(run.offset + first - run.position, first, last - first)


def _clip(band: Band, query: Run, key: Run, key_block: int) -> tuple[int, ...] | None:
    """The tile of two runs of one document, cut to rows and columns with visible pairs; None if there are none."""
    if band.lo > band.hi:
        return None
    k_first = max(key.position, query.position - band.hi)
    k_stop = min(key.position + key.length, query.position + query.length - band.lo)
    if k_first >= k_stop:
        return None
    q_first = max(query.position, k_first + band.lo)
    q_stop = min(query.position + query.length, k_stop + band.hi)
    if q_first >= q_stop:
        return None
    k_first -= (k_first - key.position) % key_block
    return (
        query.offset + q_first - query.position, q_stop - q_first, q_first,
        key.offset + k_first - key.position, k_stop - k_first, k_first,
        band.lo, band.hi,
    )  # fmt: skip
