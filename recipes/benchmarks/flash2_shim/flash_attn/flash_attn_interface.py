"""The functions of flash-attn 2 that ring-flash-attn calls, over the FlashAttention 2 that torch itself brings.

For benchmarks on machines without the package (which is built from source): the kernels are the same. Put this folder
on PYTHONPATH. Neither windows, softcap nor dropout, which the benchmark does not use. The parameters' names are those
that callers look up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ABSENT = {"dropout_p": 0, "window_size_left": -1, "window_size_right": -1, "softcap": 0, "alibi_slopes": None}


def _attended(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[Any, ...], scale: float, causal: bool, given: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _refuse(given)
    out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, *lengths, 0.0, causal, False, scale=scale
    )
    return out, lse, unused, state


def _differentiated(
    inputs: tuple[Tensor, ...], into: tuple[Tensor, ...], lengths: tuple[Any, ...], scale: float, causal: bool,
    given: dict[str, Any],
) -> None:  # fmt: skip
    _refuse(given)
    state = torch.zeros(2, dtype=torch.uint64, device=inputs[0].device)
    found = torch.ops.aten._flash_attention_backward(*inputs, *lengths, 0.0, causal, state, state, scale=scale)
    for x, gradient in zip(into, found, strict=True):
        x.copy_(gradient)


def _refuse(given: dict[str, Any]) -> None:
    for name, absent in ABSENT.items():
        if given[name] != absent:
            raise NotImplementedError(f"{name}={given[name]}: this shim has no such thing")


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _attended(q, k, v, (None, None, q.shape[1], k.shape[1]), softmax_scale, causal, locals())


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
    dv: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> None:  # fmt: skip
    lengths = None, None, q.shape[1], k.shape[1]
    _differentiated((dout, q, k, v, out, softmax_lse), (dq, dk, dv), lengths, softmax_scale, causal, locals())


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return _attended(q, k, v, lengths, softmax_scale, causal, locals())


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
    dv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, rng_state: Tensor | None = None,
) -> None:  # fmt: skip
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    _differentiated((dout, q, k, v, out, softmax_lse), (dq, dk, dv), lengths, softmax_scale, causal, locals())
