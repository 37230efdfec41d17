"""Training steps of transformers.Trainer in a ring: a step gets a sharded batch, and returns the loss of all of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from ...comm.ring import Ring, world_size
from ..batch.loss_graph import refuse_past_outputs
from ..batch.shard import SentNumbers, Sharded, shard_for
from ..context import batch_context, model_record, ring_random
from ..context.local_batch import CACHE, LocalBatch, MadeInputs
from ..context.trial_step import TrialStep
from ..gradients import fsdp
from ..log import warn
from ..patching.changes import Original, Patch, around
from ..patching.modules import Replaced
from . import between_batches, logged_numbers, own_methods, program_methods, samplers, trainer_overrides
from .label_smoothing import smoothed, smoothed_in_model
from .preserved_trainer import preserved_trainer, restoring
from .rings_as_processes import RingsAsProcesses, RingsCounted, processes_counted, rings_as_processes
from .trainer_facts import (
    counts,
    gives_whole_rows,
    group_of,
    has_ring,
    in_rings,
    inputs_handed_on,
    options_of_batches,
    refuse_loss,
    refuse_trainer,
    ring_of,
    shards_batches,
)
from .whole_row_steps import NEEDS_WHOLE_ROWS, of_sharded, sharded_calls, take_whole_rows, whole_row_step

# ---- a batch ---------------------------------------------------------------------------------------------------------


def count_over_all(trainer: Any, inputs: dict[str, Any]) -> Any:
    """Trainer's count of the labelled tokens of a batch over all data-parallel ranks."""
    return trainer._get_num_items_in_batch([inputs], trainer.args.device)


def _prepare_inputs(trainer: Any, model: nn.Module, inputs: dict[str, Any]) -> Any:
    whole = trainer._prepare_inputs(inputs)
    sharded = of_sharded(trainer, model, whole, lambda: shard_inputs(trainer, model, whole, True, count_over_all))
    return sharded or (functools.partial(whole_row_step, trainer, model, whole), whole)


def shard_inputs(
    trainer: Any, model: nn.Module, whole: Any, trains: bool, count: Callable[[Any, dict[str, Any]], Any],
    has_loss: bool = True,
) -> tuple[Callable[[], Any], dict[str, Any]]:  # fmt: skip
    """Shards a whole batch that the trainer has prepared. Returns the context of its step, and a dict of inputs.

    Args:
        trains: it is a training step. count: computes the num_items_in_batch of a batch, for the trial step.
        has_loss: the step computes a loss.
    """
    refuse_trainer(trainer)  # again: with model_init the ring was not known at the start
    options = options_of_batches(model)
    refuse_loss(trainer, options)
    step = _trial_step(trainer, trains, count) if has_loss else None
    head, numbers = gives_whole_rows(trainer), [logged_numbers.digest(trainer)]
    sharded = shard_for(whole, ring_of(trainer), options, model, False, step, head=head, numbers=numbers)
    if trains:
        batches = trainer.args.gradient_accumulation_steps * world_size() // sharded.ring.size
        sharded.context.log.rows_a_step = sharded.context.facts.rows * batches
    logged_numbers.compare(trainer, sharded.ring, *sharded.context.state(SentNumbers))
    local = _inputs(trainer, sharded)
    return functools.partial(sharded_step, trainer, sharded, local), local


def _inputs(trainer: Any, sharded: Sharded) -> dict[str, Any]:
    """The inputs for the trainer's step, in a new dict."""
    local = dict(sharded.inputs)
    if CACHE in sharded.context.state(MadeInputs):  # calls get it by themselves, and a program may give it, too
        del local[CACHE]
    if counts(trainer):
        local.pop("num_items_in_batch", None)
    return local


