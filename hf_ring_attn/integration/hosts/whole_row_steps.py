"""Steps of a trainer whose loss is of whole rows: the calls of its models are sharded when they are made."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ... import errors
from ...comm.meeting import meet
from ..batch import compared_inputs, loss_graph
from ..batch.shard import Sharded
from ..batch.whole_row_calls import shard_call, whole_row_calls
from ..context import introspect
from ..context.introspect import TOKENS, is_a
from ..context.whole_batch import LOSS_INPUTS
from ..gradients import fsdp, fsdp_units
from ..gradients.weight_parts import sharding_of
from ..log import warn
from ..losses import shared_losses
from ..patching.changes import target_of
from ..patching.modules import Replaced
from . import own_methods, program_methods, trainer_overrides
from .rings_as_processes import rings_as_processes
from .trainer_facts import (
    gives_whole_rows,
    has_ring,
    inputs_handed_on,
    options_of_batches,
    refuse_past_fused_head,
    refuse_step,
    ring_of,
    takes_count,
)
from .trainer_overrides import LOSS_ALONE, OF_WHOLE_ROWS


def calls_with_whole_rows(trainer: Any, model: nn.Module, whole: Any) -> bool:
    """Returns True if a trainer's loss is of whole rows.

    Its model's options say so, or its class; or the program has a function of outputs, of a model's logits, or a
    compute_loss of a model that takes no count; or its rows have names of their own.
    """
    loss = options_of_batches(model).loss
    smooths = trainer.label_smoother is not None and is_a(trainer, "SFTTrainer")  # by logits, which others do not need
    has_own = program_methods.is_own(trainer, "compute_loss") and not takes_count(trainer)
    has_own = has_own or trainer.compute_loss_func is not None or shared_losses.has_own_function(trainer.model)
    is_of_whole_rows = not OF_WHOLE_ROWS.isdisjoint(map(target_of, type(trainer).__mro__))
    refused = refused_losses(trainer)
    was_refused = True in refused or model.training in refused
    if loss == "gathered" or is_of_whole_rows or was_refused or not isinstance(whole, Mapping):
        return True
    if _becomes_tokens_later(trainer, whole) or any(_is_of_other_rows(name, x) for name, x in whole.items()):
        return True  # of a classifier in a program's own module, too
    by_itself = own_methods.steps_by_itself(trainer)  # an evaluation
    return (by_itself or (loss == "auto" and (has_own or smooths))) and not gives_whole_rows(trainer)


def _becomes_tokens_later(trainer: Any, whole: Mapping[str, Any]) -> bool:
    """Returns True for a batch without tokens, as texts, of which the program's own loss or model makes tokens."""
    if any(whole.get(name) is not None for name in TOKENS):
        return False
    return program_methods.is_own(trainer, "compute_loss") or not isinstance(
        introspect.inside(trainer.model), PreTrainedModel
    )


def _is_of_other_rows(name: str, x: Any) -> bool:
    """Returns True for tokens under a name of their own, as "chosen_input_ids" or "input_ids_j", and for a dict."""
    is_named = name not in TOKENS and any(one in name for one in TOKENS)
    return isinstance(x, Mapping) or (is_named and isinstance(x, Tensor))


@contextmanager
def whole_row_step(trainer: Any, model: nn.Module, whole: Any) -> Iterator[None]:
    """A step whose batch is whole, as are the outputs of its models: calls are sharded when they are made.

    Raises:
        RanksDiffer: ranks have different batches. PastOutputs: see `loss_graph.names_past_outputs`.
    """
    refuse_step(trainer)
    ring, options = ring_of(trainer), options_of_batches(model)
    batch = whole if isinstance(whole, Mapping) else {"inputs": whole}
    facts = {**compared_inputs.empty_facts(options, batch), **compared_inputs.inputs_of(batch)}
    device, advice = ring.small_device(trainer.args.device), compared_inputs.advice_for(batch)
    ring.agree(facts, device, advice, doing="compared its batch of whole rows")
    try:
        handed, counted = inputs_handed_on(trainer, whole), rings_as_processes(trainer)
        with handed, counted, sharded_calls(trainer, model, True), loss_graph.names_past_outputs():
            yield
    except Exception as error:
        refused, said = refused_losses(trainer).get(model.training), str(error).split(". ")[0]
        is_of_ring = isinstance(error, KeyError) and error.args[0] in LOSS_INPUTS  # the program's loss is for a ring
        if refused is not None and (is_of_ring or (said and said in str(refused))):
            _UNSAID.pop(trainer, None)  # whole rows fail alike: the error says it best
        if refused is not None and is_of_ring:
            raise refused from error
        raise
    finally:
        if unsaid := _UNSAID.pop(trainer, ""):
            warn(unsaid)


