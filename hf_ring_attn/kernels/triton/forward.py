"""The forward kernel: one program per block of queries and query head, online softmax over its key blocks."""

# mypy: ignore-errors

import triton
import triton.language as tl

from .common import (
    LENGTHS,
    LN2,
    LOG2E,
    chosen,
    load_bias,
    load_bounds,
    load_places,
    load_rows,
    load_work,
    tanh,
    visible,
    wide,
)


@triton.jit
def _attend(
    acc, total, largest, q, first, stop, queries, K, V, BOUNDS, row, kv_head, begin, end, tokens, keys,
    k_row, k_token, k_head, v_row, v_token, v_head, plane, layers, factor, bend, TABLE, q_places, K_PLACES, lowest,
    span, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr, MANY: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, BIAS: tl.constexpr,
    CHOICE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    for block in range(begin, end):
        start = block * BLOCK_N
        k = load_rows(K, row, kv_head, start, keys, k_row, k_token, k_head, D, BLOCK_N, BLOCK_D, TMA, MASKED)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        if SOFTCAP:
            scores = tanh(scores * bend)
        position = start + tl.arange(0, BLOCK_N)
        seen = position
        if MASKED:
            seen = visible(first, stop, position, BOUNDS, row, queries, tokens, plane, layers, MANY, True)
        if CHOICE:
            seen = chosen(TABLE, q_places, start, span, seen, BLOCK_N, True, MASKED)
        if BIAS:
            k_places = load_places(K_PLACES, row, position, keys)
            bias, _ = load_bias(TABLE, q_places, k_places, lowest, seen, True, MASKED)
            scores = tl.fma(scores, factor, bias)
        if MASKED or CHOICE:
            scores = tl.where(seen, scores, float("-inf"))
        # Explicit fma, so that both loops round alike: a row's bits must not depend on which blocks are masked.
        if BIAS:  # natural, not in powers of two: a large bias has no digits to lose
            after = tl.maximum(largest, tl.max(scores, 1))
        else:
            after = tl.maximum(largest, tl.max(scores, 1) * factor)
        shift = after
        if MASKED or BIAS or CHOICE:
            shift = tl.where(after == float("-inf"), 0.0, after)  # a query that has seen nothing yet
        if BIAS:
            weights = tl.exp2((scores - shift[:, None]) * LOG2E)
            decay = tl.exp2((largest - shift) * LOG2E)
        else:
            weights = tl.exp2(tl.fma(scores, factor, -shift[:, None]))
            decay = tl.exp2(largest - shift)
        total = tl.fma(total, decay, tl.sum(weights, 1))
        acc = acc * decay[:, None]
        v = load_rows(V, row, kv_head, start, keys, v_row, v_token, v_head, DV, BLOCK_N, BLOCK_DV, TMA, MASKED)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        largest = after
    return acc, total, largest


@triton.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    Q, K, V, OUT, LSE, SINKS, BOUNDS, PROGRAMS, RUNS,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    tokens, keys, heads, group, together, programs, plane, layers, factor, bend,
    TABLE, Q_PLACES, K_PLACES, lowest, span,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_SINKS: tl.constexpr, SOFTCAP: tl.constexpr,
    MANY: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, BIAS: tl.constexpr, CHOICE: tl.constexpr,
):  # fmt: skip
    """See `launch.forward`. ``factor`` > 0 scales a score, without a bias to powers of two; ``together`` key heads run
    side by side."""
    head, kv_head, row, block, entry, entries = load_work(PROGRAMS, programs, together, group)

    queries = block * BLOCK_M + tl.arange(0, BLOCK_M)
    q = load_rows(Q, row, head, block * BLOCK_M, tokens, q_row, q_token, q_head, D, BLOCK_M, BLOCK_D, False, True)
    first, stop = load_bounds(BOUNDS, 0, row, queries, tokens, plane)
    if HAS_SINKS:  # a key without a value
        largest = tl.zeros([BLOCK_M], tl.float32) + tl.load(SINKS + head).to(tl.float32)
        if not BIAS:
            largest = largest * LOG2E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    q_places = queries
    if BIAS:
        q_places = load_places(Q_PLACES, row, queries, tokens)
        TABLE += wide(head) * span
    if CHOICE:
        q_places = load_places(Q_PLACES, row, queries, tokens)
        TABLE += wide(row) * lowest * span

    for at in range(entry, entries):
        begin, middle, end = tl.load(RUNS + 3 * at), tl.load(RUNS + 3 * at + 1), tl.load(RUNS + 3 * at + 2)
        for MASKED in tl.static_range(1, -1, -1):  # blocks before the middle need a mask
            acc, total, largest = _attend(
                acc, total, largest, q, first, stop, queries, K, V, BOUNDS, row, kv_head,
                begin if MASKED else middle, middle if MASKED else end, tokens, keys,
                k_row, k_token, k_head, v_row, v_token, v_head, plane, layers, factor, bend,
                TABLE, q_places, K_PLACES, lowest, span,
                D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, SOFTCAP, MANY, TMA, PRECISION, BIAS, CHOICE, MASKED,
            )  # fmt: skip

    inside = queries < tokens
    if BIAS:
        lse = largest + tl.log2(total) * LN2
    else:
        lse = (largest + tl.log2(total)) * LN2
    tl.store(LSE + (wide(row) * heads + head) * tokens + queries, lse, mask=inside)
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    column = tl.arange(0, BLOCK_DV)
    where = ((wide(row) * tokens + block * BLOCK_M) * heads + head) * DV
    where += (tl.arange(0, BLOCK_M) * heads * DV)[:, None] + column[None, :]
    tl.store(OUT + where, acc.to(OUT.dtype.element_ty), mask=inside[:, None] & (column < DV)[None, :])
