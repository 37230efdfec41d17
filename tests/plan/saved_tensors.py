"""Counts the bytes that autograd saves for a backward, as the tests of `plan` compare them with its forecasts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

CHUNK = 64


def saved_bytes(run: Callable[[], Any], apart: Iterable[Tensor]) -> int:
    """Returns the bytes of all storages that ``run`` saves, each once, without those of the tensors ``apart``."""
    known, found = {x.untyped_storage().data_ptr() for x in apart}, {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage  # kept, so that no other takes its place
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = run()
    del out
    return sum(storage.nbytes() for storage in found.values())


def train(model: nn.Module, method: str) -> None:
    """All weights, or those of linear layers, whose inputs LoRA saves, too."""
    for weight in model.parameters():
        weight.requires_grad_(method == "full")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.requires_grad_(True)


class Scan(torch.autograd.Function):
    """Saves what the scans of flash-linear-attention save, and computes nothing.

    chunk_gated_delta_rule: normed queries and keys with the factors of their norms, values, summed decays, beta, and a
    chunk's inverse. chunk_kda: also the decays, and the products of queries and keys.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        normed, factors = [x.clone().contiguous() for x in (q, k)], [x.new_empty(x.shape[:3]).float() for x in (q, k)]
        inverse = v.new_empty(*beta.shape, CHUNK)
        by_channel = [g.contiguous(), torch.empty_like(inverse)] if g.dim() == 4 else []
        out = v.clone()
        ctx.save_for_backward(*normed, *factors, v.contiguous(), g.cumsum(1), beta.contiguous(), inverse, *by_channel)
        return out

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> Any:
        raise AssertionError("only its forward runs")


def scan(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_others: Any) -> tuple[Any, None]:
    """Takes the place of transformers' own functions."""
    return Scan.apply(query, key, value, g, beta), None  # type: ignore[no-untyped-call]