@contextmanager
def sharded_calls(trainer: Any, model: nn.Module, is_whole: bool = False, inside: bool = True) -> Iterator[None]:
    """Lets a trainer call its models with whole rows.

    Args:
        is_whole: Trainer's own methods see them, too. inside: see `whole_row_calls`.
    """
    others = [x for x in vars(trainer).values() if isinstance(x, nn.Module)]  # a teacher, for example
    calls = whole_row_calls((model, trainer.model, *others), functools.partial(shard_rows, trainer), inside)
    with Replaced(trainer, trainer_overrides.SHARDS_CALLS, is_whole), calls:
        yield


NEEDS_WHOLE_ROWS = (
    errors.GradientDiffers, errors.LayerWithoutSpec, errors.LossNotSharded, errors.OtherInputs, errors.PooledLoss,
    errors.PooledOutput, errors.RanksDiffer, errors.RefusedElsewhere, errors.SelfCheckFailed, errors.SelfCheckNotRun,
    errors.SelfCheckRaised, errors.ShiftedByHand, errors.UnknownOutput, errors.UnshardedInput,
)  # fmt: skip
"""Errors, raised on every rank, of a loss that a rank cannot compute from its tokens."""

RAISED_ALONE = (errors.LayerWithoutSpec, errors.OtherInputs, errors.SelfCheckRaised, errors.UnshardedInput)
"""Those that one rank may raise alone, inside a forward in which the others wait for it."""

_UNSAID: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""The warning about a trainer's losses of whole rows, said once one has been computed."""

_REFUSED_LOSSES: weakref.WeakKeyDictionary[Any, dict[bool, errors.Refused]] = weakref.WeakKeyDictionary()
"""Trainers whose loss needs whole rows: see `refused_losses`."""


def of_sharded(trainer: Any, model: nn.Module, whole: Any, compute: Callable[[], Any]) -> Any:
    """Returns what ``compute`` makes of a sharded batch; None if the trainer's loss needs whole rows.

    Raises:
        Refused: by ``compute``, for another reason; see `take_whole_rows`.
    """
    if calls_with_whole_rows(trainer, model, whole):
        return None
    try:
        return compute()
    except NEEDS_WHOLE_ROWS as error:
        take_whole_rows(trainer, model, error)
    return None


def refused_losses(trainer: Any) -> Mapping[bool, errors.Refused]:
    """Errors that refused the loss of a rank's tokens, in training (True) and in evaluation; empty if none did."""
    return _REFUSED_LOSSES.get(trainer, {})


def take_whole_rows(trainer: Any, model: nn.Module, error: errors.Refused) -> None:
    """Lets a trainer's losses be of whole rows from now on, since ``error`` refused those of a rank's tokens.

    Raises:
        Refused: ``error``, if the program chose another loss, or the model has a head of whole rows.
    """
    chosen, is_other = options_of_batches(model).loss, isinstance(error, errors.RanksDiffer) and error.of_program
    if isinstance(error, errors.RefusedElsewhere):
        is_other = not error.kinds <= {kind.__name__ for kind in NEEDS_WHOLE_ROWS}
    if chosen != "auto" or not has_ring(trainer) or gives_whole_rows(trainer) or is_other:
        raise error
    if not _all_raised(trainer, model, error) or (fsdp.is_sharded(model) and not fsdp_units.end_forward(model)):
        raise error
    when = "trains" if model.training else "evaluates"
    _REFUSED_LOSSES.setdefault(trainer, {})[model.training] = error
    one: BaseException | None = error
    while one is not None:  # its frames hold the trainer, which would never be freed
        one.__traceback__, one = None, one.__cause__ or one.__context__
    why = " ".join(str(error).split(". ")[0].split())
    _UNSAID[trainer] = TAKES_WHOLE_ROWS.format(type(trainer).__name__, when, why)


def _all_raised(trainer: Any, model: nn.Module, error: errors.Refused) -> bool:
    """Returns True if all ranks raised such an error, so that the next message finds none of them in a forward."""
    if error.everywhere or not isinstance(error, RAISED_ALONE):
        return True
    return all(meet(ring) for ring in (ring_of(trainer), *sharding_of(model)))


TAKES_WHOLE_ROWS = (
    "{} now {} by losses of whole rows, which take more memory. The reason: {}. RingConfig(loss='gathered') does so "
    "from the start; 'chunked' and 'sharded' refuse such a loss instead."
)


def shard_rows(host: Any, model: nn.Module, rows: Mapping[str, Any], fused: bool) -> Sharded:
    """Shards the whole rows of a call of a trainer's model. ``fused``: for log-probabilities, else for logits."""
    options = options_of_batches(host.model)  # for a teacher, too
    if fused:
        refuse_past_fused_head(host)
    is_hosts = introspect.inside(model) is introspect.inside(host.model)  # not one in a module of the program's own
    return shard_call(
        model, rows, ring_of(host), options, type(host).__name__, fused, trains=True,
        loss_alone=is_hosts and LOSS_ALONE in vars(host),
    )  # fmt: skip
