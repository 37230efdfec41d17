"""Models that a host calls with whole rows: each rank computes its own tokens, and gets the output of all tokens.

So a host's loss of whole sequences runs as it was written, on numbers of whole rows in their order, and needs no other
function for each kind of loss. If every rank computes the loss, the mean of gradients over ranks is right. Of TRL's
fused head log-probabilities travel, one number a token and kind: keys and values of one layer take a thousand times as
much. Without it logits do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import errors
from ..batch.shard import Sharded, shard_for
from ..context import batch_context, introspect
from ..context.local_batch import LocalBatch
from ..context.trial_step import TrialStep
from ..context.whole_batch import LOSS_INPUTS
from . import trainer

FUSED = "fused_lm_head"
"""The argument that asks TRL's head for log-probabilities in place of logits."""


class Rows(NamedTuple):
    """Whole rows that models are called with, and this rank's share of them."""

    sharded: Sharded
    whole: Mapping[str, Any]


Shard = Callable[[nn.Module, dict[str, Any]], Sharded]
"""Maps a model and its inputs for whole rows to this rank's share of them."""


@contextmanager
def whole_row_calls(models: Iterable[nn.Module | None], shard: Shard, batch: Rows | None = None) -> Iterator[None]:
    """Lets ``models`` be called with whole rows.

    With ``fused_lm_head=True`` they return each field [B, S - 1] of a label, as TRL's head does for whole rows; else
    logits [B, S, V], and the auxiliary loss of experts.

    Args:
        shard: shards the rows of a call, for that call.
        batch: rows that were sharded before, in whose context the caller is; other calls are sharded when they are
            made.
    """
    running: list[tuple[nn.Module, Sharded | None]] = []

    def before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if running:  # inside a wrapper, or in the self-check
            return None
        names = introspect.parameters_of(introspect.loss_model_of(model) or model)  # PEFT's are *args, **kwargs
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        rows = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        if batch is not None and _are_same(rows, batch.whole):
            sharded = batch.sharded
        else:  # on every rank: all hold whole rows
            running.append((model, None))
            if batch is not None:
                batch.sharded.context.log.called = False  # it may have no call of its own
            try:
                sharded = shard(model, rows)
            except BaseException:
                running.clear()
                raise
            sharded.__enter__()
        running[:] = [(model, sharded)]
        return (), _own_share(model, given, sharded.inputs)

    def after(model: nn.Module, _args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        outer, sharded = running[0] if running else (None, None)
        if outer is not model or sharded is None or batch_context.current() is not sharded.context:
            return None
        leave(None if output is not None else RuntimeError)
        return None if output is None else _whole(output, sharded, bool(kwargs.get(FUSED)))  # None: an error ended it

    def leave(error: type[Exception] | None) -> None:
        _, sharded = running.pop()
        if sharded is not None and (batch is None or sharded is not batch.sharded):
            sharded.__exit__(error, None, None)

    try:
        with ExitStack() as hooks:
            for model in {id(model): model for model in models if model is not None}.values():
                # First: others would fill in this rank's places if whole rows are as long as a rank's share.
                hooks.enter_context(model.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
                hooks.enter_context(model.register_forward_hook(after, with_kwargs=True, always_call=True))
            yield
    finally:
        if running:  # Ctrl-C ended a call, after which torch calls no hook
            leave(RuntimeError)


def shard_rows(
    host: Any, model: nn.Module, rows: Mapping[str, Any], beside: Sequence[nn.Module] = (), fused: bool = True
) -> Sharded:
    """Shards whole rows for a trainer's model.

    Args:
        beside: other models that will get them. fused: they are called for log-probabilities, else for logits.
    """
    options = trainer.options_of_batches(host.model)
    if fused:
        trainer.refuse_past_fused_head(host, options.loss)
    step = _trial_step(type(host).__name__, fused)
    return shard_for(rows, trainer.group_of(host), options, model, not fused, step, beside)


def _trial_step(name: str, fused: bool) -> TrialStep:
    """The step of the self-check: a loss in which each token's log-probability, or its logits, have their own weight.

    The host's loss runs on gathered rows, so only what it is computed of is checked. ``name``: of the host's class.
    """

    def loss(model: nn.Module, _row: Mapping[str, Any], local: LocalBatch) -> Any:
        given = {FUSED: True, "labels": local.inputs["labels"]} if fused else {}
        output = _whole(model(**_own_share(model, given, local.inputs)), Sharded(*local), fused)
        return weighed(output.log_probs[..., None] if fused else output.logits)

    return TrialStep(loss, True, "", (name, FUSED if fused else "logits"))


def weighed(x: Tensor) -> Tensor:
    """The sum of x [B, S, ...], in which each token has its own weight, for the self-check."""
    weights = 1 + torch.linspace(0, 9, x.shape[1], device=x.device).sin() / 2
    return (x * weights[:, None]).sum()


def _are_same(rows: Mapping[str, Tensor], whole: Mapping[str, Any]) -> bool:
    """Returns True if a call has all inputs of the batch but labels, and no others."""
    missing = [key for key, x in whole.items() if isinstance(x, Tensor) and key not in rows and key != "labels"]
    return not missing and all(key in whole and _same(x, whole[key]) for key, x in rows.items())


def _same(x: Tensor, other: Any) -> bool:
    return x is other or (isinstance(other, Tensor) and x.shape == other.shape and torch.equal(x, other))


def _own_share(model: nn.Module, kwargs: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call with this rank's tokens in place of whole rows."""
    wants_labels = kwargs.get("labels") is not None
    mine = {name: x for name, x in inputs.items() if wants_labels or name not in LOSS_INPUTS}
    taken = introspect.parameters_of(model, mine)
    return {**kwargs, **{name: x for name, x in mine.items() if name in taken}}


def _whole(output: Any, sharded: Sharded, fused: bool) -> Any:
    """The output with the entries of all tokens, in the order of the row."""
    if not isinstance(output, Mapping) or output.get("log_probs" if fused else "logits") is None:
        raise errors.NoLogits()
    length, fields = sharded.layout.local_length, {}
    for name, x in output.items():
        if not fused and name not in ("logits", "aux_loss"):
            continue
        of_tokens = isinstance(x, Tensor) and x.dim() >= 2 and x.shape[1] == length
        if of_tokens and fused:
            fields[name] = _gather(sharded, x)[:, :-1]  # no token follows the last one
        elif of_tokens:
            fields[name] = sharded.gather(x)
        elif name != "loss":  # that of this rank's tokens
            fields[name] = x
    return type(output)(**fields)


def _gather(sharded: Sharded, x: Tensor) -> Tensor:
    return sharded.gather(x.byte()).bool() if x.dtype == torch.bool else sharded.gather(x)
