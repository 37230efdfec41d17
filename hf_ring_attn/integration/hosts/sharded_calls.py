"""TRL's trainers whose loss needs logits of whole rows: ORPO, CPO (SimPO, AlphaPO) and TPO.

They call the model once a batch, with rows that they make of it. So a call is sharded when it is made: each rank
computes its own tokens, and gets the output of all tokens. The trainer's loss runs as it was written, on whole rows and
on every rank, so the mean of gradients over ranks is right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from ... import errors
from ..batch.shard import Sharded, shard_for
from ..context import batch_context, introspect
from ..context.local_batch import LocalBatch
from ..context.trial_step import TrialStep
from ..model import admission
from . import prediction, trainer, trainer_overrides
from .whole_outputs import whole_sequences
from .whole_row_calls import own_share, weighed


def _prepare_inputs(host: Any, model: nn.Module, inputs: dict[str, Any]) -> Any:
    whole = host._prepare_inputs(inputs)
    return functools.partial(_step, host, model, whole), whole


@contextmanager
def _step(host: Any, model: nn.Module, whole: dict[str, Any]) -> Iterator[None]:
    trainer.refuse_trainer(host)
    admission.refuse_always(host.model)
    with trainer.prepared(host, whole), _sharded_calls(host, model):
        yield


@contextmanager
def _sharded_calls(host: Any, model: nn.Module) -> Iterator[None]:
    """Shards the rows of each call of ``model``, and gathers its output.

    The context of a call stays until the end of the step: with checkpoints the backward computes its layers again.
    """
    options, group, step = trainer.options_of_batches(model), trainer.group_of(host), _logits_of_rows(host)
    running: list[tuple[nn.Module, Sharded | None]] = []

    def before(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if running:  # inside a wrapper, or in the self-check
            return None
        names = introspect.parameters_of(introspect.loss_model_of(called) or called)  # PEFT's are *args, **kwargs
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        rows = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        running.append((called, None))
        sharded = shard_for(rows, group, options, model, gathers_logits=True, step=step)
        running[:] = [(called, sharded)]
        contexts.enter_context(sharded)
        return (), own_share(called, given, sharded.inputs)

    def after(called: nn.Module, _args: Any, _kwargs: Any, output: Any) -> Any:
        outer, sharded = running[0] if running else (None, None)
        if outer is not called or sharded is None or batch_context.current() is not sharded.context:
            return None
        running.clear()
        return None if output is None else _whole(output, sharded)  # None: an error ended the call

    with ExitStack() as contexts, ExitStack() as hooks:
        for one in {id(one): one for one in (model, host.model)}.values():
            hooks.enter_context(one.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            hooks.enter_context(one.register_forward_hook(after, with_kwargs=True, always_call=True))
        yield


def _whole(output: Any, sharded: Sharded) -> Any:
    """The output with the entries of all tokens, in the order of the row."""
    if not isinstance(output, Mapping) or output.get("logits") is None:
        raise errors.NoLogits()
    found = {name: whole_sequences(sharded, name, x) for name, x in output.items() if name not in introspect.CACHES}
    return type(output)(**found)


def _logits_of_rows(host: Any) -> TrialStep:
    """The step of the self-check: a loss in which the logits of each token have their own weight."""

    def loss(model: nn.Module, _row: Mapping[str, Any], local: LocalBatch) -> Any:
        sharded = Sharded(*local)
        return weighed(sharded.gather(model(**own_share(model, {}, local.inputs)).logits))

    return TrialStep(loss, True, "", (type(host).__name__, "logits"))


def _predict(original: Callable[..., Any], host: Any, model: nn.Module, inputs: dict[str, Any], *given: Any) -> Any:
    whole = host._prepare_inputs(inputs)
    with _step(host, model, whole):
        return original(host, model, whole, *given)


HOSTS = (
    "trl.experimental.orpo.orpo_trainer:ORPOTrainer",
    "trl.experimental.cpo.cpo_trainer:CPOTrainer",
    "trl.experimental.tpo.tpo_trainer:TPOTrainer",
)
PATCHES = {
    host: [
        trainer_overrides.patch_prepare(host, trainer.shards_batches, _prepare_inputs),
        prediction.patch_prediction(host, _predict),
    ]
    for host in HOSTS
}
