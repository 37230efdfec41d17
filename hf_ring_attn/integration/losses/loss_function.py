"""The loss function of a model, in a batch's context: what it gets, and the factor by which a forward changes its loss.

It gets logits of whole rows if the batch gathers them, else those of a rank's tokens. A forward may use the loss in any
way, but not by what its rank's tokens are (twice the loss, if one of them is special): then each rank has another
factor, perhaps on no row of the self-check. Ranks compare them in the backward (`loss_gradients`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...layers.collectives import gather_sequence
from ..context import batch_context
from ..patching.compiler import uncompiled
from ..patching.modules import Arguments, Replaced, programs_own
from .changed_labels import shifted_anew
from .local_logits import held

_ATTRIBUTE = "_loss_function"
"""The attribute of a transformers model that its property ``loss_function`` reads first."""


class _Loss(NamedTuple):
    """A loss as its function returned it: a forward may write to it."""

    value: Tensor
    version: int
    edge: GradientEdge


@uncompiled("hf_ring_attn gathers the logits of whole rows")
def _with_logits(*args: Any, **given: Any) -> Arguments:
    """The arguments of a loss function, with logits [B, S, V] in place of a rank's if the batch gathers logits."""
    context = batch_context.current()
    if context is None or not context.gathers_logits:
        return args, given
    logits = held(args[0] if args else given["logits"])
    if logits.shape[:2] != context.local_shape:
        return args, given
    whole = gather_sequence(logits, context.ring, context.layout)
    return ((whole, *args[1:]), given) if args else ((), {**given, "logits": whole})


class _Watch:
    """A loss function of ``model`` that notes what it returns."""

    def __init__(self, model: nn.Module, computed: Computed) -> None:
        self.model, self.computed = model, computed
        self.own = programs_own(model.__dict__.get(_ATTRIBUTE))

    @property
    def replaced(self) -> Any:
        """The loss function that the model has by itself."""
        if self.own is not None:
            return self.own
        attributes: Any = self.model.__dict__
        watch = attributes.pop(_ATTRIBUTE)
        try:
            return getattr(self.model, "loss_function")  # noqa: B009  a property of transformers' models
        finally:
            attributes[_ATTRIBUTE] = watch

    def __call__(self, *args: Any, **given: Any) -> Any:
        replaced, uncalled = self.replaced, self.computed.uncalled
        args, given = _with_logits(*args, **given)
        given = shifted_anew(self.model, replaced, args, given)
        if uncalled is not None and not self.computed.is_called:
            return uncalled(replaced, args, given)
        loss = replaced(*args, **given)
        self.note(loss)
        return loss

    def __reduce__(self) -> Any:
        return _itself, (self.replaced,)  # a copy of the model has its own function

    @uncompiled("hf_ring_attn notes the loss that a model's loss function computes")
    def note(self, loss: Any) -> None:
        if isinstance(loss, Tensor) and loss.requires_grad and loss.dim() == 0:
            self.computed.noted.append(_Loss(loss, loss._version, get_gradient_edge(loss)))


def _itself(x: Any) -> Any:
    return x


class Computed:
    """The losses that a model's loss function computed in its current call.

    Args:
        is_called: a call of the model runs; False in one of its ``forward``, which runs no hooks.
        uncalled: calls the loss function in such a forward, with its arguments.
    """

    def __init__(self, is_called: bool = True, uncalled: Callable[[Any, Any, Any], Any] | None = None) -> None:
        self.is_called, self.uncalled = is_called or uncalled is None, uncalled
        self.noted: list[_Loss] = []

    def watch(self, model: nn.Module) -> Replaced:
        """Lets the loss function of ``model`` note what it returns, until the handle is removed."""
        return Replaced(model, _ATTRIBUTE, _Watch(model, self))

    def begin(self) -> None:
        """Begins a call."""
        self.noted.clear()
        self.is_called = True

    def end(self) -> list[_Loss]:
        """Ends a call. Returns what was computed."""
        noted, self.noted[:] = list(self.noted), []
        self.is_called = False
        return noted

    def factor_of(self, loss: Tensor) -> float | Tensor | None:
        """The derivative of the loss that the forward returns by these; None: unknown. Ends the call."""
        noted = self.end()
        if not noted or not loss.requires_grad:
            return None
        if len(noted) == 1 and loss is noted[0].value and loss._version == noted[0].version:
            return 1.0
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return None  # a checkpoint would run the forward again, to have what was saved
        found = torch.autograd.grad(loss, [one.edge for one in noted], retain_graph=True, allow_unused=True)
        factor = torch.zeros_like(loss, dtype=torch.float64)
        for number, x in enumerate(found, start=1):
            if x is not None:
                factor += number * x
        return factor
