"""Shards a batch by name, and reduces losses and gathers sequences of sharded batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ... import errors
from ...arguments import check_type
from ...attention.op import lacks_backward
from ...comm.first_order import inside_transforms
from ...comm.ring import Ring
from ...config import RingConfig
from ...layers.collectives import gather_sequence
from ...sharding.layout import Layout, note_balanced
from ...traffic import interruption_guard
from ..context import batch_context, model_record, ring_random, shared_kv
from ..context.batch_context import BatchContext
from ..context.introspect import TOKENS, configs_of, name_of
from ..context.local_batch import cut_batch
from ..context.mesh import find_ring
from ..context.model_record import Visits
from ..context.trial_step import TrialStep
from ..context.whole_batch import LOSS_INPUTS, WholeBatch, read_batch, tokens_of
from ..gradients import beside_weights, fsdp, replicas
from ..gradients.mean_loss import mean_loss
from ..losses import whole_heads
from ..losses.local_logits import held
from ..model import call_inputs, vocabulary
from ..model.call_inputs import TrackedInputs, track
from ..selfcheck import row
from . import compared_inputs
from .binding import admit, ring_context
from .rows import RowReductions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


_DOING = "compared its batch with the other ranks"
_NO_BACKWARD = (
    "This rank ran no backward since its last forward. If other ranks ran theirs, they wait for this one there: skip a "
    "backward on all ranks of a ring, or on none."
)


@dataclass(eq=False)
class Sharded(RowReductions):
    """This rank's share of a batch, as `shard` returns it, and reductions along its whole rows.

    Attributes:
        inputs: the model's inputs: ``model(**sharded.inputs)``.
        ring: the ring that shares the batch.
        layout: the rank of each token.
    """

    inputs: dict[str, Any]
    context: BatchContext
    _entered: list[AbstractContextManager[object]] = field(default_factory=list, repr=False)

    @property
    def ring(self) -> Ring:
        return self.context.ring

    @property
    def layout(self) -> Layout:
        return self.context.layout

    @property
    def positions(self) -> Tensor:
        """[T] int64: the place in the row of each token of ``inputs``, in any layout; from S on they are padding.

        With images these are the places in the inputs of the text model.
        """
        return self.layout.positions()

    def __enter__(self) -> Sharded:
        """Activates the ring. The context may be entered again inside itself."""
        again = bool(self._entered)
        entered = batch_context.activate(self.context) if again else ring_context(self.context)
        entered.__enter__()
        self._entered.append(entered)
        return self

    def __exit__(self, *error: Any) -> None:
        assert self._entered, "left a context that was not entered"
        self._entered.pop().__exit__(*error)

    def reduce(self, loss: Tensor) -> Tensor:
        """Averages a loss over the ranks, detached: the whole batch's loss, the same on every rank.

        Args:
            loss: ``out.loss``, or a sum of losses of this rank's tokens divided by ``inputs["num_items_in_batch"]``.
        """
        self._refuse_unused("reduce")
        return mean_loss(held(loss).detach(), self.ring)

    def gather(self, x: Tensor) -> Tensor:
        """Gathers whole sequences, in their original order, from every rank's share.

        Args:
            x: [B, T, ...], such as ``out.logits``.

        Returns:
            [B, S, ...] without the ring's padding, the same on every rank. It is differentiable. If every rank computes
            the same loss from it, the mean of the gradients over ranks is that of one process.
        """
        if x.dim() < 2 or x.shape[1] != self.layout.local_length:
            raise errors.BadShape("x", tuple(x.shape), f"it must be [B, {self.layout.local_length}, ...]")
        return gather_sequence(held(x), self.ring, self.layout)

    def reduce_gradients(self, model: nn.Module | nn.Parameter) -> None:
        """Averages gradients over the ring, in float32, for a model (or one weight) that neither DDP nor FSDP wraps.

        Call it after backward, before optimizer.step(). It leaves gradients that the end of the backward averaged.

        Raises:
            GradientsChanged: weights changed since the forward; or ranks scaled a gradient by different factors (only
                the smallest weight's gradient is checked).
            RefusedElsewhere: weights changed since the forward on another rank.
        """
        check_type("model", model, (nn.Module, Tensor), "a torch.nn.Module, or a weight")
        self._refuse_unused("reduce_gradients")
        if self.ring.size > 1:
            replicas.average_gradients(model, self.context)

    def _refuse_unused(self, method: str) -> None:
        if self.ring.size > 1 and not self.context.log.entered:
            raise errors.NotEntered(f"sharded.{method}() was called")


class SentNumbers(list[list[int]]):
    """The numbers that hosts of all ranks sent with a batch: for each number, those of the ranks."""


def shard(
    batch: Mapping[str, Any],
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    config: RingConfig | None = None,
    model: nn.Module | None = None,
) -> Sharded:
    """Shards a batch: returns this rank's share, which is also the context for the model's forward.

    >>> sharded = hf_ring_attn.shard(batch)
    >>> with sharded:
    ...     out = model(**sharded.inputs)
    >>> out.loss.backward()                       # DDP or FSDP averages gradients; else sharded.reduce_gradients(model)
    >>> print(out.loss)                           # of the whole batch, on every rank

    Tokens: every entry of shape [B, S, ...] is padded to a multiple of 2 * W tokens and cut to this rank's T tokens, in
    the zigzag layout. With RingConfig(layout="balanced") ranks hold other chunks if the zigzag is uneven;
    `Sharded.positions` has them. Documents begin where position_ids restart, if there is no attention_mask.

    Loss: labels are shifted on the whole row. num_items_in_batch is the count of the whole batch (yours, or that of its
    labelled tokens) divided by W. Divide the sum of this rank's losses by it: the mean of the ranks' quotients is the
    loss, and the mean of their gradients its gradient. out.loss already has the value of the whole batch on every rank,
    and the gradient of this rank's quotient. num_items_in_batch is a tensor if a ``model`` is given that FSDP2 does not
    shard; else a number.

    Heads of whole rows: if ``model`` classifies rows, or gets labels of token classes or masked words, its layers below
    the head compute sharded rows, and the head and its loss get whole ones. Inputs, labels and outputs are then whole.

    Images and sound: the batch is sharded at the input of the inner text model, in the zigzag layout. The layers before
    it compute whole rows, with the same random numbers on every rank.

    Args:
        batch: the model's whole inputs: input_ids or inputs_embeds, and any of labels, shift_labels, attention_mask
            [B, S], position_ids [B, S], num_items_in_batch (of all batches of a step) ... The same on every rank of
            the ring; it is not changed.
        group: the process group of the ring, or a mesh of one axis; None: accelerate's "cp" axis, else the world.
        config: options; None: those set on the model (`configure`), else the defaults.
        model: the model that will run. Needed if it is compiled as a whole, or if its head gets whole rows.

    Raises:
        BadOption: config has loss="gathered", which is for trainers, or a model was passed as the group.
        BadBatch: this rank's batch cannot be sharded exactly.
        UnevenLength: with RingConfig(pad=False), if the row would need padding.
        RefusedElsewhere: another rank's batch cannot be sharded.
        RanksDiffer: on every rank, if the ranks hold different batches.
        LeftHalfway: an error interrupted an earlier attention of this ring.
    """
    if isinstance(config, RingConfig) and config.loss == "gathered":
        raise errors.BadOption("loss", config.loss, _GATHERS)
    if isinstance(group, nn.Module):
        raise errors.BadOption("group", name_of(group), _BY_NAME)
    sharded = shard_for(batch, group, config, model, head=whole_heads.needs_whole_rows(model, batch))
    counted = track(sharded.inputs, LOSS_INPUTS)  # trainers count by themselves
    sharded.context.state(TrackedInputs).update(counted)
    return sharded


_GATHERS = (
    "'auto', 'chunked' or 'sharded' for shard, where a model returns what it computes of this rank's tokens. For "
    "outputs of whole rows call it in hf_ring_attn.whole_rows(model)"
)


_BY_NAME = "a process group. Pass a model by the argument's name: hf_ring_attn.shard(batch, model=model)"


def _encoder_decoder(model: nn.Module | None) -> errors.Refused | None:
    """The refusal of an encoder-decoder: a batch of one is refused for its labels or inputs, which are not at fault."""
    if model is None:
        return None
    kinds = [config.model_type for config in configs_of(model) if getattr(config, "is_encoder_decoder", False)]
    return errors.EncoderDecoder(name_of(model), kinds[0]) if kinds else None


def shard_for(
    batch: Mapping[str, Any],
    group: ProcessGroup | DeviceMesh | Ring | None,
    config: RingConfig | None,
    model: nn.Module | None,
    gathers_logits: bool = False,
    step: TrialStep | None = None,
    beside: Sequence[nn.Module] = (),
    head: bool = False,
    numbers: Sequence[int] = (),
) -> Sharded:
    """`shard`, for hosts.

    Args:
        gathers_logits: the model gets no labels; the caller computes the gathered loss.
        step: the caller's loss, for the self-check; None: the model's. beside: other models that will get the batch.
        head: the model's head gets whole rows (`whole_heads`).
        numbers: integers for all ranks of the ring, which get them as the state `SentNumbers` of the batch.
    """
    check_type("batch", batch, Mapping, "a dict of the model's inputs")
    check_type("model", model, (nn.Module, type(None)), "a torch.nn.Module, or None")
    check_type("config", config, (RingConfig, type(None)), "a RingConfig, or None")
    ring = find_ring(group)
    _check_ring(ring, model)
    options = config or (model_record.DEFAULT if model is None else model_record.options_of(model))
    read = _read(batch, ring, options, model, head)
    gradients, compare = beside_weights.start_comparison(ring, read.device)
    extremes = [0, 0] if read.refusal or ring.size == 1 else vocabulary.extremes_of(batch)
    sent = [shared_kv.compiled_here(), *extremes, *gradients, *numbers]
    advice = compared_inputs.advice_for(batch)
    agree = ring.start_agreement(read.facts, read.device, advice, read.refusal, sent, doing=_DOING)
    visited = Visits()
    if read.whole is not None:  # while the message travels
        if model is not None:
            visited.update([model_record.visit(model)])
        sharded = Sharded(*cut_batch(batch, read.whole, ring, options, model is None or fsdp.is_sharded(model)))
    try:
        compiled, least, most, *everyone = agree()
        compare(everyone[: beside_weights.COLUMNS])
    except (errors.PeerLost, errors.RanksDiffer) as error:
        _tell_of_program(error)
        raise
    assert read.whole is not None  # else a rank's refusal was raised
    if any(compiled):
        shared_kv.go_by_bits()

    context = sharded.context
    context.state(vocabulary.TokenIds).least, context.state(vocabulary.TokenIds).most = least[0], most[0]
    context.state(SentNumbers)[:] = everyone[beside_weights.COLUMNS :]
    context.gathers_logits = gathers_logits
    if step is not None:
        vars(context.state(TrialStep)).update(vars(step))
    context.learn(explicit=config is not None)
    labels = () if gathers_logits or head else LOSS_INPUTS[:2]
    context.state(TrackedInputs).update(track(sharded.inputs, (*call_inputs.PLACES, *TOKENS, *labels)))
    _note_batch(context, read.device)
    context.state(row.SelfCheckState).sample = row.Sample.of(batch, read.whole, context)
    if model is not None:
        _admit_all([model, *beside], context, visited)
    return sharded


def _check_ring(ring: Ring, model: nn.Module | None) -> None:
    """Refuses a ring whose ranks cannot compare their batches, or whose last attention did not end."""
    if ring.size > 1 and inside_transforms():  # else the comparison would fail at what it cannot read
        use = "a batch was sharded" if model is None else f"{name_of(model)} was called in a ring"
        raise errors.UnsupportedVmap(use)
    guard = interruption_guard(ring)
    guard.check_backwards(ring)
    guard.check()  # else the comparison would be taken for the rest of that attention


_SHARDED = (
    "the batch holds tokens that shard() returned: they are this rank's share, not whole rows. Call the model with "
    "them, model(**sharded.inputs) inside `with sharded:`; or shard the whole batch again."
)


@dataclass(eq=False)
class _Reading:
    """A rank's batch before the ranks compare: ``whole``, or why it is refused.

    Attributes:
        facts: what all ranks must have alike. device: of their messages.
    """

    facts: dict[str, Any]
    device: torch.device
    whole: WholeBatch | None = None
    refusal: errors.Refused | None = None


def _read(batch: Mapping[str, Any], ring: Ring, options: RingConfig, model: nn.Module | None, head: bool) -> _Reading:
    """Reads a rank's batch. A refusal is kept for all ranks to hear of it."""
    read = _Reading(compared_inputs.empty_facts(options, batch), ring.small_device())
    try:
        tokens = tokens_of(batch)
        read.device = ring.small_device(tokens.device)
        read.facts.update(rows=tokens.shape[0], tokens=tokens.shape[1])
        if ring.size > 1:
            call_inputs.refuse_outside([tokens], errors.BadBatch(_SHARDED))
            read.facts.update(compared_inputs.inputs_of(batch))
        read.whole = read_batch(batch, tokens, Layout(tokens.shape[1], ring.size, ring.rank), options, head=head)
        read.facts["layout"] = read.whole.layout.owners
    except errors.Refused as error:
        read.refusal = _encoder_decoder(model) or error
    return read


def _note_batch(context: BatchContext, device: torch.device) -> None:
    """Notes a batch that the ranks agree on, where other rooms look for it, and gives its text model a seed."""
    ring, layout = context.ring, context.layout
    if ring.size > 1:
        beside_weights.watch()
    batch_context.note_sharded(context)
    if layout.owners:
        note_balanced(context, ring.size)
    if context.text is not None and ring.size > 1:
        seeds = ring.numbers(ring_random.next_seed(), device, "sent its seed")
        context.text.random = ring_random.RingRandomness(seeds[0], ring.rank)


def _admit_all(models: Iterable[nn.Module], context: BatchContext, visited: Visits) -> None:
    """Admits the models that will get a batch. ``visited``: what is known of them now."""
    context.state(Visits).update(visited)
    for model in models:
        admit(model, context)
        context.log.named.add(model)
    context.state(Visits).clear()  # the models may change until they are called


def _tell_of_program(error: errors.PeerLost | errors.RanksDiffer) -> None:
    """Says of a failed comparison of batches what the program may have done."""
    if isinstance(error, errors.RanksDiffer):
        error.of_program = True
    if lacks_backward():
        error.add_note(_NO_BACKWARD)