def _trial_step(trainer: Any, trains: bool, count: Callable[[Any, dict[str, Any]], Any]) -> TrialStep:
    """Makes the self-check's trial step: the compute_loss of the trainer's class, for another row."""

    def loss(model: nn.Module, row: Mapping[str, Any], local: LocalBatch) -> Any:
        sharded, whole = Sharded(*local), dict(row)
        with preserved_trainer(trainer), own_methods.as_ranks(trainer):
            items = count(trainer, whole)
            group = group_of(trainer) if local.context.ring.size == 1 else None
            # An override of compute_loss may multiply by the number of processes: whole rows have one for each ring.
            counts = RingsAsProcesses if gives_whole_rows(trainer) else RingsCounted
            counted = nullcontext() if group is None else rings_as_processes(trainer, counts)
            with counted, trainer.compute_loss_context_manager():
                return trainer.compute_loss(model, _inputs(trainer, sharded), num_items_in_batch=items)

    kind, own = type(trainer), program_methods.set_on(trainer, "compute_loss")
    functions = (kind.compute_loss, own, trainer.compute_loss_func)
    # By identity, since a dataclass has no hash; weakly, since these may hold the model, whose record keeps the key.
    key: tuple[Any, ...] = tuple(None if one is None else WeakIdRef(one) for one in (trainer, *functions))
    if not program_methods.is_own(trainer, "compute_loss"):
        return TrialStep(loss, trains, "", key)
    # A term may begin at a later step, so a program's own loss is tried again at the steps 1, 2, 4, 8, ...
    return TrialStep(loss, trains, f"{kind.__name__}.compute_loss", (*key, trainer.state.global_step.bit_length()))


@contextmanager
def sharded_step(trainer: Any, sharded: Sharded, inputs: dict[str, Any]) -> Iterator[Sharded]:
    """A step of a trainer on a sharded batch, with ``inputs`` that it has prepared already."""
    with sharded, inputs_handed_on(trainer, inputs):
        yield sharded


@around
def _count_once(original: Original, self: Any, inputs: dict[str, Any]) -> Any:
    """Patches a method that counts a batch for a sum over all ranks: only the first rank of a ring counts its rows."""
    group = group_of(self)
    if group is not None and group.rank() > 0 and isinstance(inputs, Mapping):  # a list of samples counts nothing
        inputs = {name: x[:0] if isinstance(x, Tensor) and x.dim() else x for name, x in inputs.items()}
    return original(self, inputs)


class _Parameters(dict[frozenset[tuple[str, Any]], int]):
    """The numbers of a model's parameters, by the arguments of `num_parameters`."""


@around
def _floating_point_ops(original: Original, self: Any, inputs: dict[str, Any]) -> Any:
    """Patches floating_point_ops as `_count_once` does, and counts the parameters once for a model's structure.

    Trainer counts them after every backward while the GPU idles: an adapter's take 13 ms of a slow host
    (recipes/results/2026-11-28-host-of-8k).
    """
    counted, model, count = _count_once(original), self.model, getattr(self.model, "num_parameters", None)
    if not has_ring(self) or count is None:
        return counted(self, inputs)
    known = model_record.latest_record(model).state(_Parameters)

    def num_parameters(**options: Any) -> int:
        key = frozenset(options.items())
        if key not in known:
            known[key] = count(**options)
        return known[key]

    with Replaced(model, "num_parameters", num_parameters):
        return counted(self, inputs)


@around
def _get_num_items_in_batch(original: Original, self: Any, batch_samples: list[Any], device: torch.device) -> Any:
    group = group_of(self)
    if shards_batches(self):
        refuse_trainer(self)  # methods may have been set on it since
    if group is not None:
        between_batches.average_each_batch(self)
        own_methods.shard_calls(self, sharded_calls)
    averaged = group is None or self.args.average_tokens_across_devices
    # transformers 5.17 divides by the ring size and drops the remainder, which is 0 for repeated batches.
    samples = batch_samples if averaged else list(batch_samples) * group.size()
    with processes_counted(self):
        count = original(self, samples, device)
    if averaged:
        return count
    is_part = isinstance(count, Tensor) and own_methods.LOSS_OF_RANK in vars(self)
    return count / group.size() if is_part else count


