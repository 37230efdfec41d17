"""The host's side of the kernels: checks, tables, launches."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..base import Gradients, Params
from ..score_mods.chosen_keys import ChosenKeys
from .blocks import Blocks, Row, has_copy_engine, row_for
from .choice import Choice
from .distance import Bias
from .schedule import Schedule
from .tables import bounds_on, schedule_on

LOG2E = math.log2(math.e)
BYTES_SIDE_BY_SIDE = 24 * 2**20
"""Batch rows run side by side if one head of their streamed tensors fits: half of a large GPU's L2 cache."""
PROGRAMS_SIDE_BY_SIDE = 512
"""About two per slot of a large GPU; measured on an H200 from 8K to 128K tokens, see recipes/results."""
LARGEST_STRIDE = 2**23
"""Most elements between tokens, so that offsets inside a block fit 32 bits. All other offsets have 64."""

FLOAT32_ON_CUDA = "tf32x3"


@dataclass(frozen=True, eq=False)
class Problem:
    """One attention: tensors as the kernels take them, and values derived from their shapes."""

    q: Tensor
    k: Tensor
    v: Tensor
    tiles: Tensor
    params: Params
    bias: Bias | None
    choice: Choice | None

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, params: Params, into: dict[str, Tensor] | None = None
    ) -> Problem:
        """``into``: as in `Bias.of`."""
        mod = params.score_mod
        bias = choice = None
        if mod is not None and isinstance(mod.function, ChosenKeys):
            choice = Choice.of(mod.function, q, k, tiles)
        elif mod is not None:
            bias = Bias.of(mod, q, k, tiles, into)
        return cls(addressable(q), addressable(k), addressable(v), tiles, params, bias, choice)

    @property
    def group(self) -> int:
        return self.q.shape[2] // self.k.shape[2]

    def row(self, tma: bool) -> Row:
        """The shipped block sizes."""
        widths = self.q.shape[3], self.v.shape[3]
        return row_for(self.q.device, self.q.element_size(), *widths, tma, self.bias is not None)

    def constants(self, blocks: Blocks, bounds: Tensor, tma: bool) -> dict[str, Any]:
        """The constants that a kernel is compiled for."""
        dim, value_dim = self.q.shape[3], self.v.shape[3]
        return {
            "D": dim, "DV": value_dim, "BLOCK_D": padded(dim), "BLOCK_DV": padded(value_dim),
            "BLOCK_M": blocks.queries, "BLOCK_N": blocks.keys, "SOFTCAP": self.params.softcap is not None,
            "MANY": len(bounds) > 1, "TMA": tma, "PRECISION": precision(self.q), "BIAS": self.bias is not None,
            "CHOICE": self.choice is not None,
            "num_warps": blocks.warps, "num_stages": blocks.stages,
        }  # fmt: skip

    @property
    def factor_and_bend(self) -> tuple[float, float]:
        """The factor of a score in `unit`, and with a softcap the factor before the tanh."""
        scale, cap, unit = self.params.scale, self.params.softcap, self.unit
        return (scale * unit, 0.0) if cap is None else (cap * unit, scale / cap)

    @property
    def unit(self) -> float:
        """The unit of scores and log-sum-exps: powers of two; natural with a bias, to keep its digits."""
        return LOG2E if self.bias is None else 1.0

    def table(self, bounds: Tensor) -> tuple[Any, ...]:
        """The arguments of a bias or a choice, or placeholders without any."""
        table = self.bias or self.choice
        return (bounds, bounds, bounds, 0, 0) if table is None else table.arguments

    def bounds(self) -> Tensor:
        return bounds_on(self.tiles, self.q.device, self.q.shape[0], self.q.shape[1])

    def schedule(self, side: str, blocks: Blocks, *, idle: bool, streamed: tuple[Tensor, Tensor]) -> Schedule:
        """The programs of one side; ``streamed``: the tensors that each program reads."""
        mine, other, tokens = blocks.queries, blocks.keys, self.q.shape[1]
        if side == "keys":
            mine, other, tokens = other, mine, self.k.shape[1]
        one_head = sum(x.shape[0] * x.shape[1] * x.shape[3] * x.element_size() for x in streamed)
        return schedule_on(
            self.tiles, self.q.device, side, mine, other, self.q.shape[0], tokens, idle=idle,
            by_row=one_head > BYTES_SIDE_BY_SIDE,
        )  # fmt: skip

    def together(self, per_key_head: int) -> int:
        """The number of key heads that run side by side, a divisor of all: few, to reuse caches, but enough that no
        multiprocessor is idle while the last heads end."""
        heads = self.k.shape[2]
        fits = (n for n in range(1, heads) if heads % n == 0 and n * per_key_head >= PROGRAMS_SIDE_BY_SIDE)
        return next(fits, heads)


