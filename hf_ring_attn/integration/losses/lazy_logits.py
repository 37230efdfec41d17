"""Logits that are made only when somebody reads them: a tensor of no memory, which the loss consumes in chunks.

What a model does to its logits one by one (softcaps, scales, casts) is recorded, and done again to each chunk.
`torch.nn.functional.cross_entropy` of them is `layers.chunked_loss`. Any other use makes all of them first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map

from ... import errors
from ...comm.first_order import first_order_only
from ...layers.chunked_loss import CrossEntropy, graph_of_its_own, leaf
from ..context.introspect import is_of_wrapper
from ..context.references import alive
from .calls import Call
from .head import Head, Operation, through
from .local_logits import Same, followed

ONE_BY_ONE = {
    "mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "divide", "true_divide", "tanh", "float", "double",
    "half", "bfloat16", "to", "clone",
}  # fmt: skip
"""Operations on each logit by itself."""
SAME_IF_DTYPE_IS = {"float", "double", "half", "bfloat16", "to"}
SHAPES = {"view", "reshape", "flatten", "unflatten", "contiguous", "view_as"}
FACTS = {
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf", "grad", "is_cuda", "is_cpu",
    "is_meta", "is_sparse", "is_nested", "is_quantized", "output_nr", "_version", "_backward_hooks", "itemsize",
    "nbytes", "size", "dim", "numel", "nelement", "ndimension", "element_size", "is_floating_point", "is_complex",
    "is_contiguous", "stride", "get_device", "__len__", "__hash__", "is_inference", "storage_offset", "_is_view",
    "_base",
}  # fmt: skip
"""Queries that need no values."""
GRADIENT_HOOKS = {"register_hook", "retain_grad"}


class LazyLogits(Tensor):
    """Logits [..., V] of a `Head`, after the operations of ``chain``; real ones once they were read."""

    head: Head
    chain: tuple[Operation, ...]
    made: Tensor | None
    as_view: Callable[[], Tensor] | None
    """Computes these logits as a view of others, so that a write in place reaches those."""

    @staticmethod
    def of(
        head: Head, chain: tuple[Operation, ...], shape: Sequence[int], dtype: torch.dtype, trains: bool = True
    ) -> LazyLogits:
        """Makes lazy logits. ``trains``: in the graph of the head's input and weights."""
        lazy: LazyLogits
        if trains:
            first = head.rows[:1].clone()  # a copy: the rest is not saved
            lazy = _Make.apply(head, chain, shape, dtype, first, head.hidden, *head.weights)  # type: ignore[no-untyped-call]
        else:
            lazy = LazyLogits.bare(head, chain, shape, dtype)
        head.lazy.append(weakref.ref(lazy))
        return lazy

    @staticmethod
    def bare(head: Head, chain: tuple[Operation, ...], shape: Sequence[int], dtype: torch.dtype) -> LazyLogits:
        """Makes lazy logits without a graph."""
        lazy: LazyLogits = Tensor._make_wrapper_subclass(
            LazyLogits, tuple(shape), dtype=dtype, device=head.hidden.device
        )
        lazy.head, lazy.chain, lazy.made, lazy.as_view = head, chain, None, None
        return lazy

    def values(self) -> Tensor:
        """The logits' values, detached. They may share memory with the head's."""
        if self.made is not None:
            return self.made.detach()
        with torch.no_grad():
            return through(self.chain, self.head.all_logits()).reshape(self.shape)

    def tensor(self, user: str) -> Tensor:
        """Computes the logits as an ordinary tensor with a gradient, once, and with them all others of the same head.

        They may share memory: a program that writes to it (in place, by .data or numpy) must not change the others.
        """
        if self.made is None:
            self.head.state.why = self.head.state.why or f"{user}() was called on the logits"
            for other in alive(self.head.lazy):
                other.alone()
        return self.alone()

    def alone(self) -> Tensor:
        """Computes these logits, and none beside those that they are a view of."""
        if self.made is None:
            with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
                self.made = _Read.apply(self) if self.as_view is None else self.as_view()  # type: ignore[no-untyped-call]
            if not self.chain and self.as_view is None and self.head.origin is not None:
                self.head.origin.read(self.made)
        return self.made

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if name == "__get__":
            name = function.__self__.__name__
        lazy: Any = args[0] if args else None
        if name in FACTS:
            if isinstance(lazy, LazyLogits) and lazy.made is not None and name != "__hash__":
                args = (lazy.made, *args[1:])
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if name in GRADIENT_HOOKS and any(map(is_of_wrapper, args[1:])):  # it needs no gradient of them
            args[0].head.wrapper_hooks += args[1:]
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if name in GRADIENT_HOOKS and isinstance(lazy, LazyLogits) and lazy.head.losses:
            raise errors.LogitsNotMade(f"{name}() needs their gradient, which a loss in chunks does not compute")
        origin = lazy.head.origin if isinstance(lazy, LazyLogits) else None
        unmade = isinstance(lazy, LazyLogits) and lazy.made is None
        result = _recorded(lazy, function, name, args[1:], kwargs) if unmade else None
        if result is None:
            args, kwargs = tree_map(lambda x: ordinary(x, name), (args, kwargs))
            result = function(*args, **kwargs)
        return result if origin is None else followed(result, Call(origin, function, args, kwargs, lazy), origin)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub has no class
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """For code that calls torch below `__torch_function__`."""
        if function is torch.ops.aten.detach.default:
            lazy = args[0]
            return LazyLogits.bare(lazy.head, lazy.chain, lazy.shape, lazy.dtype)
        values = tree_map(lambda x: x.values() if isinstance(x, LazyLogits) else x, (args, kwargs or {}))
        return function(*values[0], **values[1])


