"""The cross entropy of a language model's head over chunks of tokens: no tensor of tokens x vocabulary is made.

Each chunk's logits, loss and gradients are made at once, in the forward. A recompute in the backward would need the
head's weights once more, which FSDP2 may have freed, costs one more product, and adds up the gradients of the weights
in their own dtype. Here they are added up in float32, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy

from ..comm.first_order import first_order_only

VALUES = 1 << 27
"""Logits of one chunk: 0.5 GiB in float32, of which a forward and a backward have about four at a time."""

LogitsOf = Callable[[Tensor, Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class CrossEntropy:
    """Options of `torch.nn.functional.cross_entropy`, under its names."""

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0


def rows_per_chunk(vocabulary: int) -> int:
    """Tokens of one chunk; at least 256, since fewer would leave a GPU idle."""
    return max(256, VALUES // vocabulary)


def chunked_cross_entropy(
    logits_of: LogitsOf, hidden: Tensor, weights: Sequence[Tensor], labels: Tensor, rows: int, options: CrossEntropy
) -> Tensor:
    """cross_entropy(logits_of(hidden, weights), labels), a chunk of ``rows`` tokens at a time.

    Args:
        logits_of: [n, D] hidden states -> [n, V] logits, each token by itself; differentiable in both arguments.
        hidden: [N, D]. weights: tensors that the logits depend on and that may need gradients.
        labels: [N] int64. options: with reduction "sum" or "mean".

    Returns:
        A scalar in the dtype of the logits. It can be differentiated once.
    """
    if not torch.is_grad_enabled():  # a Function is told that its inputs need gradients all the same
        hidden, weights = leaf(hidden, False), [leaf(x, False) for x in weights]
    inputs = (logits_of, labels, rows, options, hidden[:1].clone(), hidden, *weights)  # a copy: the rest is not saved
    loss: Tensor = _ChunkedCrossEntropy.apply(*inputs)  # type: ignore[no-untyped-call]
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_of: LogitsOf, labels: Tensor, rows: int, options: CrossEntropy, first: Tensor,
        hidden: Tensor, *weights: Tensor,
    ) -> Tensor:  # fmt: skip
        needed = ctx.needs_input_grad[5:]
        leaves = [leaf(x, need) for x, need in zip(weights, needed[1:], strict=True)]
        sums: list[Tensor | None] = [None for _ in leaves]
        of_hidden = torch.zeros_like(hidden) if needed[0] else None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        dtype = hidden.dtype
        for begin in range(0, len(hidden), rows):
            part = slice(begin, begin + rows)
            with graph_of_its_own(any(needed)):
                x = leaf(hidden[part], needed[0])
                logits = logits_of(x, leaves)
                loss = cross_entropy(
                    logits, labels[part], ignore_index=options.ignore_index, reduction="sum",
                    label_smoothing=options.label_smoothing,
                )  # fmt: skip
            del logits
            dtype = loss.dtype
            total += loss.detach()
            wanted = [one for one in (x, *leaves) if one.requires_grad]
            found = iter(torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else ())
            if of_hidden is not None and (gradient := next(found)) is not None:
                of_hidden[part] = gradient
            add_gradients(sums, leaves, found)
            del found  # gradients of weights, before the next chunk makes its own
        count = labels.ne(options.ignore_index).sum()
        if options.reduction == "mean":
            total /= count
            ctx.count = count
        ctx.has_labels = count > 0
        ctx.rows, ctx.dtypes = rows, [x.dtype for x in (hidden, *weights)]
        ctx.save_for_backward(of_hidden, *sums, first, *() if needed[0] else weights)
        return total.to(dtype)

    @staticmethod
    @first_order_only("a loss in chunks")
    def backward(ctx: Any, saved: tuple[Tensor | None, ...], gradient: Tensor) -> Any:
        factor = gradient / ctx.count if hasattr(ctx, "count") else gradient
        factor = factor.where(ctx.has_labels, 0.0)  # without labels it may be infinite, and cross_entropy gives zeros
        found = zip(saved, ctx.dtypes, strict=False)  # other saved tensors only let first_order_only find dependencies
        scaled = (None if x is None else _scaled(x, factor, dtype, ctx.rows) for x, dtype in found)
        return (None, None, None, None, None, *scaled)


@contextmanager
def graph_of_its_own(enabled: bool = True) -> Iterator[None]:
    """Records operations for gradients that are taken at once: checkpoints and offloading must not see them."""
    with torch.set_grad_enabled(enabled), saved_tensors_hooks(lambda x: x, lambda x: x):
        yield


def leaf(x: Tensor, needs_gradient: bool) -> Tensor:
    """An alias whose hooks are its own; what needs no gradient stays itself, since it may be quantized."""
    return x.detach().requires_grad_() if needs_gradient else x.detach() if x.requires_grad else x


def graph_nodes(outputs: Iterable[Tensor]) -> Iterator[Any]:
    """Yields once every node of the graph that made ``outputs``."""
    return nodes_from(one.grad_fn for one in outputs)


def nodes_from(starts: Iterable[Any], until: Collection[str] = ()) -> Iterator[Any]:
    """Yields once every node on which ``starts`` depend, but none beyond nodes of a type whose name is in ``until``."""
    seen: set[Any] = {None}
    todo = list(starts)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            if type(node).__name__ not in until:
                todo += [following for following, _ in node.next_functions]


def other_leaf(outputs: Sequence[Tensor], known: Sequence[Tensor]) -> Tensor | None:
    """Returns a leaf on which the outputs depend and that is not ``known``; None if there is none."""
    leaves = (getattr(node, "variable", None) for node in graph_nodes(outputs))
    return next((x for x in leaves if x is not None and all(x is not one for one in known)), None)


def add_gradients(sums: list[Tensor | None], leaves: Sequence[Tensor], gradients: Iterator[Tensor | None]) -> None:
    """Adds the gradients of the leaves that need one to their sums."""
    for index, one in enumerate(leaves):
        if one.requires_grad and (gradient := next(gradients)) is not None:
            sums[index] = add_wide(sums[index], gradient)


def add_wide(total: Tensor | None, gradient: Tensor) -> Tensor:
    """A sum in float32 at least."""
    if total is None:  # a copy: two terms of a sum get one tensor from autograd, and a total an expanded one
        return gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
    return total.add_(gradient)


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype, rows: int) -> Tensor:
    """x * factor with one rounding. A factor of no dimension would be rounded to the dtype of ``x`` first, on a GPU."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.dim() < 2:
        return (x.to(wide) * factor).to(dtype)
    result = torch.empty_like(x, dtype=dtype)
    for part in range(0, len(x), rows):
        result[part : part + rows] = x[part : part + rows].to(wide) * factor
    return result
