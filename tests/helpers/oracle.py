"""Attention by its definition, dense and in float64: the reference for every other computation.

Nothing here is blockwise, and nothing is shared with the rest of the package. `oracle` takes its gradients from
autograd; `gradient_oracle` from the formula, for the case where the forward's output was rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_ring_attn.testing import Case, Inputs, inputs


def visible(case: Case, documents: Tensor | None) -> Tensor:
    """Builds the dense mask of a case.

    Args:
        documents: [B, S] integers with -1 for padding, or None for one document a row.

    Returns:
        [B, S, S] bool, queries before keys: same document, and lo <= query position - key position <= hi.
    """
    position = torch.arange(case.length)
    distance = position[:, None] - position[None, :]
    lo, hi = case.band
    seen = torch.ones(case.batch, case.length, case.length, dtype=torch.bool)
    if lo is not None:
        seen &= distance >= lo
    if hi is not None:
        seen &= distance <= hi
    if documents is not None:
        seen &= (documents[:, :, None] == documents[:, None, :]) & (documents >= 0)[:, :, None]
    return seen


def oracle(case: Case, given: Inputs | None = None, *, out: Tensor | None = None) -> dict[str, Tensor]:
    """The answer to a case, in float64.

    As naive code, per batch row, with query head h reading key head h // (H / G)::

        scores = scale * q @ k.T                       # then softcap * tanh(scores / softcap), if there is a cap
        scores[not visible] = -inf
        lse = logsumexp([scores, sink])
        out = softmax([scores, sink])[..., :S] @ v

    A query that sees no key has out 0 and gradients 0; its lse is its sink, or -inf where there are none.

    Args:
        given: the tensors of the case, of any float dtype and taken as exact; None: ``inputs(case)``.
        out: [B, S, H, Dv], a rounded output. The gradients are then those of `gradient_oracle`.

    Returns:
        out [B, S, H, Dv], lse [B, H, S] (natural logarithm), dq, dk, dv of the inputs' shapes, and dsinks [H] if the
        case has sinks.
    """
    data = inputs(case) if given is None else given
    q, k, v = (_leaf(x) for x in (data["q"], data["k"], data["v"]))
    sinks = None if data["sinks"] is None else _leaf(data["sinks"])
    share = case.heads // case.kv_heads

    scores = torch.einsum("bshd,bthd->bhst", q, k.repeat_interleave(share, 2)) * _scale(case)
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~visible(case, data["documents"])[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)), 3)
    lse = scores.detach().logsumexp(3)
    # A softmax over no key at all has no value: such rows become zeros, and autograd sees no nan.
    empty = (lse == -torch.inf)[..., None]
    weights = scores.masked_fill(empty, 0).softmax(3).masked_fill(empty, 0)
    answer = torch.einsum("bhst,bthd->bshd", weights[..., : case.length], v.repeat_interleave(share, 2))

    result = {"out": answer.detach(), "lse": lse}
    if out is not None:
        return result | gradient_oracle(case, data, out)
    leaves = {"dq": q, "dk": k, "dv": v} | ({} if sinks is None else {"dsinks": sinks})
    gradients = torch.autograd.grad(answer, list(leaves.values()), data["dout"].double())
    return result | dict(zip(leaves, gradients, strict=True))


def gradient_oracle(case: Case, given: Inputs, out: Tensor) -> dict[str, Tensor]:
    """The gradients in float64 of a backward that gets this rounded ``out``, as a kernel gets its own.

    The formula (Dao et al. 2022, "FlashAttention", appendix B), with p the softmax, recomputed exactly::

        delta = rowsum(dout * out)
        dv = p.T @ dout
        ds = p * (dout @ v.T - delta)                  # times 1 - tanh(scores / softcap) ** 2, if there is a cap
        dq = scale * ds @ k;  dk = scale * ds.T @ q
        dsink = -sum(softmax of the sink * delta)

    With the exact out this is autograd's answer. ``out`` [B, S, H, Dv] of any float dtype, taken as exact.

    Returns:
        dq, dk, dv of the inputs' shapes, and dsinks [H] if the case has sinks.
    """
    grouped = (case.batch, case.length, case.kv_heads, case.heads // case.kv_heads)
    q = given["q"].double().reshape(*grouped, case.head_dim)
    k, v = given["k"].double(), given["v"].double()
    dout = given["dout"].double().reshape(*grouped, case.value_dim)
    delta = torch.einsum("bsgrd,bsgrd->bgrs", dout, out.double().reshape(dout.shape))

    scores = _scale(case) * torch.einsum("bsgrd,btgd->bgrst", q, k)
    slope = torch.ones_like(scores)
    if case.softcap is not None:
        bent = torch.tanh(scores / case.softcap)
        scores, slope = case.softcap * bent, 1 - bent**2
    seen = visible(case, given["documents"])[:, None, None]
    lse = torch.where(seen, scores, -torch.inf).logsumexp(4)
    sinks = None
    if given["sinks"] is not None:
        sinks = given["sinks"].double().reshape(1, *grouped[2:], 1)
        lse = torch.logaddexp(lse, sinks)
    p = torch.where(seen, torch.exp(scores - lse[..., None]), 0.0)

    ds = p * (torch.einsum("bsgrd,btgd->bgrst", dout, v) - delta[..., None]) * slope * _scale(case)
    gradients = {
        "dq": torch.einsum("bgrst,btgd->bsgrd", ds, k).reshape(given["q"].shape),
        "dk": torch.einsum("bgrst,bsgrd->btgd", ds, q),
        "dv": torch.einsum("bgrst,bsgrd->btgd", p, dout),
    }
    if sinks is not None:
        gradients["dsinks"] = -(torch.exp(sinks - lse) * delta).sum((0, 3)).reshape(case.heads)
    return gradients


def _leaf(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_()


def _scale(case: Case) -> float:
    return case.head_dim**-0.5 if case.scale is None else case.scale
