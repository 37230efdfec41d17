"""Models that a program calls with whole rows: each rank computes its own tokens, and gets the output of all tokens.

So a loss of whole sequences runs as it was written, on numbers of whole rows in their order, and needs no other
function for each kind of loss. If every rank computes the loss, the mean of gradients over ranks is right. Of TRL's
fused head log-probabilities travel, one number a token and kind: keys and values of one layer take a thousand times as
much. Without it logits do, or hidden states.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ... import errors
from ...arguments import check_type
from ...layers.collectives import mean_gradient
from ..context import batch_context, introspect, model_record
from ..context.introspect import CACHES, TOKENS
from ..context.local_batch import LocalBatch
from ..context.mesh import find_ring
from ..context.model_record import SeenOutputs, latest_record
from ..context.trial_step import TrialStep
from ..context.whole_batch import LOSS_INPUTS
from ..log import warn
from ..losses import shared_losses, whole_heads
from ..patching.compiler import uncompiled
from ..patching.modules import Replaced
from . import loss_graph
from .shard import Sharded, shard_for
from .whole_outputs import Wanted, kept_logits, of_tokens, wanted, weighed, whole_of_fused, whole_output

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ...config import RingConfig

FUSED = "fused_lm_head"
"""The argument that asks TRL's head for log-probabilities in place of logits."""
COUNT = "num_items_in_batch"
KEPT = "logits_to_keep"
"""The argument that says of which tokens a head makes logits."""


Shard = Callable[[nn.Module, dict[str, Any], bool], Sharded]
"""Maps a model and its inputs for whole rows to this rank's share of them. True: the call is for log-probabilities."""


class WholeRows:
    """The handle of `whole_rows`.

    Attributes:
        latest: the latest call's share of its rows; None: there was no call in a ring.
    """

    latest: Sharded | None = None

    def reduce_gradients(self, model: nn.Module | nn.Parameter) -> None:
        """Averages gradients over the ring: `Sharded.reduce_gradients`."""
        if self.latest is None:
            warn(NOT_CALLED)
        else:
            self.latest.reduce_gradients(model)


