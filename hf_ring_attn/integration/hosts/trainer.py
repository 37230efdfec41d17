"""Training steps of transformers.Trainer in a ring: a step gets a sharded batch, and returns the loss of all of it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from ... import errors
from ...comm.ring import Ring, world_size
from ...config import RingConfig
from ..batch import compared_inputs
from ..batch.loss_graph import refuse_past_outputs
from ..batch.shard import SentNumbers, Sharded, shard_for
from ..batch.whole_row_calls import shard_call, whole_row_calls
from ..context import batch_context, introspect, model_record
from ..context.introspect import TOKENS
from ..context.local_batch import LocalBatch
from ..context.mesh import find_ring, ring_enabled, ring_group
from ..context.trial_step import TrialStep
from ..context.whole_batch import LOSS_INPUTS
from ..gradients import fsdp
from ..log import warn
from ..losses import kinds, whole_heads
from ..model import adapters, admission
from ..patching.changes import Patch
from ..patching.modules import Replaced
from . import between_batches, liger_arguments, logged_numbers, own_methods, samplers, trainer_overrides
from .label_smoothing import smoothed, smoothed_in_model
from .preserved_trainer import preserved_trainer
from .rings_as_processes import RingsAsProcesses, RingsCounted, processes_counted, rings_as_processes
from .trainer_overrides import OF_WHOLE_ROWS


def group_of(trainer: Any) -> Any:
    """The process group of the trainer's ring; None if it trains without one."""
    config = getattr(trainer.accelerator, "parallelism_config", None)
    return ring_group(trainer.accelerator) if ring_enabled(config) else None


def shards_batches(trainer: Any) -> bool:
    """Returns True if batches are sharded: in the trainer's ring; or in a ring of one, to save memory, by one process.

    Without a ring several processes are left alone, and so are trainers that generate.
    """
    if group_of(trainer) is not None:
        return True
    model = trainer.model
    generates = any(_is_a(trainer, name) for name in ("GRPOTrainer", "RLOOTrainer", "DistillationTrainer"))
    if model is None or world_size() > 1 or generates:
        return False
    return model_record.options_of(model).saves_memory and introspect.uses_ring(model)


# ---- refusals --------------------------------------------------------------------------------------------------------


def refuse_trainer(trainer: Any) -> None:
    """Refuses a trainer by its class and its arguments."""
    trainer_overrides.refuse_unknown(trainer)
    trainer_overrides.check_override(trainer, shards_batches)
    own_methods.count_rings(trainer, group_of(trainer))
    liger_arguments.leave_loss_to_ring(trainer.args)


def refuse_past_fused_head(trainer: Any) -> None:
    """Refuses a trained head that FSDP2 shards: TRL's fused head reads its weight."""
    if trainer.model.training and adapters.head_read_past_fsdp(trainer.model):
        raise errors.HeadReadPastFsdp(introspect.name_of(trainer.model))


def _refuse_loss(trainer: Any, options: Any) -> None:
    """Refuses a model or a loss before the first step, when the trainer is complete."""
    admission.refuse_always(trainer.model)
    if _gives_whole_rows(trainer):  # to the head, and to whatever computes a loss of its output
        return
    if _is_a(trainer, "RewardTrainer"):
        why = "RewardTrainer needs the score of each row's last token, and it is no model of transformers that has one"
        raise errors.UnsupportedModel(introspect.name_of(trainer.model), [why])
    # SFTTrainer has a loss of its own, which smooths no labels.
    makes_logits = options.loss == "sharded" or _is_a(trainer, "SFTTrainer")
    if trainer.label_smoother is not None and makes_logits:
        raise errors.LossNotSharded("label smoothing (label_smoothing_factor)", gathers=True)
    if trainer.compute_loss_func is not None:
        raise errors.LossNotSharded("compute_loss_func", gathers=True)
    if not _takes_count(trainer):
        name = type(trainer.model).__name__
        raise errors.LossNotSharded(f"the loss of {name}, which takes no num_items_in_batch,", gathers=True)
    if trainer.label_smoother is not None and not _counts(trainer):
        name = type(trainer.model).__name__
        todo = f"{name} has accepts_loss_kwargs=False, so the loss is neither a mean nor a sum; set it to 0.0"
        raise errors.UnsupportedOption("label_smoothing_factor", todo)


