"""Models that a host calls with whole rows: each rank computes its own tokens, and gets the output of all tokens.

So a host's loss of whole sequences runs as it was written, on numbers of whole rows in their order, and needs no other
function for each kind of loss. Log-probabilities travel, one number a token and kind: keys and values of one layer take
a thousand times as much. If every rank computes the loss, the mean of gradients over ranks is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import errors
from ..batch.shard import Sharded
from ..context import batch_context, introspect
from ..context.local_batch import LocalBatch
from ..context.trial_step import TrialStep
from ..context.whole_batch import LOSS_INPUTS

FUSED = "fused_lm_head"
"""The argument that asks TRL's head for log-probabilities in place of logits."""


class Rows(NamedTuple):
    """Whole rows that models are called with, and this rank's share of them."""

    sharded: Sharded
    whole: Mapping[str, Any]


@contextmanager
def whole_row_calls(
    models: Iterable[nn.Module | None], sharded: Sharded, whole: Mapping[str, Any], others: Sequence[Rows] = ()
) -> Iterator[None]:
    """Lets ``models`` be called with the batch ``whole``, of which ``sharded`` is this rank's share.

    With ``fused_lm_head=True`` they return each field [B, S - 1] of a label, as TRL's head does for whole rows; else
    logits [B, S, V].

    Args:
        others: rows that models may be called with beside the batch, without gradients.

    Raises:
        OtherInputs: on the call, if it has other tokens, masks or labels than the batch.
    """
    running: list[tuple[nn.Module, Sharded]] = []

    def before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if running or batch_context.current() is not sharded.context:  # inside a wrapper, or the self-check's row
            return None
        found, (missing, other) = sharded, _other_inputs(args, kwargs, whole)
        if missing or other:  # first the batch: KTO's other rows may be the same, cut short
            beside = () if torch.is_grad_enabled() else others
            equal = [rows.sharded for rows in beside if _other_inputs(args, kwargs, rows.whole) == ([], [])]
            if not equal:  # on every rank: all hold whole rows
                raise errors.OtherInputs(introspect.name_of(model), missing, other)
            found = equal[0]
        mine = own_share(model, kwargs, found.inputs)
        if found is not sharded:
            found.__enter__()
        running.append((model, found))
        return (), mine

    def after(model: nn.Module, _args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if not running or running[0][0] is not model:
            return None
        found = leave(None if output is not None else RuntimeError)
        if output is None:  # an error ended the call
            return None
        return _whole(output, found, bool(kwargs.get(FUSED)))

    def leave(error: type[Exception] | None) -> Sharded:
        found = running.pop()[1]
        if found is not sharded:
            found.__exit__(error, None, None)
        return found

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


def log_probs_of_rows(name: str) -> TrialStep:
    """The step of the self-check: a loss in which each token's log-probability has its own weight.

    The host's loss runs on gathered rows, so only log-probabilities are checked. ``name``: of the host's class.
    """

    def loss(model: nn.Module, _row: Mapping[str, Any], local: LocalBatch) -> Any:
        sharded = Sharded(*local)
        inputs = own_share(model, {FUSED: True, "labels": local.inputs["labels"]}, local.inputs)
        output = _whole(model(**inputs), sharded, True)
        return weighed(output.log_probs[..., None])

    return TrialStep(loss, True, "", (name, FUSED))


def weighed(x: Tensor) -> Tensor:
    """The sum of x [B, S, ...], in which each token has its own weight, for the self-check."""
    weights = 1 + torch.linspace(0, 9, x.shape[1], device=x.device).sin() / 2
    return (x * weights[:, None]).sum()


def _other_inputs(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], whole: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Names of inputs that a call lacks, and of those that are not the batch's."""
    missing = [key for key, x in whole.items() if isinstance(x, Tensor) and key not in kwargs and key != "labels"]
    if args or missing:
        return missing or ["named inputs"], []
    tensors = {key: x for key, x in kwargs.items() if isinstance(x, Tensor)}
    return [], [key for key, x in tensors.items() if key not in whole or not _same(x, whole[key])]


def _same(x: Tensor, other: Any) -> bool:
    return x is other or (isinstance(other, Tensor) and x.shape == other.shape and torch.equal(x, other))


def own_share(model: nn.Module, kwargs: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
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
        if not fused and name != "logits":
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
