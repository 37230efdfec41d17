"""Both passes of a kernel over one table of tiles, for comparisons."""

from __future__ import annotations

from torch import Tensor

from .base import Gradients, Kernel, Params


def whole(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, tiles: Tensor, params: Params
) -> dict[str, Tensor]:
    """out, lse, and dq, dk, dv before their rounding, by name."""
    out, lse = kernel.forward(q, k, v, tiles, params)
    into = Gradients(kernel.new_gradient(q), kernel.new_gradient(k), kernel.new_gradient(v))
    kernel.backward(dout, q, k, v, lse, kernel.delta(dout, out), tiles, params, into, out)
    return {"out": out, "lse": lse, "dq": into.dq, "dk": into.dk, "dv": into.dv}
