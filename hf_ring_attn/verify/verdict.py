"""The comparison of a model in a ring with itself alone, as numbers with limits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..config import RingConfig
from ..errors import Refused
from ..integration.batch.shard import shard
from ..integration.log import quiet
from ..integration.patching.modules import Replaced
from ..integration.selfcheck.tolerance import AMPLIFICATION, LOSS, rounded_anew, tolerance
from ..testing import relative_error
from .layers import errors_in_ring, layers_of, record_alone
from .leaks import leaks
from .runs import Answer, Batch, answer_by_documents, answer_in_ring, answer_whole, random_batch

FLOOR = 0.05
"""A parameter's gradient counts for at least this share of the gradient of all: a key's bias has none but rounding."""


@dataclass(frozen=True)
class Finding:
    """One comparison: a relative error and its limit. ``where``: the layer or parameter with this error."""

    what: str
    error: float
    limit: float
    where: str = ""

    @property
    def exact(self) -> bool:
        return self.error <= self.limit


def verdict(model: Any, tokens: int, device: torch.device) -> tuple[list[Finding], str]:
    """Runs all comparisons; the same findings on every rank. Also returns the self-check's refusal, or "".

    Args:
        model: with eager attention, the same weights on every rank. It ends with ring attention.

    Raises:
        Refused: the model cannot run in a ring.
    """
    with quiet():  # the self-check's row says what runs
        found, row = _findings(model, tokens, device)
    return found, _self_check(model, row)


def _findings(model: Any, tokens: int, device: torch.device) -> tuple[list[Finding], Batch]:
    """All comparisons but the self-check, and the row of one document."""
    stops = (tokens // 2, tokens // 2 + tokens // 3, tokens)
    row, packed = (random_batch(model, ends, device) for ends in ((tokens,), stops))
    spacing = torch.finfo(model.dtype).eps
    layers = layers_of(model)
    passed = record_alone(model, layers, row)
    alone = answer_whole(model, row)
    with rounded_anew(device):
        own = _distances(answer_whole(model, row), alone)
    with no_router_loss(model):  # it is a mean over the row, not over its documents
        documents = [answer_whole(model, packed), answer_by_documents(model, packed, stops)]
    least = tolerance(spacing, device)
    limits = {kind: max(least * (LOSS if kind == "loss" else 1), AMPLIFICATION * x) for kind, (x, _) in own.items()}

    model.set_attn_implementation("ring_fp32")
    errors, found = errors_in_ring(model, layers, row, passed), []
    for kind in dict.fromkeys(layer.kind for layer in layers if layer.name in errors):
        worst = max((layer.name for layer in layers if layer.kind == kind), key=lambda name: errors.get(name, -1.0))
        first = next((x.name for x in layers if x.kind == kind and errors.get(x.name, 0.0) > least), worst)
        found.append(Finding(f"layers of kind {kind}", errors[first], least, first))
    cases = {"one document": _distances(answer_in_ring(model, row), alone)}
    with no_router_loss(model):
        got = answer_in_ring(model, packed)
    # Chunked attention and some RoPE go by the place in the row, and some models mix documents: one of two is right.
    nearer = min(documents, key=lambda want: relative_error(got.logits, want.logits))
    cases["packed documents"] = _distances(got, nearer)
    found += [
        Finding(f"{case}: {kind}", x, limits.get(kind, limits["gradients"]), where)
        for case, distances in cases.items()
        for kind, (x, where) in distances.items()
    ]
    # Products of the same sizes give the same bits; only experts get other numbers of tokens when tokens change. What
    # they round anew, later layers may magnify: by 100 and more if their kernels multiply in TF32.
    has_experts = any("experts" in name for name, _ in model.named_modules())
    still = max(4 * spacing, own["logits"][0]) if has_experts else 4 * torch.finfo(torch.float32).eps
    found += [Finding(f"leak: {what}", x, still) for what, x in leaks(model, row, packed, stops).items()]
    return found, row


def no_router_loss(model: Any) -> Replaced:
    """Inside, a model of experts adds no loss of its router."""
    return Replaced(model.config.get_text_config(), "output_router_logits", False)


def _distances(got: Answer, want: Answer) -> dict[str, tuple[float, str]]:
    """Relative errors of loss, logits, and gradients by kind of module, with the worst parameter of each kind."""
    found = {
        "loss": (abs(got.loss - want.loss) / abs(want.loss), ""),
        "logits": (relative_error(got.logits, want.logits), ""),
    }
    floor = FLOOR * float(torch.stack([x.double().norm() for x in want.gradients.values()]).norm())
    worst: dict[str, tuple[float, str]] = {}
    for name in sorted({*got.gradients, *want.gradients}):
        error = _gradient_error(got.gradients.get(name), want.gradients.get(name), floor)
        kind = f"gradients of {re.sub(r'[.][0-9]+[.]', '.*.', name.rpartition('.')[0])}"
        worst[kind] = max(worst.get(kind, (0.0, "")), (error, name))
    return {**found, "gradients": max(worst.values(), default=(torch.inf, "no parameter")), **worst}


def _gradient_error(got: Tensor | None, want: Tensor | None, floor: float) -> float:
    given = [x for x in (got, want) if x is not None]
    a, b = (torch.zeros_like(given[0]).double() if x is None else x.double() for x in (got, want))
    return float((a - b).norm()) / max(float(b.norm()), floor) if bool(a.isfinite().all()) else torch.inf


@torch.no_grad()
def _self_check(model: nn.Module, batch: Batch) -> str:
    """The self-check's refusal of a model, or ""."""
    try:
        with (sharded := shard(batch, config=RingConfig(self_check=True))):
            model(**sharded.inputs)
    except Refused as error:
        return str(error)
    return ""
