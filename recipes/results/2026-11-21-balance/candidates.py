"""Chunks that were compared before one way was chosen: python recipes/results/2026-11-21-balance/candidates.py

On the packed rows of recipes/benchmarks/traffic.py, for a ring of 8: the work of a causal mask (the largest share over
the mean: its mean over rows, and the worst row), and the share of the other ranks' keys that a rank sees.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "benchmarks"))

from hf_ring_attn.layout import Layout  # noqa: E402  as above
from hf_ring_attn.mask import CAUSAL, Mask  # noqa: E402  as above
from hf_ring_attn.tables import _pieces, seen_keys  # noqa: E402  as above

from hf_ring_attn import balance  # noqa: E402  as above
from hf_ring_attn.bench.provenance import facts  # noqa: E402  as above
from traffic import documents_of, packed_rows  # noqa: E402  lies in a folder of programs

LENGTH, RING = 131072, 8


def back_and_forth(chunks: int) -> tuple[int, ...]:
    """A zigzag that goes on: ranks 0 to W - 1, and back, and again."""
    there = tuple(range(RING))
    return tuple(rank for turn in range(chunks) for rank in (there if turn % 2 == 0 else there[::-1]))


def seen_of_others(mask: Mask, layout: Layout) -> float:
    """Mean over ranks."""
    total = 0
    for rank in range(RING):
        seen = seen_keys(mask, layout, rank)
        total += sum(run.length for run in seen) - sum(length for _, length, _ in _pieces(seen, layout.runs(rank)))
    return total / (RING * (layout.padded - layout.local_length))


def main() -> None:
    head, found = facts(), []
    rows = [documents_of(row, LENGTH) for row in packed_rows(LENGTH)]
    masks = [Mask.of(CAUSAL, 1, LENGTH, ids) for ids in rows]
    work = [balance._work_before(ids) for ids in rows]
    for how in ("back and forth", "dealt by work"):
        for chunks in (2, 4, 8, 16, 32):
            shares, seen = [], []
            for mask, before in zip(masks, work, strict=True):
                layout = Layout(LENGTH, RING, 0, back_and_forth(chunks))
                by_chunk = balance._by_chunk(before, layout)
                if how == "dealt by work":
                    layout = Layout(LENGTH, RING, 0, balance._dealt(by_chunk, RING))
                shares.append(balance._most(layout, by_chunk) * RING / sum(by_chunk))
                seen.append(seen_of_others(mask, layout))
            found.append({"how": how, "chunks": chunks, "work": shares, "keys_seen": seen})
            mean, keys = (sum(column) / len(rows) for column in (shares, seen))
            print(f"| {chunks} | {how} | {mean:.3f} | {max(shares):.3f} | {keys:.1%} |")
    (HERE / "candidates.json").write_text(json.dumps({**head, "rows": found}) + "\n")


if __name__ == "__main__":
    main()
