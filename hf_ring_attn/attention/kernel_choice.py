"""Chooses the kernel of a ring, the same on all ranks: one that supports the request and passes a trial here."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..comm.ring import Ring
from ..kernels import Params, Part, Request, ScoreMod, asking, choose, kernels_named, text_of
from ..sharding.layout import Run
from ..sharding.mask import Mask, tiles
from . import kernel_trial

_SAME_KERNEL = (
    "Kernels differ in the order of their sums and in the memory order of gradients that travel, so install the same "
    "packages and versions for every rank, or name one kernel that all have: RingConfig(kernel='reference')."
)


@functools.lru_cache(maxsize=256)
def kernel_for(ring: str, name: str, request: Request) -> str:
    """Returns the kernel's name for a request: each rank chooses, and one small collective compares the choices.

    Cached for the life of the process, so a request costs its collective once. Ranks of a ring see the same requests
    in the same order.

    Raises:
        BadOption, UnsupportedAttention, or RefusedElsewhere on the other ranks: no such kernel, or none fits.
        RanksDiffer: on every rank, if the ranks chose differently or have different versions of torch.
    """
    chosen, refusal = "", None
    try:
        chosen = choose(name, request, kernel_trial.failures_of).name
    except Exception as error:  # noqa: BLE001  raised below; else the others would wait
        refusal = error
    meeting = Ring(ring)
    facts = {"kernel": chosen, "version of torch": str(torch.__version__)}
    device = meeting.small_device(torch.device(request.device))
    meeting.agree(facts, device, _SAME_KERNEL, refusal, doing="chose a kernel")
    return chosen


@functools.lru_cache(maxsize=256)
def why_not_preferred(name: str, chosen: str, request: Request) -> str:
    """Says why this machine, and not the attention, kept "auto" from a preferred kernel. "": it did not.

    Args:
        name: as it was asked for. chosen: `kernel_for` of it.
    """
    for kernel in kernels_named(name).values():
        if kernel.name == chosen:
            break
        can = not kernel.unsupported(request)
        why: Sequence[str] = kernel_trial.failures_of(kernel.name, request) if can else kernel.lacks(request)
        if why:
            return f"not {kernel.name}: {why[0]}"
    return ""


_KNOWN = WeakIdKeyDictionary()
"""Score functions by their object, itself but for a method, and the rings whose ranks were found to have the same."""


def score_mod_facts(mod: ScoreMod | None) -> dict[str, object]:
    """Facts about a score_mod that ranks must agree on."""
    return {
        "score_mod": None if mod is None else text_of(mod),
        "tensors of the score_mod": None if mod is None else [*mod.captured, *mod.fixed],
    }


def agree_on_scores(ring: Ring, mod: ScoreMod, device: torch.device) -> None:
    """Checks, once per function, that all ranks have the same code and captured values. A collective.

    Raises:
        RanksDiffer: on every rank.
    """
    # By identity: an equal one may live, in the graph of a loss that one rank holds, so the others would ask alone.
    function: Any = mod.function
    holder, code = (function.__self__, function.__func__) if isinstance(function, MethodType) else (function, function)
    try:
        known: set[str] = _KNOWN.setdefault(holder, WeakIdKeyDictionary()).setdefault(code, set())
    except TypeError:  # it cannot be cached
        known = set()
    if ring.size > 1 and ring.name not in known:
        ring.agree(score_mod_facts(mod), ring.small_device(device), _SAME_FUNCTION, doing="compared its score_mod")
        known.add(ring.name)


_SAME_FUNCTION = (
    "Every rank computes with its own copy of the function and of what it uses: seed a learned bias alike, or make it "
    "a part of the model."
)


def kernel_for_scores(
    ring: str, name: str, request: Request, params: Params, mask: Mask, batch: int, length: int
) -> str:
    """As `kernel_for`, for a ``score_mod``, which kernels may try on a part of this attention.

    Args:
        mask: the mask of ``batch`` whole rows of ``length`` tokens.
    """
    mod = params.score_mod
    assert mod is not None, "without a score_mod a request says all"
    if {"flex", "triton"} & set(kernels_named(name)):
        request = asking(request, mod, params.scale, params.softcap, functools.partial(part_of, mask, batch, length))
    return kernel_for(ring, name, request)


PART_ROWS, PART_QUERIES, PART_KEYS = 2, 200, 320


def part_of(mask: Mask, batch: int, length: int) -> Part:
    """The first visible tokens of a few rows, for a trial; keys in two pieces for the backward."""
    rows = mask.terms[0][1][: min(batch, PART_ROWS)]
    start = min((queries[0].start for queries, _ in rows if queries), default=0)
    queries, keys = min(PART_QUERIES, length - start), min(PART_KEYS, length - start)

    def seen(first: int, stop: int) -> Tensor:
        table = tiles(mask, [Run(0, start, queries)], [Run(0, start + first, stop - first)])
        return table[table[:, 0] < len(rows)]

    pieces = [(0, keys // 2), (keys // 2, keys)]
    return Part(len(rows), queries, keys, seen(0, keys), tuple((a, b, seen(a, b)) for a, b in pieces if a < b))
