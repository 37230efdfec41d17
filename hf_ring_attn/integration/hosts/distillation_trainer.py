"""TRL's DistillationTrainer in a ring: a ring generates rows once, and each rank compares the models at its own tokens.

The trainer's loss is a sum over completion tokens, of the last hidden states of student and teacher. A rank gets those
of its tokens [B, T], with the mask that says which predict a completion token, in place of whole completions [B, C].
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn

from ..batch.shard import Sharded, shard_for
from ..batch.whole_outputs import weighed
from ..context import batch_context, introspect
from ..context.local_batch import LocalBatch
from ..context.trial_step import TrialStep
from ..context.whole_batch import IGNORED, LOSS_INPUTS
from ..log import warn
from ..model import ring_calls
from ..patching.changes import Original, Patch, around
from ..patching.modules import Replaced
from . import grpo_trainer, trainer, trainer_facts, trainer_overrides
from . import rings_as_processes as rings
from .gather_for_metrics import gather_sums_per_ring
from .program_methods import stand_in


def start(host: Any) -> None:
    """Refuses what cannot be exact."""
    _refuse(host)
    # It sizes batches of prompts, and calls its sampler.
    stand_in(host, "get_train_dataloader", rings.counting_rings(kind=rings.RingsCounted))
    if host.args.use_vllm:
        warn(grpo_trainer.VLLM, everywhere=False)


def _refuse(host: Any) -> None:
    trainer_facts.refuse_step(host)
    trainer_overrides.refuse_unknown(host, _SEE_SHARES)


_SEE_SHARES = (
    "_generate", "_generate_and_score_completions", "compute_loss", "_compute_loss", "_get_last_hidden_state",
)  # fmt: skip
"""Methods whose override might gather from every rank, count processes, or take a rank's tokens for whole rows."""

# ---- rows ------------------------------------------------------------------------------------------------------------


class _Share:
    """The inputs of both models of a batch: this rank's share."""

    def __init__(self) -> None:
        self.inputs: dict[str, Any] = {}


def _shard(host: Any, model: nn.Module, whole: dict[str, Any]) -> Sharded:
    _refuse(host)
    options = trainer_facts.options_of_batches(host.model)
    trainer_facts.refuse_past_fused_head(host)
    step = TrialStep(_trial_loss, True, "", (type(host).__name__,))
    rows = _rows_of(whole)
    beside = [host.teacher_model]
    sharded = shard_for(rows, trainer_facts.group_of(host), options, model, step=step, beside=beside)
    sharded.context.state(_Share).inputs = sharded.inputs
    return sharded


def _rows_of(whole: dict[str, Any]) -> dict[str, Tensor]:
    """The models' whole inputs of prompts and completions, with images."""
    scored = _scored(whole)
    ids, mask = (torch.cat([whole[f"prompt_{x}"], whole[f"completion_{x}"]], 1) for x in ("ids", "mask"))
    labels = ids.clone()
    labels[:, : -scored.shape[1]] = IGNORED
    labels[:, -scored.shape[1] :][scored == 0] = IGNORED
    rows = {name: whole[name] for name in grpo_trainer.IMAGES if isinstance(whole.get(name), Tensor)}
    return {**rows, "input_ids": ids, "attention_mask": mask, "labels": labels}


def _scored(whole: dict[str, Any]) -> Tensor:
    """[B, C]: not 0 at the completion tokens that the loss compares: the student's own, not those of tools."""
    found: Tensor = whole["completion_mask"] * whole.get("tool_mask", 1)
    return found


