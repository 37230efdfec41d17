"""Models that a program calls with whole rows: each rank computes its own tokens, and gets the output of all tokens.

So a loss of whole sequences runs as it was written, on numbers of whole rows in their order, and needs no other
function for each kind of loss. If every rank computes the loss, the mean of gradients over ranks is right. Of TRL's
fused head log-probabilities travel, one number a token and kind: keys and values of one layer take a thousand times as
much. Without it logits do, or hidden states.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ... import errors
from ...arguments import check_type
from ..context import batch_context, introspect, model_record
from ..context.introspect import CACHES, TOKENS
from ..context.local_batch import LocalBatch
from ..context.model_record import PooledOutputs, latest_record
from ..context.trial_step import TrialStep
from ..context.whole_batch import LOSS_INPUTS
from ..losses import kinds, whole_heads
from ..patching.modules import OwnForward, Replaced
from .shard import Sharded, shard_for
from .whole_outputs import kept_logits, of_tokens, weighed, whole_of_fused, whole_output

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ...config import RingConfig

FUSED = "fused_lm_head"
"""The argument that asks TRL's head for log-probabilities in place of logits."""
COUNT = "num_items_in_batch"
KEPT = "logits_to_keep"
"""The argument that says of which tokens a head makes logits."""


class Rows(NamedTuple):
    """Whole rows that models are called with, and this rank's share of them."""

    sharded: Sharded
    whole: Mapping[str, Any]


Shard = Callable[[nn.Module, dict[str, Any]], Sharded]
"""Maps a model and its inputs for whole rows to this rank's share of them."""


class WholeRows:
    """The handle of `whole_rows`.

    Attributes:
        latest: the latest call's share of its rows; None: there was no call in a ring.
    """

    latest: Sharded | None = None

    def reduce_gradients(self, model: nn.Module | nn.Parameter) -> None:
        """Averages gradients over the ring: `Sharded.reduce_gradients`."""
        if self.latest is None:
            raise errors.NotEntered("rows.reduce_gradients() was called, but no model of whole_rows(...),")
        self.latest.reduce_gradients(model)


@contextmanager
def whole_rows(*models: nn.Module, group: ProcessGroup | DeviceMesh | None = None) -> Iterator[WholeRows]:
    """Lets ``models`` be called with whole rows: each rank of the ring computes its share of the tokens of a call.

    >>> with hf_ring_attn.whole_rows(model) as rows:
    ...     logits = model(**batch).logits               # [B, S, V] on every rank, in the order of the rows
    >>> loss = any_loss(logits, batch)                   # the same on every rank
    >>> loss.backward()
    >>> rows.reduce_gradients(model)                     # not under DDP or FSDP2, which do it themselves

    A call may have any rows, the same on every rank: chosen and rejected answers one after the other, queries and
    documents. What it returns for each token is gathered, differentiably, so a loss that one process can compute needs
    no change, and its gradient is that of one process. Its memory is tokens x vocabulary for logits, and
    tokens x width for hidden states. With labels the loss is there, too.

    Models without ring attention compute whole rows on every rank, and so do calls with a cache: `generate`, and those
    with ``use_cache=True``.

    Args:
        models: to be called inside; of a module of your own the transformers models in it.
        group: the process group of the ring, as in `shard`.

    Raises:
        BadOption: a model is no nn.Module. In a call, and in the optimizer's next step:
        RanksDiffer: ranks have other rows, or make another loss of what the model returned.
        Refused: everything else that `shard` refuses.
    """
    for model in models:
        check_type("models", model, nn.Module, "models of transformers, wrapped or not")
    rows = WholeRows()

    def shard(model: nn.Module, given: dict[str, Any]) -> Sharded:
        rows.latest = shard_call(model, given, group, model_record.options_of(model))
        return rows.latest

    with whole_row_calls(models, shard):
        yield rows


