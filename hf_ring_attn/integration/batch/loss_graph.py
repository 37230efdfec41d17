"""The graph of a loss of whole rows: states past what models returned, and weights inside that are not theirs.

In a loop the graph is followed before each backward: a few milliseconds for LoRA on 32 layers.
"""

from __future__ import annotations

import functools
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ... import errors
from ...comm.first_order import refuse_second_gradients
from ...comm.ring import Ring
from ...layers.chunked_loss import nodes_from
from ..context import batch_context
from ..context.batch_context import BatchContext, live_batches
from ..context.graph_notes import WholeCall, batch_of_output, call_of_attention
from ..context.model_record import latest_record
from ..context.tensor_tree import tensors_of
from ..gradients import fsdp
from ..gradients.backward_end import SOME, average, call_at_end
from ..patching.changes import at_uninstall
from ..patching.compiler import uncompiled
from ..patching.modules import Replaced

OUTPUTS = {"_GatherSequenceBackward", "_OfBatchBackward", "_SumOverRingBackward", "_DDPSinkBackward"}
"""The functions by which a loss may reach into a model: what it returned, also through DDP, its loss, and that of its
experts."""
WHOLE = {"_MeanGradientBackward"}
"""The function by which a model's call has whole rows: their gradients are the same on all ranks."""


def refuse_past_outputs(loss: Any) -> None:
    """Refuses a loss that uses a rank's states, which a hook or an attribute took out of a model.

    Raises:
        PastOutputs: on every rank, as they run one program.
    """
    if isinstance(loss, Tensor) and _reached_from(_ends_of(loss))[1]:
        raise errors.PastOutputs()


@contextmanager
def names_past_outputs() -> Iterator[None]:
    """Names the reason of a program's error: a rank's states do not fit to whole rows, as in shapes.

    Raises:
        PastOutputs: a function of the program that failed, outside of its models, holds such states.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (errors.RingAttentionError, MemoryError, torch.OutOfMemoryError)):
            raise
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        in_model = any(frame.f_code.co_filename == _CALLS for frame in frames)  # its own frames hold such states, too
        held = () if in_model else (x for frame in frames for _, x in tensors_of([*frame.f_locals.values()]))
        if _reached_from(_ends_of([x for x in held if x.grad_fn is not None]))[1]:
            raise errors.PastOutputs() from error
        raise


_CALLS = str(Path(__file__).with_name("whole_row_calls.py"))
"""The file whose functions call a model with whole rows."""


def _ends_of(losses: Any) -> list[Any]:
    """The functions that made losses."""
    return [x.grad_fn if isinstance(x, Tensor) else getattr(x, "node", None) for x in _each(losses)]


def _each(given: Any) -> list[Any]:
    """The tensors of an argument for gradients: one, several, or by name; a `GradientEdge` stands for one."""
    if isinstance(given, (Tensor, GradientEdge)):
        return [given]
    return list(given.values() if isinstance(given, Mapping) else given)


def _reached_from(ends: Iterable[Any]) -> tuple[list[Any], list[WholeCall]]:
    """The functions by which a graph reaches into models, and the calls whose attentions it reaches past these."""
    reached, past = [], []
    for node in nodes_from(ends, OUTPUTS):
        if type(node).__name__ in OUTPUTS:
            reached.append(node)
        if (call := call_of_attention(node)) is not None:
            past.append(call)
    return reached, past


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
        return any(node is made_by for node in nodes_from(end for end in ends if end is not made_by))

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


# ---- loops -----------------------------------------------------------------------------------------------------------


_replaced: list[Replaced] = []
"""torch's functions for gradients, while a loop has outputs of whole rows: no hook of torch gets a loss."""


def note_call(model: nn.Module, context: BatchContext) -> None:
    """Notes that a loop called a model with whole rows."""
    if torch.is_grad_enabled() and context.ring.size > 1:
        context.state(WholeCall).model = weakref.ref(model)
        if not _replaced:
            functions: dict[str, Callable[..., Any]] = {"backward": _backward, "grad": _grad}
            for name, own in functions.items():
                of_torch = functools.partial(own, getattr(torch.autograd, name))
                _replaced.append(Replaced(torch.autograd, name, of_torch))


@uncompiled("hf_ring_attn looks at the graph of a loss")
def _backward(original: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
    """In place of `torch.autograd.backward`: weights of the program's own get the gradient of whole rows, too."""
    beside = _beside(tensors)
    original(tensors, *args, **kwargs)
    for ring, weights in beside.items():
        facts = {"weights beside the model": str([tuple(x.shape) for x in weights])}
        device = ring.small_device(weights[0].device)
        ring.agree(facts, device, SOME, doing="averaged weights beside the model")
        average(weights, ring)


@uncompiled("hf_ring_attn looks at the graph of a loss")
def _grad(original: Callable[..., Any], outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of `torch.autograd.grad`, as `_backward`."""
    if kwargs.get("is_grads_batched") and _reached_from(_ends_of(outputs))[0]:
        raise errors.UnsupportedVmap("a gradient of whole rows was asked for with is_grads_batched=True, so")
    beside, found = _beside(outputs), original(outputs, inputs, *args, **kwargs)
    for ring, weights in beside.items():
        asked = zip(_each(inputs), _each(found), strict=True)
        mine = [x.detach() for one, x in asked if x is not None and any(one is weight for weight in weights)]
        for gradient, mean in zip(mine, ring.means(mine) if mine else [], strict=True):
            gradient.copy_(mean)
    return found


def _beside(losses: Any) -> dict[Ring, list[Tensor]]:
    """Weights of the program's own that models used inside calls with whole rows, by the calls' rings.

    Raises:
        PastOutputs: see `refuse_past_outputs`. SecondGradient: the loss has a gradient in it.
    """
    if not any(context.state(WholeCall).model for context in live_batches()):
        forget()
        return {}
    # A backward inside another one recomputes layers; in a batch's context a rank's tokens are a program's own affair.
    if torch._C._current_graph_task_id() >= 0 or batch_context.current() is not None:
        return {}
    reached, past = _reached_from(_ends_of(losses))
    if any(call.model is not None for call in past):  # in other batches, losses are of a rank's tokens
        refuse_second_gradients(nodes_from(_ends_of(losses), OUTPUTS))
        raise errors.PastOutputs()
    calls = [(node, context) for node in reached if (context := batch_of_output(node)) is not None]
    found: dict[Ring, list[Tensor]] = {}
    called = (context.state(WholeCall).model for _, context in calls)
    models = {id(model): model for of in called if of is not None and (model := of()) is not None}
    known = {id(x) for model in models.values() for x in latest_record(model).weights()}
    if any(map(fsdp.is_sharded, models.values())):  # its weights have no identity while they are gathered
        return {}
    for ring in dict.fromkeys(context.ring for _, context in calls):
        starts = [following for node, context in calls if context.ring == ring for following, _ in node.next_functions]
        leaves = (node.variable for node in nodes_from(starts, WHOLE) if type(node).__name__ == "AccumulateGrad")
        if weights := [x for x in leaves if id(x) not in known]:
            found[ring] = weights
    return found


@at_uninstall
def forget() -> None:
    """Brings torch's own functions back."""
    while _replaced:
        _replaced.pop().remove()
