"""The trial step: the loss of the check's row as the program computes it, in the mode it trains in, and gradients.

Dropout and NEFTune stay off, since a token draws other numbers in a ring. A model that draws random numbers by other
means is tried in evaluation mode, and one that draws them there, too, is not tried. Of a program's own step only the
model's loss is tried.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from ...layers.chunked_loss import graph_nodes, graph_of_its_own
from ..context import batch_context, introspect
from ..context.local_batch import LocalBatch
from ..context.program_states import TORCHS_OWN
from ..context.threads import runs_for
from ..context.trial_step import TrialStep
from ..gradients import fsdp_units, loss_gradients
from ..log import warn
from ..model import neftune
from ..model.ring_calls import in_ring

VALUES = 1 << 16
"""The most values of a weight's gradient that are compared; weights with no more are preferred."""
ALWAYS = 3
"""The most weights that are compared in any dtype. The others only in float32: in 16 bits rounding sends some token to
another expert in nearly every row, and the gradient of a router or of an expert has few tokens."""
OTHERS = 1 << 23
"""The most values of these others together, the smallest ones first."""
FLOOR = 1e-2
"""The least norm of a gradient, relative to the largest one: that of a key's bias is rounding alone."""
GRADIENT = 4.0
"""The tolerance of a gradient, relative to that of a token's output: a forward and a backward round it."""

_RANDOM_LOSS = (
    "the loss of {} draws random numbers, so the self-check could not compare it: each of its terms must add up over "
    "ranks, as a sum over shift_labels / num_items_in_batch does."
)
_RANDOM_TRAINING = (
    "{} draws random numbers in training, beside its dropout modules, so the self-check compared it in evaluation "
    "mode. It is right if each token gets its own numbers, or if all ranks draw the same ones for all tokens. A "
    "shuffle, a mean or new positions of one rank's tokens would be wrong unseen."
)


class StepResult(NamedTuple):
    """The loss of a row, and the gradients of some weights; none if they could not be computed."""

    loss: Tensor
    gradients: list[Tensor]

    def of_first(self, count: int) -> StepResult:
        """The same with the gradients of the first weights only."""
        return StepResult(self.loss, self.gradients[:count])


def run_step(
    step: TrialStep, model: nn.Module, given: nn.Module, row: Mapping[str, Any], local: LocalBatch,
    call: Callable[[], Any], agree: Callable[[Mapping[str, object], str], None], weights: Sequence[nn.Parameter],
    as_one: bool,
) -> StepResult | None:  # fmt: skip
    """Computes the loss of a row's local batch and its gradients; None if there is no loss.

    Args:
        given: the model that the host's loss gets.
        call: calls the model with the local batch, if the host does not compute the loss.
        agree: compares facts, with advice if they differ, among the ranks that exchange messages in a backward.
        as_one: see `in_ring`.
    """
    with graph_of_its_own(bool(weights)), _without_reentrant_checkpoints():  # the program may be inside a checkpoint
        # The backward, too: a checkpointed layer that it runs again must see this row's context, not the batch's.
        with batch_context.activate(local.context), in_ring(model, as_one=as_one):
            given.training = model.training
            with nullcontext() if as_one else _called_on_every_rank(model, local):
                loss = loss_of(call()) if step.loss is None else step.loss(given, row, local)
            if weights and isinstance(loss, Tensor):  # else a rank would wait for one that has no backward
                # Functions written in Python are those of the ring's attention.
                reaches = any(isinstance(node, BackwardCFunction) for node in graph_nodes([loss]))
                facts = {"dependence of the loss on the model": "some" if reaches else "none"}
                agree(facts, loss_gradients.TODO)
            gradients = differentiate(loss, model, weights) if isinstance(loss, Tensor) else []
        if not isinstance(loss, Tensor):
            return None
        return StepResult(loss.detach().double(), gradients)


def repeatable_step(
    call: Callable[[], StepResult | None], model: nn.Module, name: str, device: torch.device
) -> StepResult | None:
    """Calls a trial step, again in evaluation mode if it draws random numbers; None: it has no loss, or still draws.

    Args:
        name: of what computes the loss.
    """
    before = _random_state(device)
    step = call()
    draws = not torch.equal(before, _random_state(device))
    if draws:  # not dropout: a router's noise, perhaps
        set_modes(model, [False for _ in model.modules()])
        before = _random_state(device)
        step = call()
    if step is None:
        return None
    if not torch.equal(before, _random_state(device)):
        warn(_RANDOM_LOSS.format(name))
        return None
    if draws:
        warn(_RANDOM_TRAINING.format(introspect.name_of(model)))
    return step


_LEFT_OUT = (
    "Call the model on every rank, also for tokens without labels: the others wait. To skip a batch, look at "
    "num_items_in_batch, and return the model's loss times 0."
)


@contextmanager
def _called_on_every_rank(model: nn.Module, local: LocalBatch) -> Iterator[None]:
    """Refuses a loss that calls a model that attends, or such a part, more often on some ranks than on others.

    Raises:
        RanksDiffer: on every rank, before one of them waits for the others' keys and values.
    """
    ring = local.context.ring
    device = ring.small_device(next(model.parameters()).device)
    running: list[RemovableHandle] = []
    thread = threading.get_ident()

    def agree(use: str) -> None:
        ring.agree({"next call of the model in the loss": use}, device, _LEFT_OUT, doing="tried its step")

    def after(*_: Any) -> None:
        running.pop().remove()

    def before(module: nn.Module, _inputs: Any) -> None:
        if not running and runs_for(thread) and introspect.uses_ring(module):
            agree("made")
            running.append(module.register_forward_hook(after, always_call=True))

    handle = torch.nn.modules.module.register_module_forward_pre_hook(before)
    try:
        yield
        agree("left out")
    finally:
        for one in (handle, *running):
            one.remove()