@contextmanager
def whole_row_calls(models: Iterable[nn.Module | None], shard: Shard, batch: Rows | None = None) -> Iterator[None]:
    """Lets ``models`` be called with whole rows.

    With ``fused_lm_head=True`` they return each field [B, S - 1] of a label, as TRL's head does for whole rows; else
    each output [B, S, ...] of tokens, and the loss.

    Args:
        shard: shards the rows of a call, for that call.
        batch: rows that were sharded before, in whose context the caller is; other calls are sharded when they are
            made.
    """
    running: list[_Call] = []

    def before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Inside a wrapper, or in the self-check; or the program has sharded the rows of this call.
        if running or (batch is None and batch_context.current() is not None):
            return None
        names = introspect.parameters_of(introspect.loss_model_of(model) or model)  # PEFT's are *args, **kwargs
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        caches = given.get("use_cache") is True or any(given.get(name) is not None for name in CACHES)
        if caches or all(given.get(name) is None for name in TOKENS):
            return None
        call = _Call(model, bool(given.get(FUSED)))
        if not call.fused:
            call.kept = given.pop(KEPT, None)
        rows = {name: x for name, x in given.items() if isinstance(x, Tensor) or (x is not None and name == COUNT)}
        running.append(call)
        if batch is not None and _are_same(rows, batch.whole):
            call.sharded = batch.sharded
        else:  # on every rank: all hold whole rows
            if batch is not None:
                batch.sharded.context.log.called = False  # it may have no call of its own
            try:
                sharded = shard(model, rows)
            except BaseException:
                running.clear()
                raise
            sharded.__enter__()
            call.sharded = sharded
        return (), _own_share(model, given, call.sharded)

    def after(model: nn.Module, output: Any) -> Any:
        call = running[0] if running else None
        sharded = None if call is None else call.sharded
        if call is None or sharded is None or call.model is not model:
            return output
        if batch_context.current() is not sharded.context:
            return output
        leave(None if output is not None else RuntimeError)
        if output is None:  # an error ended it
            return None
        if call.fused:
            return whole_of_fused(output, sharded)
        whole = whole_output(output, sharded, _pooled(model))
        return whole if call.kept is None else kept_logits(whole, call.kept)

    def leave(error: type[Exception] | None) -> None:
        sharded = running.pop().sharded
        if sharded is not None and (batch is None or sharded is not batch.sharded):
            sharded.__exit__(error, None, None)

    try:
        with ExitStack() as hooks:
            for model in {id(model): model for model in _called(models)}.values():
                _around(model, before, after, hooks)
            yield
    finally:
        if running:  # Ctrl-C ended a call, after which torch calls no hook
            leave(RuntimeError)


@dataclass
class _Call:
    """A call of a model with whole rows. ``kept``: the tokens whose logits it is to return."""

    model: nn.Module
    fused: bool
    kept: int | Tensor | None = None
    sharded: Sharded | None = None


def _called(models: Iterable[nn.Module | None]) -> Iterator[nn.Module]:
    """The modules whose calls may have rows of tokens: models in their wrappers, and those inside, which a program may
    call alone (a model below its head), or in modules of its own."""
    for model in {id(model): model for model in models if model is not None}.values():
        if not introspect.uses_ring(model):
            continue
        inner = introspect.inside(model)
        is_model = isinstance(inner, PreTrainedModel) or introspect.file_of(inner).startswith("peft.")
        compiled = introspect.compiled_part(model)
        parts = () if compiled is not None else introspect.modules_of(inner)  # else it would trace hooks there
        found = [part for part in parts if isinstance(part, PreTrainedModel) and part is not inner]
        yield from [*([model] if is_model or compiled is not None else []), *found]


