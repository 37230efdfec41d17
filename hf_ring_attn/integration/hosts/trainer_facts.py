"""Facts about a trainer in a ring: its group, its options, its loss, and by which of them it is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from ... import errors
from ...comm.ring import LOCAL, Ring, world_size
from ...config import RingConfig
from ..context import introspect, model_record
from ..context.introspect import is_a
from ..context.mesh import ring_enabled, ring_group, warn_without_ring
from ..gradients import weight_parts
from ..log import warn
from ..losses import whole_heads
from ..model import adapters, admission
from ..patching.changes import around
from ..patching.modules import Replaced
from . import liger_arguments, own_methods, parallelism_config, trainer_overrides


def group_of(trainer: Any) -> Any:
    """The process group of the trainer's ring; None if it trains without one."""
    config = getattr(trainer.accelerator, "parallelism_config", None)
    return ring_group(trainer.accelerator) if ring_enabled(config) else None


def has_ring(trainer: Any) -> bool:
    """Returns True if the trainer trains in a ring."""
    return group_of(trainer) is not None


def ring_of(trainer: Any) -> Ring:
    """The ring of a trainer's sharded batches: without a ring each process is a ring of one."""
    if (group := group_of(trainer)) is not None:
        return Ring.of(group)
    if trainer.model.training:
        warn_without_ring()
    return Ring(LOCAL)


def shards_batches(trainer: Any) -> bool:
    """Returns True if batches are sharded: in the trainer's ring; or where options save memory, in a ring of one.

    Warns if these options have no effect.
    """
    if has_ring(trainer):
        return True
    model = trainer.model
    if model is None or not introspect.uses_ring(model):
        return False
    if not (options := model_record.options_of(model).saving_memory):
        return False
    if why := _left_alone(trainer):
        warn(_NO_EFFECT.format(", ".join(options), why), everywhere=False)
    return why is None


def _left_alone(trainer: Any) -> str | None:
    """Why a trainer without a ring is left alone; None if its batches may be sharded in rings of one."""
    if any(is_a(trainer, name) for name in ("GRPOTrainer", "RLOOTrainer", "DistillationTrainer")):
        return f"{type(trainer).__name__} generates rows"
    try:
        trainer_overrides.refuse_unknown(trainer)
    except errors.Refused:  # its numbers are right as it is
        return f"{type(trainer).__name__} is not known to be exact with them"
    if world_size() == 1:
        return None
    if (host := parallelism_config.untested_host(trainer.accelerator)) is not None:
        return f"{host} is not tested with them"
    config = getattr(trainer.accelerator, "parallelism_config", None)
    shares_rows = config is not None and max(config.tp_size, config.sp_size) > 1
    if shares_rows or model_record.latest_record(trainer.model).once(_is_in_parts, trainer.model):
        return "each process computes a part of a row or of a layer"
    return None


def _is_in_parts(model: nn.Module) -> bool:
    return any(map(weight_parts.is_split, model.modules()))


_NO_EFFECT = (
    "these options have no effect here: {}. This run has no ring, and {}. Train in a ring, with DDP or FSDP2, or leave "
    "the options out."
)


def in_rings(run: Callable[..., Any]) -> Callable[[Any], Any]:
    """As `changes.around` for a trainer's method: a trainer without a ring calls the method itself."""

    @around
    def method(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(original, self, *args, **kwargs) if has_ring(self) else original(self, *args, **kwargs)

    return method


# ---- refusals --------------------------------------------------------------------------------------------------------


def refuse_step(trainer: Any) -> None:
    """Refuses a trainer, its arguments and its model before each step: some are set after the start."""
    refuse_trainer(trainer)
    admission.refuse_always(trainer.model)


def refuse_trainer(trainer: Any) -> None:
    """Refuses a trainer by its class and its arguments."""
    trainer_overrides.refuse_unknown(trainer)
    trainer_overrides.check_override(trainer, shards_batches)
    own_methods.wrap_own_methods(trainer, group_of(trainer))
    liger_arguments.leave_loss_to_ring(trainer.args)


def refuse_past_fused_head(trainer: Any) -> None:
    """Refuses a trained head that FSDP2 shards: TRL's fused head reads its weight."""
    if trainer.model.training and adapters.head_read_past_fsdp(trainer.model):
        raise errors.HeadReadPastFsdp(introspect.name_of(trainer.model))


_INSIDE = (
    "it updates weights inside the backward, by the gradient of one rank's tokens. Take an optimizer that updates them "
    "later"
)


def refuse_loss(trainer: Any, options: Any) -> None:
    """Refuses a model or a loss before the first step, when the trainer is complete."""
    admission.refuse_always(trainer.model)
    if trainer.accelerator.has_lomo_optimizer:
        raise errors.UnsupportedOption("LOMO", _INSIDE)
    if gives_whole_rows(trainer):  # to the head, and to whatever computes a loss of its output
        return
    if is_a(trainer, "RewardTrainer"):
        why = "RewardTrainer needs the score of each row's last token, and it is no model of transformers that has one"
        raise errors.UnsupportedModel(introspect.name_of(trainer.model), [why])
    # SFTTrainer has a loss of its own, which smooths no labels.
    makes_logits = options.loss == "sharded" or is_a(trainer, "SFTTrainer")
    if trainer.label_smoother is not None and makes_logits:
        raise errors.LossNotSharded("label smoothing (label_smoothing_factor)", gathers=True)
    if trainer.compute_loss_func is not None:
        raise errors.LossNotSharded("compute_loss_func", gathers=True)
    if not takes_count(trainer):
        name = type(trainer.model).__name__
        raise errors.LossNotSharded(f"the loss of {name}, which takes no num_items_in_batch,", gathers=True)
    if trainer.label_smoother is not None and not counts(trainer):
        name = type(trainer.model).__name__
        todo = f"{name} has accepts_loss_kwargs=False, so the loss is neither a mean nor a sum; set it to 0.0"
        raise errors.UnsupportedOption("label_smoothing_factor", todo)


def takes_count(trainer: Any) -> bool:
    """Returns True if the trainer's model can divide its loss by the count of the whole batch."""
    count = "num_items_in_batch"
    return trainer.model_accepts_loss_kwargs or count in introspect.parameters_of(trainer.model, [count])


def gives_whole_rows(trainer: Any) -> bool:
    """Returns True if the head of the trainer's model gets whole rows: see `whole_heads`."""
    return whole_heads.body_of(trainer.model) is not None and not is_a(trainer, "SFTTrainer")


def counts(trainer: Any) -> bool:
    """Returns True if the trainer divides losses by a count of tokens of all batches of a step; else each is a mean."""
    return bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func)


def options_of_batches(model: nn.Module) -> RingConfig:
    """The options of a trainer's batches. Layout "auto" is "balanced" there, since trainers index no tokens."""
    options = model_record.options_of(model)
    return replace(options, layout="balanced") if options.layout == "auto" else options


def inputs_handed_on(trainer: Any, local: dict[str, Any]) -> Replaced:
    """Makes ``_prepare_inputs`` return ``local`` as it is: a subclass might number each rank's tokens from 0."""
    prepare = trainer._prepare_inputs
    return Replaced(trainer, "_prepare_inputs", lambda inputs: inputs if inputs is local else prepare(inputs))
