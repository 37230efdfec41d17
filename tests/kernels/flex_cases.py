"""FlexAttention on a CPU, where torch has its definition, which autograd can follow, but no backward of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.attention.flex_attention as flex_attention
from torch import Tensor

from hf_ring_attn.bench.replay import Answer, Transfer, replay
from hf_ring_attn.config import RingConfig
from hf_ring_attn.kernels import KERNELS, Kernel, ScoreMod
from hf_ring_attn.kernels.flex import Flex
from hf_ring_attn.testing import Case, inputs
from tests.helpers.kernel_answers import mask_of, params_of
from tests.helpers.score_mods import MODS, Builder, Mod

NAMES = (*Answer._fields, "captured")


@contextmanager
def on_cpu(tried: bool = False) -> Iterator[Flex]:
    """A kernel "flex" that serves CPU tensors: torch refuses a backward there, since it would not compile."""
    kernel = Flex("eager", tried=tried)
    with pytest.MonkeyPatch.context() as patches:
        patches.setitem(KERNELS, "flex", kernel)
        patches.setattr(flex_attention, "_validate_device", lambda *_: None)  # no mock: the compiler looks into it
        yield kernel


def mixed(make: Builder) -> Mod:
    """What a score may depend on, in one function whose tensors have one size for rows of any length."""
    heads = make.case.heads
    limit, weight, rows, scalar = make.learned(heads), make.learned(9, heads), make.learned(3), make.learned()
    bucket = make.indices(9, 41)

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        near = bucket[(q_idx - kv_idx).clamp(-20, 20) + 20]
        moved = score + weight[near, h] * scalar + rows[b] * (kv_idx % 3)
        most = 2.0 + torch.exp(limit)[h]
        return most * torch.tanh(moved / most)

    return Mod(mod, {"limit": limit, "weight": weight, "rows": rows, "scalar": scalar})


@dataclass
class Played:
    """A case with a function through a kernel, in float64, and the gradients of what the function captures."""

    answer: Answer
    captured: list[Tensor]


def simulated(kernel: Kernel, case: Case, mod: Mod, size: int, path: Transfer = "ring") -> Played:
    x = inputs(case)
    function = ScoreMod.of(mod.function, torch.device("cpu"))
    function = function.with_values(function.captured, [y.requires_grad for y in function.captured])
    params, extra = replace(params_of(case, x), score_mod=function), function.new_gradients()
    got = replay(
        kernel, x["q"], x["k"], x["v"], x["dout"], mask_of(case, x["documents"]), size, params, path=path, extra=extra
    )
    return Played(got, list(extra.values()))


def distances(got: Played, want: Played) -> dict[str, float]:
    """Relative, of what is not infinite; infinite where only one of both is."""
    pairs = [*zip(got.answer, want.answer, strict=True), *zip(got.captured, want.captured, strict=True)]
    names = [*Answer._fields, *(f"captured {at}" for at in range(len(got.captured)))]
    errors = {}
    for name, (a, b) in zip(names, pairs, strict=True):
        if not torch.equal(a.isinf(), b.isinf()):
            errors[name] = torch.inf
            continue
        a, b = a.masked_fill(a.isinf(), 0), b.masked_fill(b.isinf(), 0)
        # Where the exact gradient is zero, what is left is the rounding of larger terms.
        errors[name] = float((a - b).norm() / b.norm().clamp(min=0.1 * b.numel() ** 0.5))
    return errors


__all__ = ["MODS", "NAMES", "Builder", "Played", "RingConfig", "distances", "mixed", "on_cpu", "simulated"]
