"""The two libraries that have FlashAttention 2: torch itself, and the flash-attn package. The latter is not imported
before it is asked for what torch does not have.

Both are one kernel (in torch's sources aten/src/ATen/native/transformers/cuda/flash_attn): masks are aligned to the
lower right corner, statistics are natural logarithms in float32, and gradients leave in the inputs' dtype; where
queries are grouped, those of a key are rounded for each query head, added, and rounded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..base import Params
from ..flash4.calls import Bounds

PACKAGE, TESTED = "flash-attn", ("2.7.", "2.8.")
"""The package, and how the versions begin whose functions are those that are written down here."""

NO_DROPOUT = 0.0


class Lengths(NamedTuple):
    """Entries of a packed call, one after the other: where each begins, and the end, [n + 1] int32 on the GPU."""

    q_starts: Tensor
    k_starts: Tensor
    most_queries: int
    most_keys: int


class Library(Protocol):
    """What is used of FlashAttention 2. Tests put a fake in plain torch in its place.

    Tensors are [B, T, heads, D], lse is [B, H, T]; with lengths [tokens, heads, D] and [H, tokens].
    """

    name: str

    def reasons(self, softcap: bool, deterministic: bool) -> Sequence[str]:
        """Why it cannot serve this; empty if it can."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, params: Params, bounds: Bounds, lengths: Lengths | None
    ) -> tuple[Tensor, Tensor]:
        """out and lse (natural), without sinks."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, params: Params, bounds: Bounds,
        lengths: Lengths | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """dq, dk, dv in their inputs' dtype. lse is contiguous."""
        ...


FORWARD = "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask"
BACKWARD = "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal rng_state unused"
NAMED = "scale window_size_left window_size_right"


class Torch:
    """torch's own: nothing to install."""

    name = "torch's own"

    def reasons(self, softcap: bool, deterministic: bool) -> Sequence[str]:
        reasons = [*_torch_differences()]
        if softcap:
            reasons.append("it has no softcap")
        if deterministic:
            reasons.append("it is deterministic only if the whole process is (torch.use_deterministic_algorithms)")
        active = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
        if active is not None:
            reasons.append(f"torch was told to use {active} in its place (restore_flash_attention_impl() undoes it)")
        return reasons

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, params: Params, bounds: Bounds, lengths: Lengths | None
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *self._sizes(q, k, lengths), NO_DROPOUT, bounds.causal, False, **self._more(params, bounds)
        )
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, params: Params, bounds: Bounds,
        lengths: Lengths | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        no_random = torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, *self._sizes(q, k, lengths), NO_DROPOUT, bounds.causal, *no_random,
            **self._more(params, bounds),
        )  # fmt: skip
        return dq, dk, dv

    def _sizes(self, q: Tensor, k: Tensor, lengths: Lengths | None) -> tuple[Tensor | None, Tensor | None, int, int]:
        if lengths is None:
            return None, None, q.shape[1], k.shape[1]
        return lengths.q_starts, lengths.k_starts, lengths.most_queries, lengths.most_keys

    def _more(self, params: Params, bounds: Bounds) -> dict[str, Any]:
        left, right = (None, None) if bounds.causal else bounds
        return {"scale": params.scale, "window_size_left": left, "window_size_right": right}


@cache
def _torch_differences() -> tuple[str, ...]:
    """What is not as it was when this was written."""
    if not torch.backends.cuda.is_flash_attention_available():
        return ("this build of torch has none",)
    aten = torch.ops.aten
    return (
        *_changed("torch's _flash_attention_forward", aten._flash_attention_forward, FORWARD, NAMED),
        *_changed("torch's _flash_attention_backward", aten._flash_attention_backward, BACKWARD, NAMED),
    )


def _changed(what: str, op: Any, first: str, named: str = "") -> tuple[str, ...]:
    """A reason if an op does not take these arguments, in order and then by name, or needs others beside them."""
    arguments = op.default._schema.arguments
    names, count = [argument.name for argument in arguments], len(first.split())
    others = [x for x in arguments[count:] if x.name not in named.split() and not x.has_default_value()]
    if names[:count] == first.split() and set(named.split()) <= set(names[count:]) and not others:
        return ()
    return (f"the parameters of {what} have changed",)


SIZES = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
OPTIONS = "dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes"
GRADIENTS = "dout q k v out softmax_lse dq dk dv"
OPS = {
    "_flash_attn_forward": f"q k v {OPTIONS} return_softmax",
    "_flash_attn_varlen_forward": f"q k v {SIZES} {OPTIONS} return_softmax",
    "_flash_attn_backward": f"{GRADIENTS} {OPTIONS} deterministic",
    "_flash_attn_varlen_backward": f"{GRADIENTS} {SIZES} {OPTIONS} deterministic",
}
"""The package's ops and the parameters that they are called with, in order."""


class Package:
    """The flash-attn package: also softcap and deterministic gradients."""

    name = f"the {PACKAGE} package"

    def reasons(self, softcap: bool, deterministic: bool) -> Sequence[str]:
        return _package().reasons

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, params: Params, bounds: Bounds, lengths: Lengths | None
    ) -> tuple[Tensor, Tensor]:
        options = self._options(params, bounds)
        if lengths is None:
            out, lse, *_ = _package().ops["_flash_attn_forward"](q, k, v, *options, False)
        else:
            out, lse, *_ = _package().ops["_flash_attn_varlen_forward"](q, k, v, *lengths, *options, False)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, params: Params, bounds: Bounds,
        lengths: Lengths | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        name = "_flash_attn_backward" if lengths is None else "_flash_attn_varlen_backward"
        _package().ops[name](
            dout, q, k, v, out, lse, dq, dk, dv, *(lengths or ()), *self._options(params, bounds), params.deterministic
        )
        return dq, dk, dv

    def _options(self, params: Params, bounds: Bounds) -> tuple[Any, ...]:
        left, right = (-1 if bound is None or bounds.causal else bound for bound in bounds)
        return NO_DROPOUT, params.scale, bounds.causal, left, right, params.softcap or 0.0, None


class Installed(NamedTuple):
    ops: dict[str, Any]
    reasons: tuple[str, ...]


@cache
def _package() -> Installed:
    """The package's ops, or why they cannot be used. Imports it, once, if its version is one of those."""
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        return Installed({}, ("it is not installed",))
    if not found.startswith(TESTED):
        return Installed({}, (f"version {found} is not known here ({', '.join(TESTED)}x are)",))
    try:
        interface = import_module("flash_attn.flash_attn_interface")
        # Beside each function there is torch's op of it.
        ops = {name: getattr(interface, f"_wrapped{name}") for name in OPS}
        changed = [_changed(f"its {name}", ops[name], first) for name, first in OPS.items()]
    except Exception as error:  # noqa: BLE001  # compiled for another torch it may fail in any way; each is a reason
        return Installed({}, (f"it does not import: {type(error).__name__}: {error}",))
    return Installed(ops, tuple(reason for reasons in changed for reason in reasons))
