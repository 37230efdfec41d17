"""The sharded batch that is being computed now: read only while a mask function or a model's first call runs.

Process-wide and a stack, not a thread-local: backward runs in threads of its own. What a backward or a recompute needs
travels on the `MaskSpec`, so leaving the context before backward is fine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ... import errors
from ...attention.op import attentions
from ...comm.ring import Ring
from ...config import RingConfig
from ...sharding.layout import Layout
from ...sharding.mask import Mask
from ...sharding.plan import Plan
from .mask_functions import MaskExpr
from .not_a_tensor import Opaque
from .ring_random import RingRandomness
from .shared_kv import SharedKV
from .tracked_input import TrackedInput

S = TypeVar("S")

_STACK: list[Scope] = []

LIVE: weakref.WeakSet[Scope] = weakref.WeakSet()
"""Every batch that is shared out and still in use, entered or not."""


def live_batches() -> list[Scope]:
    """Those of rings of several ranks."""
    return [scope for scope in LIVE if scope.ring.size > 1]


class MaskSpec(Opaque):
    """What an attention layer needs to know: the plan of its ring, and where it came from.

    Not a dataclass: FSDP2 walks the fields of dataclasses among a layer's inputs and rebuilds them, and this is one
    opaque object, whose scope leads back to it.

    Args:
        mask: of the whole rows.
        seen: which keys a query sees, as the model asked for it.
        scope: the sharded batch it belongs to; None for a ring of one that needs none.

    Attributes:
        places: [T] int64, where this rank's tokens are in the row: a tensor, since a compiler makes a new graph for
            each layout that it looks into.
        shared: where layers keep keys and values for each other; None: each gathers for itself.
    """

    def __init__(
        self, plan: Plan, layout: Layout, mask: Mask, seen: MaskExpr, config: RingConfig, scope: Scope | None
    ) -> None:
        self.plan = plan
        self.mask = mask
        self.layout = layout
        self.places = layout.positions()
        self.seen = seen
        self.config = config
        self.scope = scope
        # Who says how many heads are gathered at a time bounds memory by it: then nothing stays.
        keeps = scope is not None and scope.ring.size > 1 and config.heads_per_gather is None
        self.shared = scope.shared if scope is not None and keeps else None

    def contiguous(self) -> MaskSpec:
        """Itself: generate() with a static cache calls this on every mask that was made ahead."""
        return self


class CompiledMasks:
    """The masks of a batch that were made before its model was called, as attributes: see `ahead`."""


@dataclass(eq=False)
class Scope:
    """One sharded batch.

    Args:
        documents: [B, S padded] ids on the CPU, -1 for padding to the ring; None: one document, causal masks only.
        hidden: [B, S padded] bool on the CPU, keys that a 2-D padding mask hides; None: none.
        positions: [B, S padded] on the CPU, the position ids of documents; None: places in the row count.
        blocks: [B, S padded] on the CPU, spans that attend both ways (images), by their ids, -1 for other tokens.
        max_position: the largest position id of the whole batch, for RoPE that depends on it.
        late: the batch holds images, so that the text model's inputs are cut, not the batch: see `backbone`.
        has_labels: the batch holds labels, so the model computes a loss on its shard.
        rows: B.
        numbered: the batch had no position_ids, and was given 0, 1, 2, ... in each row.
    """

    ring: Ring
    layout: Layout
    config: RingConfig
    documents: Tensor | None = None
    hidden: Tensor | None = None
    positions: Tensor | None = None
    blocks: Tensor | None = None
    max_position: int | None = None
    has_labels: bool = False
    late: bool = False
    rows: int = 0
    numbered: bool = False
    text_config: Any = None
    """Of a late batch: the transformers config of the text model that shares the row."""
    inside: bool = False
    """Of a late batch: whether that text model is running."""
    before: int = 0
    """Attentions that ran before this batch, or belong to another one inside its context."""
    scored: int = 0
    plain: int = 0
    """Attentions of the row that ran in this context, with a score_mod and without; no compiled ones without."""
    entered: bool = False
    """Whether its context was."""
    whole_loss: bool = False
    """Whether labels are kept from the model, and the loss is computed on gathered logits."""
    handed: dict[str, TrackedInput] = field(default_factory=dict)
    """What a model must be given as it is, by name."""
    called: bool = False
    """Whether any model was called in this context."""
    attends: bool = True
    """Whether some layer of them must attend: not beside a model that is known to have no attention."""
    models: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    """The outermost models that were."""
    configs: list[Any] = field(default_factory=list)
    """The transformers configs in them."""
    reduced: set[int] = field(default_factory=set)
    """Identities of the parameters whose gradients `Sharded.reduce_gradients` averaged."""
    checked: set[int] = field(default_factory=set)
    """Identities of the modules and configs that were looked at."""
    share_of_whole: float = 1.0
    """What a rank returns of what each of them has whole. The mean over ranks gives all of it back, unless a trainer
    multiplies each rank's loss by their number."""
    kernel: str = ""
    """The kernel that computed it, and below what its layers had: for the line at start."""
    features: set[str] = field(default_factory=set)
    randomness: RingRandomness | None = None
    """Of a late batch in a ring: what makes all ranks draw the same random numbers around that text model."""
    shared: SharedKV = field(default_factory=SharedKV)
    """Gathered keys and values that several layers attend to."""
    compiled_masks: CompiledMasks = field(default_factory=CompiledMasks)
    _specs: dict[tuple[MaskExpr, int], MaskSpec] = field(default_factory=dict)
    _states: dict[type, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A tensor without memory: a compiler keeps numbers, and makes a new graph for each, but lets sizes vary.
        self.share = torch.empty(()).expand(self.rows, self.layout.local_length)

    def spec(self, seen: MaskExpr, batch: int, make: Callable[[MaskExpr, int], MaskSpec]) -> MaskSpec:
        """The spec of a kind of mask, made once per batch."""
        key = (seen, batch)
        if key not in self._specs:
            self._specs[key] = make(seen, batch)
        return self._specs[key]

    def state(self, kind: type[S]) -> S:
        """A feature's own state of this batch: an instance of its class, made at first use."""
        found: S = self._states.setdefault(kind, kind())
        return found

    @property
    def kinds(self) -> set[MaskExpr]:
        """The kinds of masks that were made for it."""
        return {seen for seen, _ in self._specs}

    @property
    def before_text(self) -> bool:
        """Whether what runs now is what a late batch does before its text model: whole rows, on every rank alike."""
        return self.late and not self.inside

    def admit(self) -> None:
        """Called for every mask made in this scope; a scope that stands for no sharded batch refuses."""

    def refuse_labels_of_bidirectional(self) -> None:
        if self.has_labels and self.ring.size > 1:
            raise errors.LossNotSharded("the loss of a model with bidirectional attention (masked LM, encoders)")


def current() -> Scope | None:
    """The innermost sharded batch, or None outside any."""
    return _STACK[-1] if _STACK else None


@contextmanager
def activate(scope: Scope) -> Iterator[Scope]:
    """Makes ``scope`` the current one while a model's forward runs.

    Raises:
        NoRingAttention: on leaving, if a model ran but none of its layers attended in the ring.
    """
    _STACK.append(scope)
    scope.before = attentions()
    try:
        yield scope
    finally:
        _STACK.remove(scope)
        ran = attentions() - scope.before
        for outer in _STACK:
            outer.before += ran
    if scope.called and scope.attends and not ran:
        raise errors.NoRingAttention()
