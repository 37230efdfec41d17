"""Compares runs of a whole row and of this rank's share: each token's error, and the first module that differs.

Tensors are paired by their names and shapes: one dim has the row's tokens in one and the share's in the other, and all
other dims are alike. An output without such a dim is one answer for the whole row (a pooled output). Inside the
model such tensors are left out (the tokens of one expert), and scalars always are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...sharding.layout import Layout
from ..context.tensor_tree import tensors_of


@dataclass(frozen=True, eq=False)
class ComparedTokens:
    """The tokens of a share and those of the row that are compared: real ones that no padding mask hides.

    Args:
        length: tokens in the row; local: tokens in the share, padding to the ring included.
        here: [k] indices into the share; there: [k] indices into the row.
    """

    length: int
    local: int
    here: Tensor
    there: Tensor

    @classmethod
    def of(cls, layout: Layout, hidden: Tensor | None, device: torch.device) -> ComparedTokens:
        positions = layout.positions()
        compared = positions < layout.length
        if hidden is not None:
            compared &= ~hidden[0, positions]
        here = compared.nonzero().flatten()
        return cls(layout.length, layout.local_length, here.to(device), positions[here].to(device))

    def dim(self, whole: torch.Size, share: torch.Size) -> int | None:
        """The dim of tokens of a pair of shapes; None if they are no such pair."""
        if len(whole) != len(share):
            return None
        unlike = [dim for dim, (a, b) in enumerate(zip(whole, share, strict=True)) if a != b]
        found = len(unlike) == 1 and (whole[unlike[0]], share[unlike[0]]) == (self.length, self.local)
        return unlike[0] if found else None

    def errors(self, whole: Any, share: Any, again: Any = None, pooled: bool = True) -> Tensor:
        """[T] float64 on the CPU: the largest relative error of each token of a share's outputs; nan without any.

        Args:
            again: outputs of a second run of the whole row, which are compared instead, at the same places.
            pooled: outputs of the same shape (one answer for the whole row) count for all tokens.
        """
        here, found = self.here.cpu(), torch.full((self.local,), torch.nan, dtype=torch.float64)
        for _, want, got, dim in self._pairs(whole, share, again):
            if dim is not None or pooled:
                found[here] = found[here].fmax(relative(got, want, dim or 0).double().cpu())
        return found

    def pooled_errors(self, whole: Any, share: Any) -> dict[str, float]:
        """The relative error of each output without a dim of tokens, by name."""
        pairs = self._pairs(whole, share, None)
        return {name.removeprefix("."): float(relative(got, want, 0)) for name, want, got, dim in pairs if dim is None}

    def odd_outputs(self, whole: Any, share: Any) -> set[str]:
        """The paths of outputs that are neither of tokens, in their second dim, nor without a dim of tokens."""
        shares = dict(tensors_of(share))
        shapes = {name: (x.shape, shares[name].shape) for name, x in tensors_of(whole) if x.dim() and name in shares}
        return {name[1:] for name, (want, got) in shapes.items() if want != got and self.dim(want, got) != 1}

    def _pairs(self, whole: Any, share: Any, again: Any) -> Iterator[tuple[str, Tensor, Tensor, int | None]]:
        """The outputs of two runs at this rank's tokens, and the dim of these; None for a pooled output."""
        shares, others = dict(tensors_of(share)), dict(tensors_of(share if again is None else again))
        at = self.here if again is None else self.there
        for name, want in tensors_of(whole):
            if name not in shares:
                continue
            dim = self.dim(want.shape, shares[name].shape)
            if dim is not None:
                yield name, want.index_select(dim, self.there), others[name].index_select(dim, at), dim
            elif want.shape == shares[name].shape and want.dim() and want.is_floating_point() and want.numel():
                yield name, want[None], others[name][None], None


