"""transformers' masks as data: converts a mask function to a `MaskSpec` by recognising it, never by probing.

masking_utils calls the registered function once per kind of mask and forward, and passes its result unchanged to every
attention layer. Ours returns a spec with the ring, the layout and the tables of tiles, so a backward or a recompute
needs no global state.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, masking_utils
from transformers.masking_utils import sdpa_mask

from ... import errors
from ...comm.ring import LOCAL, Ring, world_size
from ...sharding.layout import Layout
from ...sharding.mask import Band, Mask, Term, Terms, both
from ...sharding.plan import Plan
from ...traffic.gathered_kv import is_recomputing
from ..context import batch_context, model_record
from ..context.batch_context import BatchContext, MaskSpec
from ..context.introspect import CACHES, NAME, by_name
from ..context.mask_functions import MaskExpr, SameGroup, parts_of, recognise, terms_of
from ..context.model_record import latest_record
from ..context.whole_batch import restarts, text_positions
from ..log import warn
from ..model import admission, call_inputs
from ..patching.changes import Original, Patch, around, render, target_of
from ..patching.compiler import uncompiled
from . import compiled_masks

CHUNKS_BY_POSITION = hasattr(masking_utils, "remap_positions_for_packed_sequence")
"""True if this transformers counts chunks from the start of each document; 5.17 counts from that of the row."""


def ring_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    config: Any = None,
    **kwargs: Any,
) -> MaskSpec | Tensor | None:
    """The mask function registered for "ring_fp32": a spec, or transformers' own mask for cached decoding.

    Raises:
        Refused: for a mask or a model that a ring cannot do exactly, before any attention is computed.
    """
    if torch.compiler.is_dynamo_compiling() and compiled_masks.readable(attention_mask, config, kwargs):
        context = batch_context.current()
        if context is not None and compiled_masks.fits(
            context, config, batch_size, q_length, kv_length, q_offset, kv_offset
        ):
            name = _name_of_prepared(*compiled_masks.band_of(mask_function))
            if name:
                spec: MaskSpec = getattr(context.compiled_masks, name)
                return spec
    mask: MaskSpec | Tensor | None = _ring_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, config, kwargs
    )
    return mask


# A compiler runs it once per band, which it guards, and caches the name, under which each batch has its own mask.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _name_of_prepared(lo: int, hi: int) -> str:
    """The name of the current batch's prepared mask of this band; "" if it is refused."""
    context, band = batch_context.current(), Band(lo, hi)
    assert context is not None, "a compiler asks inside a batch"
    if not _prepare_mask(context, band):
        return ""
    for model in context.log.models:
        latest_record(model).state(_Bands).add(band)
    return _name(band)


class _Bands(set[Band]):
    """The bands of masks that compilers found in a model."""


def prepare_masks(model: nn.Module, context: BatchContext) -> None:
    """Prepares the masks that a compiled ``model`` will look up; does nothing for others."""
    for band in sorted(latest_record(model).state(_Bands)):
        _prepare_mask(context, band)


def _prepare_mask(context: BatchContext, band: Band) -> bool:
    try:
        setattr(context.compiled_masks, _name(band), _of_shard(context, band, context.facts.rows))
    except errors.Refused:  # then the model asks for it outside its graph, and gets the error
        return False
    return True


def _name(band: Band) -> str:
    return f"band_{band.lo}_{band.hi}"


_BY_HOST = "hf_ring_attn makes this mask from the batch, or refuses it: uncompiled, it says why"


@uncompiled(_BY_HOST)
def _ring_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int, kv_offset: int, mask_function: Callable[..., Any],
    attention_mask: Tensor | None, config: Any, kwargs: dict[str, Any],
) -> MaskSpec | Tensor | None:  # fmt: skip
    context = batch_context.current()
    whole = q_length == kv_length and compiled_masks.is_zero(q_offset) and compiled_masks.is_zero(kv_offset)
    if context is not None and context.text is not None and context.before_text:
        if whole and context.text.knows(config):
            return _spec_of_whole_rows(context.layout, context, batch_size, mask_function, attention_mask, config)
        context = None  # a vision tower's
    if context is None:
        if not whole:
            # An explicit mask even if plain causal: softcap and sinks use the model's eager code.
            kwargs["allow_is_causal_skip"] = False
            return sdpa_mask(
                batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
                kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask, config=config,
                **kwargs,
            )  # fmt: skip
        if is_recomputing() and world_size() > 1:
            raise errors.MaskOutsideRing()
        layout = Layout(q_length, 1, 0)
        device = kwargs.get("device")
        return _spec_of_whole_rows(layout, None, batch_size, mask_function, attention_mask, config, device)
    if not whole or q_length != context.layout.local_length:
        raise errors.UnshardedInput(q_length, kv_length, context.layout.local_length, context.layout.length)
    admission.refuse(config, context)
    return _of_shard(context, recognise(mask_function), batch_size)


