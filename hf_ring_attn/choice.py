"""The kernel that all ranks of a ring compute with: one that can, and that got a small attention right here."""

from __future__ import annotations

import functools
import zlib

import torch

from . import errors, trial
from .comm import Ring
from .kernels import KERNELS, Request, choose

_SAME_KERNEL = (
    "Kernels differ in the order of their sums and in the memory order of gradients that travel, so install the same "
    "packages and versions for every rank, or name one kernel that all have: RingConfig(kernel='reference')."
)


@functools.lru_cache(maxsize=256)
def kernel_for(ring: str, name: str, request: Request) -> str:
    """The name of the kernel for a request: each rank chooses, and one small collective makes sure of the same choice.

    Kept for as long as the process lives, so a request costs its collective once. Ranks of a ring meet the same
    requests in the same order.

    Raises:
        BadOption, UnsupportedAttention, or RefusedElsewhere on the other ranks: no such kernel, or none that can.
        RanksDiffer: on every rank, if the ranks chose differently or have different versions of torch.
    """
    chosen, refusal = "", None
    try:
        chosen = choose(name, request, trial.fails).name
    except errors.Refused as error:
        refusal = error
    meeting = Ring(ring)
    facts = {
        f"kernel (of {sorted(KERNELS)}, by number)": sorted(KERNELS).index(chosen) if chosen else -1,
        "version of torch (its fingerprint)": zlib.crc32(torch.__version__.encode()),
    }
    device = meeting.small_device(torch.device(request.device))
    try:
        meeting.agree(facts, device, _SAME_KERNEL, None if refusal is None else str(refusal))
    except errors.RefusedElsewhere as elsewhere:
        raise refusal or elsewhere from None
    if refusal is not None:
        raise refusal
    return chosen
