"""The active sharded batch, and the mask that its attention layers read.

A batch is active in the thread that entered it, and in autograd's: other threads of a program may run other models
meanwhile. The `MaskSpec` has everything that a backward or a recompute needs, so the context may be left before it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from ... import errors
from ...attention.op import attentions
from ...comm.groups import is_alive, state_in
from ...comm.ring import Ring
from ...config import RingConfig
from ...layers.halo import RowShare
from ...sharding.layout import Layout
from ...sharding.mask import Mask
from ...sharding.plan import Plan
from ...sharding.visible import bounds, by_position, visible
from .mask_functions import MaskExpr
from .ring_random import RingRandomness
from .shared_kv import SharedKV
from .threads import runs_for
from .whole_batch import MaskFacts

S = TypeVar("S")

_STACK: list[tuple[int, BatchContext]] = []
"""Active batches, each with the thread that entered it."""
os.register_at_fork(after_in_child=_STACK.clear)  # a forked process computes alone

LIVE: weakref.WeakSet[BatchContext] = weakref.WeakSet()
"""Every sharded batch that is still in use, entered or not."""
_RINGS: set[Ring] = set()
"""The rings of several ranks that shared a batch, also one that is in use no more."""


def note_sharded(context: BatchContext) -> None:
    """Notes a batch that was sharded."""
    LIVE.add(context)
    if context.ring.size > 1:
        _RINGS.add(context.ring)


def rings_of_batches() -> set[Ring]:
    """The rings of several ranks that shared a batch, if their groups were not destroyed."""
    _RINGS.difference_update([ring for ring in _RINGS if not is_alive(ring.name)])
    return set(_RINGS)


def live_batches() -> list[BatchContext]:
    """Sharded batches still in use, of rings of several ranks."""
    return [context for context in LIVE if context.ring.size > 1]


class Opaque:
    """Refuses all tensor operations: arithmetic, indexing, torch's functions, a tensor's attributes."""

    refusal: type[errors.MaskIsNoTensor | errors.StatesLeftOut] = errors.MaskIsNoTensor

    def __getattr__(self, name: str) -> NoReturn:
        # hasattr() must return False, so the refusal is an AttributeError, too.
        raise self.refusal(f".{name}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise cls.refusal(f" in {getattr(function, '__name__', function)}()")

    def _refuse(self, *_: Any) -> NoReturn:
        raise self.refusal(" in arithmetic or indexing")

    def __getitem__(self, index: Any) -> Any:
        """Returns itself for a full slice, as Gemma 4 takes before its layers with shared keys."""
        parts = index if isinstance(index, tuple) else (index,)
        if all(part in (slice(None), slice(0, None), ...) for part in parts):
            return self
        return self._refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __invert__ = __neg__ = _refuse
    __and__ = __or__ = __lt__ = __gt__ = __le__ = __ge__ = __iter__ = _refuse


class MaskSpec(Opaque):
    """The mask of an attention layer. Not a dataclass: FSDP2 would rebuild one field by field.

    Args:
        mask: of the whole rows. seen: the mask expression that the model asked for.
        context: its sharded batch; None for a ring of one that needs none. Only read here: it holds its specs.
        device: of the model's tensors; None: the CPU, or it does not matter.

    Attributes:
        in_batch: it belongs to a sharded batch.
        places: [T] int64, positions of this rank's tokens in the row, for compilers as a tensor.
        shared: gathered K/V that several layers share; None: each layer gathers by itself.
        rows: of the batch, for layers beside attention that look along the row; None: they need no help.
    """

    def __init__(
        self, plan: Plan, layout: Layout, mask: Mask, seen: MaskExpr, config: RingConfig,
        context: BatchContext | None, device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self.plan = plan
        self.mask = mask
        self.layout = layout
        self.places = layout.positions()
        self._places: dict[torch.device, Tensor] = {}
        self._seen: dict[torch.device, Tensor] = {}
        self.device = torch.device("cpu" if device is None else device)
        self.seen = seen
        self.config = config
        self.in_batch = context is not None
        self.rows = None if context is None else context.row_share
        # A given number of heads per gather bounds memory: then layers share nothing.
        shares = context is not None and context.ring.size > 1 and config.heads_per_gather is None
        self.shared = context.state(SharedKV) if context is not None and shares else None

    def places_on(self, device: torch.device) -> Tensor:
        """`places` on a device, to which they are copied once, since a copy waits for a GPU."""
        if torch.compiler.is_compiling():
            return self.places.to(device)
        if device not in self._places:
            self._places[device] = self.places.to(device)
        return self._places[device]

    def __getitem__(self, index: Any) -> Any:
        """The mask of all heads, [:, 0], which models hand to an indexer: itself, or outside of batches as a tensor."""
        heads = index[1] if isinstance(index, tuple) and len(index) > 1 else None
        if type(heads) is int and heads == 0:
            whole = super().__getitem__((index[0], slice(None), *index[2:]))
            return whole if self.in_batch else visible(self.seen_keys(self.device), self.layout.length)
        return super().__getitem__(index)

    def seen_keys(self, device: torch.device) -> Tensor:
        """The positions of the keys that this rank's queries see: `bounds` [L, 2, B, T] on a device, copied once."""
        if device not in self._seen:
            rows = len(self.mask.terms[0][1])
            tiles = by_position(self.plan.tables.forward)
            self._seen[device] = bounds(tiles, rows, len(self.places)).to(device)
        return self._seen[device]

    def contiguous(self) -> MaskSpec:
        """Returns itself: generate() with a static cache calls this on every prepared mask."""
        return self


