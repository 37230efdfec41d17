"""The ops of the flash-attn package 2.8 with their own parameters, in their own order, computing with the fake."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_ring_attn.kernels import Params
from hf_ring_attn.kernels.flash2.libraries import Lengths
from hf_ring_attn.kernels.flash4.calls import Bounds
from tests.kernels.fake_flash2 import Fake

fake = Fake()

OPTIONS = (
    "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left{no}, SymInt window_size_right{no}, "
    "float softcap{zero}, Tensor? alibi_slopes{none}"
)
FIRST = OPTIONS.format(no="", zero="", none="")
LATER = OPTIONS.format(no="=-1", zero="=0.0", none="=None")
SIZES = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
GRADIENTS = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq, Tensor(b!)? dk, "
    "Tensor(c!)? dv"
)
SCHEMAS = {
    "_flash_attn_forward": (
        f"(Tensor q, Tensor k, Tensor v, {FIRST}, bool return_softmax) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "_flash_attn_varlen_forward": (
        f"(Tensor q, Tensor k, Tensor v, {SIZES}, {LATER}, bool return_softmax=False, Tensor? block_table=None, "
        "Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "_flash_attn_backward": f"({GRADIENTS}, {FIRST}, bool deterministic, Tensor? rng_state=None) -> Tensor",
    "_flash_attn_varlen_backward": (
        f"({GRADIENTS}, {SIZES}, {FIRST}, bool deterministic, Tensor? rng_state=None, bool zero_tensors=False)"
        " -> Tensor"
    ),
}


def _understood(
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None,
) -> tuple[Params, Bounds]:  # fmt: skip
    assert dropout_p == 0 and alibi_slopes is None
    if causal:
        window_size_right = 0
    left, right = (None if bound < 0 else bound for bound in (window_size_left, window_size_right))
    return Params(softmax_scale, softcap or None), Bounds(left, right)


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert rest[7:] == (False,), "return_softmax"
    out, lse = fake.forward(q, k, v, *_understood(*rest[:7]), None)
    return out, lse.contiguous(), q.new_empty(0), q.new_empty(0)


def _varlen_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert rest[11:] in ((), (False,)), "return_softmax; the dispatcher leaves out what is a default"
    out, lse = fake.forward(q, k, v, *_understood(*rest[4:11]), Lengths(*rest[:4]))
    return out, lse.contiguous(), q.new_empty(0), q.new_empty(0)


def _write(given: list[Tensor], made: tuple[Tensor, ...]) -> Tensor:
    for to, x in zip(given, made, strict=True):
        to.copy_(x)
    return given[0].new_empty(0)


def _backward(*rest: Any) -> Tensor:
    assert isinstance(rest[16], bool), "deterministic"
    dout, q, k, v, out, lse, *gradients = rest[:9]
    return _write(gradients, fake.backward(dout, q, k, v, out, lse, *_understood(*rest[9:16]), None))


def _varlen_backward(*rest: Any) -> Tensor:
    assert isinstance(rest[20], bool), "deterministic"
    dout, q, k, v, out, lse, *gradients = rest[:9]
    return _write(gradients, fake.backward(dout, q, k, v, out, lse, *_understood(*rest[13:20]), Lengths(*rest[9:13])))


_library = torch.library.Library("hf_ring_attn_flash_attn", "DEF")
OPS: dict[str, Any] = {}
for _name, _does in zip(SCHEMAS, (_forward, _varlen_forward, _backward, _varlen_backward), strict=True):
    _library.define(_name + SCHEMAS[_name])
    _library.impl(_name, _does, "CompositeExplicitAutograd")
    OPS[f"_wrapped{_name}"] = getattr(torch.ops.hf_ring_attn_flash_attn, _name)