def _takes_count(trainer: Any) -> bool:
    """Returns True if the trainer's model can divide its loss by the count of the whole batch."""
    count = "num_items_in_batch"
    return trainer.model_accepts_loss_kwargs or count in introspect.parameters_of(trainer.model, [count])


def _is_a(trainer: Any, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(trainer).__mro__)


def _gives_whole_rows(trainer: Any) -> bool:
    """Returns True if the head of the trainer's model gets whole rows: see `whole_heads`."""
    return whole_heads.body_of(trainer.model) is not None and not _is_a(trainer, "SFTTrainer")


def _counts(trainer: Any) -> bool:
    """Returns True if the trainer divides losses by a count of tokens of all batches of a step; else each is a mean."""
    return bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func)


def options_of_batches(model: nn.Module) -> RingConfig:
    """The options of a trainer's batches. Layout "auto" is "balanced" there, since trainers index no tokens."""
    options = model_record.options_of(model)
    return replace(options, layout="balanced") if options.layout == "auto" else options


# ---- a batch ---------------------------------------------------------------------------------------------------------


def count_over_all(trainer: Any, inputs: dict[str, Any]) -> Any:
    """Trainer's count of the labelled tokens of a batch over all data-parallel ranks."""
    return trainer._get_num_items_in_batch([inputs], trainer.args.device)


def _prepare_inputs(trainer: Any, model: nn.Module, inputs: dict[str, Any]) -> Any:
    whole = trainer._prepare_inputs(inputs)
    if not calls_with_whole_rows(trainer, model, whole):
        try:
            return shard_inputs(trainer, model, whole, True, count_over_all)
        except NEEDS_WHOLE_ROWS as error:
            take_whole_rows(trainer, model, error)
    return functools.partial(whole_row_step, trainer, model, whole), whole


NEEDS_WHOLE_ROWS = (
    errors.GradientDiffers, errors.LossNotSharded, errors.MeanOfOneRank, errors.OtherInputs, errors.PaddingInLoss,
    errors.PooledLoss, errors.PooledOnOneRank, errors.PooledOutput, errors.RanksDiffer, errors.RefusedElsewhere,
    errors.SelfCheckFailed, errors.SelfCheckNotRun, errors.SelfCheckRaised, errors.ShiftedByHand, errors.UnknownOutput,
    errors.UnshardedInput,
)  # fmt: skip
"""What is raised, on every rank, of a loss that a rank cannot compute from its tokens."""
IN_A_FORWARD = (
    errors.OtherInputs, errors.RanksDiffer, errors.RefusedElsewhere, errors.SelfCheckNotRun, errors.SelfCheckRaised,
    errors.UnshardedInput,
)  # fmt: skip
"""Of these what may come inside a forward: under FSDP2 no other one can follow."""

_OF_WHOLE_ROWS: weakref.WeakKeyDictionary[Any, dict[bool, errors.Refused]] = weakref.WeakKeyDictionary()
"""Trainers whose loss needs whole rows, as a self-check found: what it raised in training (True), in evaluation."""


def take_whole_rows(trainer: Any, model: nn.Module, error: errors.Refused) -> None:
    """Lets a trainer's losses be of whole rows from now on, since ``error`` refused those of a rank's tokens.

    Raises:
        Refused: ``error``, if the program chose another loss, or the model has a head of whole rows.
    """
    chosen, is_other = options_of_batches(model).loss, isinstance(error, errors.RanksDiffer) and error.of_batch
    if isinstance(error, errors.RefusedElsewhere):
        is_other = not error.kinds <= {kind.__name__ for kind in NEEDS_WHOLE_ROWS}
    is_stuck = isinstance(error, IN_A_FORWARD) and fsdp.is_sharded(model)
    if chosen != "auto" or group_of(trainer) is None or _gives_whole_rows(trainer) or is_other or is_stuck:
        raise error
    when = "trains" if model.training else "evaluates"
    _OF_WHOLE_ROWS.setdefault(trainer, {})[model.training] = error
    warn(TAKES_WHOLE_ROWS.format(type(trainer).__name__, when, " ".join(str(error).split(". ")[0].split())))