def _of_shard(context: BatchContext, seen: MaskExpr, batch: int) -> MaskSpec:
    context.admit()
    spec = context.spec(seen, batch, functools.partial(_spec, context))
    if spec.seen is not seen:  # made for an equal expression, perhaps of other blocks
        for part in parts_of(seen):
            if isinstance(part, SameGroup) and part.kind == "blocks":
                _blocks(context, part, batch)
    return spec


def _spec(context: BatchContext, seen: MaskExpr, batch: int) -> MaskSpec:
    """The spec of a shard, made from the whole batch: masking_utils' closures hold one rank's shard only."""
    facts = context.facts
    if batch != facts.rows and (facts.documents is not None or facts.hidden is not None):  # each row twice, for example
        raise errors.OtherInputs("a model", [], [f"number of rows ({batch} for the batch's {facts.rows})"])

    def alike(part: SameGroup) -> Terms:
        if part.kind == "chunks":
            positions = context.facts.positions if CHUNKS_BY_POSITION else None
            return _chunks(part.size, batch, context.layout.padded, context.facts.hidden, positions)
        if part.kind == "blocks":
            return _blocks(context, part, batch)
        raise errors.ShardedMask(part.kind)

    terms = both(terms_of(seen, alike), (Term(ids=context.facts.documents),))
    mask = Mask.of_terms(terms, batch, context.layout.padded, context.facts.hidden)
    return MaskSpec(_plan(context.ring.name, context.layout, mask), context.layout, mask, seen, context.config, context)


def _blocks(context: BatchContext, part: SameGroup, batch: int) -> Terms:
    """Terms of the batch's blocks, of which a model must have this rank's.

    Raises:
        ShardedMask: it has others.
    """
    assert part.tensor is not None
    known = context.facts.blocks
    if known is None and not bool((part.tensor >= 0).any()):
        return ()
    if known is None or not torch.equal(
        context.layout.shard(known, 1), part.tensor.to("cpu", torch.int64).expand(batch, -1)
    ):
        raise errors.ShardedMask(part.kind)
    return (Term(ids=known),)


def _chunks(size: int, batch: int, length: int, hidden: Tensor | None, positions: Tensor | None) -> Terms:
    """Terms of chunks of ``size`` positions: the given ones, else indices in the row after its left padding."""
    if positions is None:
        left = (
            torch.zeros(batch, 1, dtype=torch.int64, device="cpu")
            if hidden is None
            else hidden.long().cumprod(1).sum(1, True)
        )
        positions = torch.arange(length, device="cpu") - left
    ids = positions.div(size, rounding_mode="floor").expand(batch, -1)
    return (Term(ids=ids - ids.min()),)  # ids of padding are negative


def _plan(ring: str, layout: Layout, mask: Mask) -> Plan:
    plan = Plan.cached(Ring(ring), layout, mask)
    if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it takes seconds
        torch._dynamo.maybe_mark_dynamic(plan.tiles, 0)  # other documents, another number of tiles: the same graph
    return plan


def _spec_of_whole_rows(
    layout: Layout, context: BatchContext | None, batch: int, mask_function: Callable[..., Any],
    attention_mask: Tensor | None, config: Any, device: torch.device | None = None,
) -> MaskSpec:  # fmt: skip
    """The spec of a call with whole rows: documents and padding come from this call alone.

    Args:
        context: a batch that is sharded later, at the text model's input; None for a ring of one.
    """
    length, seen = layout.length, recognise(mask_function)
    hidden = None
    if attention_mask is not None:
        hidden = ~attention_mask[:, :length].to("cpu", torch.bool)
        hidden = layout.pad(hidden, 1, False) if hidden.any() else None

    def alike(part: SameGroup) -> Terms:
        assert part.tensor is not None
        if part.kind == "chunks":
            at = None if part.positions is None else layout.pad(part.positions.to("cpu", torch.int64), 1)
            return _chunks(part.size, batch, layout.padded, hidden, at)
        return (Term(ids=layout.pad(part.tensor[:, :length].to("cpu", torch.int64).expand(batch, -1), 1, -1)),)

    terms = terms_of(seen, alike)
    if layout.padded > length:
        terms = both(terms, (Term(ids=layout.pad(torch.zeros(batch, length, dtype=torch.int64, device="cpu"), 1, -1)),))
    mask = Mask.of_terms(terms, batch, layout.padded, hidden)
    if context is None:
        options = model_record.configured([config]) or model_record.DEFAULT
        return MaskSpec(_plan(LOCAL, layout, mask), layout, mask, seen, options, None, device)
    return MaskSpec(_plan(context.ring.name, layout, mask), layout, mask, seen, context.config, context)


# ---- prepared masks --------------------------------------------------------------------------------------------------


