"""By eager attention in one process, without the plugin: what a class must give, and whether its mechanisms matter."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import hf_ring_attn
from hf_ring_attn.testing import relative_error

from .configs import OFF, Entry, build, implementation, known_inert, needs_mask, packed_whole, rope_changes, thresholds
from .rows import IGNORED, Row, projection

MATTERS = 1e-3
"""A mechanism that moves the logits by less than this, relatively, when it is switched off is not tested by the row."""


@dataclass
class Answer:
    """Logits [B, S, V] of whole rows, the loss, and gradients by parameter."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def changes_of(entry: Entry, row: Row) -> dict[str, Any]:
    return rope_changes(entry) if row.kind == "rope" else {}


@contextmanager
def without_the_plugin() -> Iterator[None]:
    hf_ring_attn.uninstall()
    try:
        yield
    finally:
        hf_ring_attn.install()


def alone(entry: Entry, row: Row, labelled: bool = True, numbered: bool = False) -> Answer:
    """By eager attention, without a ring: a packed row by documents (but see `packed_whole`), others as they are."""
    model = build(entry, implementation(entry), **changes_of(entry, row))
    batch = row.batch(numbered)
    if row.kind != "packed" or packed_whole(entry):
        named = {name: x for name, x in batch.items() if labelled or name != "labels"}
        if needs_mask(entry):
            named.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
        out = call(model, named)
        loss = out.loss if labelled else projected(out.logits, batch)
        loss.backward()
        return Answer(out.logits.detach(), loss.detach(), gradients_of(model))
    logits = torch.empty(0)
    total = torch.zeros(())
    weights = projection(row.length)
    count = int((batch["labels"][:, 1:] != IGNORED).sum())
    for at, start, stop in row.documents():
        ids = batch["input_ids"][at : at + 1, start:stop]
        document = {"input_ids": ids, "position_ids": batch["position_ids"][at : at + 1, start:stop]}
        if needs_mask(entry):
            document["attention_mask"] = torch.ones_like(ids)
        out = call(model, document)
        if not len(logits):
            logits = torch.empty(*batch["input_ids"].shape, out.logits.shape[-1])
        logits[at, start:stop] = out.logits[0].detach()
        if labelled:
            labels = batch["labels"][at, start + 1 : stop]
            part = torch.nn.functional.cross_entropy(out.logits[0, :-1].float(), labels, reduction="sum") / count
        else:
            part = (out.logits[0] * weights[start:stop]).sum()
        part.backward()
        total = total + part.detach()
    return Answer(logits, total, gradients_of(model))


def call(model: Any, inputs: dict[str, Tensor]) -> Any:
    """Without what its forward does not take."""
    parameters = inspect.signature(model.forward).parameters
    if not any(x.kind is x.VAR_KEYWORD for x in parameters.values()):
        inputs = {name: x for name, x in inputs.items() if name in parameters}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        takes_cache = "use_cache" in parameters or any(x.kind is x.VAR_KEYWORD for x in parameters.values())
        return model(**inputs, **({"use_cache": False} if takes_cache else {}))


def projected(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    return (logits * projection(logits.shape[1]) * real[..., None]).sum()


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def inert(entry: Entry, row: Row, want: Answer) -> list[str]:
    """The mechanisms that can be switched off without moving the logits: the row does not test them."""
    changes = changes_of(entry, row)
    if row.kind == "rope":
        off = {"dynamic RoPE": {"rope_parameters": build(entry, "eager").config.get_text_config().rope_parameters}}
    else:
        known = known_inert(entry)
        off = {name: {name: OFF} for name in thresholds(build(entry, "eager").config) if name not in known}
    found = []
    for name, change in off.items():
        with torch.no_grad():
            out = call(build(entry, "eager", **{**changes, **change}), {"input_ids": row.batch()["input_ids"]})
        if relative_error(out.logits, want.logits) < MATTERS:
            found.append(name)
    return found