def relative(got: Tensor, want: Tensor, dim: int) -> Tensor:
    """[k] float32: norm of got - want over the norm of want, of each of the k slices along ``dim``.

    The norm of a slice is at least a tenth of their root mean square: a token that is nearly 0 by chance would show
    rounding as a difference. inf and nan equal themselves; a nan on one side only is infinitely far.
    """
    got, want = (x[..., None].movedim(dim, 0).flatten(1).float() for x in (got, want))  # x may have one dim
    equal = (got == want) | (got.isnan() & want.isnan())
    apart = torch.where(equal, 0.0, got - want).norm(dim=1)
    size = torch.where(want.isfinite(), want, 0.0).norm(dim=1)
    size = size.clamp_min(0.1 * float(size.square().mean().sqrt()) if len(size) else 0.0)
    return torch.where(apart == 0, 0.0, apart / size).nan_to_num(nan=torch.inf)


def spread(table: Tensor) -> float:
    """The largest median of any group of tokens: one number that a defect moves and a few odd tokens do not.

    Experts are chosen by comparing near-equal numbers, so rounding alone changes the expert of single tokens. A defect
    of the sharding moves a whole chunk (positions, states, attention), or the same place in all ranks' shares (a
    convolution's or a shift's first tokens). So the groups are the chunks and these places.

    Args:
        table: [W, T] errors of each rank's tokens; nan for a token that is not compared. All nan give nan.
    """
    halves = table.reshape(table.shape[0] * 2, -1)
    groups = [*halves, *table.unbind(1)]
    medians = [group[~group.isnan()].sort().values for group in groups]
    return max((float(group[len(group) // 2]) for group in medians if len(group)), default=float("nan"))


def outputs_inside(model: nn.Module, call: Callable[[], Any]) -> list[Any]:
    """The outputs of the transformers models inside a model, in the order of a ``call`` of it."""
    outputs: list[Any] = []
    with ExitStack() as stack:
        for module in model.modules():
            if module is not model and "loss_type" in module.__dict__:
                after = module.register_forward_hook(lambda _module, _args, output: outputs.append(output))
                stack.enter_context(after)
        call()
    return outputs


class Event(NamedTuple):
    """A call of a module, the first or a later one, or its return."""

    module: str
    call: int
    returned: bool


@dataclass
class Recorder:
    """Records the inputs and outputs of modules, in order.

    Args:
        tokens: the tokens to record. whole: the run is of the whole row, so only this rank's tokens are recorded.
    """

    tokens: ComparedTokens
    whole: bool
    events: dict[Event, dict[str, tuple[int, Tensor]]] = field(default_factory=dict)
    callers: dict[Event, str] = field(default_factory=dict)
    _stack: list[Event] = field(default_factory=list)
    _calls: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[Recorder]:
        with ExitStack() as stack:
            for name, module in model.named_modules():
                before, after = self._before(name), self._after
                stack.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                stack.enter_context(module.register_forward_hook(after, with_kwargs=True))
            yield self

    def _before(self, name: str) -> Any:
        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self._calls[name] = self._calls.get(name, 0) + 1
            event = Event(name, self._calls[name], False)
            self._record(event, self._stack[-1].module if self._stack else name, [args, kwargs])
            self._stack.append(event)

        return before

    def _after(self, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        event = self._stack.pop()._replace(returned=True)
        self._record(event, event.module, output)

    def _record(self, event: Event, caller: str, value: Any) -> None:
        """Records copies, since models add to their hidden states in place."""
        self.callers[event] = caller
        recorded = self.events[event] = {}
        for name, x in tensors_of(value):
            dims = [dim for dim, size in enumerate(x.shape) if size == self.tokens.length]
            if not self.whole:
                recorded[name] = (-1, x.detach().clone())
            elif len(dims) == 1:
                recorded[name] = (dims[0], x.detach().index_select(dims[0], self.tokens.there))

    def errors(self, event: Event, share: Recorder) -> float:
        """The largest error of any token of an event in ``share``, or in a second run of the whole row."""
        worst = 0.0
        for name, (dim, want) in self.events[event].items():
            _, got = share.events.get(event, {}).get(name, (-1, None))
            if got is not None and not share.whole and got.dim() == want.dim() and got.shape[dim] == self.tokens.local:
                got = got.index_select(dim, self.tokens.here)
            if got is not None and got.shape == want.shape and len(self.tokens.here):
                worst = max(worst, float(relative(got, want, dim).max()))
        return worst
