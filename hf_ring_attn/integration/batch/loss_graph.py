"""The graph of a loss of whole rows: states past what models returned, and weights inside that are not theirs.

In a loop the graph of a loss is followed before its backward: after the calls 1, 2, 4, 8, ... of a model, since a
program may change on the way.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ... import errors
from ...comm.ring import LOCAL, Ring
from ..context.model_record import latest_record
from ..gradients import fsdp
from ..gradients.backward_end import average, call_at_end
from ..patching.compiler import uncompiled
from ..patching.modules import Replaced

OUTPUTS = {"_GatherSequenceBackward", "_OfBatchBackward", "_SumOverRingBackward", "_DDPSinkBackward"}
"""The functions by which a loss may reach into a model: what it returned, also through DDP, its loss, and that of its
experts."""
WHOLE = "_MeanGradientBackward"
"""The function by which a model's call has whole rows: their gradients are the same on all ranks."""


def refuse_past_outputs(*losses: Any) -> list[Any]:
    """Refuses losses that use a rank's states, which a hook or an attribute took out of a model.

    Returns:
        The functions by which they reach into models.

    Raises:
        PastOutputs: on every rank, as they run one program.
    """
    reached = []
    for node in _followed((loss.grad_fn for loss in losses if isinstance(loss, Tensor)), OUTPUTS):
        name = type(node).__name__
        if name in OUTPUTS:
            reached.append(node)
        elif name == "_AttentionBackward" and LOCAL not in node.rest:
            raise errors.PastOutputs()
    return reached


def refuse_gradient_of_state(whole: Tensor, made_by: Any, ends: list[Any], path: str) -> None:
    """Refuses, in a backward, a gradient by a state from which a model computed other outputs.

    They come from each rank's part of it, so they are no part of the gradient of the whole one.

    Args:
        whole: the state of whole rows. made_by: the function that made a rank's part of it. ends: those of all outputs,
            later ones too. path: its name.

    Raises:
        GradientOfState: it has a hook, or its gradient is kept; or `torch.autograd.grad` asked for it, at its end.
    """
    of, ran = weakref.ref(whole), list[bool]()

    def is_used() -> bool:
        return any(node is made_by for node in _followed((end for end in ends if end is not made_by), set()))

    def refuse() -> None:
        if not ran and is_used():
            raise errors.GradientOfState(path)

    def arrive(_gradient: Tensor) -> None:
        ran.clear()
        state = of()
        # Hooks: that of the comparison, and this.
        if state is not None and (state.retains_grad or len(state._backward_hooks or ()) > 2):
            refuse()
        call_at_end(refuse)  # what makes the state does not run if `torch.autograd.grad` asked for its gradient

    whole.register_hook(arrive)
    assert whole.grad_fn is not None
    whole.grad_fn.register_hook(lambda *_gradients: ran.append(True))


def _followed(nodes: Iterable[Any], until: set[str]) -> Iterator[Any]:
    """Nodes of a graph from ``nodes`` on, each once; of those whose names are in ``until`` what follows is left out."""
    seen, todo = set[Any]([None]), list(nodes)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if type(node).__name__ not in until:
            todo += [following for following, _ in node.next_functions]


# ---- loops -----------------------------------------------------------------------------------------------------------


class _Calls:
    """The calls of a model with whole rows. ``beside``: weights of the program's own that were used inside it."""

    def __init__(self) -> None:
        self.number = 0
        self.beside = WeakIdKeyDictionary()


_CALLS: weakref.WeakKeyDictionary[nn.Module, _Calls] = weakref.WeakKeyDictionary()
_called: dict[weakref.ref[nn.Module], Ring] = {}
"""Models that were called since the last backward, with their rings."""
_replaced: list[Replaced] = []
"""torch's function, from such a call to that backward: no hook of torch gets a loss."""


def note_call(model: nn.Module, ring: Ring) -> None:
    """Notes that a loop called a model with whole rows, before the backward of its loss."""
    if torch.is_grad_enabled() and ring.size > 1:
        _CALLS.setdefault(model, _Calls()).number += 1
        _called[weakref.ref(model)] = ring
        if not _replaced:
            _replaced.append(
                Replaced(torch.autograd, "backward", functools.partial(_backward, torch.autograd.backward))
            )


@uncompiled("hf_ring_attn looks at the graph of a loss")
def _backward(original: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
    """In place of `torch.autograd.backward`: weights of the program's own get the gradient of whole rows, too."""
    called = [(model, ring) for one, ring in _called.items() if (model := one()) is not None]
    forget()
    losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if any(number & (number - 1) == 0 for number in (_CALLS[model].number for model, _ in called)):
        _look_at(losses, [model for model, _ in called])
    original(losses, *args, **kwargs)
    for model, ring in called:
        average(list(_CALLS[model].beside), ring)


def _look_at(losses: list[Any], models: list[nn.Module]) -> None:
    """Finds weights of the program's own that calls of ``models`` used. Raises PastOutputs."""
    reached = refuse_past_outputs(*losses)
    if any(map(fsdp.is_sharded, models)):  # its weights have no identity while they are gathered
        return
    known = {id(x) for model in models for x in latest_record(model).weights()}
    inside = (following for node in reached for following, _ in node.next_functions)
    for node in _followed(inside, {WHOLE}):
        if type(node).__name__ == "AccumulateGrad" and id(node.variable) not in known:
            _CALLS[models[-1]].beside[node.variable] = None


def forget() -> None:
    """Forgets the calls since the last backward."""
    _called.clear()
    while _replaced:
        _replaced.pop().remove()
