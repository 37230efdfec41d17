"""Functions of the Triton language that the kernels share; mypy knows no types for their arguments."""

# mypy: ignore-errors

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

LENGTHS = ["tokens", "keys", "together", "programs", "plane", "layers", "lowest", "span"]
"""Arguments that change from batch to batch: kernels are not specialized on their values."""


@triton.jit
def wide(x):
    """Widens x to 64 bits: an offset of elements may pass 2**31."""
    return tl.full((), 0, tl.int64) + x


@triton.jit
def load_work(PROGRAMS, programs, together, group):
    """Loads what this program computes: its head, that one's key head, and its row of `Schedule.programs`.

    The heads of ``together`` groups run side by side.
    """
    pid = tl.program_id(0)
    side_by_side = together * group
    index = pid // side_by_side % programs
    head = pid // (side_by_side * programs) * side_by_side + pid % side_by_side
    kv_head = head // group
    row, block = tl.load(PROGRAMS + 4 * index), tl.load(PROGRAMS + 4 * index + 1)
    entry, entries = tl.load(PROGRAMS + 4 * index + 2), tl.load(PROGRAMS + 4 * index + 3)
    return head, kv_head, row, block, entry, entries


@triton.jit
def load_rows(
    X, row, head, first, length, row_stride, token_stride, head_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Loads x[row, first : first + ROWS, head] of [B, T, H, D], zeros past D and, with CHECK, past ``length`` tokens.

    Without CHECK all the rows must exist. With TMA, X is a descriptor over [B, H, T, D] with that block.
    """
    if TMA:
        block = X.load([row, head, first, 0]).reshape(ROWS, COLUMNS)
    else:
        token, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
        X += wide(row) * row_stride + wide(head) * head_stride + wide(first) * token_stride
        where = X + (token * token_stride + column)
        if CHECK:
            if COLUMNS == WIDTH:
                block = tl.load(where, mask=first + token < length, other=0.0)
            else:
                block = tl.load(where, mask=(first + token < length) & (column < WIDTH), other=0.0)
        else:
            if COLUMNS == WIDTH:
                block = tl.load(where)
            else:
                block = tl.load(where, mask=column < WIDTH, other=0.0)
    return block


@triton.jit
def load_bounds(BOUNDS, layer, row, queries, tokens, plane):
    """Loads first, stop of one layer of `sharding.visible.bounds` for these queries; (0, 0) past the last query."""
    where = BOUNDS + wide(layer) * 2 * plane + wide(row) * tokens + queries
    first = tl.load(where, mask=queries < tokens, other=0)
    stop = tl.load(where + plane, mask=queries < tokens, other=0)
    return first, stop


@triton.jit
def visible(first, stop, keys, BOUNDS, row, queries, tokens, plane, layers, MANY: tl.constexpr, BY_QUERY: tl.constexpr):
    """Computes visible pairs: [queries, keys], or [keys, queries]. first, stop: the bounds of layer 0.

    MANY: there are more layers; a loop costs registers even if it never runs.
    """
    seen = _between(first, stop, keys, BY_QUERY)
    if MANY:
        for layer in range(1, layers):
            first, stop = load_bounds(BOUNDS, layer, row, queries, tokens, plane)
            seen = seen | _between(first, stop, keys, BY_QUERY)
    return seen


@triton.jit
def _between(first, stop, keys, BY_QUERY: tl.constexpr):
    if BY_QUERY:
        seen = (keys[None, :] >= first[:, None]) & (keys[None, :] < stop[:, None])
    else:
        seen = (keys[:, None] >= first[None, :]) & (keys[:, None] < stop[None, :])
    return seen


@triton.jit
def load_places(PLACES, row, offsets, length):
    """Loads the position in the row of each token; past the last token, that of the last one."""
    return tl.load(PLACES + wide(row) * length + tl.minimum(offsets, length - 1))


@triton.jit
def load_bias(TABLE, q_places, k_places, lowest, seen, BY_QUERY: tl.constexpr, MASKED: tl.constexpr):
    """Loads the bias of each pair, [queries, keys] or [keys, queries], from a head's table of `distance.Bias`, and
    returns its index as well. The table may lack invisible pairs."""
    if BY_QUERY:
        index = k_places[None, :] - (q_places[:, None] + lowest)
    else:
        index = k_places[:, None] - (q_places[None, :] + lowest)
    if MASKED:
        bias = tl.load(TABLE + index, mask=seen, other=0.0)
    else:
        bias = tl.load(TABLE + index)
    return bias, index


@triton.jit
def chosen(
    BITS, q_rows, start, words, seen, BLOCK_N: tl.constexpr, BY_QUERY: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Returns which pairs of a block of keys are chosen, [queries, keys] or [keys, queries], by the bits of
    `choice.Choice`; if MASKED, of those that are ``seen``. A word is loaded once for each query, not for each pair."""
    column = tl.arange(0, BLOCK_N)
    bit = (start + column) & 31
    BITS += wide(q_rows) * words
    index = (start + column) // 32
    if BY_QUERY:
        word = tl.load(BITS + start // 32)[:, None] + tl.zeros([1, BLOCK_N], tl.int32)
    else:
        word = tl.load(BITS + start // 32)[None, :] + tl.zeros([BLOCK_N, 1], tl.int32)
    for n in tl.static_range(1, BLOCK_N // 32):
        at = start // 32 + n
        part = tl.load(BITS + at, mask=at < words, other=0)
        if BY_QUERY:
            word = tl.where((index == at)[None, :], part[:, None], word)
        else:
            word = tl.where((index == at)[:, None], part[None, :], word)
    if BY_QUERY:
        picked = ((word >> bit[None, :]) & 1) != 0
    else:
        picked = ((word >> bit[:, None]) & 1) != 0
    if MASKED:
        picked = picked & seen
    return picked


@triton.jit
def tanh(x):
    """Computes tanh to float32's accuracy; the hardware's has 11 bits only."""
    decay = tl.exp2(tl.abs(x) * -2.8853900817779268)
    bent = (1 - decay) / (1 + decay)
    square = x * x
    small = x * (1 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315))))
    return tl.where(tl.abs(x) < 0.15, small, tl.where(x < 0, -bent, bent))
