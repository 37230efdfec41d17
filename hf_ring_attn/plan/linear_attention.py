"""Memory, operations and traffic of one layer's linear attention (a gated delta rule), head-parallel in a ring.

Counted as the layers of transformers with the kernels of flash-linear-attention save and allocate them. Tests count the
first on the CPU, and compare the second with filed runs.
A rank computes whole rows of its share of the heads.
"""

from __future__ import annotations

from ..layers.head_parallel import head_ranges, shared_ranges
from .attention_memory import AttentionMemory
from .hardware import DELTA_CHUNK, DELTA_RULES, FLOAT32
from .setup import Setup
from .shape import DeltaShape

NAME = "linear attention"
FLA = "flash-linear-attention"
TORCH = {False: 12, True: 55}
"""How many times the bytes of FLA's kernels transformers' own function saves of its scan, with heads 128 wide: of
decays by head, by channel."""


def rank_heads(attention: DeltaShape, ranks: int) -> tuple[int, int]:
    """Heads, and those of queries and keys, of the rank that has most of them."""
    ranges = head_ranges(attention.heads, [attention.key_heads], ranks)
    groups = shared_ranges(ranges, attention.heads // attention.key_heads)
    heads, key_heads = (max(stop - start for start, stop in spans) for spans in (ranges, groups))
    return heads, key_heads


def memory_of_delta_rule(attention: DeltaShape, setup: Setup) -> AttentionMemory:
    """Bytes that a layer saves, and its buffers.

    Saved before the scan: input and output of the convolution, and what gates are made of. By the scan, of whole rows:
    normed queries and keys, values, beta, decays, and the inverse of a chunk for each head. After it: the gated norm of
    its output, mostly in float32. Buffers: in the backward of that norm, or of the scan, or the exchange of its inputs.
    """
    tokens, size = setup.tokens_per_rank, setup.itemsize
    by_channel, decays = attention.by_channel, attention.key_width if attention.by_channel else 1
    of_gates = decays * ((2 * FLOAT32 + 1) if by_channel else FLOAT32)
    if setup.method == "full":
        of_gates += decays * FLOAT32
    of_gates += size if setup.ring_size > 1 else 0  # beta, of which the scan saves what arrives
    before = 2 * tokens * attention.mixed_numbers * size + tokens * attention.heads * of_gates
    if by_channel:  # the inner numbers of two gates of low rank
        before += 2 * tokens * attention.key_width * size
    scanned = _scanned_bytes(attention, setup)
    # The norm beside decays by channel casts its output only; the other one its normed input, too, and saves that.
    of_norm = 3 * FLOAT32 + (1 if by_channel else 2) * size
    if setup.method == "full":
        of_norm += FLOAT32 if by_channel else size
    after = tokens * (attention.out_numbers * of_norm + attention.heads * FLOAT32)
    of_norm_backward = after + 2 * FLOAT32 * tokens * attention.out_numbers
    exchange = 3 * exchanged_bytes(attention, setup)[0] if setup.ring_size > 1 else 0.0
    buffers = max(_backward_bytes(attention, setup), of_norm_backward, exchange)
    return AttentionMemory(NAME, float(before + scanned + after), float(before + scanned), float(buffers))


def torch_bytes(attention: DeltaShape, setup: Setup) -> float:
    """Bytes that transformers' own function saves in a layer beyond what FLA's kernels save, about."""
    return (TORCH[attention.by_channel] - 1) * _scanned_bytes(attention, setup)


def _scanned_bytes(attention: DeltaShape, setup: Setup) -> float:
    heads, key_heads = rank_heads(attention, setup.ring_size)
    size, by_channel = setup.itemsize, attention.by_channel
    decays = 2 * attention.key_width if by_channel else 1
    inverses = 2 if by_channel else 1
    of_head = attention.value_width * size + size + decays * FLOAT32 + inverses * DELTA_CHUNK * size
    return setup.padded * float(heads * of_head + 2 * key_heads * (attention.key_width * size + FLOAT32))


def _backward_bytes(attention: DeltaShape, setup: Setup) -> float:
    """Tensors of the scan's backward, which computes its states again: a state for each chunk, and its gradient."""
    heads, key_heads = rank_heads(attention, setup.ring_size)
    key, value = attention.key_width, attention.value_width
    states = 2 * key * value / DELTA_CHUNK
    if attention.by_channel:
        wide = 6 * key + 2 * DELTA_CHUNK  # gradients of queries, keys and decays, twice; of two inverses
        return setup.padded * heads * ((3 * key + 4 * value + states) * setup.itemsize + wide * FLOAT32)
    first = heads * (4 * key + 4 * value) + key_heads * key
    then = heads * (3 * key + 5 * value) + 2 * key_heads * key
    return setup.padded * ((max(first, then) + heads * states) * setup.itemsize + 3 * heads * FLOAT32)


def exchanged_bytes(attention: DeltaShape, setup: Setup) -> tuple[float, float]:
    """Bytes that a rank has of whole rows after the all-to-all of the scan's inputs, and before that of its output."""
    heads, key_heads = rank_heads(attention, setup.ring_size)
    decays = attention.key_width if attention.by_channel else 1
    of_head = attention.value_width * setup.itemsize + decays * FLOAT32 + setup.itemsize
    inputs = 2 * key_heads * attention.key_width * setup.itemsize + heads * of_head
    return setup.padded * float(inputs), setup.padded * float(heads * attention.value_width * setup.itemsize)


def delta_flops(attention: DeltaShape, tokens: int) -> float:
    """Operations of the chunked rule's forward over a row: products within chunks, and with the state of each."""
    key, value = attention.key_width, attention.value_width
    return 2.0 * tokens * attention.heads * (DELTA_CHUNK * (3 * key + 2 * value) + 3 * key * value)


def scan_seconds(attention: DeltaShape, setup: Setup) -> tuple[float, float] | None:
    """Seconds of a rank's forward and backward of the scan, by the nearest filed measurement; None if there is none."""
    measured = DELTA_RULES["by channel" if attention.by_channel else "by head"]
    if not measured:
        return None
    heads, _ = rank_heads(attention, setup.ring_size)
    nearest = min(measured, key=lambda one: (abs(one[1] - attention.key_width), abs(one[0] - heads)))
    forward, backward = (1e-9 * setup.padded * each * heads / nearest[0] for each in measured[nearest])
    return forward, backward


def moved_numbers(attention: DeltaShape, hidden: int) -> float:
    """Numbers per token that its unfused kernels read and write, in the model's dtype, beside its scan.

    The mask: 2 of the hidden states. The convolution: 18, as transformers' own was measured
    (recipes/results/2026-11-27-linear-attention). The exchange: 4 of each number. The gated norm: 34 of its output.
    Decays of each channel: 27.
    """
    exchanged = attention.mixed_numbers + attention.out_numbers
    decays = attention.heads * attention.key_width if attention.by_channel else 0
    return float(2 * hidden + 18 * attention.mixed_numbers + 4 * exchanged + 34 * attention.out_numbers + 27 * decays)
