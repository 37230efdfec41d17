"""Attention that the ring does not know: each rank computes it on whole documents, by the model's own code.

Layers of an unknown type compress or choose keys along the row, for example. They are exact by construction, as other
layers on whole documents are (`whole_layers`): a rank gathers what the layer gets of tokens, computes each document
with the mask that one process makes for it, by transformers' sdpa or the model's eager code, and keeps its own tokens.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ... import errors
from ...attention.op import count_attention
from ...comm.ring import LOCAL, Ring
from ...layers.halo import ALL, Piece, RowShare
from ...sharding.layout import Layout
from ...sharding.plan import Plan
from ...sharding.visible import bounds, by_position, visible
from ..context import batch_context
from ..context.batch_context import BatchContext, MaskSpec
from ..context.introspect import calls_interface, class_of, file_of, forwards_of, text_modules
from ..context.model_record import latest_record
from ..context.tensor_tree import tensors_of
from ..gradients.attention_outputs import note_output
from ..log import warn
from ..patching.compiler import uncompiled
from ..patching.modules import Replaced, replace_forward
from . import indexers
from .decoder import named_kinds
from .recurrent_ops import BY_HOST
from .refused_arguments import CAUSAL_OR_NOT, NO_DROPOUT, OF_SCORES, REFUSED_ARGUMENTS, is_causal_or_not
from .whole_layers import SHARED, OnWholeDocuments, is_of_tokens
from .written_arguments import call_with

KINDS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
"""The types of layers whose attention the ring computes."""
HYBRIDS = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "mlp", "moe", "recurrent"}
"""Types of layers that hybrids have beside attention, or with it."""

_READS_PADDING = (
    "it compresses or chooses keys by their place, so tokens read padding that stands before them: pad on the right, "
    "or pack"
)
_PAIRS = (
    "an input of it has a number for each two tokens of a rank, and how one process makes these of a whole row is not "
    "known: train it without a ring"
)


# ---- which layers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WholeAttention:
    """An attention on whole documents.

    Args:
        implementation: "sdpa" or "eager", as transformers chooses for this model.
        kind: the type of its layer; None: its config names none.
    """

    module: weakref.ref[nn.Module]
    implementation: str
    kind: str | None


def whole_attention_of(model: nn.Module) -> list[WholeAttention]:
    """The attention of ``model`` that the ring does not know, found once for each structure."""
    return latest_record(model).once(_find, model)


def kinds_of(model: nn.Module) -> set[str]:
    """The types of these layers."""
    return {one.kind for one in whole_attention_of(model) if one.kind is not None}


def _find(model: nn.Module) -> list[WholeAttention]:
    known = KINDS | HYBRIDS | (indexers.LAYERS if indexers.indexers_of(model) else set())
    found, models = [], list[tuple[str, bool]]()
    for name, module in text_modules(model):
        if isinstance(module, PreTrainedModel):
            models.append((name, bool(module._supports_sdpa)))
        if isinstance(module, PreTrainedModel) or not any(map(_attends, forwards_of(module))):
            continue
        kind = _kind_of(module)
        if (kind is None or kind in known) and not _adds_a_bias(module):
            continue
        sdpa = next((x for outer, x in reversed(models) if not outer or name.startswith(f"{outer}.")), False)
        found.append(WholeAttention(weakref.ref(module), "sdpa" if sdpa else "eager", kind))
    return found


def _attends(forward: Any) -> bool:
    """Returns True for a forward that uses transformers' attention interface, and takes a mask."""
    return calls_interface(forward) and any(name.endswith("mask") for name in inspect.signature(forward).parameters)


def _kind_of(module: nn.Module) -> str | None:
    """The type of the layer that an attention belongs to."""
    own = vars(module)
    kinds, index = named_kinds(own.get("config")), own.get("layer_idx")
    return str(kinds[index]) if type(index) is int and 0 <= index < len(kinds) else None