def forward(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, params: Params, row: Row | None = None
) -> tuple[Tensor, Tensor]:
    """Computes `kernels.base.Kernel.forward`.

    Args:
        row: block sizes; None: those of the shipped table.
    """
    batch, tokens, heads, _ = q.shape
    out = torch.empty(batch, tokens, heads, v.shape[3], dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    problem = Problem.of(q, k, v, tiles, params)
    q, k, v = problem.q, problem.k, problem.v
    tma = descriptors_possible(k, v)
    blocks = (row or problem.row(tma)).forward
    schedule, bounds = problem.schedule("queries", blocks, idle=True, streamed=(k, v)), problem.bounds()
    programs = len(schedule.programs)
    arguments = (
        q, described(k, blocks.keys, tma), described(v, blocks.keys, tma), out, lse,
        lse if params.sinks is None else params.sinks.contiguous(), bounds, schedule.programs, schedule.runs,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], tokens, k.shape[1], heads, problem.group,
        problem.together(programs * problem.group), programs, batch * tokens, len(bounds), *problem.factor_and_bend,
        *problem.table(bounds),
    )  # fmt: skip
    with on(q.device):
        jit("forward", "forward_kernel")[(programs * heads,)](
            *arguments, **problem.constants(blocks, bounds, tma), HAS_SINKS=params.sinks is not None
        )
    return out, lse


