"""The functions of flash-attn 2 that ring-flash-attn calls, over the FlashAttention 2 that torch itself brings.

For benchmarks on machines without the package (which is built from source): the kernels are the same. Put this folder
on PYTHONPATH. Neither windows, softcap nor dropout, which the benchmark does not use.
"""

from __future__ import annotations

import torch
from torch import Tensor

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward
_NO_DROPOUT = {"dropout_p": 0.0, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}


def _check(**options: object) -> None:
    for name, value in options.items():
        if value != _NO_DROPOUT[name]:
            raise NotImplementedError(f"{name}={value}: this shim has no such thing")


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _check(
        dropout_p=float(dropout_p), window_size_left=window_size_left, window_size_right=window_size_right,
        softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    out, lse, state, unused, _ = _forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=softmax_scale
    )
    return out, lse, unused, state


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
    dv: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> None:  # fmt: skip
    _check(
        dropout_p=float(dropout_p), window_size_left=window_size_left, window_size_right=window_size_right,
        softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    found = _backward(
        dout, q, k, v, out, softmax_lse, None, None, q.shape[1], k.shape[1], 0.0, causal, state, state,
        scale=softmax_scale,
    )  # fmt: skip
    for into, gradient in zip((dq, dk, dv), found, strict=True):
        into.copy_(gradient)


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _check(
        dropout_p=float(dropout_p), window_size_left=window_size_left, window_size_right=window_size_right,
        softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    out, lse, state, unused, _ = _forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, causal, False, scale=softmax_scale
    )
    return out, lse, unused, state


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
    dv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, rng_state: Tensor | None = None,
) -> None:  # fmt: skip
    _check(
        dropout_p=float(dropout_p), window_size_left=window_size_left, window_size_right=window_size_right,
        softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    found = _backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, causal, state,
        state, scale=softmax_scale,
    )  # fmt: skip
    for into, gradient in zip((dq, dk, dv), found, strict=True):
        into.copy_(gradient)
