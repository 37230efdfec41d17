"""The one table of cases. Every kernel, ring size and backward runs it."""

from __future__ import annotations

from hf_ring_attn.testing import BIDIRECTIONAL, PADDING, Case, packed, sliding

WORLD_SIZES = (1, 2, 4, 8)
"""The ring sizes that every case is tried at."""

# Chunks of S = 48 tokens: 24, 12, 6, 3 at W = 1, 2, 4, 8; of S = 64: 32, 16, 8, 4.
CASES = (
    # Lengths
    Case(why="one token, the other ranks hold nothing but padding", length=1, seed=1),
    Case(why="two tokens in two rows", batch=2, length=2, seed=2),
    Case(why="five tokens, bidirectional", length=5, band=BIDIRECTIONAL, head_dim=4, value_dim=6, seed=3),
    Case(why="thirteen tokens, the last chunk of eight ranks is empty", length=13, heads=3, kv_heads=1, seed=4),
    Case(why="causal with nothing to pad", length=32, seed=5),
    Case(why="bidirectional with nothing to pad", length=32, band=BIDIRECTIONAL, seed=6),
    # Heads and widths
    Case(why="four query heads a key head, two rows", batch=2, length=48, heads=4, kv_heads=1, seed=7),
    Case(why="three query heads a key head", length=36, heads=6, kv_heads=2, seed=8),
    Case(why="odd length, odd widths, values narrower", length=37, head_dim=5, value_dim=3, seed=9),
    Case(
        why="odd widths, values wider, bidirectional, two rows",
        batch=2, length=31, heads=3, kv_heads=3, head_dim=3, value_dim=7, band=BIDIRECTIONAL, seed=10,
    ),
    # Windows
    Case(why="window of one: gradients of q and k are zero", length=24, band=sliding(1), seed=11),
    Case(why="window smaller than any chunk", length=48, band=sliding(2), seed=12),
    Case(why="window of one token more than a chunk of eight ranks", length=64, band=sliding(5), seed=13),
    Case(why="window larger than a chunk", length=48, band=sliding(29), heads=4, seed=14),
    Case(why="window larger than the row", length=33, band=sliding(100), seed=15),
    Case(why="bidirectional window smaller than any chunk", length=48, band=(-1, 1), seed=16),
    Case(why="bidirectional window larger than a chunk", length=45, band=(-20, 20), seed=17),
    Case(why="window longer to the left than to the right", length=41, band=(-3, 7), heads=3, kv_heads=1, seed=18),
    Case(why="all of the future, little of the past", length=40, band=(None, 2), seed=19),
    # Documents and padding
    Case(
        why="documents shorter than a chunk",
        length=64, documents=(packed(3, 2, 1, 5, 4, 1, 1, 6, 3, 2, 7, 3, 5, 2, 3, 1, 4, 8, 3),), seed=20,
    ),
    Case(why="a document longer than two ranks hold", length=48, documents=(packed(5, 41, 2),), seed=21),
    Case(
        why="other documents in each row, bidirectional",
        batch=2, length=43, band=BIDIRECTIONAL, documents=(packed(1, 30, 12), packed(11, 11, 21)), seed=22,
    ),
    Case(
        why="padding on the right, and a row of nothing but padding",
        batch=3, length=32, documents=(packed(32), packed(19, -13), packed(-32)), seed=23,
    ),
    Case(
        why="padding on the left, bidirectional",
        batch=2, length=30, band=BIDIRECTIONAL, documents=(packed(-9, 21), packed(-26, 4)), seed=24,
    ),
    Case(
        why="holes between and inside documents",
        batch=2, length=40, heads=4, kv_heads=2,
        documents=(packed(-1, 9, -5, 12, -3, 10), ((0, 6), (PADDING, 3), (0, 14), (PADDING, 1), (1, 16))), seed=25,
    ),
    Case(
        why="window across a hole of its document",
        length=40, band=sliding(9), documents=(((0, 17), (PADDING, 4), (0, 19)),), seed=26,
    ),
    # Scores
    Case(why="softcap that bends most scores", length=40, softcap=1.5, seed=27),
    Case(why="softcap of Gemma 2 with scale 1", length=35, softcap=50.0, scale=1.0, band=sliding(12), seed=28),
    Case(why="sinks, grouped heads", length=48, heads=4, kv_heads=2, sinks=True, seed=29),
    Case(why="sinks with a window, as gpt-oss", length=53, heads=8, kv_heads=2, band=sliding(10), sinks=True, seed=30),
    Case(
        why="sinks where a query sees no key",
        batch=2, length=29, sinks=True, documents=(packed(20, -9), packed(-11, 7, -1, 10)), seed=31,
    ),
    Case(why="a scale of its own, bidirectional", length=34, band=BIDIRECTIONAL, scale=0.11, seed=32),
    # All at once
    Case(
        why="window, documents, padding, sinks, softcap, grouped heads, odd everything",
        batch=2, length=61, heads=6, kv_heads=2, head_dim=7, value_dim=5, band=sliding(13),
        documents=(packed(3, 39, 1, 15, -3), packed(-2, 27, 32)), softcap=2.5, sinks=True, scale=0.5, seed=33,
    ),
    Case(
        why="bidirectional window, documents, holes, sinks, softcap, one key head",
        batch=2, length=47, heads=4, kv_heads=1, head_dim=9, value_dim=3, band=(-6, 6),
        documents=(packed(14, -3, 30), packed(47)), softcap=3.0, sinks=True, seed=34,
    ),
)  # fmt: skip
