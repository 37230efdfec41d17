"""What looking at a score_mod costs the host: in each forward its tensors, its graph and `triton`'s proof; in each
backward its tensors and its graph once more."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from hf_ring_attn.biases import Alibi, RelativeBias
from hf_ring_attn.kernels import ScoreMod, text_of
from hf_ring_attn.kernels.triton.distance import why_not


def milliseconds(call: Callable[[], object], times: int = 50) -> float:
    call()
    began = time.perf_counter()
    for _ in range(times):
        call()
    return 1e3 * (time.perf_counter() - began) / times


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
for bias in (Alibi(32, learnable=True).to(device), RelativeBias(32).to(device)):
    forward = milliseconds(lambda of=bias: why_not(ScoreMod.of(of, device)))
    backward = milliseconds(lambda of=bias: text_of(ScoreMod.of(of, device)))
    print(f"{type(bias).__name__} on {device}: forward {forward:.1f} ms, backward {backward:.1f} ms")