class CompiledMasks:
    """The masks prepared for a compiled model, as attributes: see `compiled_masks`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchFacts(MaskFacts):
    """Facts about a batch, known before its model runs.

    Args:
        max_position: the largest position id of the batch, for RoPE that depends on it. rows: B.
        has_labels: the batch has labels, so the model computes a loss.
        numbered: the batch had no position_ids, so each row is numbered 0, 1, 2, ...
        explicit: `shard` got options, which override those of the model.
    """

    max_position: int | None = None
    rows: int = 0
    has_labels: bool = False
    numbered: bool = False
    explicit: bool = False


class Models:
    """Models in the order in which they were added, the same on every rank. It does not keep them alive."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[nn.Module]] = []

    def add(self, model: nn.Module) -> None:
        """Adds a model, once."""
        if all(model is not known for known in self):
            self._references.append(weakref.ref(model))

    def remove(self, model: nn.Module) -> None:
        """Removes a model."""
        self._references = [reference for reference in self._references if reference() is not model]

    def __iter__(self) -> Iterator[nn.Module]:
        return (model for reference in self._references if (model := reference()) is not None)


@dataclass
class RunLog:
    """Events in a batch's context, for the log line at the start and the checks at the end.

    Args:
        plain, scored: ring attentions without and with a score_mod; compiled ones without are not counted.
        before: attentions before this batch, or of another batch nested in its context.
        fused: TRL's fused head was asked for, which computes the loss in chunks of tokens.
        entered: the context was. admitted: a model was. ran: one was called since the context was entered.
        attends: False for a model that is known to have no attention.
        models: the outermost models that were admitted, in order. named: those given to `shard`.
        configs: their transformers configs.
        rows_a_step: the rows of a trainer's optimizer step, if all its batches on all rings are like this one.
    """

    kernel: str = ""
    features: set[str] = field(default_factory=set)
    plain: int = 0
    scored: int = 0
    before: int = 0
    entered: bool = False
    admitted: bool = False
    ran: bool = False
    fused: bool = False
    attends: bool = True
    models: Models = field(default_factory=Models)
    named: Models = field(default_factory=Models)
    configs: list[Any] = field(default_factory=list)
    rows_a_step: int | None = None


@dataclass
class TextModel:
    """The model at whose input a batch is sharded: a text model, with images or sound before it (`multimodal`), or one
    below a head of whole rows (`whole_heads`).

    Args:
        configs: those of such a text model in each model that gets the batch: a reference has its own.
        running: it is being called. random: synchronizes random numbers around it; None in a ring of one.
        gathers: its output is gathered, so that the head computes whole rows, and the loss of these.
    """

    configs: list[Any] = field(default_factory=list)
    running: bool = False
    gathers: bool = False
    random: RingRandomness | None = None

    def knows(self, config: Any) -> bool:
        """Returns True for the config of such a text model."""
        return any(config is known for known in self.configs)