def _last_hidden_states(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """[B, T, H] of this rank's tokens, as `_get_last_hidden_state` finds them."""
    inner: Any = model
    backbone = (inner.base_model.model if is_peft_model(inner) else inner).base_model
    mine = {name: x for name, x in inputs.items() if name not in LOSS_INPUTS}
    taken = introspect.parameters_of(backbone, mine)
    found: Tensor = backbone(**{name: x for name, x in mine.items() if name in taken}).last_hidden_state
    return found


def _trial_loss(model: nn.Module, _row: Mapping[str, Any], local: LocalBatch) -> Any:
    """A loss for the self-check, in which each completion token's hidden state has its own weight.

    The trainer's own is a sum over tokens: any function of a token's hidden states is exact if these are.
    """
    sharded, inner = Sharded(*local), introspect.inside(model)
    counted = local.inputs["shift_labels"].ne(IGNORED)[..., None]
    mine = _redirected(model, inner, functools.partial(_last_hidden_states, inner, local.inputs), local.inputs)
    return weighed(sharded.gather(mine * counted).float())


def _redirected(wrapper: nn.Module, inner: nn.Module, call: Callable[[], Any], inputs: Mapping[str, Any]) -> Any:
    """Runs ``call`` inside a forward of ``wrapper`` with these inputs, as TRL does to begin a step of DDP or FSDP."""
    with Replaced(inner, "forward", lambda *_, **__: call()):
        return wrapper(**inputs)


def _prepare_inputs(host: Any, model: nn.Module, inputs: Any) -> Any:
    whole = host._prepare_inputs(inputs)
    return functools.partial(trainer.sharded_step, host, _shard(host, model, whole), whole), whole


@trainer_facts.in_rings
def _score(original: Original, self: Any, inputs: Any) -> Any:
    _refuse(self)
    with rings.rings_as_processes(self):
        args = self.args  # the table of completions has the last generation's: counted by processes so far
        rows = args.per_device_train_batch_size * self.accelerator.num_processes * args.gradient_accumulation_steps
        if any(column.maxlen != rows for column in self._logs.values()):
            self._logs.update({name: deque(column, maxlen=rows) for name, column in self._logs.items()})
        return original(self, inputs)


# ---- the loss --------------------------------------------------------------------------------------------------------


@trainer_facts.in_rings
def _compute_loss(
    original: Original, self: Any, model: nn.Module, inputs: dict[str, Any], *others: Any, **named: Any
) -> Any:
    context = batch_context.current()
    if context is None and torch.is_grad_enabled():
        trainer.warn_of_whole_rows(self)
        return original(self, model, inputs, *others, **named)
    with ExitStack() as stack:
        if context is None:  # an evaluation
            stack.enter_context(trainer.sharded_step(self, _shard(self, model, inputs), inputs))
        gather = functools.partial(gather_sums_per_ring, self.accelerator)
        stack.enter_context(Replaced(self.accelerator, "gather_for_metrics", gather))
        stack.enter_context(Replaced(self, "_forward_redirection", _redirect_share))
        return original(self, model, inputs, *others, **named)


def _redirect_share(wrapper: nn.Module, inner: nn.Module, method: Callable[..., Any], *args: Any, **given: Any) -> Any:
    context = batch_context.current()
    assert context is not None
    inputs = context.state(_Share).inputs
    return _redirected(wrapper, inner, functools.partial(method, *args, **given), inputs)


@around
def _compute_share(
    original: Original, self: Any, unwrapped_student: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any
) -> Any:
    context = batch_context.current()
    if context is None:
        return original(self, unwrapped_student, inputs, num_items_in_batch)
    if num_items_in_batch is not None and not self.args.average_tokens_across_devices:
        num_items_in_batch = num_items_in_batch / context.ring.size  # a rank's part of the ring's
    counted = context.state(_Share).inputs["shift_labels"].ne(IGNORED).long()
    if num_items_in_batch is None:  # the mean over the batch, not over a rank's tokens
        num_items_in_batch = _scored(inputs).sum().clamp(min=1) / context.ring.size
    share = dict.fromkeys(("prompt_ids", "prompt_mask"), counted[:, :0])
    share |= dict.fromkeys(("completion_ids", "completion_mask"), counted)
    loss, *sums = original(self, unwrapped_student, share, num_items_in_batch)
    return ring_calls.with_value_of_batch(loss, context), *sums  # a wrapper of PEFT does not give it that


@around
def _hidden_states(original: Original, self: Any, unwrapped_model: nn.Module, *given: Any, **named: Any) -> Any:
    context = batch_context.current()
    if context is None:
        return original(self, unwrapped_model, *given, **named)
    return _last_hidden_states(unwrapped_model, context.state(_Share).inputs)


DISTILLATION = "trl.trainer.distillation_trainer:DistillationTrainer"
_MODULE = DISTILLATION.partition(":")[0]
_HIDDEN = (
    "(self, unwrapped_model, input_ids, attention_mask, logits_to_keep, pixel_values=, image_grid_thw=, "
    "pixel_attention_mask=, spatial_shapes=, image_sizes=, token_type_ids=, mm_token_type_ids=, image_position_ids=)"
)
_LOSS = "(self, model, inputs, return_outputs=, num_items_in_batch=)"
PATCHES = [
    trainer_overrides.patch_prepare(DISTILLATION, trainer_facts.has_ring, _prepare_inputs),
    Patch(f"{DISTILLATION}._generate_and_score_completions", "(self, inputs)", _score),
    Patch(f"{DISTILLATION}._generate", "(self, prompts)", grpo_trainer.generate),
    Patch(f"{DISTILLATION}.compute_loss", _LOSS, _compute_loss),
    Patch(f"{DISTILLATION}._compute_loss", "(self, unwrapped_student, inputs, num_items_in_batch)", _compute_share),
    Patch(f"{DISTILLATION}._get_last_hidden_state", _HIDDEN, _hidden_states),
    Patch(f"{_MODULE}:gather_object", "(object)", rings.gather_object),
    Patch(f"{_MODULE}:set_seed", "(seed, device_specific=, deterministic=)", rings.set_seed),
    Patch(f"{_MODULE}:shuffle_sequence_dict", "(seq_dict)", rings.shuffle),
]