@around
def _compute_loss(
    original: Original, self: Any, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:  # fmt: skip
    context, group = batch_context.current(), group_of(self)
    shards_calls, is_part = trainer_overrides.SHARDS_CALLS in vars(self), own_methods.LOSS_OF_RANK in vars(self)
    by_model = self.compute_loss_func is None and self.label_smoother is None
    reads_loss = shards_calls and context is None and by_model and not return_outputs
    compute = functools.partial(_loss_alone, original) if reads_loss else original
    if context is not None and by_model:
        num_items_in_batch = fsdp.uncast(num_items_in_batch, model)  # else the model computes no loss
    if (context is None and group is None) or num_items_in_batch is None or not counts(self):
        return compute(self, model, inputs, return_outputs, num_items_in_batch)
    # As with `shard`, the mean of the ranks' losses is the loss of the whole batch.
    # Outside of a batch's context each rank computes whole rows, as the trial step does in a ring of one.
    if context is None and self.model.training and not shards_calls:
        warn_of_whole_rows(self)
    of_tokens = None if context is None or context.whole_head else context
    parts = 1 if of_tokens is None or is_part else of_tokens.ring.size
    with smoothed(self, model) if of_tokens is None else smoothed_in_model(self, of_tokens):
        result = compute(self, model, inputs, return_outputs, num_items_in_batch / parts)
    # A trainer that averages over devices multiplies losses by their number, here W for each ring.
    multiplied = self.args.average_tokens_across_devices and not isinstance(self.accelerator, RingsCounted)
    times = 1 / group.size() if multiplied and group is not None else 1
    if shards_calls and context is None:
        refuse_past_outputs(result[0] if return_outputs else result)
    return (result[0] * times, result[1]) if return_outputs else result * times


def _loss_alone(original: Callable[..., Any], trainer: Any, *given: Any) -> Any:
    """Calls Trainer's compute_loss, of whose model only the loss is wanted."""
    with Replaced(trainer, trainer_overrides.LOSS_ALONE, True):
        return original(trainer, *given)


@in_rings
def _training_step(
    original: Original, self: Any, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
) -> Any:
    """The method that returns the loss of the ring's rows on each of its ranks, as one process does.

    Trainer adds these up, without those that are nan, and averages over ranks what it logs, but not its `train_loss`.
    """
    call = functools.partial(original, self, model, inputs, num_items_in_batch)
    is_own = program_methods.is_own(self, "compute_loss")
    restores = [restoring(self), ring_random.Draws().restore] if is_own else []
    try:
        loss = own_methods.hosts_step(self, call)
    except NEEDS_WHOLE_ROWS as error:  # the self-check's rows had no such difference
        if not (is_own and error.in_loss):
            raise
        take_whole_rows(self, model, error)
        for restore in restores:
            restore()
        loss = own_methods.hosts_step(self, call)
    return Ring.of(group_of(self)).mean(loss)


def warn_of_whole_rows(trainer: Any) -> None:
    """Warns once of a trainer's loss outside of its ring."""
    warn(_WHOLE_ROWS.format(type(trainer).__name__))


_WHOLE_ROWS = (
    "{} computes a loss outside of its ring: its training_step does not call Trainer's, so every rank computes whole "
    "rows. That is exact, but saves no memory. Override compute_loss instead."
)


TRAINER = "transformers.trainer:Trainer"
PATCHES = [
    trainer_overrides.patch_prepare(TRAINER, shards_batches, _prepare_inputs),
    Patch(f"{TRAINER}.__reduce_ex__", "(self, protocol)", program_methods.without_stand_ins),
    Patch(f"{TRAINER}._track_num_input_tokens", "(self, inputs)", _count_once),
    Patch(f"{TRAINER}.floating_point_ops", "(self, inputs)", _floating_point_ops),
    Patch(f"{TRAINER}._get_train_sampler", "(self, train_dataset=)", samplers.rings_balanced),
    Patch(f"{TRAINER}._get_num_items_in_batch", "(self, batch_samples, device)", _get_num_items_in_batch),
    Patch(f"{TRAINER}.training_step", "(self, model, inputs, num_items_in_batch=)", _training_step),
    Patch(f"{TRAINER}.compute_loss", "(self, model, inputs, return_outputs=, num_items_in_batch=)", _compute_loss),
]