@dataclass(eq=False)
class BatchContext:
    """A sharded batch: its ring, its layout, facts about it, and a log of its run.

    Args:
        text: the model at whose input the batch is sharded; None: the batch itself is sharded.
        gathers_logits: ranks share no loss; one of whole rows is computed on what is gathered, logits for example.
    """

    ring: Ring
    layout: Layout
    config: RingConfig
    facts: BatchFacts = field(default_factory=BatchFacts)
    text: TextModel | None = None
    gathers_logits: bool = False
    log: RunLog = field(default_factory=RunLog)
    compiled_masks: CompiledMasks = field(default_factory=CompiledMasks)
    _specs: dict[tuple[MaskExpr, int], MaskSpec] = field(default_factory=dict)
    _states: dict[type, Any] = field(default_factory=dict)
    _rows: RowShare | None = None

    def __post_init__(self) -> None:
        # A tensor without memory: a compiler makes a new graph for each number, but lets sizes vary.
        self._of_local_shape = torch.empty((), device="cpu").expand(self.facts.rows, self.layout.local_length)

    @property
    def local_shape(self) -> torch.Size:
        """The size [B, T] of this rank's rows."""
        return self._of_local_shape.shape

    def learn(self, **facts: Any) -> None:
        """Adds facts that are known only after the model was called, as in a batch with images.

        A text model may be called again with other documents or padding: masks and rows are then made again.
        """
        known = self.facts
        self.facts = replace(known, **facts)
        if not all(_are_equal(getattr(known, one.name), getattr(self.facts, one.name)) for one in fields(MaskFacts)):
            self._specs, self._rows = {}, None

    def state(self, kind: type[S]) -> S:
        """A feature's own state of this batch: an instance of its class, made at first use."""
        return state_in(self._states, kind)

    def spec(self, seen: MaskExpr, batch: int, make: Callable[[MaskExpr, int], MaskSpec]) -> MaskSpec:
        """The spec of a kind of mask, made once per batch."""
        key = (seen, batch)
        if key not in self._specs:
            self._specs[key] = make(seen, batch)
        return self._specs[key]

    @property
    def kinds(self) -> set[MaskExpr]:
        """The kinds of masks made for this batch."""
        return {seen for seen, _ in self._specs}

    @property
    def before_text(self) -> bool:
        """True while every rank computes whole rows: in a batch with images, around its text model."""
        return self.text is not None and not self.text.running

    @property
    def row_share(self) -> RowShare | None:
        """For layers beside attention that look along the row; None where this process computes whole documents.

        The same object until documents change: it stands for the batch in a recompute (`whole_layers`).
        """
        if self.before_text or (self.ring.size == 1 and self.facts.documents is None):
            return None
        if self._rows is None:
            self._rows = RowShare(self.ring, self.layout, self.facts.documents, self.facts.rows)
        return self._rows

    @property
    def whole_head(self) -> bool:
        """True if the model's head and its loss see whole rows on every rank."""
        return self.text is not None and self.text.gathers

    def admit(self) -> None:
        """Called for every mask made in this context; a placeholder context refuses."""


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def is_active(context: BatchContext) -> bool:
    """Returns True if ``context`` was entered, and not left."""
    return any(active is context for _, active in _STACK)


def current() -> BatchContext | None:
    """The innermost active batch of this thread; in a thread of autograd's that of all."""
    if torch.compiler.is_compiling():  # threads cannot be traced
        return _STACK[-1][1] if _STACK else None
    return next((context for thread, context in reversed(_STACK) if runs_for(thread)), None)


@contextmanager
def activate(context: BatchContext) -> Iterator[BatchContext]:
    """Makes ``context`` the active batch. Within itself it may be entered again.

    Raises:
        NoRingAttention: on leaving, if a model ran but none of its layers attended in the ring.
    """
    log = context.log
    _count_attentions()
    if not is_active(context):
        log.before, log.ran = attentions(), False
    entry = threading.get_ident(), context
    _STACK.append(entry)
    try:
        yield context
    finally:
        _count_attentions()
        if entry in _STACK:  # not in a process that was forked inside
            del _STACK[len(_STACK) - 1 - _STACK[::-1].index(entry)]  # its latest entry
    if log.admitted and log.attends and attentions() == log.before:
        raise errors.NoRingAttention(log.ran)


_counted = 0
"""All attentions until a batch was last entered or left."""


def _count_attentions() -> None:
    """Counts the attentions since then for the innermost batch of this thread, and for none around it."""
    global _counted
    ran, _counted = attentions() - _counted, attentions()
    mine = [context for thread, context in _STACK if runs_for(thread)]
    for outer in {*mine} - {*mine[-1:]}:
        outer.log.before += ran
