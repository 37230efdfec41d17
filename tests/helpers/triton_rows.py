"""What the Triton kernels answer with the block sizes of any GPU."""

from __future__ import annotations

from torch import Tensor

from hf_ring_attn.kernels import KERNELS, Gradients
from hf_ring_attn.kernels.triton import launch
from hf_ring_attn.kernels.triton.blocks import Row
from hf_ring_attn.testing import Case, Inputs
from tests.helpers.kernel_answers import Answer, params_of

TRITON = KERNELS["triton"]


def computed_with(row: Row, case: Case, x: Inputs, table: Tensor) -> Answer:
    """out, lse, and dq, dk, dv before their rounding, with the launches of one row of `TABLE`."""
    q, k, v, dout, params = x["q"], x["k"], x["v"], x["dout"], params_of(case, x)
    out, lse = launch.forward(q, k, v, table, params, row)
    into = Gradients(TRITON.new_gradient(q), TRITON.new_gradient(k), TRITON.new_gradient(v))
    launch.backward(dout, q, k, v, lse, TRITON.delta(dout, out), table, params, into, row)
    return {"out": out, "lse": lse, "dq": into.dq, "dk": into.dk, "dv": into.dv}
