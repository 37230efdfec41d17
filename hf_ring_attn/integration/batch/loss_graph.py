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
from ..context.batch_context import BatchContext, live_batches
from ..context.model_record import latest_record
from ..gradients import fsdp
from ..gradients.backward_end import SOME, average, call_at_end
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
    reached, goes_past = _reached_by(losses)
    if goes_past:
        raise errors.PastOutputs()
    return reached


def _reached_by(losses: Iterable[Any]) -> tuple[list[Any], bool]:
    """The functions by which losses reach into models, and if they reach an attention past these."""
    reached, goes_past = [], False
    for node in _followed((loss.grad_fn for loss in losses if isinstance(loss, Tensor)), OUTPUTS):
        name = type(node).__name__
        if name in OUTPUTS:
            reached.append(node)
        goes_past |= name == "_AttentionBackward" and LOCAL not in node.rest
    return reached, goes_past


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
        # Hooks: two of an output, and this.
        if state is not None and (state.retains_grad or len(state._backward_hooks or ()) > 3):
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
    """The calls of a model with whole rows, and weights of the program's own that were used inside it.

    Attributes:
        number: of calls. ring: of the latest. found: how many such weights there were. used: those of the backward that
            runs, by their numbers.
    """

    def __init__(self) -> None:
        self.number = self.found = 0
        self.ring: Ring | None = None
        self.used: dict[int, Tensor] = {}
        self._known = WeakIdKeyDictionary()

    def find(self, weight: Tensor) -> None:
        """Notes a weight. Its hook tells the backwards that use it, in the same order on every rank."""
        if weight in self._known:
            return
        of, calls, index = weakref.ref(weight), weakref.ref(self), self.found
        self._known[weight] = None
        self.found += 1

        def use(_gradient: Tensor) -> None:
            one, known = of(), calls()
            if one is not None and known is not None:
                known.used[index] = one

        weight.register_hook(use)

    def average(self) -> None:
        """Averages the gradients of the weights that a backward used.

        Raises:
            RanksDiffer: on every rank, if ranks used others.
        """
        if self.found and self.ring is not None:
            used, self.used = self.used, {}
            facts = {"weights beside the model": str(sorted(used))}
            device = next(iter(used.values())).device if used else torch.device("cpu")
            self.ring.agree(facts, self.ring.small_device(device), SOME)
            average([used[index] for index in sorted(used)], self.ring)


_CALLS: weakref.WeakKeyDictionary[nn.Module, _Calls] = weakref.WeakKeyDictionary()
_called: list[weakref.ref[nn.Module]] = []
"""Models that were called since the last backward."""
_reached: dict[_Calls, None] = {}
"""Calls of which a backward that runs has reached an output: the same on every rank."""
_replaced: list[Replaced] = []
"""torch's function, from such a call to that backward: no hook of torch gets a loss."""


class NotedCalls(list[_Calls]):
    """A state of a call's batch: the calls of its model; empty in a trainer."""


def note_call(model: nn.Module, context: BatchContext) -> None:
    """Notes that a loop called a model with whole rows, before the backward of its loss."""
    if torch.is_grad_enabled() and context.ring.size > 1:
        calls = _CALLS.setdefault(model, _Calls())
        calls.number += 1
        calls.ring = context.ring
        context.state(NotedCalls)[:] = [calls]
        _called.append(weakref.ref(model))
        if not _replaced:
            _replaced.append(
                Replaced(torch.autograd, "backward", functools.partial(_backward, torch.autograd.backward))
            )


def note_output(whole: Tensor, context: BatchContext) -> None:
    """Notes an output of a call, for the backwards that reach it."""
    made_by: Any = whole.grad_fn
    if made_by is not None:
        made_by.metadata[_WHOLE_OUTPUT] = True
        calls = dict.fromkeys(context.state(NotedCalls))
        whole.register_hook(lambda _gradient: _reached.update(calls))


_WHOLE_OUTPUT = "hf_ring_attn: an output of whole rows"


@uncompiled("hf_ring_attn looks at the graph of a loss")
def _backward(original: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
    """In place of `torch.autograd.backward`: weights of the program's own get the gradient of whole rows, too."""
    models = [model for one in _called if (model := one()) is not None]
    forget()
    losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if any(number & (number - 1) == 0 for number in (_CALLS[model].number for model in models)):
        _look_at(losses, models)
    original(losses, *args, **kwargs)
    for calls in list(_reached):
        calls.average()
    _reached.clear()


def _look_at(losses: list[Any], models: list[nn.Module]) -> None:
    """Finds weights of the program's own that calls of ``models`` used. Raises PastOutputs."""
    reached, goes_past = _reached_by(losses)
    reached = [node for node in reached if _WHOLE_OUTPUT in node.metadata]
    # Other batches' losses are of a rank's tokens, and the calls may have been those of an evaluation.
    if goes_past and (reached or all(context.state(NotedCalls) for context in live_batches() if context.ring.size > 1)):
        raise errors.PastOutputs()
    if any(map(fsdp.is_sharded, models)):  # its weights have no identity while they are gathered
        return
    known = {id(x) for model in models for x in latest_record(model).weights()}
    inside = (following for node in reached for following, _ in node.next_functions)
    for node in _followed(inside, {WHOLE}):
        if type(node).__name__ == "AccumulateGrad" and id(node.variable) not in known:
            _CALLS[models[-1]].find(node.variable)


def forget() -> None:
    """Forgets the calls since the last backward."""
    _called.clear()
    _reached.clear()
    while _replaced:
        _replaced.pop().remove()
