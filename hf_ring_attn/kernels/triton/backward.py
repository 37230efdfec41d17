"""The backward kernels: probabilities from lse; gradients in float32 registers, added once to the accumulators.

`keys_kernel` owns a block of keys and loops over the queries that see it, for dk, dv, or one of them if registers do
not hold both. `queries_kernel` owns a block of queries and loops over the keys it sees, for dq. Neither uses atomics:
the order of every sum is fixed; only the gradient of a bias does. A single pass with atomics for dq has five products
per pair of blocks instead of seven, but measured slower (recipes/results).
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from .common import (
    LENGTHS,
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


@triton.jit(do_not_specialize=LENGTHS)
def delta_kernel(
    DOUT, OUT, DELTA, dout_row, dout_token, dout_head, out_row, out_token, out_head, tokens, heads,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Computes delta[row, head] = rowsum(dout * out) of a block of queries."""
    start, head, row = tl.program_id(0) * BLOCK_M, tl.program_id(1), tl.program_id(2)
    dout = load_rows(
        DOUT, row, head, start, tokens, dout_row, dout_token, dout_head, DV, BLOCK_M, BLOCK_DV, False, True
    )
    out = load_rows(OUT, row, head, start, tokens, out_row, out_token, out_head, DV, BLOCK_M, BLOCK_DV, False, True)
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    queries = start + tl.arange(0, BLOCK_M)
    tl.store(DELTA + (wide(row) * heads + head) * tokens + queries, delta, mask=queries < tokens)


@triton.jit
def _weights(scores, lse, bias, factor, bend, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, BY_QUERY: tl.constexpr):
    """Computes exp(score - lse), and the softcap's derivative; ``lse`` is negated, in `Problem.unit`."""
    slope = scores
    if BY_QUERY:
        lse = lse[:, None]
    else:
        lse = lse[None, :]
    if SOFTCAP:
        scores = tanh(scores * bend)
        slope = 1 - scores * scores
    if BIAS:  # as the forward rounds it
        scores = tl.fma(scores, factor, bias)
        # -lse of a query that sees none is inf.
        weights = tl.where(scores == float("-inf"), 0.0, tl.exp2((scores + lse) * LOG2E))
    else:
        weights = tl.exp2(tl.fma(scores, factor, lse))
    return weights, slope


@triton.jit
def _load_rows_of(where, inside, MASKED: tl.constexpr):
    if MASKED:
        x = tl.load(where, mask=inside, other=0.0)
    else:
        x = tl.load(where)
    return x


@triton.jit
def _over_queries(
    dk, dv, k, v, position, DOUT, Q, LSE, DELTA, BOUNDS, row, head, begin, end, tokens,
    dout_row, dout_token, dout_head, q_row, q_token, q_head, lse_row, lse_head, plane, layers, factor, bend,
    TABLE, Q_PLACES, k_places, lowest, span,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, MANY: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    BIAS: tl.constexpr, CHOICE: tl.constexpr, DK: tl.constexpr, DVALUES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    at_lse = wide(row) * lse_row + wide(head) * lse_head
    for block in range(begin, end):
        start = block * BLOCK_M
        queries = start + tl.arange(0, BLOCK_M)
        q = load_rows(Q, row, head, start, tokens, q_row, q_token, q_head, D, BLOCK_M, BLOCK_D, TMA, MASKED)
        inside = queries < tokens
        lse = _load_rows_of(LSE + at_lse + queries, inside, MASKED)
        scores = tl.dot(k, q.T, input_precision=PRECISION)
        bias, seen = scores, scores
        if MASKED:
            first, stop = load_bounds(BOUNDS, 0, row, queries, tokens, plane)
            seen = visible(first, stop, position, BOUNDS, row, queries, tokens, plane, layers, MANY, False)
        if CHOICE:
            q_places = load_places(Q_PLACES, row, queries, tokens)
            seen = chosen(TABLE, q_places, k_places, span, seen, BLOCK_N, False, MASKED)
        if BIAS:
            q_places = load_places(Q_PLACES, row, queries, tokens)
            bias, _ = load_bias(TABLE, q_places, k_places, lowest, seen, False, MASKED)
        weights, slope = _weights(scores, lse, bias, factor, bend, SOFTCAP, BIAS, False)
        if MASKED or CHOICE:
            weights = tl.where(seen, weights, 0.0)
        dout = load_rows(
            DOUT, row, head, start, tokens, dout_row, dout_token, dout_head, DV, BLOCK_M, BLOCK_DV, TMA, MASKED
        )
        if DVALUES:
            dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision=PRECISION)
        if DK:
            delta = _load_rows_of(DELTA + at_lse + queries, inside, MASKED)
            dweights = tl.dot(v, dout.T, input_precision=PRECISION)
            dscores = weights * (dweights - delta[None, :])
            if SOFTCAP:
                dscores = dscores * slope
            if MASKED or CHOICE:  # again: 0 times the nan of another key's query is nan
                dscores = tl.where(seen, dscores, 0.0)
            dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=LENGTHS)