def _around(model: nn.Module, before: Callable[..., Any], after: Callable[..., Any], hooks: ExitStack) -> None:
    """Calls functions before and after each call of a model, until ``hooks`` closes; ``after`` after errors, too."""
    compiled = model.__dict__.get("_compiled_call_impl")
    if compiled is None:
        # First: others would fill in this rank's places if whole rows are as long as a rank's share.
        hooks.enter_context(model.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        hooks.enter_context(
            model.register_forward_hook(lambda model, _args, output: after(model, output), always_call=True)
        )
        hooks.enter_context(_called_by_forward(model))
        return

    def call(*args: Any, **kwargs: Any) -> Any:  # of a model that is compiled in place, which would trace hooks
        changed = before(model, args, kwargs)
        if changed is None:
            return compiled(*args, **kwargs)
        output = None
        try:
            output = model.__dict__["_compiled_call_impl"](*changed[0], **changed[1])  # with what the ring put there
        finally:
            whole = after(model, output)
        return whole

    hooks.enter_context(Replaced(model, "_compiled_call_impl", call))


@contextmanager
def _called_by_forward(model: nn.Module) -> Iterator[None]:
    """Makes a program's ``model.forward(...)`` a call of the model: it would run no hooks."""
    own, began = OwnForward(model), list[bool]()

    @functools.wraps(model.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not began:
            return model(*args, **kwargs)
        began.pop()
        return own.forward(*args, **kwargs)

    forward.__module__, forward.replaced = __name__, own.replaced  # type: ignore[attr-defined]  # see `programs_own`

    def begin(_model: nn.Module, _args: Any) -> None:
        began[:] = [True]

    with Replaced(model, "forward", forward), model.register_forward_pre_hook(begin):
        yield


# ---- inputs ----------------------------------------------------------------------------------------------------------


def shard_call(
    model: nn.Module, rows: Mapping[str, Any], group: Any, options: RingConfig, name: str = "",
    beside: Sequence[nn.Module] = (), fused: bool = False, trains: bool | None = None,
) -> Sharded:  # fmt: skip
    """Shards the whole rows of a model's call.

    Args:
        name: of the host's class. beside: other models that will get them. fused: it is for log-probabilities.
        trains: the host sets the model to training mode first; None: it trains if gradients are on.
    """
    trains = torch.is_grad_enabled() if trains is None else trains
    if fused:
        step = TrialStep(_trial_of_fused, trains, "", (name, FUSED))
        return shard_for(rows, group, options, model, False, step, beside)
    options = replace(options, loss="sharded") if options.loss in ("auto", "chunked") else options  # logits are read
    head, labelled = whole_heads.needs_whole_rows(model, rows), rows.get("labels") is not None
    shares = labelled and kinds.are_causal(model)
    trial = None if head or shares else TrialStep(_trial, trains, "", (name, "whole rows", labelled))
    return shard_for(rows, group, options, model, not (head or shares), trial, beside, head=head)


def _own_share(model: nn.Module, given: Mapping[str, Any], sharded: Sharded) -> dict[str, Any]:
    """The arguments of a call with this rank's tokens in place of whole rows; labels, too, if ranks share the loss."""
    shares_loss = given.get("labels") is not None and not sharded.context.gathers_logits
    mine = {name: x for name, x in sharded.inputs.items() if shares_loss or name not in LOSS_INPUTS}
    taken = introspect.parameters_of(model, mine)
    return {**given, **{name: x for name, x in mine.items() if name in taken}}


def _are_same(rows: Mapping[str, Any], whole: Mapping[str, Any]) -> bool:
    """Returns True if a call has all inputs of the batch but labels, and no others."""
    missing = [key for key, x in whole.items() if isinstance(x, Tensor) and key not in rows and key != "labels"]
    return not missing and all(key in whole and _same(x, whole[key]) for key, x in rows.items())


def _same(x: Any, other: Any) -> bool:
    if not isinstance(x, Tensor) or not isinstance(other, Tensor):
        return bool(x is other)
    return x is other or (x.shape == other.shape and torch.equal(x, other))


# ---- the self-check --------------------------------------------------------------------------------------------------


def _trial(model: nn.Module, row: Mapping[str, Any], local: LocalBatch) -> Any:
    """The self-check's loss of a call, whose host's loss runs on gathered rows: only what that is computed of is tried.

    With labels it is the model's loss of whole logits.
    """
    sharded = Sharded(*local)
    given = {name: row[name] for name in LOSS_INPUTS if row.get(name) is not None}
    output = whole_output(model(**_own_share(model, given, sharded)), sharded, _pooled(model))
    return output["loss"] if given else weighed(of_tokens(output))


def _trial_of_fused(model: nn.Module, _row: Mapping[str, Any], local: LocalBatch) -> Any:
    given = {FUSED: True, "labels": local.inputs["labels"]}
    sharded = Sharded(*local)
    return weighed(whole_of_fused(model(**_own_share(model, given, sharded)), sharded).log_probs[..., None])


def _pooled(model: nn.Module) -> Collection[str]:
    return latest_record(model).state(PooledOutputs)