TAKES_WHOLE_ROWS = (
    "{} {} by losses of whole rows from now on, which takes more memory, since one rank's tokens do not give its loss: "
    '{}. RingConfig(loss="gathered") does so without trying; with another loss it is refused.'
)


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
    _refuse_loss(trainer, options)
    step = _trial_step(trainer, trains, count) if has_loss else None
    head, numbers = _gives_whole_rows(trainer), [logged_numbers.digest(trainer)]
    sharded = shard_for(whole, group_of(trainer), options, model, False, step, head=head, numbers=numbers)
    if trains:
        batches = trainer.args.gradient_accumulation_steps * world_size() // sharded.ring.size
        sharded.context.log.rows_a_step = sharded.context.facts.rows * batches
    logged_numbers.compare(trainer, sharded.ring, *sharded.context.state(SentNumbers))
    local = _inputs(trainer, whole, sharded)
    return functools.partial(_step, trainer, model, sharded, local), local


def _inputs(trainer: Any, whole: Any, sharded: Sharded) -> dict[str, Any]:
    """The inputs for the trainer's step, in a new dict."""
    local = dict(sharded.inputs)
    if _counts(trainer):
        local.pop("num_items_in_batch", None)
    return local


def _trial_step(trainer: Any, trains: bool, count: Callable[[Any, dict[str, Any]], Any]) -> TrialStep:
    """Makes the self-check's trial step: the compute_loss of the trainer's class, for another row."""

    def loss(model: nn.Module, row: Mapping[str, Any], local: LocalBatch) -> Any:
        sharded, whole = Sharded(*local), dict(row)
        with preserved_trainer(trainer):
            items = count(trainer, whole)
            group = group_of(trainer) if local.context.ring.size == 1 else None
            if group is not None and items is not None and not trainer.args.average_tokens_across_devices:
                items = items * group.size()  # `_get_num_items_in_batch` gives a rank's part, and this row is whole
            # An override of compute_loss may multiply by the number of processes: whole rows have one for each ring.
            counts = RingsAsProcesses if _gives_whole_rows(trainer) else RingsCounted
            counted = nullcontext() if group is None else rings_as_processes(trainer, counts)
            with counted, trainer.compute_loss_context_manager():
                return trainer.compute_loss(model, _inputs(trainer, whole, sharded), num_items_in_batch=items)

    kind, own = type(trainer), own_methods.set_by_program(trainer)
    functions = (kind.compute_loss, own, trainer.compute_loss_func)
    # By identity: a dataclass has no hash. The model's record must not keep alive what may hold the model.
    key: tuple[Any, ...] = tuple(None if one is None else WeakIdRef(one) for one in (trainer, *functions))
    if own is None and kind.compute_loss.__module__.startswith(("transformers.", "trl.")):
        return TrialStep(loss, trains, "", key)
    # A term may begin at a later step, so a program's own loss is tried again at the steps 1, 2, 4, 8, ...
    return TrialStep(loss, trains, f"{kind.__name__}.compute_loss", (*key, trainer.state.global_step.bit_length()))


def calls_with_whole_rows(trainer: Any, model: nn.Module, whole: Any) -> bool:
    """Returns True if a trainer's loss is of whole rows.

    Its model's options say so, or its class; or the program has a function of outputs, of a model's logits, or a
    compute_loss of a model that takes no count; or its rows have names of their own.
    """
    loss = options_of_batches(model).loss
    smooths = trainer.label_smoother is not None and _is_a(trainer, "SFTTrainer")  # by logits, which others do not need
    is_own = own_methods.is_own(trainer, "compute_loss") and not _takes_count(trainer)
    is_own = is_own or trainer.compute_loss_func is not None or kinds.has_own_function(trainer.model)
    is_of_whole_rows = any(f"{cls.__module__}:{cls.__name__}" in OF_WHOLE_ROWS for cls in type(trainer).__mro__)
    found = _OF_WHOLE_ROWS.get(trainer, {})
    was_found = True in found or model.training in found
    if loss == "gathered" or is_of_whole_rows or was_found or not isinstance(whole, Mapping):
        return True
    if own_methods.steps_by_itself(trainer):  # an evaluation
        return not _gives_whole_rows(trainer)
    if loss == "auto" and (is_own or smooths):
        return not _gives_whole_rows(trainer)
    return any(_is_of_other_rows(name, x) for name, x in whole.items())


