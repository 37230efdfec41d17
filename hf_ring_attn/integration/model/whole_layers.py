"""Layers that look along the sequence in a way that is not known: each rank computes them on whole documents.

They are exact by construction. The masks of a batch carry its rows (`recurrent_rows`): a layer gets one, or the layer
around it does. Attention and MLPs beside them stay shared.
"""

from __future__ import annotations

import inspect
import re
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ... import errors
from ...comm.ring import Ring
from ...layers.halo import ALL, Piece, RowShare
from ...layers.whole_documents import compute_on_whole_documents
from ...traffic.gathered_kv import is_recomputing
from ..context.batch_context import BatchContext
from ..context.introspect import class_of, forward_of, holds_attention, inner_text_model, text_modules
from ..context.tensor_tree import tensors_of
from ..log import warn
from ..patching.compiler import uncompiled
from ..patching.modules import OwnForward, attach, replace_forward
from .document_attributes import DocumentAttributes, give_back
from .recurrent_ops import BY_HOST, RunningLayers
from .recurrent_rows import MASK, have_same_documents, refuse_cache, rows_in, rows_of_batch
from .written_arguments import call_with

TOKENWISE = re.compile(r"(Norm(Gated)?|M[Ll][Pp]|Embedding)$")
STATEFUL = re.compile(r"Mamba|Rwkv|Recurrent|GatedDelta|ShortConv|LinearAttention|LightningAttention|xLSTM")
HOLDERS = (PreTrainedModel, GradientCheckpointingLayer, nn.ModuleList)
"""Models and layers, whose MLPs stay shared, and lists of layers. A dict has adapters: any layer may hold one."""
SHARED = "{}: ranks do not share the work of these layers. Each rank computes them on whole rows."
_MIXED = (
    "a checkpoint recomputes it while packed batches of other documents are in use, or calls without a ring: run the "
    "backward of each batch before the next forward"
)
_BY_CHANCE = (
    "an input of it has as many entries as a rank has tokens, and had another number in batches of other lengths, so "
    "it may be no tokens: pad rows to another length"
)
_WRITES = (
    "in packed rows it is called for each document, and it keeps a tensor in a dict or a list that it gets: return it "
    "for each token instead, or do not pack"
)
_ROWS = "hf_ring_attn: the rows of this layer on whole rows"
AROUND = RunningLayers()
"""Those that take a mask, around layers on whole rows."""


# ---- which layers ----------------------------------------------------------------------------------------------------


def carries_state(module: nn.Module) -> bool:
    """Returns True for a class that carries state along the sequence, by its name."""
    kind = type(module).__name__
    return bool(STATEFUL.search(kind)) and not TOKENWISE.search(kind)