def _pass_spec_through(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a prepared mask unchanged, as when an outer model passes its mask to its text model.

    masking_utils recognises a prepared mask by its four dimensions, so a 4-D tensor replaces ours there. Of a cache it
    gets the length where there are keys.
    """
    names = tuple(inspect.signature(original).parameters)
    name_of_cache = next(name for name in CACHES if name in names)

    def _preprocess_mask_arguments(*args: Any, **kwargs: Any) -> Any:
        given = by_name(names, args, kwargs)
        spec = next((x for x in given.values() if isinstance(x, MaskSpec)), None)
        if spec is None:
            cache = given[name_of_cache]
            if not torch.compiler.is_dynamo_compiling():
                _refuse_share(given, cache)
            if cache is not None and given["config"]._attn_implementation == NAME:
                given["layer_idx"] = _layer_with_keys(cache, given["layer_idx"])
            return original(**given)
        stand_in = torch.empty(0, 0, 0, 0, device="cpu")
        given = {name: stand_in if x is spec else x for name, x in given.items()}
        return tuple(spec if x is stand_in else x for x in original(**given))

    return _preprocess_mask_arguments


def _layer_with_keys(cache: Any, asked: int) -> int:
    """The layer by whose keys to size a mask: the one asked for, or if it has none, the next of its kind that has some.

    transformers asks for the first layer, which never has keys in MiniMax.
    """
    layers = list(getattr(cache, "layers", ()))[asked:]
    if not layers or _has_keys(layers[0]):
        return asked
    kinds = [getattr(layer, "is_sliding", False) for layer in layers]
    return next((asked + i for i, x in enumerate(layers) if kinds[i] == kinds[0] and _has_keys(x)), asked)


def _has_keys(layer: Any) -> bool:
    """Returns True for a layer's cache that is not empty. A static one has a place for every key from the start."""
    if not hasattr(layer, "get_seq_length"):  # a state, as of linear attention
        return False
    return bool(getattr(layer, "is_compileable", False) or layer.get_seq_length() > 0)


def needed_parameters(original: Callable[..., Any] | None) -> str:
    """The parameters that `_preprocess_mask_arguments` must have: its own, if they have what is read here."""
    if original is not None:
        names = inspect.signature(original).parameters.keys()
        if {"config", "attention_mask", "position_ids", "layer_idx"} <= names and not names.isdisjoint(CACHES):
            return render(original)
    return "(config, inputs_embeds, attention_mask, cache, position_ids, layer_idx, ...)"


def _refuse_share(given: Mapping[str, Any], cache: Any) -> None:
    """Refuses a mask or a cache of a shard outside its ring, whatever attention the model has.

    Inside the ring it refuses one whose documents transformers would infer from positions: the zigzag looks like a new
    document there, but not on every rank.
    """
    context, mask, positions = batch_context.current(), given["attention_mask"], given["position_ids"]
    has_cache = cache is not None
    if context is None:
        call_inputs.refuse_cache_of_share(cache)
        if not is_recomputing():  # `ring_mask` refuses a recompute with more detail
            call_inputs.refuse_outside((mask, positions))
        if has_cache and mask is None and given["config"]._attn_implementation == NAME and _has_documents(positions):
            warn(DOCUMENTS_WITH_A_CACHE)
        return
    if given["config"]._attn_implementation != NAME or context.before_text:
        return
    embeddings = given.get("inputs_embeds")
    if embeddings is None or embeddings.shape[1] == context.layout.local_length:  # else they are refused themselves
        call_inputs.refuse_other_masks(mask, positions, f"A model ({type(given['config']).__name__})", context)
    if positions is not None and mask is None and not has_cache and context.ring.size > 1:
        raise errors.ShardedMask("documents")


DOCUMENTS_WITH_A_CACHE = (
    "position_ids start anew within a row, and the model was called with a cache: outside of a ring transformers then "
    "does not separate the documents. To separate them, as a ring does, call it with use_cache=False, or set "
    "model.config.use_cache = False."
)


def _has_documents(position_ids: Tensor | None) -> bool:
    """Returns True for rows with more than one document. Of one token, as each that is generated, it reads nothing."""
    positions = text_positions(position_ids)
    return positions is not None and positions.shape[1] > 1 and bool(restarts(positions).any())


@around
def _generate(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Generation numbers positions anew, so a share is recognized by its tokens."""
    call_inputs.refuse_outside((*args, *kwargs.values()), errors.GenerationFromShare(type(self).__name__))
    return original(self, *args, **kwargs)


_PREPROCESS = "_preprocess_mask_arguments"
PATCHES = [
    Patch(f"{target_of(GenerationMixin)}.generate", render(GenerationMixin.generate), _generate),
    Patch(
        f"{masking_utils.__name__}:{_PREPROCESS}",
        needed_parameters(getattr(masking_utils, _PREPROCESS, None)),
        _pass_spec_through,
    ),
]