def keys_kernel(
    DOUT, Q, K, V, LSE, DELTA, INTO_DK, INTO_DV, BOUNDS, PROGRAMS, RUNS,
    dk_row, dk_token, dk_head, dv_row, dv_token, dv_head,
    dout_row, dout_token, dout_head, q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    lse_row, lse_head, tokens, keys, group, together, programs, plane, layers, factor, bend, scale,
    TABLE, Q_PLACES, K_PLACES, lowest, span,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, MANY: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, BIAS: tl.constexpr, CHOICE: tl.constexpr, DK: tl.constexpr, DVALUES: tl.constexpr,
):  # fmt: skip
    """Adds dk and dv, or one of them, of a block of keys of a key head, one query head after another."""
    kv_head, _, row, block, entry, entries = load_work(PROGRAMS, programs, together, 1)
    start = block * BLOCK_N
    position = start + tl.arange(0, BLOCK_N)
    k_places = position
    if BIAS:
        k_places = load_places(K_PLACES, row, position, keys)
    if CHOICE:
        k_places = start
        TABLE += wide(row) * lowest * span
    k = load_rows(K, row, kv_head, start, keys, k_row, k_token, k_head, D, BLOCK_N, BLOCK_D, False, True)
    v = k
    if DK:
        v = load_rows(V, row, kv_head, start, keys, v_row, v_token, v_head, DV, BLOCK_N, BLOCK_DV, False, True)
    for head in range(kv_head * group, kv_head * group + group):
        # One sum per head: matrix units truncate long sums, and a ring's sums are short.
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        for at in range(entry, entries):
            begin, middle, end = tl.load(RUNS + 3 * at), tl.load(RUNS + 3 * at + 1), tl.load(RUNS + 3 * at + 2)
            for MASKED in tl.static_range(1, -1, -1):  # blocks before the middle need a mask
                dk, dv = _over_queries(
                    dk, dv, k, v, position, DOUT, Q, LSE, DELTA, BOUNDS, row, head,
                    begin if MASKED else middle, middle if MASKED else end, tokens,
                    dout_row, dout_token, dout_head, q_row, q_token, q_head, lse_row, lse_head, plane, layers,
                    factor, bend, TABLE if CHOICE else TABLE + wide(head) * span, Q_PLACES, k_places, lowest, span,
                    D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, SOFTCAP, MANY, TMA, PRECISION, BIAS, CHOICE, DK,
                    DVALUES, MASKED,
                )  # fmt: skip
        if DK:
            add_rows(INTO_DK, dk * scale, row, kv_head, start, keys, dk_row, dk_token, dk_head, D, BLOCK_N, BLOCK_D)
        if DVALUES:
            add_rows(INTO_DV, dv, row, kv_head, start, keys, dv_row, dv_token, dv_head, DV, BLOCK_N, BLOCK_DV)


