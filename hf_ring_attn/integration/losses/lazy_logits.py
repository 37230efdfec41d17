"""Logits that are made only when somebody reads them: a tensor of no memory, which the loss consumes in chunks.

What a model does to its logits one by one (softcaps, scales, casts) is recorded, and done again to each chunk.
`torch.nn.functional.cross_entropy` of them is `layers.chunked_loss`. Any other use makes all of them first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from ... import errors
from ...comm.first_order import first_order_only
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
from ..context.introspect import is_dtensor, is_of_wrapper, is_unit
from ..context.program_states import kept_buffers
from ..context.tracked_input import version_of
from ..patching.parameter_slots import slots_of, with_weights
from .calls import Call
from .local_logits import Same, followed
from .origins import Origin

Operation = Callable[[Tensor], Tensor]

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
        self.autocast = (kind := hidden.device.type, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self.made: Tensor | None = None
        self.lazy: list[weakref.ref[LazyLogits]] = []
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
            return _through(chain, self.logits_of(hidden, weights))

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


def _through(chain: Sequence[Operation], x: Tensor) -> Tensor:
    for operation in chain:
        x = operation(x)
    return x


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
            return _through(self.chain, self.head.all_logits()).reshape(self.shape)

    def tensor(self, user: str) -> Tensor:
        """Computes the logits as an ordinary tensor with a gradient, once, and with them all others of the same head.

        They may share memory: a program that writes to it (in place, by .data or numpy) must not change the others.
        """
        if self.made is None:
            self.head.state.why = self.head.state.why or f"{user}() was called on the logits"
            for other in [lazy for reference in self.head.lazy if (lazy := reference()) is not None]:
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
            args, kwargs = tree_map(lambda x: _ordinary(x, name), (args, kwargs))
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


def _ordinary(x: Any, user: str) -> Any:
    return x.tensor(user) if isinstance(x, LazyLogits) else x


def with_logits(x: Any, user: str) -> Any:
    """An output of a model, nested perhaps, with its lazy logits made."""
    return tree_map(lambda part: _ordinary(part, user), x)


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
            logits = _through(ctx.chain, head.logits_of(inputs[0], inputs[1:]))
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