def _is_of_other_rows(name: str, x: Any) -> bool:
    """Returns True for tokens under a name of their own, as "chosen_input_ids" or "input_ids_j", and for a dict."""
    is_named = name not in TOKENS and any(one in name for one in TOKENS)
    return isinstance(x, Mapping) or (is_named and isinstance(x, Tensor))


@contextmanager
def whole_row_step(trainer: Any, model: nn.Module, whole: Any) -> Iterator[None]:
    """A step whose batch is whole, as are the outputs of its models: calls are sharded when they are made.

    Raises:
        RanksDiffer: ranks have different batches.
    """
    refuse_trainer(trainer)
    admission.refuse_always(trainer.model)
    ring, options = find_ring(group_of(trainer)), options_of_batches(model)
    batch = whole if isinstance(whole, Mapping) else {"inputs": whole}
    facts = {**compared_inputs.empty_facts(options, batch), **compared_inputs.inputs_of(batch)}
    ring.agree(facts, ring.small_device(trainer.args.device), compared_inputs.advice_for(batch))
    try:
        with prepared(trainer, whole), rings_as_processes(trainer), sharded_calls(trainer, model, True):
            yield
    except KeyError as missing:
        refused = _OF_WHOLE_ROWS.get(trainer, {}).get(model.training)
        if refused is not None and missing.args[0] in LOSS_INPUTS:  # the program's loss is one for a ring
            raise refused from missing
        raise


@contextmanager
def sharded_calls(trainer: Any, model: nn.Module, is_whole: bool = False) -> Iterator[None]:
    """Lets a trainer call its models with whole rows. ``is_whole``: Trainer's own methods see them, too."""
    others = [x for x in vars(trainer).values() if isinstance(x, nn.Module)]  # a teacher, for example
    shard = functools.partial(shard_rows, trainer, fused=False)
    calls = whole_row_calls((model, trainer.model, *others), shard, inside=True)
    with Replaced(trainer, trainer_overrides.BY_CALLS, is_whole), calls:
        yield


def shard_rows(
    host: Any, model: nn.Module, rows: Mapping[str, Any], beside: Sequence[nn.Module] = (), fused: bool = True
) -> Sharded:
    """Shards whole rows for a trainer's model.

    Args:
        beside: other models that will get them. fused: they are called for log-probabilities, else for logits.
    """
    options = options_of_batches(host.model)  # for a teacher, too
    if fused:
        refuse_past_fused_head(host)
    return shard_call(model, rows, group_of(host), options, type(host).__name__, beside, fused, trains=True)


@contextmanager
def _step(trainer: Any, model: nn.Module, sharded: Sharded, local: dict[str, Any]) -> Iterator[Sharded]:
    with sharded, prepared(trainer, local):
        yield sharded


def prepared(trainer: Any, local: dict[str, Any]) -> Replaced:
    """Makes ``_prepare_inputs`` return ``local`` as it is: a subclass might number each rank's tokens from 0."""
    prepare = trainer._prepare_inputs
    return Replaced(trainer, "_prepare_inputs", lambda inputs: inputs if inputs is local else prepare(inputs))


def _count_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patches a method that counts a batch for a sum over all ranks: only the first rank of a ring counts its rows."""

    def count(self: Any, inputs: dict[str, Any]) -> Any:
        group = group_of(self)
        if group is not None and group.rank() > 0 and isinstance(inputs, Mapping):  # a list of samples counts nothing
            inputs = {name: x[:0] if isinstance(x, Tensor) and x.dim() else x for name, x in inputs.items()}
        return original(self, inputs)

    return count


class _Parameters(dict[frozenset[tuple[str, Any]], int]):
    """The numbers of a model's parameters, by the arguments of `num_parameters`."""


