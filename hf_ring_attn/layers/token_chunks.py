"""Functions of single tokens, run over chunks of tokens: what they compute inside exists for one chunk at a time.

The backward runs the function again, a chunk at a time. Gradients of weights are added up in float32, and rounded once,
as one product over all tokens would round them; so hooks on weights (DDP, FSDP2) see one gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ..comm.first_order import first_order_only
from ..errors import HiddenWeight
from .chunked_loss import add_gradients, graph_of_its_own, leaf, other_leaf


class TokenFunction(Protocol):
    """A function of tokens [n, D] that gives tensors [n, ...], each token by itself.

    Attributes:
        checked: its graph was searched for weights that it was not given.
    """

    name: str
    checked: bool

    def run(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Runs with ``weights`` in place of the trained weights; differentiable in all of them."""


def run_in_chunks(function: TokenFunction, x: Tensor, weights: Sequence[Tensor], rows: int) -> tuple[Tensor, ...]:
    """``function.run(x, weights)``, a chunk of ``rows`` tokens at a time. It can be differentiated once.

    Args:
        x: [N, D]. weights: those that need gradients.
    """
    run = _Run(function, rows, x, weights)
    if not torch.is_grad_enabled() or not any(one.requires_grad for one in (x, *weights)):
        return run.outputs(x, weights)
    # Two nodes: the first keeps the inputs, so a checkpoint's recompute ends before the second computes anything.
    kept: tuple[Tensor, ...] = _Keep.apply(run, x, *weights)  # type: ignore[no-untyped-call]
    outputs: tuple[Tensor, ...] = _Fill.apply(run, x.detach(), weights, *kept)  # type: ignore[no-untyped-call]
    return outputs


class _Run:
    """One call. ``kinds``: the dtype and the shape of a token of each output."""

    def __init__(self, function: TokenFunction, rows: int, x: Tensor, weights: Sequence[Tensor]) -> None:
        self.function, self.rows = function, rows
        kind = x.device.type
        self.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self.random = _Random(x.device)
        with torch.no_grad(), self.random.again():
            sample = self.call(x[:2], weights)
        self.kinds = [(one.dtype, one.shape[1:]) for one in sample]

    def call(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        # A copy, since a function may change its input. Autocast would remember weights cast without gradients.
        with torch.autocast(*self.autocast, cache_enabled=False):
            return self.function.run(x.clone(), weights)

    def outputs(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        found = tuple(x.new_empty((len(x), *shape), dtype=dtype) for dtype, shape in self.kinds)
        for part in self.parts(x):
            for whole, one in zip(found, self.call(x[part], weights), strict=True):
                whole[part] = one
        return found

    def parts(self, x: Tensor) -> Iterator[slice]:
        return (slice(begin, begin + self.rows) for begin in range(0, len(x), self.rows))


class _Keep(torch.autograd.Function):
    """Inputs -> tensors without memory, of the outputs' shapes. Its backward is that of the function."""

    @staticmethod
    def forward(ctx: Any, run: _Run, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *weights)
        outputs = tuple(x.new_zeros((), dtype=dtype).expand(len(x), *shape) for dtype, shape in run.kinds)
        ctx.mark_non_differentiable(*(one for one in outputs if not one.is_floating_point()))
        return outputs

    @staticmethod
    @first_order_only("layers in chunks of tokens (mlp_tokens)")
    def backward(ctx: Any, saved: tuple[Tensor, ...], *gradients: Tensor | None) -> Any:
        (x, *weights), run, needed = saved, ctx.run, ctx.needs_input_grad[1:]
        if all(gradient is None for gradient in gradients):
            return (None,) * len(ctx.needs_input_grad)
        leaves = [leaf(w, need) for w, need in zip(weights, needed[1:], strict=True)]
        sums: list[Tensor | None] = [None for _ in leaves]
        of_x = torch.empty_like(x) if needed[0] else None
        with run.random.again(), graph_of_its_own():
            for part in run.parts(x):
                given = leaf(x[part], needed[0])
                outputs = run.call(given, leaves)
                wanted = [one for one in (given, *leaves) if one.requires_grad]
                _refuse_others(run.function, outputs, wanted)
                pairs = [(y, g[part]) for y, g in zip(outputs, gradients, strict=True) if g is not None]
                pairs = [(y, g) for y, g in pairs if y.requires_grad]
                found = iter(_grad(pairs, wanted))
                del outputs, pairs
                if of_x is not None:
                    gradient = next(found)
                    of_x[part] = 0 if gradient is None else gradient
                add_gradients(sums, leaves, found)
                del found  # gradients of weights, before the next chunk makes its own
        rounded = (None if s is None else s.to(w.dtype) for s, w in zip(sums, weights, strict=True))
        return (None, of_x, *rounded)


class _Fill(torch.autograd.Function):
    """Computes the outputs in place of tensors without memory, to which it passes their gradients."""

    @staticmethod
    def forward(ctx: Any, run: _Run, x: Tensor, weights: Sequence[Tensor], *_kept: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        outputs = run.outputs(x, weights)
        ctx.mark_non_differentiable(*(one for one in outputs if not one.is_floating_point()))
        return outputs

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor | None) -> Any:
        return (None, None, None, *gradients)


def _grad(pairs: Sequence[tuple[Tensor, Tensor]], wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
    if not pairs:
        return [None for _ in wanted]
    outputs, gradients = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)


def _refuse_others(function: TokenFunction, outputs: Sequence[Tensor], known: Sequence[Tensor]) -> None:
    """Raises HiddenWeight if the outputs depend on a leaf that is not ``known``: its gradient would be lost."""
    if function.checked:
        return
    hidden = other_leaf(outputs, known)
    if hidden is not None:
        raise HiddenWeight(function.name, tuple(hidden.shape))
    function.checked = True


class _Random:
    """The state of the generators from which a function on ``device`` draws, when this was made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host = torch.get_rng_state()
        self.own = None if device.type in ("cpu", "meta") else self._module().get_rng_state(device)

    def _module(self) -> Any:
        return torch.get_device_module(self.device)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the same numbers are drawn as after this was made; afterwards, those that were next before."""
        now = _Random(self.device)
        self._set()
        try:
            yield
        finally:
            now._set()

    def _set(self) -> None:
        torch.set_rng_state(self.host)
        if self.own is not None:
            self._module().set_rng_state(self.own, self.device)