def delta(dout: Tensor, out: Tensor) -> Tensor:
    """`kernels.base.row_products`, without copies in float32."""
    batch, tokens, heads, width = out.shape
    dout, out = addressable(dout), addressable(out)
    sums = torch.empty(batch, heads, tokens, dtype=torch.float32, device=out.device)
    block = max(16, 8192 // padded(width))
    if sums.numel():
        with on(out.device):
            jit("backward", "delta_kernel")[(-(-tokens // block), heads, batch)](
                dout, out, sums, *dout.stride()[:3], *out.stride()[:3], tokens, heads, DV=width,
                BLOCK_DV=padded(width), BLOCK_M=block, num_warps=4,
            )  # fmt: skip
    return sums


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, tiles: Tensor, params: Params,
    into: Gradients, row: Row | None = None,
) -> None:  # fmt: skip
    """Computes `kernels.base.Kernel.backward`."""
    if tiles.shape[0] == 0 or q.numel() == 0:
        return
    problem = Problem.of(q, k, v, tiles, params, into.extra)
    dout = addressable(dout)
    lse, delta = torch.mul(lse, -problem.unit, out=aligned(lse)), aligned(delta).copy_(delta)
    row = row or problem.row(descriptors_possible(problem.q, problem.k, problem.v, dout))
    with on(q.device):
        if row.values is None:
            add_dk_dv(problem, dout, lse, delta, into, row.keys)
        else:
            add_dk_dv(problem, dout, lse, delta, into, row.keys, dv=False)
            add_dk_dv(problem, dout, lse, delta, into, row.values, dk=False)
        add_dq(problem, dout, lse, delta, into, row.queries)
    if problem.bias is not None:
        problem.bias.finish()


def add_dk_dv(
    problem: Problem, dout: Tensor, lse: Tensor, delta: Tensor, into: Gradients, blocks: Blocks, *, dk: bool = True,
    dv: bool = True,
) -> None:  # fmt: skip
    """Adds dk and dv of the tiles, or one of them; ``lse`` negated, in `Problem.unit`."""
    q, k, v = problem.q, problem.k, problem.v
    tma = descriptors_possible(q, dout)
    schedule, bounds = problem.schedule("keys", blocks, idle=False, streamed=(q, dout)), problem.bounds()
    programs = len(schedule.programs)
    jit("backward", "keys_kernel")[(programs * k.shape[2],)](
        described(dout, blocks.queries, tma), described(q, blocks.queries, tma), k, v, lse, delta, into.dk, into.dv,
        bounds, schedule.programs, schedule.runs, *into.dk.stride()[:3], *into.dv.stride()[:3],
        *_numbers(problem, dout, lse, bounds, programs, programs),
        **problem.constants(blocks, bounds, tma), DK=dk, DVALUES=dv,
    )  # fmt: skip


def add_dq(problem: Problem, dout: Tensor, lse: Tensor, delta: Tensor, into: Gradients, blocks: Blocks) -> None:
    """Adds dq of the tiles, and the gradient of a bias; ``lse`` negated, in `Problem.unit`."""
    q, k, v = problem.q, problem.k, problem.v
    tma = descriptors_possible(k, v)
    schedule, bounds = problem.schedule("queries", blocks, idle=False, streamed=(k, v)), problem.bounds()
    programs = len(schedule.programs)
    numbers = _numbers(problem, dout, lse, bounds, programs, programs * problem.group)
    learned = None if problem.bias is None else problem.bias.learned
    jit("backward", "queries_kernel")[(programs * q.shape[2],)](
        dout, q, described(k, blocks.keys, tma), described(v, blocks.keys, tma), lse, delta, into.dq,
        bounds, schedule.programs, schedule.runs, *into.dq.stride()[:3], *numbers,
        delta if learned is None else learned,
        **problem.constants(blocks, bounds, tma), LEARNED=learned is not None,
    )  # fmt: skip


def _numbers(
    problem: Problem, dout: Tensor, lse: Tensor, bounds: Tensor, programs: int, per_key_head: int
) -> tuple[float, ...]:
    """The numbers that both backward kernels take, in order; ``per_key_head``: as in `Problem.together`."""
    q, k, v = problem.q, problem.k, problem.v
    return (
        *dout.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *lse.stride()[:2],
        q.shape[1], k.shape[1], problem.group, problem.together(per_key_head), programs,
        q.shape[0] * q.shape[1], len(bounds), *problem.factor_and_bend, problem.params.scale,
        *problem.table(bounds),
    )  # fmt: skip


def precision(x: Tensor) -> str:
    """The precision of float32 products: on CUDA three of tf32 halves, to float32's accuracy; else float32."""
    return FLOAT32_ON_CUDA if x.device.type == "cuda" and torch.version.hip is None else "ieee"


@cache
def jit(file: str, name: str) -> Any:
    """Looks up a kernel; imports triton, at the first launch."""
    return getattr(import_module(f".{file}", __package__), name)


def padded(width: int) -> int:
    """Rounds up to a power of two, at least the 16 of a matrix product."""
    return max(16, 1 << (width - 1).bit_length())


def addressable(x: Tensor) -> Tensor:
    """Returns x, or a contiguous copy if the kernels cannot address it."""
    return x if x.stride(3) == 1 and x.stride(1) < LARGEST_STRIDE else x.contiguous()


def aligned(x: Tensor) -> Tensor:
    """Makes a tensor like x [B, H, T] whose strides are multiples of 16: one compiled kernel serves all lengths."""
    batch, heads, tokens = x.shape
    return x.new_empty(batch, heads, -(-tokens // 16) * 16)[..., :tokens]


def descriptors_possible(*tensors: Tensor) -> bool:
    """Returns True if the GPU's copy engine can fetch blocks of [B, T, H, D]: Hopper or later, 16-byte strides."""
    if not has_copy_engine(tensors[0].device):
        return False
    return all(
        x.numel() > 0
        and x.data_ptr() % 16 == 0
        and all(step > 0 and step * x.element_size() % 16 == 0 for size, step in _dims(x) if size > 1)
        for x in tensors
    )


def _dims(x: Tensor) -> list[tuple[int, int]]:
    return list(zip(x.shape[:3], x.stride()[:3], strict=True))


def described(x: Tensor, rows: int, tma: bool) -> Any:
    """Returns x [B, T, H, D], or its descriptor for blocks of ``rows`` tokens of one head."""
    if not tma:
        return x
    unit = 16 // x.element_size()
    (batch, row), (tokens, token), (heads, head) = ((n, step if n > 1 else unit) for n, step in _dims(x))
    return _descriptor()(x, [batch, heads, tokens, x.shape[3]], [row, head, token, 1], [1, 1, rows, padded(x.shape[3])])


@cache
def _descriptor() -> Any:
    return import_module("triton.tools.tensor_descriptor").TensorDescriptor


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes this device the current one for launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
