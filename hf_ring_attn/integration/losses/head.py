"""The head of a model, called later and for some tokens at a time: its loss needs no logits of all tokens."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ... import errors
from ...comm.ring import Ring
from ...layers.chunked_loss import (
    CrossEntropy,
    chunked_cross_entropy,
    graph_of_its_own,
    leaf,
    other_leaf,
    rows_per_chunk,
)
from ...layers.collectives import sum_over_ring
from ..context.introspect import is_dtensor, is_unit
from ..context.program_states import kept_buffers
from ..context.tracked_input import version_of
from ..patching.parameter_slots import slots_of, with_weights
from .origins import Origin

Operation = Callable[[Tensor], Tensor]

SPACING = 8
"""A head has changed if logits differ by this many roundings of the largest one."""


@dataclass
class ChunkedLoss:
    """The loss without logits of a batch: a state of its context.

    Args:
        smoothing: by which the loss of the next forward smooths labels.
        keeps: all logits are made, too, while the head's weights are there; without a float32 copy.
        runs: the model's forward has begun, and has not ended.
        losses: how many were computed in chunks. why: the reason why logits were made instead.
        ring: set while the forward runs, if all ranks hold the same tokens: each computes the loss of a part of them.
    """

    smoothing: float = 0.0
    keeps: bool = False
    runs: bool = False
    losses: int = 0
    why: str = ""
    ring: Ring | None = None


class Head:
    """One call of a head: hidden states, and how logits are made of any of them.

    Args:
        module: it was called; forward: its own. hidden: [..., D].
    """

    def __init__(self, module: nn.Module, forward: Callable[[Tensor], Tensor], hidden: Tensor, state: ChunkedLoss):
        self.module, self.forward, self.hidden, self.state = module, forward, hidden, state
        held = list(slots_of(module))
        self.slots = [slot for slot, _ in held]
        self.weights: list[Any] = [weight for _, weight in held]  # no nn.Parameter perhaps
        self.versions = self._versions()
        kind = hidden.device.type
        self.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self.made: Tensor | None = None
        self.lazy: list[weakref.ref[Any]] = []
        self.losses = 0
        self.origin: Origin | None = None  # set once a program has the logits whose loss the self-check does not try
        self.wrapper_hooks: list[Callable[[Tensor], Any]] = []
        first, *weights = inputs = [leaf(x, x.requires_grad) for x in (self.rows[:1], *self.weights)]
        with graph_of_its_own(torch.is_grad_enabled()), kept_buffers(module) as self.written:
            sample = self.logits_of(first, weights)
        self.is_alone, self.trains = other_leaf([sample], inputs) is None, sample.requires_grad
        self.sample = sample.detach()
        self.vocabulary, self.dtype = sample.shape[-1], sample.dtype

    def reasons(self) -> Iterator[str]:
        """Why logits or gradients would be lost in chunks."""
        if self.written:
            yield "its head changes its buffers in each call"
        if self._versions() != self.versions:  # PEFT's target_parameters write them
            yield "its head changes its weights in each call"
        if not self.is_alone:
            yield "its head reads trained weights of other modules"
        if is_dtensor(self.sample):  # a hook on the head gathers them
            yield "its logits are in parts, on several ranks"
        if self.trains and self.dtype == torch.float16:  # taken in the forward, before a GradScaler has its factor
            yield "its logits are float16, whose gradients may overflow before the loss is scaled"

    @property
    def rows(self) -> Tensor:
        return self.hidden.reshape(-1, self.hidden.shape[-1])

    def logits_of(self, hidden: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """[n, V] of [n, D], with these in place of the module's weights."""
        # Autocast would remember weights that were cast without gradients.
        with torch.autocast(*self.autocast, cache_enabled=False), with_weights(self.slots, weights):
            return self.forward(hidden)

    def all_logits(self) -> Tensor:
        """[..., V] as the head gives them, without a gradient; made once."""
        if self.made is None:
            self.check()
            with torch.no_grad():
                self.made = self.logits_of(self.rows, self.weights).reshape(*self.hidden.shape[:-1], self.vocabulary)
        return self.made

    def check(self) -> None:
        """Raises LogitsNotMade if logits would now be none, or others than in the forward."""
        if any(self._freed()):
            raise errors.LogitsNotMade("FSDP2 has freed the weights of its head since the forward")
        if self._versions() != self.versions or not (self.state.runs or self._gives_the_same()):
            raise errors.LogitsNotMade("its head, or the head's inputs, have changed since the forward")

    def _gives_the_same(self) -> bool:
        """Computes the first token's logits once more: a mode, an adapter or a buffer may have changed, too."""
        with torch.no_grad():
            now = self.logits_of(self.rows[:1], self.weights)
        largest = self.sample.float().nan_to_num(0.0, 0.0, 0.0).abs().max()
        most = float(largest) * SPACING * torch.finfo(self.dtype).eps
        return torch.allclose(now.float(), self.sample.float(), rtol=0, atol=most, equal_nan=True)

    def _freed(self) -> Iterator[bool]:
        return (x.numel() > 0 and x.untyped_storage().size() == 0 for x in self.weights)

    def _versions(self) -> list[int]:
        return list(map(version_of, (self.hidden, *self.weights)))

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Gathers the weights again of a head that FSDP2 sharded by itself; its hook reduces their gradients."""
        module: Any = self.module
        if is_unit(module) and any(self._freed()):
            module.unshard()
            try:
                yield
            finally:
                module.reshard()
        else:
            yield

    def loss(self, chain: Sequence[Operation], labels: Tensor, options: CrossEntropy) -> Tensor:
        def logits_of(hidden: Tensor, weights: Sequence[Tensor]) -> Tensor:
            return through(chain, self.logits_of(hidden, weights))

        with self.unsharded():
            self.check()
            if self.state.keeps:
                self.all_logits()
            ring, tokens = self.state.ring, len(labels)
            ring = ring if ring is not None and 1 < ring.size <= tokens else None
            part, of_part = slice(None), options
            if ring is not None:
                part = slice(tokens * ring.rank // ring.size, tokens * (ring.rank + 1) // ring.size)
                of_part = replace(options, reduction="sum")
            rows = rows_per_chunk(self.vocabulary)
            loss = chunked_cross_entropy(logits_of, self.rows[part], self.weights, labels[part], rows, of_part)
            if ring is not None:
                loss = sum_over_ring(loss, ring)
                if options.reduction == "mean":
                    loss = loss / labels.ne(options.ignore_index).sum()
        self.state.losses += 1
        self.losses += 1
        for hook in self.wrapper_hooks if loss.requires_grad else ():
            loss.register_hook(hook)  # no gradient reaches the logits
        return loss


def through(chain: Sequence[Operation], x: Tensor) -> Tensor:
    """Applies the operations of a chain in order."""
    for operation in chain:
        x = operation(x)
    return x