def _adds_a_bias(module: nn.Module) -> bool:
    """Returns True if its own eager attention takes an argument of scores that a ring's does not."""
    eager = getattr(sys.modules.get(file_of(module)), "eager_attention_forward", None)
    takes = set() if eager is None else set(inspect.signature(eager).parameters)
    return not takes.isdisjoint(OF_SCORES)


# ---- what they compute -----------------------------------------------------------------------------------------------


def prepare(model: nn.Module, context: BatchContext) -> None:
    """Replaces the forwards of attention that the ring does not know."""
    names = set()
    for one in whole_attention_of(model):
        if (module := one.module()) is None:
            continue
        names.add(class_of(module))
        replace_forward(module, _OnWholeRows, one)
    if names and context.ring.size > 1:
        warn(SHARED.format(", ".join(sorted(names))), everywhere=False)


class _OnWholeRows(OnWholeDocuments):
    """An attention's forward: in a sharded batch on whole documents, else as transformers computes it."""

    def __init__(self, module: nn.Module, one: WholeAttention) -> None:
        super().__init__(module)
        self.implementation, self.by_mask_alone = one.implementation, one.kind in KINDS | HYBRIDS

    @uncompiled(BY_HOST)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        spec, context = _spec_in([*args, *kwargs.values()]), batch_context.current()
        layout = _layout_of(spec, context)
        if layout is None:
            return super().__call__(*args, **kwargs)
        self._refuse(kwargs, spec)
        if spec is not None:
            self._refuse_padding(spec)
        count_attention()
        if context is not None:
            context.log.kernel = context.log.kernel or f"{self.implementation} on whole rows"
            context.log.plain += 1
        found = super().__call__(*args, **kwargs)
        note_output(max((x for _, x in tensors_of(found)), key=lambda x: x.requires_grad), self.module, layout)
        return found

    def _refuse(self, given: Mapping[str, Any], spec: MaskSpec | None) -> None:
        where, config = class_of(self.module), self.module.__dict__.get("config")
        dropout = getattr(self.module, "attention_dropout", getattr(config, "attention_dropout", 0.0))
        dropout = getattr(dropout, "p", dropout)  # of a module
        if self.module.training and dropout:
            raise errors.UnsupportedArgument(where, f"dropout={dropout}", NO_DROPOUT)
        if given.get("output_attentions"):
            raise errors.UnsupportedArgument(where, "output_attentions", REFUSED_ARGUMENTS["output_attentions"])
        if spec is not None and self.implementation == "sdpa" and is_causal_or_not(self.module, spec.seen):
            raise errors.UnsupportedArgument(where, "is_causal=False", CAUSAL_OR_NOT)

    def _refuse_padding(self, spec: MaskSpec) -> None:
        """Refuses padding on the left, which the layer may choose or compress, if a ring has other numbers for it.

        Such padding sees no key. A ring's layers give it zeros, as sdpa and sinks do; eager attention gives it a mean.
        """
        zeros = self.implementation == "sdpa" or getattr(self.module, "sinks", None) is not None
        if not self.by_mask_alone and not zeros and _sees_nothing(spec):
            raise errors.UnsupportedModel(class_of(self.module), [_READS_PADDING])

    def alone(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers computes it, without a ring; in a ring of one, rows of one document."""
        return self._computed(None, args, kwargs)

    def on_document(self, place: Piece, *args: Any, **kwargs: Any) -> Any:
        """As one process computes this document. Attention weights are no output of a ring."""
        return self._computed(place, args, kwargs)

    def _computed(self, place: Piece | None, args: Any, kwargs: Any) -> Any:
        hidden = next(x for _, x in tensors_of((args, kwargs)) if x.is_floating_point())

        def as_tensor(x: Any) -> Any:
            if isinstance(x, MaskSpec):
                x = _mask_of(x, place or Piece(ALL, 0, x.layout.length), hidden.device)
            is_mask = isinstance(x, Tensor) and x.dtype == torch.bool and x.dim() == 4
            if not is_mask or self.implementation == "sdpa":
                return x
            return torch.zeros_like(x, dtype=hidden.dtype).masked_fill(~x, torch.finfo(hidden.dtype).min)

        config: Any = self.module.__dict__["config"]
        with Replaced(config, "_attn_implementation_internal", self.implementation):  # its code asks for that
            found, _ = call_with(self.forward, args, kwargs, as_tensor)
        if place is None or type(found) is not tuple:
            return found
        return tuple(None if _are_weights(x, hidden.shape[1]) else x for x in found)

    def is_of_pairs(self, x: Any, rows: RowShare) -> bool:
        """Returns True for a table that the model made by a rank's length: of distances, also if rows are as many.

        Raises:
            UnsupportedModel: a table of something else.
        """
        length = rows.layout.local_length
        if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[-2:] != (length, length):
            return False
        if x.dim() == 2 and x.dtype != torch.bool and torch.equal(x, _distances(length, x)):
            return True
        if is_of_tokens(x, rows):  # ids, or positions, of as many rows; or as many features
            return False
        raise errors.UnsupportedModel(class_of(self.module), [_PAIRS])

    def pairs_of(self, x: Tensor, tokens: int) -> Tensor:
        """The table that one process makes of a document."""
        return _distances(tokens, x)


def _are_weights(x: Any, tokens: int) -> bool:
    """Returns True for attention weights [B, H, T, keys]."""
    return isinstance(x, Tensor) and x.dim() == 4 and x.shape[2] == tokens


def _distances(tokens: int, like: Tensor) -> Tensor:
    at = torch.arange(tokens, device=like.device, dtype=like.dtype)
    return at[:, None] - at[None, :]


def _layout_of(spec: MaskSpec | None, context: BatchContext | None) -> Layout | None:
    """The layout of the rows that an attention gets a share of; None outside of sharded batches, and in a recompute
    without the ring's mask."""
    if spec is not None:
        return spec.layout if spec.in_batch else None
    return None if context is None or context.before_text or context.row_share is None else context.layout


def _spec_in(given: Iterable[Any]) -> MaskSpec | None:
    return next((x for x in given if isinstance(x, MaskSpec)), None)


def _mask_of(spec: MaskSpec, place: Piece, device: torch.device) -> Tensor:
    """The mask [b, 1, n, n] of a document, bool, made once a batch: all layers keep one, as in one process."""
    known, seen = _MASKS.setdefault(spec, {}), _bounds_of(spec)
    key = place.rows.start, place.rows.stop, place.start, place.stop, device
    if key not in known:
        mine = place.rows if seen.shape[2] > 1 else ALL
        of_queries = seen[:, :, mine, place.start : place.stop]
        known[key] = visible(of_queries.to(device), place.stop)[:, None, :, place.start :].contiguous()
    mask: Tensor = known[key]
    return mask


def _bounds_of(spec: MaskSpec) -> Tensor:
    """The `bounds` of all queries of the rows."""
    known = _MASKS.setdefault(spec, {})
    if _BOUNDS not in known:
        plan = Plan.cached(Ring(LOCAL), Layout(spec.layout.padded, 1, 0), spec.mask)
        known[_BOUNDS] = bounds(by_position(plan.tables.forward), len(spec.mask.terms[0][1]), spec.layout.padded)
    found: Tensor = known[_BOUNDS]
    return found


def _sees_nothing(spec: MaskSpec) -> bool:
    """Returns True if a query before other tokens of its row sees no key: it is padding before the first token."""
    known = _MASKS.setdefault(spec, {})
    if _BLIND not in known:
        first, stop = _bounds_of(spec)[..., : spec.layout.length].unbind(1)
        sees = (first < stop).any(0)
        known[_BLIND] = bool((~sees & (sees.flip(1).cumsum(1).flip(1) > 0)).any())
    blind: bool = known[_BLIND]
    return blind


_MASKS: weakref.WeakKeyDictionary[MaskSpec, dict[Any, Any]] = weakref.WeakKeyDictionary()
_BOUNDS, _BLIND = "bounds", "a query that sees nothing"
