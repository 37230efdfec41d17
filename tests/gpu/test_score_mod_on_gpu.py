"""score_mods on a GPU: as near to float64 as 16 bits allow, alone and in a ring, with what they learn."""

from __future__ import annotations

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the reference's products, while memory is poisoned

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_ring_attn.attention.function import ring_attention
from hf_ring_attn.attention.kernel_choice import part_of
from hf_ring_attn.bench.replay import Answer, Transfer, replay
from hf_ring_attn.biases import Alibi, RelativeBias
from hf_ring_attn.config import RingConfig
from hf_ring_attn.kernels import KERNELS, Params, Request, ScoreMod, asking, choose
from hf_ring_attn.kernels.score_mods.chosen_keys import ChosenKeys
from hf_ring_attn.testing import BIDIRECTIONAL, Case, inputs, packed, relative_error, sliding
from tests.helpers.kernel_answers import mask_of

FLEX, TRITON, REFERENCE = KERNELS["flex"], KERNELS["triton"], KERNELS["reference"]
ABLE = torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ABLE, reason="needs an NVIDIA GPU of capability 8.0 or later")]

PLAIN = Case(why="D 128, grouped", length=1024, heads=8, kv_heads=2, head_dim=128, value_dim=128, seed=90)
CASES = (
    PLAIN,
    replace(
        PLAIN, why="D 64, two rows, window, sinks", batch=2, head_dim=64, value_dim=64, band=sliding(300), sinks=True
    ),
    replace(PLAIN, why="documents, softcap", documents=(packed(300, 1, 129, 400, 64, 130),), softcap=20.0),
    replace(
        PLAIN, why="padding, bidirectional", batch=2, band=BIDIRECTIONAL, documents=(packed(-24, 1000), packed(1024))
    ),
    replace(PLAIN, why="values narrower", value_dim=64),
)