NOT_CALLED = (
    "no model that whole_rows was given was called with rows in its context, so each rank computed whole rows. The "
    "numbers are right, but no memory is saved. Give whole_rows the model that you call, with ring_fp32, and call it "
    "inside."
)


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

    Yields:
        `WholeRows`, with ``reduce_gradients``.

    Raises:
        BadOption: a model is no nn.Module. In a call, and in the optimizer's next step:
        RanksDiffer: ranks have other rows, or make another loss of what the model returned.
        Refused: everything else that `shard` refuses.
    """
    for model in models:
        check_type("models", model, nn.Module, "models of transformers, wrapped or not")
    rows = WholeRows()

    def shard(model: nn.Module, given: dict[str, Any], fused: bool) -> Sharded:
        rows.latest = shard_call(model, given, group, model_record.options_of(model), fused=fused)
        loss_graph.note_call(model, rows.latest.context)
        return rows.latest

    with whole_row_calls(models, shard, inside=True), loss_graph.names_past_outputs():
        yield rows


@contextmanager
def whole_row_calls(models: Iterable[nn.Module | None], shard: Shard, inside: bool) -> Iterator[None]:
    """Lets ``models`` be called with whole rows.

    With ``fused_lm_head=True`` they return each field [B, S - 1] of a label, as TRL's head does for whole rows; else
    each output [B, S, ...] of tokens, and the loss.

    Args:
        shard: shards the rows of a call, for that call.
        inside: of modules and models of the program's own, shard the calls of those inside.
    """

    def call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Inside, calls are the models' own: the ring hooks them, and the self-check makes some.
        with ExitStack() as inside:
            inside.enter_context(calls.off())
            if batch_context.current() is not None:  # the program has sharded the rows of this call
                return model(*args, **kwargs)
            given = _by_name(model, args, kwargs)
            caches = given.get("use_cache") is True or any(given.get(name) is not None for name in CACHES)
            if caches or all(given.get(name) is None for name in TOKENS):
                return model(*args, **kwargs)
            fused = bool(given.get(FUSED))
            kept = None if fused else given.pop(KEPT, None)
            rows = {name: x for name, x in given.items() if isinstance(x, Tensor) or (x is not None and name == COUNT)}
            sharded = inside.enter_context(shard(model, rows, fused))  # on every rank: all hold whole rows
            output = model(**_own_share(model, given, sharded))
            packed = given.get("position_ids") is not None and sharded.context.facts.documents is not None
            if packed and sharded.ring.size > 1 and _makes_cache(model, given):
                warn(DOCUMENTS_APART)
        if fused:
            return whole_of_fused(output, sharded)
        whole = whole_output(wanted(output, sharded), sharded, _known(model))
        names = [name for name in CACHES if name in getattr(type(whole), "__dataclass_fields__", ())]
        if names and isinstance(whole, Mapping) and _makes_cache(model, given):
            whole[names[0]] = NoCache()  # type: ignore[index]
        return whole if kept is None else kept_logits(whole, kept)

    calls = _Calls(_called(models, inside), call)
    calls.put()
    try:
        yield
    finally:
        calls.remove()


DOCUMENTS_APART = (
    "position_ids restart, as for packed documents, and the model would make a cache. In one process transformers lets "
    "documents see each other then; in the ring they do not. For the same numbers set model.config.use_cache=False."
)


class NoCache:
    """Stands for the cache that one process would have."""

    def __getattr__(self, _name: str) -> Any:
        raise errors.CacheNotKept()


def _makes_cache(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """Returns True if a call returns a cache in one process."""
    inner: Any = introspect.loss_model_of(model) or introspect.inside(model)
    config = inner.config.get_text_config()
    uses = getattr(config, "use_cache", False) if given.get("use_cache") is None else given["use_cache"]
    checkpoints = inner.training and getattr(inner, "is_gradient_checkpointing", False)
    return bool(uses) and not checkpoints


_BY_HOST = "hf_ring_attn shards the rows of a model's call"
_PLACES = ("_compiled_call_impl", "forward")
"""The attributes with the function of a call: torch reads the first before it runs hooks, programs call the second."""


class _Called:
    """A function in place of a model's calls. ``replaced``: what the program or a compiler put there, if anything."""

    def __init__(self, model: nn.Module, calls: _Calls, place: str) -> None:
        self.model, self.calls, self.place, self.replaced = model, calls, place, model.__dict__.get(place)
        self.__signature__ = inspect.signature(model.forward)

    @uncompiled(_BY_HOST, alone=True)  # inside a sharded call it is in the graph of a compiled model
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.calls.are_off:
            return self._shard(args, kwargs)
        own = self.replaced or (self.model._call_impl if self.place == _PLACES[0] else _forward_of(self.model, None))
        return own(*args, **kwargs)

    @uncompiled(_BY_HOST)  # a compiler would trace all that shards the rows, if a compiled function calls the model
    def _shard(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.calls.call(self.model, args, kwargs)

    def __reduce__(self) -> Any:  # a copy of the model has its own forward
        return _forward_of, (self.model, self.replaced)


def _forward_of(model: nn.Module, replaced: Any) -> Any:
    return functools.partial(type(model).forward, model) if replaced is None else replaced


class _Calls:
    """The functions in place of several models' calls. ``call`` gets the model and its arguments."""

    def __init__(self, models: Iterable[nn.Module], call: Callable[..., Any]) -> None:
        self.models, self.call, self.replaced = list(models), call, list[Replaced]()
        self.are_off = False

    def put(self) -> None:
        places = [(model, place) for model in self.models for place in _PLACES]
        self.replaced += [Replaced(model, place, _Called(model, self, place)) for model, place in places]

    def remove(self) -> None:
        """Removes them. One that a program has wrapped since stays, and calls the model's own function."""
        for one in reversed(self.replaced):
            one.remove()
        self.replaced.clear()
        self.are_off = True

    def off(self) -> Replaced:
        """Passes calls on to the models' own functions while inside."""
        return Replaced(self, "are_off", True)


def _called(models: Iterable[nn.Module | None], inside: bool) -> list[nn.Module]:
    """The modules whose calls may have rows of tokens: models in their wrappers, and those inside, which a program may
    call alone (a model below its head). ``inside``: of a program's own modules and models those inside alone."""
    found: dict[int, nn.Module] = {}
    parts_of: dict[nn.Module, list[PreTrainedModel]] = {}  # wrappers have one model
    for model in (model for model in models if model is not None):
        inner = introspect.inside(model)
        if inner not in parts_of:
            uses = introspect.uses_ring(inner)
            every = introspect.modules_of(inner) if uses else ()
            parts = parts_of[inner] = [part for part in every if isinstance(part, PreTrainedModel)]
            found.update({id(part): part for part in parts if part is not inner and not (inside and _is_own(part))})
        parts = parts_of[inner]
        is_model = introspect.file_of(inner).startswith("peft.") or inner in parts[:1]
        if parts and is_model and not (inside and _is_own(parts[0])):
            found[id(model)] = model
    return [*found.values()]


def _is_own(model: nn.Module) -> bool:
    """Returns True for a program's own model around another one: its ``forward`` may do anything with whole rows."""
    parts = (part for part in introspect.modules_of(model) if isinstance(part, PreTrainedModel) and part is not model)
    return not introspect.file_of(model).startswith("transformers.models.") and any(parts)


# ---- inputs ----------------------------------------------------------------------------------------------------------


def shard_call(
    model: nn.Module, rows: Mapping[str, Any], group: Any, options: RingConfig, name: str = "", fused: bool = False,
    trains: bool | None = None, loss_alone: bool = False,
) -> Sharded:  # fmt: skip
    """Shards the whole rows of a model's call.

    Args:
        name: of the host's class. fused: it is for log-probabilities.
        trains: the host sets the model to training mode first; None: it trains if gradients are on.
        loss_alone: the host reads the model's loss, and no other output.
    """
    trains, ring = torch.is_grad_enabled() if trains is None else trains, find_ring(group)
    rows = {name: mean_gradient(x, ring) if isinstance(x, Tensor) else x for name, x in rows.items()}
    if fused:
        step = TrialStep(_trial_of_fused, trains, "", (name, FUSED))
        return shard_for(rows, group, options, model, False, step)
    head, labelled = whole_heads.needs_whole_rows(model, rows), rows.get("labels") is not None
    shares = labelled and shared_losses.are_causal(model)
    makes_logits = options.loss == "sharded" or not (shares and loss_alone)
    options = replace(options, loss="sharded" if makes_logits else "auto")
    trial = None if head or shares else TrialStep(_trial, trains, "", (name, "whole rows", labelled))
    sharded = shard_for(rows, group, options, model, not (head or shares), trial, head=head)
    sharded.context.state(Wanted).loss_alone = loss_alone
    return sharded


def _by_name(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    names = introspect.parameters_of(model)
    if args and not any(name in TOKENS for name in names):  # PEFT's may be *args, **kwargs
        names = introspect.parameters_of(introspect.loss_model_of(model) or model)
    return introspect.by_name(names, args, kwargs)


def _own_share(model: nn.Module, given: Mapping[str, Any], sharded: Sharded) -> dict[str, Any]:
    """The arguments of a call with this rank's tokens in place of whole rows; labels, too, if ranks share the loss."""
    shares_loss = given.get("labels") is not None and not sharded.context.gathers_logits
    mine = {name: x for name, x in sharded.inputs.items() if shares_loss or name not in LOSS_INPUTS}
    taken = introspect.parameters_of(model, mine)
    return {**given, **{name: x for name, x in mine.items() if name in taken}}


# ---- the self-check --------------------------------------------------------------------------------------------------


def _trial(model: nn.Module, row: Mapping[str, Any], local: LocalBatch) -> Any:
    """The self-check's loss of a call, whose host's loss runs on gathered rows: only what that is computed of is tried.

    With labels it is the model's loss of whole logits.
    """
    sharded = Sharded(*local)
    given = {name: row[name] for name in LOSS_INPUTS if row.get(name) is not None}
    output = whole_output(model(**_own_share(model, given, sharded)), sharded, _known(model))
    return output["loss"] if given else weighed(of_tokens(output))


def _trial_of_fused(model: nn.Module, _row: Mapping[str, Any], local: LocalBatch) -> Any:
    given = {FUSED: True, "labels": local.inputs["labels"]}
    sharded = Sharded(*local)
    return weighed(whole_of_fused(model(**_own_share(model, given, sharded)), sharded).log_probs[..., None])


def _known(model: nn.Module) -> SeenOutputs:
    return latest_record(model).state(SeenOutputs)