def find_whole_layers(model: nn.Module, known: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The outermost modules that look along the sequence beside attention, without the ``known`` layers, by name."""
    text, layers = inner_text_model(model), {id(layer) for layer in known.values()}
    of_text = None if text is None else {id(module) for module in text.modules()}  # beside it are projectors of images
    whole: dict[str, nn.Module] = {}
    for name, module in text_modules(model):
        if any(f"{name}.".startswith(f"{outer}.") for outer in (*known, *whole)) or not _looks_along(module):
            continue
        holds_layers = any(id(part) in layers or isinstance(part, HOLDERS) for part in module.modules())
        if holds_layers or isinstance(module, nn.ModuleDict) or holds_attention(module):
            continue
        if of_text is None or id(module) in of_text:
            whole[name] = module
    return whole


def _looks_along(module: nn.Module) -> bool:
    """Returns True for a recurrence, and for a module that has a convolution."""
    if isinstance(module, nn.RNNBase):
        return module.batch_first
    of_shares = forward_of(module) is nn.Conv1d.forward  # its caller has moved the tokens to the last dim
    convolutions = [x for x in module.modules() if isinstance(x, nn.Conv1d) and x.kernel_size != (1,)]
    return any(x is not module or not of_shares for x in convolutions) or carries_state(module)


def gets_rows(module: nn.Module) -> bool:
    """Returns True for a layer that is sure to get rows: by the mask that transformers makes for recurrent layers."""
    return MASK in getattr(forward_of(module), "__globals__", {}) and takes_mask(module)


def takes_mask(module: nn.Module) -> bool:
    if isinstance(module, PreTrainedModel):  # it makes the mask
        return False
    return any(name.endswith("_mask") for name in inspect.signature(forward_of(module)).parameters)


# ---- what they compute -----------------------------------------------------------------------------------------------


def prepare(model: nn.Module, whole: Mapping[str, weakref.ref[nn.Module]], context: BatchContext) -> None:
    """Replaces the forwards of ``whole`` layers of ``model``; without effect outside of sharded batches."""
    kinds = set()
    for name, reference in whole.items():
        if (module := reference()) is None:
            continue
        kinds.add(class_of(module))
        replace_forward(module, OnWholeDocuments)
        if (layer := _layer_around(model, name)) is not None:
            attach(layer, "layer around whole layers", _enter, _leave)
    if kinds and context.ring.size > 1:
        warn(SHARED.format(", ".join(sorted(kinds))), everywhere=False)


def _layer_around(model: nn.Module, name: str) -> nn.Module | None:
    """The innermost module around a layer that takes a mask; None if there is none."""
    while name:
        name = name.rpartition(".")[0]
        if takes_mask(outer := model.get_submodule(name)):
            return outer
    return None


@uncompiled(BY_HOST)
def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    AROUND.enter(module, rows_in([*args, *kwargs.values()]))


@uncompiled(BY_HOST)
def _leave(module: nn.Module, _args: Any, _output: Any) -> None:
    AROUND.leave(module)


class OnWholeDocuments(OwnForward):
    """A layer's forward in a sharded batch."""

    @uncompiled(BY_HOST)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        give_back(self.module)
        rows = None if WITHIN.depth else self._rows(args, kwargs)
        if rows is None:
            return self.alone(*args, **kwargs)
        name, several = type(self.module).__name__, sum(map(len, rows.pieces)) > 1
        refuse_cache(name, [*args, *kwargs.values()])
        given, attributes = tree_leaves((args, kwargs)), DocumentAttributes(self.module)
        of_rnn = [args[0] if args else kwargs.get("input")]
        tokens, bare = self._tokens(given, of_rnn if isinstance(self.module, nn.RNNBase) else given, rows)

        def compute(whole: list[Tensor], of: Piece) -> Any:
            whole = [x[0] if number in bare else x for number, x in zip(tokens, whole, strict=True)]
            theirs = {**self._states(given, of), **dict(zip(tokens, whole, strict=True))}
            whole_length = of.stop - of.start

            def change(x: Any) -> Any:
                if id(x) in theirs:
                    return theirs[id(x)]
                return self.pairs_of(x, whole_length) if self.is_of_pairs(x, rows) else x

            with WITHIN.one_more(), attributes.of_document() if several else nullcontext():
                of_document = partial(self.on_document, of)
                found, wrote = call_with(of_document, args, kwargs, change)
            if wrote and several:
                raise errors.UnsupportedModel(name, [_WRITES])
            return found

        if not tokens:
            return compute([], Piece(ALL, 0, rows.layout.length))
        found = compute_on_whole_documents(rows, [*tokens.values()], compute, name)
        attributes.end()
        return _keep_rows(rows, found)

    def _tokens(self, given: list[Any], searched: list[Any], rows: RowShare) -> tuple[dict[int, Tensor], set[int]]:
        """The inputs of a rank's tokens by their identities, and which of these had no axis of rows.

        Args:
            given: all inputs. searched: those that may be of tokens.

        Raises:
            UnsupportedModel: an input may have the size of tokens by chance.
        """
        ran = _RAN[self.module]
        tokens: dict[int, Tensor] = {
            id(x): x for x in searched if is_of_tokens(x, rows) and not self.is_of_pairs(x, rows)
        }
        # Only beside them: a layer that gets nothing else may look along features, with tokens in place of rows.
        bare = ran.without_rows(given, {*map(id, searched)}, rows) if tokens else set()
        tokens |= {id(x): x[None] for x in searched if id(x) in bare}
        if not ran.knows(given, tokens, rows.layout.local_length):
            raise errors.UnsupportedModel(type(self.module).__name__, [_BY_CHANCE])
        return tokens, bare

    def _states(self, given: list[Any], of: Piece) -> dict[int, Tensor]:
        """A document's states of an RNN, which are [layers, B, H]; by the identities of those of all rows."""
        if not isinstance(self.module, nn.RNNBase):
            return {}
        return {id(x): x[:, of.rows].contiguous() for x in given if isinstance(x, Tensor) and x.dim() == 3}

    def alone(self, *args: Any, **kwargs: Any) -> Any:
        """The layer outside of sharded batches, or inside another layer on whole rows."""
        return self.forward(*args, **kwargs)

    def on_document(self, place: Piece, *args: Any, **kwargs: Any) -> Any:
        """The layer on the tokens of a document."""
        return self.forward(*args, **kwargs)

    def is_of_pairs(self, x: Any, rows: RowShare) -> bool:
        """Returns True for an input that has a number for each two tokens of a rank."""
        return False

    def pairs_of(self, x: Tensor, tokens: int) -> Tensor:
        """Returns what a document has in place of an input of pairs."""
        raise NotImplementedError

    def _rows(self, args: Any, kwargs: Any) -> RowShare | None:
        """The rows of which this call has a share; None outside of sharded batches."""
        given, ran = [*args, *kwargs.values()], _RAN.setdefault(self.module, _Runs())
        rows = rows_in(given) or AROUND.rows
        if rows is None and is_recomputing():
            fitting = [one for one in ran.alive if any(is_of_tokens(x, one) for _, x in tensors_of((args, kwargs)))]
            if fitting and (ran.latest is None or not all(have_same_documents(one, fitting[0]) for one in fitting)):
                raise errors.UnsupportedModel(type(self.module).__name__, [_MIXED])
            return fitting[0] if fitting else None
        rows = rows or rows_of_batch()
        ran.latest = rows
        if rows is not None:
            ran.alive.add(rows)
        return rows


@dataclass
class _Runs:
    """The rows of which a layer computed shares: a checkpoint's recompute may get nothing that tells them.

    Args:
        latest: of the latest forward; None: it was outside of sharded batches.
        alive: all whose batch or graph is in use.
        of_tokens: the places of inputs that had a rank's tokens. others: of those that had none, with the rank's
            number of tokens.
    """

    latest: RowShare | None = None
    alive: weakref.WeakSet[RowShare] = field(default_factory=weakref.WeakSet)
    of_tokens: set[tuple[int, int]] = field(default_factory=set)
    others: dict[tuple[int, int], set[int]] = field(default_factory=dict)

    def knows(self, given: list[Any], tokens: Mapping[int, Tensor], length: int) -> bool:
        """Notes the inputs of a call. Returns False if one that had no tokens may have the size of tokens by chance."""
        for index, x in enumerate(given):
            place = len(given), index
            if id(x) in tokens:
                if place not in self.of_tokens and length not in self.others.get(place, {length}):
                    return False
                self.of_tokens.add(place)
            elif isinstance(x, Tensor):
                self.others.setdefault(place, set()).add(length)
        return True

    def without_rows(self, given: list[Any], searched: set[int], rows: RowShare) -> set[int]:
        """The identities of inputs of tokens that have no axis of rows, [T] or [T, ...], as positions may be.

        Something else may have as many entries, as many heads. That is the same on all ranks of a ring, which hold
        other tokens; so they compare what was not of tokens before, with a message.
        """
        found, length = set[int](), rows.layout.local_length
        for index, x in enumerate(given):
            if id(x) not in searched or not isinstance(x, Tensor) or isinstance(x, nn.Parameter):
                continue
            if x.shape[:1] != (length,) or is_of_tokens(x, rows):
                continue
            known = (len(given), index) in self.of_tokens
            if known or (x.shape[-2:] != (length, length) and _differs(x, rows.ring)):  # that would be of pairs
                found.add(id(x))
        return found


def _differs(x: Tensor, ring: Ring) -> bool:
    """Returns True if ranks hold different tensors, on every rank. One rank alone cannot know: True, too."""
    parts = ring.gather(x.detach(), "compared an input of a layer on whole rows").wait()[0]
    return ring.size == 1 or not all(torch.equal(part, parts[0]) for part in parts[1:])


_RAN: weakref.WeakKeyDictionary[nn.Module, _Runs] = weakref.WeakKeyDictionary()


def _keep_rows(rows: RowShare, output: Any) -> Any:
    """Lets the graph of an output keep its rows alive."""
    for _, x in tensors_of(output):
        made_by: Any = x.grad_fn
        if made_by is not None:
            made_by.metadata[_ROWS] = rows
    return output


class _Within(threading.local):
    """How many layers this thread computes on whole rows, one inside the other: the inner ones get whole rows."""

    depth = 0

    @contextmanager
    def one_more(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


WITHIN = _Within()


def is_of_tokens(x: Any, rows: RowShare) -> bool:
    """Returns True for a tensor of the size of a rank's tokens, [B, T, ...] or [1, T, ...]."""
    if not isinstance(x, Tensor) or x.dim() < 2:
        return False
    return x.shape[0] in (1, rows.count) and x.shape[1] == rows.layout.local_length