def _floating_point_ops(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patches floating_point_ops as `_count_once` does, and counts the parameters once for a model's structure.

    Trainer counts them after every backward while the GPU idles: an adapter's take 13 ms of a slow host
    (recipes/results/2026-11-28-host-of-8k).
    """
    counted = _count_once(original)

    def floating_point_ops(self: Any, inputs: dict[str, Any]) -> Any:
        count, model = getattr(self.model, "num_parameters", None), self.model
        if group_of(self) is None or count is None:
            return counted(self, inputs)
        known = model_record.latest_record(model).state(_Parameters)

        def num_parameters(**options: Any) -> int:
            key = frozenset(options.items())
            if key not in known:
                known[key] = count(**options)
            return known[key]

        with Replaced(model, "num_parameters", num_parameters):
            return counted(self, inputs)

    return floating_point_ops


def _get_num_items_in_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    def _get_num_items_in_batch(self: Any, batch_samples: list[Any], device: torch.device) -> Any:
        group = group_of(self)
        if shards_batches(self):
            refuse_trainer(self)  # methods may have been set on it since
        if group is not None:
            between_batches.average_each_batch(self)
            own_methods.shard_calls(self, sharded_calls, group.size())
        if group is None or self.args.average_tokens_across_devices:
            with processes_counted(self):  # it divides by the ring size
                return original(self, batch_samples, device)
        # transformers 5.17 divides by the ring size and drops the remainder, which is 0 for repeated batches.
        size = group.size()
        count = original(self, list(batch_samples) * size, device)
        return count / size if isinstance(count, Tensor) else count

    return _get_num_items_in_batch


def _compute_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute_loss(
        self: Any,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        context, group = batch_context.current(), group_of(self)
        if context is not None and self.compute_loss_func is None and self.label_smoother is None:
            num_items_in_batch = fsdp.uncast(num_items_in_batch, model)  # else the model computes no loss
        if (context is None and group is None) or num_items_in_batch is None or not _counts(self):
            return original(self, model, inputs, return_outputs, num_items_in_batch)
        # As with `shard`, the mean of the ranks' losses is the loss of the whole batch. A trainer that averages over
        # devices multiplies losses by all ranks: so count and loss are divided by W here.
        # Outside of a batch's context each rank computes whole rows, as the trial step does in a ring of one.
        by_calls, of_rings = (name in vars(self) for name in (trainer_overrides.BY_CALLS, own_methods.OF_RINGS))
        averaged, counts_rings = self.args.average_tokens_across_devices, isinstance(self.accelerator, RingsCounted)
        is_whole = counts_rings and (averaged or of_rings or not by_calls)  # its count, too
        ring_size = 1 if group is None or is_whole else group.size()
        size = 1 if context is None else context.ring.size
        if context is None and self.model.training and not by_calls:
            warn(WHOLE_ROWS.format(type(self).__name__))
        items = num_items_in_batch if averaged else num_items_in_batch * ring_size
        sharded = context is None or not context.whole_head
        with smoothed_in_model(self, context) if context is not None and sharded else smoothed(self, model):
            result = original(self, model, inputs, return_outputs, items / size if sharded else items)
        times = 1 / ring_size if averaged else 1
        if by_calls and context is None:
            refuse_past_outputs(result[0] if return_outputs else result)
        return (result[0] * times, result[1]) if return_outputs else result * times

    return compute_loss


def _training_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patches training_step to return the loss of the ring's rows on each of its ranks, as one process does.

    Trainer adds these up, without those that are nan, and averages over ranks what it logs, but not its `train_loss`.
    """

    def training_step(self: Any, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        group = group_of(self)
        if group is None:
            return original(self, model, inputs, num_items_in_batch)
        call = functools.partial(original, self, model, inputs)
        return Ring.of(group).mean(own_methods.hosts_step(self, call, num_items_in_batch, group.size()))

    return training_step


WHOLE_ROWS = (
    "{} computes a loss outside of its ring: its training_step does not call Trainer's, so every rank computes whole "
    "rows. That is exact, but saves no memory. Override compute_loss instead."
)


TRAINER = "transformers.trainer:Trainer"
PATCHES = [
    trainer_overrides.patch_prepare(TRAINER, shards_batches, _prepare_inputs),
    Patch(f"{TRAINER}._track_num_input_tokens", "(self, inputs)", _count_once),
    Patch(f"{TRAINER}.floating_point_ops", "(self, inputs)", _floating_point_ops),
    Patch(f"{TRAINER}._get_train_sampler", "(self, train_dataset=)", samplers.rings_balanced),
    Patch(f"{TRAINER}._get_num_items_in_batch", "(self, batch_samples, device)", _get_num_items_in_batch),
    Patch(f"{TRAINER}.training_step", "(self, model, inputs, num_items_in_batch=)", _training_step),
    Patch(f"{TRAINER}.compute_loss", "(self, model, inputs, return_outputs=, num_items_in_batch=)", _compute_loss),
]