def ordinary(x: Any, user: str) -> Any:
    """Lazy logits as an ordinary tensor, made for ``user``; anything else as it is."""
    return x.tensor(user) if isinstance(x, LazyLogits) else x


def _recorded(
    lazy: LazyLogits, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """The result of an operation without any logits made; None if it needs them."""
    head, trains = lazy.head, lazy.requires_grad
    if function is functional.cross_entropy:
        with nullcontext() if trains else torch.no_grad():
            return _cross_entropy(lazy, *args, **kwargs)
    if name == "detach":
        result = LazyLogits.of(head, lazy.chain, lazy.shape, lazy.dtype, trains=False)
        result.as_view = lambda: lazy.alone().detach()
        return result
    others = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if name in SHAPES and not others:
        view = function(torch.empty(lazy.shape, dtype=lazy.dtype, device="meta"), *args, **kwargs)
        if view.shape[-1:] != lazy.shape[-1:] or view.dtype != lazy.dtype:
            return None
        result = LazyLogits.of(head, lazy.chain, view.shape, lazy.dtype, trains)
        result.as_view = lambda: function(lazy.alone(), *args, **kwargs)
        return result
    if name in ONE_BY_ONE and not any(x.dim() or x.requires_grad for x in others):
        probe = function(torch.empty(1, dtype=lazy.dtype, device=lazy.device), *args, **kwargs)
        if probe.shape != (1,) or probe.device != lazy.device or not probe.is_floating_point():
            return None
        if name in SAME_IF_DTYPE_IS and probe.dtype == lazy.dtype and not kwargs.get("copy"):
            return lazy
        # Copies, since the program may change a factor before the logits are made.
        args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (args, kwargs))

        def operation(x: Tensor) -> Tensor:
            result: Tensor = function(x, *args, **kwargs)
            return result

        return LazyLogits.of(head, (*lazy.chain, operation), lazy.shape, probe.dtype, trains)
    return None


def _cross_entropy(
    lazy: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    given = weight is not None or size_average is not None or reduce is not None or reduction not in ("sum", "mean")
    if given or lazy.dim() != 2 or target.shape != lazy.shape[:1] or target.is_floating_point():
        return None
    options = CrossEntropy(reduction, ignore_index, label_smoothing or lazy.head.state.smoothing)
    return lazy.head.loss(lazy.chain, target, options)


class _Make(torch.autograd.Function):
    """Hidden states and weights -> lazy logits. Its backward recomputes them, for gradients of any use of them."""

    @staticmethod
    def forward(
        ctx: Any, head: Head, chain: tuple[Operation, ...], shape: Sequence[int], dtype: torch.dtype, first: Tensor,
        _hidden: Tensor, *weights: Tensor,
    ) -> LazyLogits:  # fmt: skip
        ctx.head, ctx.chain = head, chain
        ctx.set_materialize_grads(False)  # a wrapper (DDP) may connect them with a loss that does not use them
        ctx.save_for_backward(first, *() if ctx.needs_input_grad[5] else weights)  # what gradients depend on
        return LazyLogits.bare(head, chain, shape, dtype)

    @staticmethod
    @first_order_only("logits that were made on demand")
    def backward(ctx: Any, _saved: tuple[Tensor, ...], gradient: Tensor | None) -> Any:
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        head, needed = ctx.head, ctx.needs_input_grad[5:]
        with head.unsharded(), graph_of_its_own():
            head.check()
            inputs = [leaf(x, need) for x, need in zip((head.rows, *head.weights), needed, strict=True)]
            logits = through(ctx.chain, head.logits_of(inputs[0], inputs[1:]))
            wanted = [x for x in inputs if x.requires_grad]
            found = iter(torch.autograd.grad(logits, wanted, gradient.reshape(logits.shape), allow_unused=True))
        first, *rest = (next(found) if x.requires_grad else None for x in inputs)
        return (None, None, None, None, None, None if first is None else first.reshape(head.hidden.shape), *rest)


class _Read(Same):
    """Lazy logits -> ordinary ones."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyLogits) -> Tensor:
        ctx.set_materialize_grads(False)
        return lazy.values().detach()  # an alias: its memory may be the head's