class Table(nn.Module):
    """Buffers read by another buffer, a number for all, one for each row: what flash kernels have no words for."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)

        def learned(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator) / 2)

        self.bias, self.rows, self.scalar = learned(16, case.heads), learned(3), learned()
        self.gate, self.limit = learned(case.heads), learned(case.heads)
        self.register_buffer("offset", torch.randint(0, 16, (case.length,), generator=generator))

    def forward(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        offset: Any = self.offset
        moved = score * torch.sigmoid(self.gate)[h] + self.bias[offset[kv_idx], h] * self.rows[b]
        most = 8 + self.limit[h].square()
        return most * torch.tanh((moved + self.scalar * (kv_idx % 2)) / most)


class Choice:
    """The keys that an indexer chose, of which a few queries see none."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(6)
        self.length = case.length
        self.keys = torch.randint(0, case.length, (case.batch, case.length, case.length // 4), generator=generator)

    def cuda(self) -> ChosenKeys:
        return ChosenKeys(self.keys.cuda(), torch.arange(self.length, device="cuda"), self.length)


FUNCTIONS: dict[str, Callable[[Case], Any]] = {
    "chosen keys": Choice,
    "alibi": lambda case: Alibi(case.heads, learnable=True),
    "relative bias": lambda case: RelativeBias(case.heads, 32, 128, bidirectional=not case.causal),
    "tables": Table,
}
SERVED = [(FLEX, name) for name in FUNCTIONS] + [(TRITON, name) for name in FUNCTIONS if name != "tables"]


def of_kernel(x: Any) -> str:
    return getattr(x, "name", str(x))


@dataclass
class SimulatedTraffic:
    answer: Answer
    captured: list[Tensor]


def simulated(
    kernel: Any, case: Case, function: Any, dtype: torch.dtype, size: int, path: Transfer = "ring"
) -> SimulatedTraffic:
    """``dtype``: of the inputs that are rounded; the reference widens them to float64."""
    x = inputs(case, dtype)
    wide = torch.float64 if kernel is REFERENCE else dtype
    q, k, v, dout = (x[name].cuda().to(wide) for name in ("q", "k", "v", "dout"))
    mod = ScoreMod.of(function, torch.device("cuda"))
    if kernel is not REFERENCE:
        request = Request(
            "cuda", dtype, case.heads, case.kv_heads, case.head_dim, case.value_dim, case.softcap is not None,
            case.sinks, False, score_mod=True,
        )  # fmt: skip
        part = partial(part_of, mask_of(case, x["documents"]), case.batch, case.length)
        asked = asking(request, mod, case.head_dim**-0.5, case.softcap, part)
        assert choose(kernel.name, asked) is kernel
    mod = mod.with_values(mod.captured, [y.requires_grad for y in mod.captured])
    sinks = None if x["sinks"] is None else x["sinks"].cuda().to(wide)
    params, extra = Params(case.head_dim**-0.5, case.softcap, sinks, False, mod), mod.new_gradients()
    got = replay(kernel, q, k, v, dout, mask_of(case, x["documents"]), size, params, path=path, extra=extra)
    return SimulatedTraffic(got, list(extra.values()))


def far(got: SimulatedTraffic, want: SimulatedTraffic, dtype: torch.dtype) -> dict[str, float]:
    """How often what 16 bits allow: eps; in float32 1e-5."""
    unit = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    errors = {}
    for name in Answer._fields:
        mine, theirs = getattr(got.answer, name).double().nan_to_num(neginf=0), getattr(want.answer, name)
        errors[name] = relative_error(mine, theirs.nan_to_num(neginf=0)) / unit
    for at, (mine, theirs) in enumerate(zip(got.captured, want.captured, strict=True)):
        # A sum over all tokens, of both signs: the errors of its terms do not cancel as they do.
        errors[f"captured {at}"] = relative_error(mine, theirs) / unit / 4
    return errors


@pytest.mark.parametrize(("kernel", "name"), SERVED, ids=of_kernel)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.why)
def test_alone_and_in_a_ring_it_is_as_near_to_float64_as_16_bits_allow(case: Case, kernel: Any, name: str) -> None:
    function = FUNCTIONS[name](case).cuda()
    want = simulated(REFERENCE, case, function, torch.bfloat16, 1)
    ways: list[tuple[int, Transfer]] = [(1, "ring"), (4, "ring"), (4, "gather")]
    for size, path in ways:
        errors = far(simulated(kernel, case, function, torch.bfloat16, size, path), want, torch.bfloat16)
        print(kernel.name, name, case.why, size, path, {key: f"{error:.2f}" for key, error in errors.items()})  # noqa: T201  # for -rP
        assert max(errors.values()) < 1, (size, path, errors)


@pytest.mark.parametrize(("kernel", "name"), SERVED, ids=of_kernel)
def test_float32_is_float32(kernel: Any, name: str) -> None:
    case = replace(CASES[1], length=384)
    function = FUNCTIONS[name](case).cuda()
    torch.set_float32_matmul_precision("high")  # as many training programs do
    try:
        got = simulated(kernel, case, function, torch.float32, 2)
    finally:
        torch.set_float32_matmul_precision("highest")
    errors = far(got, simulated(REFERENCE, case, function, torch.float32, 1), torch.float32)
    assert max(errors.values()) < 1, errors


def test_the_public_function_takes_it_and_trains() -> None:
    bias = Alibi(8, learnable=True).cuda()
    x = inputs(PLAIN, torch.bfloat16)
    q, k, v = (x[name].cuda().requires_grad_() for name in ("q", "k", "v"))
    found = []
    for kernel in ("triton", "flex", "reference"):
        out = ring_attention(q, k, v, score_mod=bias, config=RingConfig(kernel=kernel))
        found.append([out, *torch.autograd.grad(out, (q, k, v, bias.slopes), x["dout"].cuda())])
    for mine, flex, theirs in zip(*found, strict=True):
        assert max(relative_error(mine, theirs), relative_error(flex, theirs)) < 0.03
    assert torch.equal(ring_attention(q, k, v, score_mod=bias), found[0][0]), "auto takes triton"

    def scaled(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        twice: Tensor = 2 * bias(score, b, h, q_idx, kv_idx)
        return twice

    names = [RingConfig(kernel="flex"), RingConfig(), RingConfig(deterministic=True), RingConfig(kernel="reference")]
    flex, auto, still, reference = (ring_attention(q, k, v, score_mod=scaled, config=config) for config in names)
    assert torch.equal(auto, flex) and torch.equal(still, reference), "auto takes flex, or the reference"