@contextmanager
def _without_reentrant_checkpoints() -> Iterator[None]:
    """Makes reentrant checkpoints, also a program's own, call their function: their backward refuses autograd.grad."""
    CheckpointFunction.apply = lambda function, _preserve, *inputs: function(*inputs)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del CheckpointFunction.apply  # the inherited one again


class _StandIn(DistributedDataParallel):
    """Calls the model inside. It has no hooks, and of DDP the attributes alone.

    A program may know weights by DDP's names ("module.model..."), or take the model out of its wrapper. DDP itself
    would send buffers, and record a forward for a backward that never comes.
    """

    def __init__(self, original: DistributedDataParallel) -> None:
        nn.Module.__init__(self)
        left_out = {*TORCHS_OWN, "forward", "_compiled_call_impl"}  # the latter call DDP itself
        self.__dict__.update({name: x for name, x in vars(original).items() if name not in left_out})
        self.module = original.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


_StandIn.__name__ = DistributedDataParallel.__name__


def stand_in(model: nn.Module, inner: nn.Module) -> nn.Module:
    """Returns the model that a program's loss gets for the outermost ``model``: ``inner``, or a wrapper around it."""
    if isinstance(model, DistributedDataParallel) and model.module is inner:
        return _StandIn(model)
    return inner


def _random_state(device: torch.device) -> Tensor:
    """The state of the generator that a model draws from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_modes(model: nn.Module, modes: Sequence[bool] | None) -> None:
    """Sets each module's mode, or the whole model for training, without dropout, noise and checkpointing."""
    if modes is None:
        model.train()
    for index, module in enumerate(model.modules()):
        if modes is not None:
            module.__dict__["training"] = modes[index]
        if isinstance(module, _DropoutNd) or neftune.ALPHA in module.__dict__:
            module.__dict__["training"] = False
        if getattr(module, "gradient_checkpointing", False) is True:
            module.__dict__["gradient_checkpointing"] = False  # the row is short: nothing need be computed twice


def watched_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The first, the middle and the last of the trained weights that are small, else the smallest one; then others.

    A gradient may be wrong in one weight alone: that of a router which gets detached states, for example.
    """
    trained = {name: x for name, x in model.named_parameters() if x.requires_grad and x.is_floating_point()}
    sizes = {name: x.numel() for name, x in sorted(trained.items(), key=lambda entry: entry[1].numel())}
    small = [name for name, x in trained.items() if x.numel() <= VALUES] or [*sizes][:1]
    chosen = dict.fromkeys(small[:1] + small[len(small) // 2 :][:1] + small[-1:])
    total = 0
    for name, size in sizes.items():
        total += size
        if total <= OTHERS and trained[name].dtype in (torch.float32, torch.float64):
            chosen.setdefault(name)
    return {name: trained[name] for name in chosen}


def loss_of(output: Any) -> Tensor | None:
    """Finds the loss among a model's outputs."""
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    loss = output.get("loss") if isinstance(output, Mapping) else first
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def differentiate(loss: Tensor, model: nn.Module, weights: Sequence[nn.Parameter]) -> list[Tensor]:
    """The first values of the gradients of ``weights``, which are added to no ``grad``: of this rank, also in FSDP2."""
    if not (weights and loss.requires_grad) or introspect.is_dtensor(loss):  # the check refuses a DTensor
        return []
    with fsdp_units.unreduced(model):
        used = fsdp_units.gathered(model, weights)
        found: Sequence[Tensor | None] = torch.autograd.grad(loss, used, allow_unused=True)
    return [_first_values(x, gradient, loss.device) for x, gradient in zip(used, found, strict=True)]


def _first_values(weight: Any, gradient: Any, device: torch.device) -> Tensor:
    """The first values of a gradient. Ranks that hold parts of the weight (experts, heads) gather those of it."""
    if introspect.is_dtensor(weight):  # by the weight, since all of these ranks must take part
        parts: Any = torch.zeros_like(weight) if gradient is None else gradient
        gradient = parts.full_tensor()
    if gradient is None:
        return torch.zeros(min(weight.numel(), VALUES), dtype=torch.float32, device=device)
    values: Tensor = gradient.flatten()[:VALUES].to(device, torch.float32)
    return values


def distances(got: StepResult, want: StepResult) -> list[float]:
    """The relative distance of the loss and of each gradient. A nan equals a nan in losses only."""
    loss, expected = float(got.loss), float(want.loss)
    same = loss == expected or (math.isnan(loss) and math.isnan(expected))
    apart = [0.0 if same else abs(loss - expected) / (abs(expected) or 1.0)]
    norms = [float(x.norm()) for x in want.gradients]
    least = max(FLOOR * max(norms, default=0.0), 1e-30)
    pairs = zip(got.gradients, want.gradients, norms, strict=True)
    apart += [float((a - b).norm()) / max(norm, least) for a, b, norm in pairs]
    return [math.inf if math.isnan(x) else x for x in apart]