@triton.jit
def add_rows(
    X, part, row, head, first, length, row_stride, token_stride, head_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds ``part`` to x[row, first : first + ROWS, head] of [B, T, H, D], any strides."""
    token, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    X += wide(row) * row_stride + wide(head) * head_stride + wide(first) * token_stride
    where = X + (token[:, None] * token_stride + column[None, :])
    inside = (first + token < length)[:, None] & (column < WIDTH)[None, :]
    tl.store(where, tl.load(where, mask=inside, other=0.0) + part, mask=inside)


@triton.jit
def _over_keys(
    dq, q, dout, lse, delta, first, stop, queries, K, V, BOUNDS, row, kv_head, begin, end, tokens, keys,
    k_row, k_token, k_head, v_row, v_token, v_head, plane, layers, factor, bend, TABLE, INTO_TABLE, q_places, K_PLACES,
    lowest, span,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr, MANY: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, BIAS: tl.constexpr,
    CHOICE: tl.constexpr, LEARNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    for block in range(begin, end):
        start = block * BLOCK_N
        k = load_rows(K, row, kv_head, start, keys, k_row, k_token, k_head, D, BLOCK_N, BLOCK_D, TMA, MASKED)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        position = start + tl.arange(0, BLOCK_N)
        bias, index, seen = scores, position, scores
        if MASKED:
            seen = visible(first, stop, position, BOUNDS, row, queries, tokens, plane, layers, MANY, True)
        if CHOICE:
            seen = chosen(TABLE, q_places, start, span, seen, BLOCK_N, True, MASKED)
        if BIAS:
            k_places = load_places(K_PLACES, row, position, keys)
            bias, index = load_bias(TABLE, q_places, k_places, lowest, seen, True, MASKED)
        weights, slope = _weights(scores, lse, bias, factor, bend, SOFTCAP, BIAS, True)
        if MASKED or CHOICE:
            weights = tl.where(seen, weights, 0.0)
        v = load_rows(V, row, kv_head, start, keys, v_row, v_token, v_head, DV, BLOCK_N, BLOCK_DV, TMA, MASKED)
        dweights = tl.dot(dout, v.T, input_precision=PRECISION)
        dscores = weights * (dweights - delta[:, None])
        if MASKED or CHOICE:
            dscores = tl.where(seen, dscores, 0.0)
        if LEARNED:
            if MASKED:
                tl.atomic_add(INTO_TABLE + index, dscores, mask=seen, sem="relaxed")
            else:  # queries that do not exist add 0 where the last one adds
                tl.atomic_add(INTO_TABLE + index, dscores, sem="relaxed")
        if SOFTCAP:
            dscores = dscores * slope
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=LENGTHS)
def queries_kernel(
    DOUT, Q, K, V, LSE, DELTA, DQ, BOUNDS, PROGRAMS, RUNS,
    dq_row, dq_token, dq_head,
    dout_row, dout_token, dout_head, q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    lse_row, lse_head, tokens, keys, group, together, programs, plane, layers, factor, bend, scale,
    TABLE, Q_PLACES, K_PLACES, lowest, span, INTO_TABLE,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, MANY: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, BIAS: tl.constexpr, CHOICE: tl.constexpr, LEARNED: tl.constexpr,
):  # fmt: skip
    """Adds dq of one block of queries of one query head."""
    head, kv_head, row, block, entry, entries = load_work(PROGRAMS, programs, together, group)
    start = block * BLOCK_M
    queries = start + tl.arange(0, BLOCK_M)
    q = load_rows(Q, row, head, start, tokens, q_row, q_token, q_head, D, BLOCK_M, BLOCK_D, False, True)
    dout = load_rows(
        DOUT, row, head, start, tokens, dout_row, dout_token, dout_head, DV, BLOCK_M, BLOCK_DV, False, True
    )
    at_lse = wide(row) * lse_row + wide(head) * lse_head
    # Queries that do not exist: probabilities of 0, also where a bias is large.
    lse = tl.load(LSE + at_lse + queries, mask=queries < tokens, other=float("-inf"))
    delta = tl.load(DELTA + at_lse + queries, mask=queries < tokens, other=0.0)
    first, stop = load_bounds(BOUNDS, 0, row, queries, tokens, plane)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    q_places = queries
    if BIAS:
        q_places = load_places(Q_PLACES, row, queries, tokens)
        TABLE += wide(head) * span
        INTO_TABLE += wide(head) * span
    if CHOICE:
        q_places = load_places(Q_PLACES, row, queries, tokens)
        TABLE += wide(row) * lowest * span
    for at in range(entry, entries):
        begin, middle, end = tl.load(RUNS + 3 * at), tl.load(RUNS + 3 * at + 1), tl.load(RUNS + 3 * at + 2)
        for MASKED in tl.static_range(1, -1, -1):  # blocks before the middle need a mask
            dq = _over_keys(
                dq, q, dout, lse, delta, first, stop, queries, K, V, BOUNDS, row, kv_head,
                begin if MASKED else middle, middle if MASKED else end, tokens, keys,
                k_row, k_token, k_head, v_row, v_token, v_head, plane, layers, factor, bend,
                TABLE, INTO_TABLE, q_places, K_PLACES, lowest, span,
                D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, SOFTCAP, MANY, TMA, PRECISION, BIAS, CHOICE, LEARNED, MASKED,
            )  # fmt: skip
    add_rows(DQ, dq * scale, row, head, start, tokens, dq_row, dq_token, dq_head, D, BLOCK_M, BLOCK_D)
