"""`ring_attention`: ring attention as one function, without transformers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..arguments import check, check_flag, check_tensor, check_type, is_whole, number, whole_number
from ..comm.first_order import refuse_transforms, refuse_vmap
from ..comm.ring import LOCAL, Ring
from ..config import RingConfig
from ..dtypes import FLOATS, INTEGERS
from ..errors import BadShape, RanksDiffer
from ..kernels import Params, Request, ScoreFunction, ScoreMod
from ..sharding.layout import LONGEST, Layout
from ..sharding.mask import BIDIRECTIONAL, CAUSAL, UNBOUNDED, Band, Mask
from ..sharding.plan import Plan
from ..traffic import interruption_guard
from .call import Call, RingOptions, with_scale_above_zero
from .kernel_choice import kernel_for, kernel_for_scores, score_mod_facts
from .op import attend
from .score_mod_op import attend_scored

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Options(TypedDict, total=False):
    """The keyword arguments of `ring_attention` that do not change what it returns."""

    group: ProcessGroup | DeviceMesh | None
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
    group: ProcessGroup | DeviceMesh | None = None,
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
    """Attention over a sequence that is sharded over the ranks of a group, exact at any ring size.

    Computes, for the whole row and with query head h reading key head h // (H / G)::

        scores = scale * q @ k.T                       # then softcap * tanh(scores / softcap), if there is a cap
        scores = score_mod(scores, b, h, i, j)         # of query i and key j of the whole row, if there is one
        scores[not visible] = -inf                     # visible: same document, and inside causal and window
        out = softmax([scores, sinks])[..., :S] @ v    # without sinks: softmax(scores) @ v

    and returns this rank's rows of ``out``. Differentiable in q, k, v, sinks and tensors that score_mod captures. Sums
    over tokens are float32 (float64 for float64 inputs) in both passes and in messages, and each gradient is rounded
    once. A query that sees no key gets 0.

    Scores are float32 (float64 for float64), as in every flash attention, so a score of size s is known to s * 6e-8:
    the relative error of out and gradients grows with the largest score, on one device too: 7e-6 at 1e2, 1e-3 at 1e4,
    6e-2 at 1e6. Beyond 1e7 they are meaningless, and gradients on a GPU may be nan.

    Args:
        q: [B, T, H, D], this rank's queries: ``row[:, positions(S, rank=rank, world_size=W)]``.
        k: [B, T, G, D], this rank's keys, of q's dtype; H is a multiple of G.
        v: [B, T, G, Dv], this rank's values, of q's dtype.
        group: the process group of the ring, or a mesh of one axis; None: the world, or this process alone if nothing
            is distributed.
        causal: a query sees no later key.
        window: (left, right): a query at p sees keys p - left to p + right; None means no bound on that side.
            transformers' ``sliding_window=w`` of a causal model is (w - 1, 0).
        documents: [B, S] or [S] integers for the whole row, the same on every rank: tokens see only tokens with the
            same id. Ids are 0 or more; -1 marks tokens that see nothing and are not seen. The host reads them. Booleans
            are refused. From cu_seqlens: ``repeat_interleave(arange(n), cu_seqlens.diff())``.
        softcap: cap of the scores, as in Gemma 2.
        sinks: [H], one logit per head that takes part in the softmax without a value, as in gpt-oss. Its gradient is
            this rank's share, as that of any weight: sum it over the ranks.
        score_mod: a function of a score, as in FlexAttention: ``score_mod(score, b, h, q_idx, kv_idx) -> score``, five
            scalars in, one out, made of torch functions; b is the batch row, h the query head, and on every rank q_idx
            and kv_idx count tokens from the start of the whole row. It is called for visible pairs only. Tensors that
            it uses (from closures, modules, globals) must cover the whole row and be the same on every rank; those
            that require a gradient get this rank's share, as sinks do, rounded once. The backward runs it again, so
            they must not change until then. `hf_ring_attn.biases` has examples. On a GPU, ``triton`` serves functions
            that add a term of head and kv_idx - q_idx, and ``flex`` most others, in float32; it sums gradients of these
            tensors in no fixed order, so their last bits vary from run to run. ``flex`` compiles each function once: a
            changed Python number in it makes a new one, so use a tensor. Elsewhere, and on a GPU with
            ``deterministic=True``, the reference serves in float64. torch.compile breaks its graph here.
        scale: factor of the scores; None: D ** -0.5.
        length: S, the tokens of the whole row. None: the ranks agree on it in one small collective, for which the host
            waits, and which also detects calls with different shapes or options. Give it in training.
        return_lse: also return the log-sum-exp of each query's scores.
        config: see `RingConfig`; of it ``kernel``, ``backward``, ``heads_per_gather``, ``traffic`` and
            ``deterministic`` apply to a call. The row is always in zigzag order, as `positions` gives it.

    Returns:
        out [B, T, H, Dv] in q's dtype; with ``return_lse`` also lse [B, H, T], float32 (float64 for float64), natural
        logarithm, not differentiable, -inf where a query sees no key and there is no sink.

    Raises:
        BadShape, BadOption: inputs that do not fit together.
        BadScoreMod: score_mod is not such a function, or would lose a gradient.
        ScoreModChanged: in the backward, if score_mod has changed.
        RanksDiffer: on every rank, if ranks were called differently. Detected only without ``length``.
        RefusedElsewhere: another rank refused its call. Detected only without ``length``.
        UnsupportedTransform: inside forward-mode autograd or a gradient transform of torch.func.
        UnsupportedVmap: inside torch.func.vmap over documents, over sinks without ``length``, or with a score_mod.
        UnsupportedAttention: with every reason, if no kernel can compute this exactly.
        LeftHalfway: an error interrupted an earlier attention of this ring.
    """
    ring = Ring.of(group)
    refusal: Exception | None = None
    facts: dict[str, object] = dict.fromkeys(FACTS)
    ids: Tensor | None = None
    try:
        _check_tensors(q, k, v, sinks, documents)
        refuse_transforms("ring attention", q, k, v, sinks)
        compared = sinks if length is None and ring.size > 1 else None
        refuse_vmap("ring attention", documents=documents, sinks=compared, score_mod=score_mod)
        _check_options(causal, score_mod, return_lse, config)
        window = _sides(window)
        band = _band(causal, window)
        if softcap is not None:
            softcap = number("softcap", softcap, "a number above 0, or None for no cap", above=0)
        factor = q.shape[3] ** -0.5 if scale is None else number("scale", scale, "a finite number, or None")
        if length is not None:
            length = whole_number("length", length, "a number of tokens, 0 to 2**40", most=LONGEST)
        mod = None if score_mod is None else ScoreMod.of(score_mod, q.device, config.deterministic)
        ids = None if documents is None else _ids(documents)
        facts = _facts(q, k, v, documents, causal, window, softcap, factor, sinks, config, mod)
    except Exception as error:  # noqa: BLE001  raised below; else the others would wait
        refusal = error
    interruption_guard(ring).check()  # else peers would read the comparison below as data of that attention
    if length is None:
        length = _agreed_length(ring, q, facts, refusal)
    if refusal is not None:
        raise refusal
    layout = Layout(length, ring.size, ring.rank)
    held = layout.held()
    if q.shape[1] != held:
        need = f"rank {ring.rank} of {ring.size} holds {held} tokens of a row of length {length}"
        need += ": see hf_ring_attn.positions"
        raise BadShape("q", tuple(q.shape), need)

    batch = q.shape[0]
    mask = Mask.of(band, batch, layout.padded, _documents(ids, batch, layout))
    q, factor = with_scale_above_zero(q, factor)
    params = Params(factor, softcap, sinks, config.deterministic, mod)
    kernel = _kernel(ring, config, q, k, v, params, mask, length)
    missing = layout.local_length - held  # the last tokens of each rank's share, as they are of the row
    if missing:
        q, k, v = (pad(x, (0, 0, 0, 0, 0, missing)) for x in (q, k, v))
    if batch * layout.padded == 0:  # nothing to send, and not every transport can send nothing
        ring, layout, mask = Ring(LOCAL), Layout(q.shape[1], 1, 0), Mask.of(CAUSAL, batch, q.shape[1])
    call = Call(q, k, v, Plan.cached(ring, layout, mask), params, RingOptions.of(config, kernel))
    out, lse = attend(call) if mod is None else attend_scored(call)
    if missing:
        out, lse = out[:, :held].contiguous(), lse[..., :held].contiguous()
    return (out, lse) if return_lse else out


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, documents: Tensor | None) -> None:
    check_tensor("q", q, FLOATS)
    for name, x in (("k", k), ("v", v)):
        check_tensor(name, x, (q.dtype,), q.device)
    if q.dim() != 4 or 0 in q.shape[2:]:
        raise BadShape("q", tuple(q.shape), "it must be [B, T, H, D]")
    batch, tokens, heads, head_dim = q.shape
    if k.dim() != 4 or k.shape[:2] != q.shape[:2] or k.shape[3] != head_dim:
        raise BadShape("k", tuple(k.shape), f"it must be [{batch}, {tokens}, G, {head_dim}] to go with q")
    if v.dim() != 4 or v.shape[:3] != k.shape[:3] or v.shape[3] == 0:
        raise BadShape("v", tuple(v.shape), f"it must be [{batch}, {tokens}, {k.shape[2]}, Dv] to go with k")
    if k.shape[2] == 0 or heads % k.shape[2]:
        raise BadShape("k", tuple(k.shape), f"q's {heads} heads must be a multiple of its {k.shape[2]} heads")
    if sinks is not None:
        check_tensor("sinks", sinks, FLOATS, q.device)
        if sinks.shape != (heads,):
            raise BadShape("sinks", tuple(sinks.shape), f"it must be [{heads}], one for each query head")
    if documents is not None:
        check_tensor("documents", documents, INTEGERS)


def _check_options(causal: bool, score_mod: ScoreFunction | None, return_lse: bool, config: RingConfig) -> None:
    check_flag("causal", causal)
    check_flag("return_lse", return_lse)
    check(score_mod is None or callable(score_mod), "score_mod", score_mod, "a function of a score, or None")
    check_type("config", config, RingConfig, "a RingConfig")


def _sides(window: Sequence[object]) -> tuple[int | None, int | None]:
    """The window in Python's numbers: numpy's without a sign have no negative."""
    need = "(left, right) in tokens, each 0 or more, or None for no bound"
    check_type("window", window, (tuple, list), need)
    check(len(window) == 2 and all(side is None or is_whole(side) for side in window), "window", window, need)
    left, right = (None if side is None else whole_number("window", side, need) for side in window)
    return left, right


def _band(causal: bool, window: tuple[int | None, int | None]) -> Band:
    left, right = window
    band = Band(-UNBOUNDED if right is None else -right, UNBOUNDED if left is None else left)
    return band & (CAUSAL if causal else BIDIRECTIONAL)


def _ids(documents: Tensor) -> Tensor:
    """The same on the CPU, as int64."""
    ids = documents.detach().to("cpu", torch.int64)
    least = int(ids.min()) if ids.numel() else 0
    check(least >= -1, "documents", least, "ids of 0 or more, and -1 for tokens that see nothing")
    return ids


def _documents(ids: Tensor | None, batch: int, layout: Layout) -> Tensor | None:
    """[B, padded] ids on the CPU, with padding as -1; None where all tokens are of one document."""
    if ids is None:
        if layout.padded == layout.length:
            return None
        ids = torch.zeros(layout.length, dtype=torch.int64, device="cpu")
    if ids.shape not in ((layout.length,), (batch, layout.length)):
        raise BadShape("documents", tuple(ids.shape), f"it must be [{batch}, {layout.length}], the whole row")
    return layout.pad(ids.expand(batch, -1), 1, -1)


def _kernel(
    ring: Ring, config: RingConfig, q: Tensor, k: Tensor, v: Tensor, params: Params, mask: Mask, length: int
) -> str:
    """The name of the kernel of a call."""
    batch, _, heads, head_dim = q.shape
    request = Request(
        q.device.type, q.dtype, heads, k.shape[2], head_dim, v.shape[3], params.softcap is not None,
        params.sinks is not None, config.deterministic, mask.holes, params.score_mod is not None,
    )  # fmt: skip
    if params.score_mod is None:
        return kernel_for(ring.name, config.kernel, request)
    return kernel_for_scores(ring.name, config.kernel, request, params, mask, batch, length)


FACTS = (
    "number of rows (B)", "number of query heads (H)", "number of key heads (G)", "width of a query head (D)",
    "width of a value head (Dv)", "dtype", "causal", "window", "softcap", "scale", "sinks", "score_mod",
    "tensors of the score_mod", "deterministic", "kernel", "backward", "heads_per_gather", "traffic", "documents",
    "needs a gradient",
)  # fmt: skip
"""Facts of a call that ranks compare."""


def _facts(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, causal: bool, window: tuple[int | None, ...],
    softcap: float | None, scale: float, sinks: Tensor | None, config: RingConfig, mod: ScoreMod | None,
) -> dict[str, object]:  # fmt: skip
    differentiated = (q, k, v, *(() if sinks is None else (sinks,)), *(() if mod is None else mod.captured))
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in differentiated)
    values = (
        q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.dtype, causal, window, softcap, scale, sinks,
        *score_mod_facts(mod).values(), config.deterministic, config.kernel, config.backward, config.heads_per_gather,
        config.traffic, documents, trains,
    )  # fmt: skip
    return dict(zip(FACTS, values, strict=True))


def _device_of(q: object) -> torch.device:
    """The device of q, or of this process where q is no such tensor: a rank that refuses must meet the others."""
    if isinstance(q, Tensor) and q.device.type in ("cpu", "cuda"):
        return q.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _agreed_length(ring: Ring, q: Tensor, facts: dict[str, object], refusal: Exception | None) -> int:
    """Compares the calls of all ranks and returns the length of the whole row; if one refuses, all raise."""
    device = ring.small_device(_device_of(q))
    todo = "Call ring_attention with the same options on every rank."
    # A transform of torch.func that was refused would wrap messages, too.
    with nullcontext() if refusal is None else torch._C._DisableFuncTorch():
        mine = [q.shape[1] if refusal is None else 0]
        (lengths,) = ring.agree(facts, device, todo, refusal, mine, doing="compared its call of ring_attention")
    total = sum(lengths)
    expected = [Layout(total, ring.size, rank).held() for rank in range(ring.size)]
    if lengths != expected:
        todo = f"A row of {total} tokens is held as {expected}: see hf_ring_attn.positions."
        raise RanksDiffer("zigzag share of a row", [*lengths], todo)
    return total
