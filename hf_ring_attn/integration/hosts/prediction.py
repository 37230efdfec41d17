"""Evaluation and prediction of transformers.Trainer in a ring: batches are sharded, and what it returns is whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_pt_utils import nested_detach

from ... import errors
from ...comm.ring import world_size
from ..batch.shard import Sharded
from ..batch.whole_outputs import NOTHING_SEEN, whole_output
from ..context.introspect import CACHES
from ..context.model_record import SeenOutputs, latest_record
from ..context.trial_step import TrialStep
from ..gradients.mean_loss import mean_loss
from ..losses.head import ChunkedLoss
from ..patching.changes import Original, Patch, around
from . import own_methods, uneven_batches
from .rings_as_processes import RingsAsProcesses
from .trainer import TRAINER, count_over_all, shard_inputs
from .trainer_facts import group_of, has_ring, shards_batches
from .trainer_overrides import SHARDS_CALLS
from .whole_row_steps import of_sharded, whole_row_step


def patch_prediction(host: str, in_ring: Callable[..., Any]) -> Patch:
    """Patches a host's `prediction_step`: where batches are sharded, ``in_ring`` gets it and its arguments."""

    @around
    def prediction_step(
        original: Original, self: Any, model: nn.Module, inputs: Any, prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:  # fmt: skip
        # In a step whose batch stays whole the host's own runs, its parent's too.
        if not shards_batches(self) or vars(self).get(SHARDS_CALLS):
            return original(self, model, inputs, prediction_loss_only, ignore_keys)
        with own_methods.as_ranks(self):
            return in_ring(original, self, model, inputs, prediction_loss_only, ignore_keys)

    signature = "(self, model, inputs, prediction_loss_only, ignore_keys=)"
    return Patch(f"{host}.prediction_step", signature, prediction_step)


def predicting(predict_in_ring: Callable[..., Any]) -> Callable[..., Any]:
    """For `patch_prediction`: a host's own step, if its losses are of whole rows, else ``predict_in_ring``."""

    def step(original: Callable[..., Any], trainer: Any, model: nn.Module, inputs: dict[str, Any], *given: Any) -> Any:
        whole = trainer._prepare_inputs(inputs)
        predicted = of_sharded(trainer, model, whole, lambda: predict_in_ring(trainer, model, whole, *given))
        if predicted is not None:
            return predicted
        with whole_row_step(trainer, model, whole):
            return original(trainer, model, whole, *given)

    return step


def predict_batch(trainer: Any, *given: Any) -> Any:
    """Trainer's prediction step on a sharded batch."""
    return predict(trainer, *given, count=count_over_all, names=trainer.label_names)


@around
def _evaluation_loop(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    with ExitStack() as stack:
        if has_ring(self):
            stack.enter_context(uneven_batches.evened(args[0] if args else kwargs.get("dataloader")))
        stack.enter_context(own_methods.as_ranks(self))
        # Seq2SeqTrainer gathers without dropping samples: each rank of a ring would give its rows again.
        if has_ring(self) and self.gather_function == self.accelerator.gather:
            self.gather_function = RingsAsProcesses(self.accelerator).gather
        if shards_batches(self) and not self.accelerator._models:  # else it is prepared already
            stack.enter_context(_prepared_for_evaluation(self))
        output = original(self, *args, **kwargs)
    _latest.clear()
    if (group := group_of(self)) is not None and output.num_samples is not None:
        rings = world_size() // group.size()
        _latest[output.num_samples] = math.ceil(output.num_samples / (self.args.eval_batch_size * rings))
    return output


_latest: dict[int, int] = {}
"""The steps of the latest evaluation in a ring, by its number of samples, until its speed is computed."""


@around
def _speed_metrics(
    original: Original, split: str, start_time: float, num_samples: Any = None, num_steps: Any = None,
    num_tokens: Any = None,
) -> Any:  # fmt: skip
    """Patches the numbers per second: Trainer takes each process to have evaluated a batch of its own at a step."""
    if split != "train" and num_samples is not None:
        num_steps = _latest.pop(num_samples, num_steps)
    return original(split, start_time, num_samples, num_steps, num_tokens)


@contextmanager
def _prepared_for_evaluation(trainer: Any) -> Iterator[None]:
    """Undoes on exit accelerate's preparation for an evaluation, after which `train` would not wrap the model."""
    model, wrapped, own = trainer.model, trainer.model_wrapped, vars(trainer.model)
    before = {name: own[name] for name in _PREPARED if name in own}
    try:
        yield
    finally:
        if trainer.model is model:  # else FSDP has sharded it, for training too
            trainer.model_wrapped = wrapped
            trainer.accelerator._models.clear()
            for name in _PREPARED:
                own.pop(name, None)
            own.update(before)


_PREPARED = ("_is_accelerate_prepared", "_original_forward", "forward")
"""Attributes that accelerate sets on a model."""


def predict(
    trainer: Any,
    model: nn.Module,
    inputs: dict[str, Any],
    prediction_loss_only: bool,
    ignore_keys: list[str] | None,
    *,
    count: Callable[[Any, dict[str, Any]], Any],
    names: Sequence[str],
    only: str = "",
) -> tuple[Any, Any, Any]:
    """`Trainer.prediction_step` on a sharded batch: loss, and logits and labels of whole sequences in their order.

    Args:
        inputs: the whole batch, prepared by the trainer.
        count: computes num_items_in_batch for the trainer's compute_loss. names: the inputs that are labels.
        only: the one output to return; "" for all.
    """
    has_loss = _has_loss(trainer, inputs, names)
    labels = tuple(inputs[name].detach() for name in names) if has_loss else None
    num_items = count(trainer, inputs) if has_loss else None

    enter, local = shard_inputs(trainer, model, inputs, False, count, has_loss)
    loss = outputs = None
    with torch.no_grad(), trainer.compute_loss_context_manager(), enter() as sharded:
        sharded.context.state(ChunkedLoss).keeps = not prediction_loss_only  # its weights may be freed afterwards
        if not has_loss:
            outputs = model(**local)
        elif prediction_loss_only:
            loss = trainer.compute_loss(model, local, return_outputs=False, num_items_in_batch=num_items)
        else:
            loss, outputs = trainer.compute_loss(model, local, return_outputs=True, num_items_in_batch=num_items)
    if loss is not None:
        loss = mean_loss(loss.detach().mean(), sharded.ring, sharded.context.state(TrialStep).has_one_value)
    if prediction_loss_only:
        return loss, None, None
    left_out = _ignored(trainer) if ignore_keys is None else ignore_keys
    left_out = [*left_out, "loss"] if has_loss else left_out  # else Trainer takes it for a prediction
    logits = _whole_outputs(sharded, model, outputs, left_out, only)
    return loss, logits[0] if len(logits) == 1 else logits, labels[0] if labels and len(labels) == 1 else labels


def _has_loss(trainer: Any, inputs: dict[str, Any], names: Sequence[str]) -> bool:
    """Returns True for a batch with all labels ``names``; without names, if the model or the batch says so."""
    if names:
        return all(inputs.get(name) is not None for name in names)
    return_loss = inputs.get("return_loss")
    return bool(trainer.can_return_loss if return_loss is None else return_loss)


def _ignored(trainer: Any) -> list[str]:
    """The outputs that a trainer takes for no predictions, if its caller names none."""
    config = getattr(trainer.model, "config", None)
    return [*(getattr(config, "keys_to_ignore_at_inference", None) or ()), *CACHES]


def _whole_outputs(
    sharded: Sharded, model: nn.Module, outputs: Any, left_out: Sequence[str], only: str
) -> tuple[Any, ...]:
    """The outputs of a call, gathered to whole sequences. ``only``: the one that is asked for; "": all."""
    if not isinstance(outputs, dict):
        raise errors.UnknownOutput("outputs", type(outputs).__name__, sharded.layout.local_length)
    wanted = [name for name in outputs if name not in left_out and only in ("", name)]
    seen = latest_record(model).state(SeenOutputs)
    return tuple(whole_sequences(sharded, name, outputs[name], seen) for name in wanted)


def whole_sequences(sharded: Sharded, name: str, x: Any, seen: SeenOutputs = NOTHING_SEEN) -> Any:
    """Gathers a model's output to whole sequences. ``seen``: what the self-check saw of outputs."""
    whole = whole_output(x, sharded, seen, name)
    if whole is None:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise errors.UnknownOutput(name, got, sharded.layout.local_length)
    return nested_detach(whole)  # type: ignore[no-untyped-call]


_SPEED = "(split, start_time, num_samples=, num_steps=, num_tokens=)"
_EVALUATION = "(self, dataloader, description, prediction_loss_only=, ignore_keys=, metric_key_prefix=)"
PATCHES = [
    Patch(f"{TRAINER}.evaluation_loop", _EVALUATION, _evaluation_loop),
    Patch("transformers.trainer:speed_metrics", _SPEED, _speed_metrics),
    patch_prediction(TRAINER, predicting(predict_batch)),
]
