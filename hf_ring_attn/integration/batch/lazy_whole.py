"""Logits of whole rows that are gathered only when somebody reads them: the model's own loss in chunks needs none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ...comm.first_order import first_order_only
from ...comm.ring import Ring
from ...layers.collectives import share_of_gradient
from ...sharding.layout import Layout
from ..losses.lazy_logits import FACTS, LazyLogits


class LazyWhole(Tensor):
    """Logits [B, S, V] of whole rows; real ones once they were read, which all ranks must do at the same place."""

    make: Callable[[], Tensor]
    made: Tensor | None

    @staticmethod
    def of(mine: LazyLogits, ring: Ring, layout: Layout, make: Callable[[], Tensor]) -> LazyWhole:
        """Makes them of a rank's lazy logits [B, T, V]. ``make`` gathers the logits of all ranks, differentiably."""
        whole: LazyWhole = _GatherLazily.apply(mine, ring, layout)  # type: ignore[no-untyped-call]
        whole.make, whole.made = make, None
        return whole

    def tensor(self) -> Tensor:
        """The logits as an ordinary tensor with a gradient, made once."""
        if self.made is None:
            with torch.set_grad_enabled(self.requires_grad):
                self.made = self.make()
        return self.made

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if name == "__get__":
            name = function.__self__.__name__
        lazy: Any = args[0] if args else None
        if name in FACTS and (name == "__hash__" or (isinstance(lazy, LazyWhole) and vars(lazy)["made"] is None)):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        args, kwargs = tree_map(_ordinary, (args, kwargs))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub has no class
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """For code that calls torch below `__torch_function__`."""
        values = tree_map(lambda x: x.tensor().detach() if isinstance(x, LazyWhole) else x, (args, kwargs or {}))
        return function(*values[0], **values[1])


def _ordinary(x: Any) -> Any:
    return x.tensor() if isinstance(x, LazyWhole) else x


class _GatherLazily(torch.autograd.Function):
    """A rank's lazy logits -> those of whole rows, of no memory. An `autograd.Function` of them goes backward here."""

    @staticmethod
    def forward(ctx: Any, mine: LazyLogits, ring: Ring, layout: Layout) -> LazyWhole:
        ctx.ring, ctx.layout = ring, layout
        ctx.set_materialize_grads(False)
        shape = mine.shape[0], layout.length, *mine.shape[2:]
        made: LazyWhole = Tensor._make_wrapper_subclass(LazyWhole, shape, dtype=mine.dtype, device=mine.device)
        return made

    @staticmethod
    @first_order_only("logits that were gathered on demand")
    def backward(ctx: Any, _saved: tuple[()], gradient: Tensor | None) -> Any:
        return None if gradient is None else share_of_gradient(gradient, ctx.ring, ctx.layout), None, None
