"""Ring attention as one function, for people without transformers."""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, get_args, overload

import torch
from torch import Tensor

from ..comm.fingerprint import fingerprint
from ..comm.ring import LOCAL, Ring
from ..config import RingConfig, Traffic
from ..errors import BadOption, BadShape, RanksDiffer
from ..kernels import Params, Request, ScoreFunction, ScoreMod
from ..sharding.layout import Layout, held_of_zigzag
from ..sharding.mask import BIDIRECTIONAL, CAUSAL, UNBOUNDED, Band, Mask
from ..sharding.plan import Plan
from ..traffic import interruption_guard
from .kernel_choice import kernel_for, kernel_for_scores, score_mod_facts
from .op import attend
from .score_mod_op import attend_scored

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Options(TypedDict, total=False):
    """The keyword arguments of `ring_attention` that do not change what it returns."""

    group: ProcessGroup | None
    causal: bool
    window: tuple[int | None, int | None]
    documents: Tensor | None
    softcap: float | None
    sinks: Tensor | None
    score_mod: ScoreFunction | None
    scale: float | None
    length: int | None
    config: RingConfig


@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[Options]
) -> Tensor: ...
@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] = (None, None),
    documents: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    score_mod: ScoreFunction | None = None,
    scale: float | None = None,
    length: int | None = None,
    return_lse: bool = False,
    config: RingConfig = RingConfig(),
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a sequence that is spread over the ranks of a group, exact at any ring size.

    Computes, for the whole row and with query head h reading key head h // (H / G)::

        scores = scale * q @ k.T                       # then softcap * tanh(scores / softcap), if there is a cap
        scores = score_mod(scores, b, h, i, j)         # of query i and key j of the whole row, if there is one
        scores[not visible] = -inf                     # visible: same document, and inside causal and window
        out = softmax([scores, sinks])[..., :S] @ v    # without sinks: softmax(scores) @ v

    and returns this rank's rows of ``out``. Differentiable in q, k, v, sinks and what score_mod captures; sums over
    tokens are kept in float32 (float64 for float64 inputs) in both passes, on the wire too, and each gradient is
    rounded once. A query that sees no key gets 0.

    Args:
        q: [B, T, H, D], this rank's queries: ``row[:, positions(S, rank=rank, world_size=W)]``.
        k: [B, T, G, D], H a multiple of G; v: [B, T, G, Dv]; of q's dtype.
        group: the process group of the ring; None: the world, or this process alone if nothing is distributed.
        causal: a query sees no later key.
        window: (left, right): a query at p sees keys p - left to p + right; None means no bound on that side.
            transformers' ``sliding_window=w`` of a causal model is (w - 1, 0).
        documents: [B, S] or [S] integers for the whole row, the same on every rank: tokens see only tokens with the
            same id, and -1 marks tokens that see nothing and are not seen. Read on the host.
        softcap: cap of the scores, as in Gemma 2.
        sinks: [H], a logit a head that takes part in the softmax without a value, as in gpt-oss. Its gradient is this
            rank's share, as that of any weight: add over ranks.
        score_mod: a function of a score, as in FlexAttention: ``score_mod(score, b, h, q_idx, kv_idx) -> score``, five
            scalars in, one out, made of torch functions; b is the batch row, h the query head, and on every rank q_idx
            and kv_idx count tokens from the beginning of the whole row. It is asked about visible pairs only. The
            tensors that it uses, wherever it has them from (closures, modules, globals), are those of the whole row and
            the same on every rank; those that require a gradient get this rank's share of it, as sinks do, rounded
            once. The backward runs it again, so what it uses must stay until then. `hf_ring_attn.biases` has some. On a
            GPU ``triton`` serves those that add something by head and kv_idx - q_idx, and ``flex`` most others: in
            float32, with gradients of those tensors added up in no fixed order, so that their last bits differ from run
            to run. ``flex`` compiles each function once, so a Python number in it that changes makes it another one:
            use a tensor. Elsewhere the reference does, in float64
            (``deterministic=True``: on a GPU too, with the same bits from run to run).
            torch.compile breaks its graph here.
        scale: factor of the scores; None: D ** -0.5.
        length: S, the tokens of the whole row. None: the ranks tell each other in one small collective, and find out
            there if they were called with different shapes or options.
        return_lse: also return the log-sum-exp of each query's scores.
        config: see `RingConfig`; ``loss`` and ``pad`` play no part here.

    Returns:
        out [B, T, H, Dv] in q's dtype; with ``return_lse`` also lse [B, H, T], float32 (float64 for float64), natural
        logarithm, not differentiable, -inf where a query sees no key and there is no sink.

    Raises:
        BadShape, BadOption: for inputs that do not fit together.
        BadScoreMod: score_mod is not such a function, or uses a gradient in a way that would lose it.
        ScoreModChanged: in the backward: it is another function by then.
        RanksDiffer: on every rank, if ranks were called differently (found only without ``length``).
        UnsupportedAttention: with every reason, if no kernel can compute this exactly.
        LeftHalfway: an error ended an earlier attention of this ring half-way.
    """
    _check_shapes(q, k, v, sinks)
    _check_options(window, softcap)
    mod = None if score_mod is None else ScoreMod.of(score_mod, q.device, config.deterministic)
    ring = Ring.of(group)
    interruption_guard(ring).check()  # what is compared below would be taken for the rest of that attention
    if length is None:
        length = _agreed_length(ring, q, k, v, documents, causal, window, softcap, sinks, scale, config, mod)
    layout = Layout(length, ring.size, ring.rank)
    held = held_of_zigzag(length, ring.rank, ring.size)
    if q.shape[1] != len(held):
        need = f"rank {ring.rank} of {ring.size} holds {len(held)} of {length} tokens: see hf_ring_attn.positions"
        raise BadShape("q", tuple(q.shape), need)

    batch, _, heads, head_dim = q.shape
    mask = Mask.of(_band(causal, window), batch, layout.padded, _documents(documents, batch, layout))
    request = Request(
        q.device.type, q.dtype, heads, k.shape[2], head_dim, v.shape[3], softcap is not None, sinks is not None,
        config.deterministic, mask.holes, mod is not None,
    )  # fmt: skip
    scale = head_dim**-0.5 if scale is None else scale
    params = Params(scale, softcap, sinks, config.deterministic, mod)
    if mod is None:
        kernel = kernel_for(ring.name, config.kernel, request)
    else:
        kernel = kernel_for_scores(ring.name, config.kernel, request, params, mask, batch, length)
    real = torch.nonzero(layout.positions() < length).flatten().to(q.device)
    short = len(held) < layout.local_length
    if short:
        q, k, v = (x.new_zeros(batch, layout.local_length, *x.shape[2:]).index_copy(1, real, x) for x in (q, k, v))
    if batch * layout.padded == 0:  # nothing to send, and not every road sends nothing
        ring, layout, mask = Ring(LOCAL), Layout(q.shape[1], 1, 0), Mask.of(CAUSAL, batch, q.shape[1])
    out, lse = (attend if mod is None else attend_scored)(
        q, k, v, Plan.of(ring, layout, mask), params, kernel=kernel, backward=config.backward,
        heads_per_gather=config.heads_per_gather, traffic=config.traffic,
    )  # fmt: skip
    if short:
        out, lse = out.index_select(1, real), lse.index_select(2, real)
    return (out, lse) if return_lse else out


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    if q.dim() != 4:
        raise BadShape("q", tuple(q.shape), "it must be [B, T, H, D]")
    batch, tokens, heads, head_dim = q.shape
    if k.dim() != 4 or k.shape[:2] != q.shape[:2] or k.shape[3] != head_dim:
        raise BadShape("k", tuple(k.shape), f"it must be [{batch}, {tokens}, G, {head_dim}] to go with q")
    if v.dim() != 4 or v.shape[:3] != k.shape[:3]:
        raise BadShape("v", tuple(v.shape), f"it must be [{batch}, {tokens}, {k.shape[2]}, Dv] to go with k")
    if k.shape[2] == 0 or heads % k.shape[2]:
        raise BadShape("k", tuple(k.shape), f"q's {heads} heads must be a multiple of its {k.shape[2]} heads")
    if sinks is not None and sinks.shape != (heads,):
        raise BadShape("sinks", tuple(sinks.shape), f"it must be [{heads}], one for each query head")
    if not q.dtype.is_floating_point:
        raise BadOption("q.dtype", q.dtype, "a floating-point dtype")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise BadOption(f"{name}.dtype", x.dtype, f"{q.dtype}, as q")


def _check_options(window: tuple[int | None, int | None], softcap: float | None) -> None:
    if any(side is not None and side < 0 for side in window):
        raise BadOption("window", window, "(left, right) in tokens, each 0 or more, or None for no bound")
    if softcap is not None and not 0 < softcap < math.inf:
        raise BadOption("softcap", softcap, "a number above 0, or None for no cap")


def _band(causal: bool, window: tuple[int | None, int | None]) -> Band:
    left, right = window
    band = Band(-UNBOUNDED if right is None else -right, UNBOUNDED if left is None else left)
    return band & (CAUSAL if causal else BIDIRECTIONAL)


def _documents(documents: Tensor | None, batch: int, layout: Layout) -> Tensor | None:
    """[B, padded] ids on the CPU, with padding as -1; None where all tokens are of one document."""
    if documents is None:
        if layout.padded == layout.length:
            return None
        documents = torch.zeros(layout.length, dtype=torch.int64)
    if documents.shape not in ((layout.length,), (batch, layout.length)):
        raise BadShape("documents", tuple(documents.shape), f"it must be [{batch}, {layout.length}], the whole row")
    return layout.pad(documents.to("cpu", torch.int64).expand(batch, -1), 1, -1)


def _agreed_length(ring: Ring, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, *options: Any) -> int:
    causal, window, softcap, sinks, scale, config, mod = options
    facts = {
        "number of rows (B)": q.shape[0],
        "number of query heads (H)": q.shape[2],
        "number of key heads (G)": k.shape[2],
        "width of a query head (D)": q.shape[3],
        "width of a value head (Dv)": v.shape[3],
        "dtype (its bits)": torch.finfo(q.dtype).bits,
        "dtype (bits of its fraction)": round(-math.log2(torch.finfo(q.dtype).eps)),
        "causal": int(causal),
        "window, left": -1 if window[0] is None else window[0],
        "window, right": -1 if window[1] is None else window[1],
        "softcap (in millionths)": 0 if softcap is None else int(softcap * 1e6),
        "scale (in billionths, 0 for the default)": 0 if scale is None else int(scale * 1e9),
        "use of sinks": int(sinks is not None),
        **score_mod_facts(mod),
        "deterministic": int(config.deterministic),
        "kernel (its name's checksum)": zlib.crc32(config.kernel.encode()),
        "backward ('ring': 0, 'gather': 1)": int(config.backward == "gather"),
        "heads_per_gather": config.heads_per_gather or 0,
        "traffic ('auto': 0, 'messages': 1, 'pulls': 2)": get_args(Traffic).index(config.traffic),
        "documents (their fingerprint)": fingerprint(documents),
    }
    ring.agree(facts, q.device, "Call ring_attention with the same options on every rank.")
    lengths = ring.numbers(q.shape[1], q.device, "told its length")
    total = sum(lengths)
    expected = [len(held_of_zigzag(total, rank, ring.size)) for rank in range(ring.size)]
    if lengths != expected:
        todo = f"A row of {total} tokens is held as {expected}: see hf_ring_attn.positions."
        raise RanksDiffer("zigzag share of a row", list(lengths), todo)
    return total
