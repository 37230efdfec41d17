"""The attention function registered as "ring_fp32". The only place that knows transformers' [B, H, T, D]."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ... import errors
from ...attention.call import Call, RingOptions, with_scale_above_zero
from ...attention.kernel_choice import agree_on_scores, kernel_for, kernel_for_scores, why_not_preferred
from ...attention.op import attend
from ...attention.score_mod_op import attend_scored
from ...comm.ring import Ring
from ...kernels import Params, Request, ScoreFunction, ScoreMod
from ...kernels.score_mods.chosen_keys import ChosenKeys, is_chosen
from ...traffic import GatheredKV, LayerRole
from ..context import batch_context
from ..context.batch_context import BatchContext, MaskSpec
from ..context.introspect import class_of, file_of
from ..context.mesh import ring_group, warn_without_ring
from ..gradients import replicas
from ..gradients.attention_outputs import note_output
from ..log import say
from ..model import temperature
from ..model.refused_arguments import (
    CAUSAL_OR_NOT,
    NO_DROPOUT,
    NO_RING,
    OF_SCORES,
    REFUSED_ARGUMENTS,
    WITHOUT_BATCH,
    is_causal_or_not,
)
from ..patching.compiler import uncompiled


def ring_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskSpec | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: ScoreFunction | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer; runs in the ring if and only if its mask is our spec.

    Args:
        query: [B, H, T, D]; key: [B, G, T, D]; value: [B, G, T, Dv].
        s_aux, sinks: [H] sink logits, under either of the names that models use.
        score_mod: as in `ring_attention`; b is the batch row, q_idx and kv_idx count the row's tokens, with padding.
            Models pass extra arguments of a call to their layers; a custom layer may pass another function.
        indices: [B, T, n] integers, the tokens of the row that each query may attend to, where its mask shows them; -1
            for none. Models with an indexer pass them (`indexers`).

    Returns:
        [B, T, H, Dv] contiguous in query's dtype, and None for the weights, which never exist.

    Raises:
        Refused: a ring cannot compute this exactly.
    """
    if not isinstance(attention_mask, MaskSpec):
        if score_mod is not None:
            _refuse(errors.UnsupportedArgument, type(module).__name__, "score_mod", _SCORED_LOCALLY)
        if indices is not None:
            attention_mask = _of_chosen(attention_mask, indices, key.shape[2])
        return _local(module, query, key, value, attention_mask, scaling, dropout, softcap, s_aux, sinks, kwargs)
    spec = attention_mask
    _refuse_arguments(module, spec, dropout, softcap, kwargs)
    _check_lengths(module, spec, query, key)
    dtype = query.dtype
    query = temperature.scale_queries(module, query, spec)
    q, k, v = (x.transpose(1, 2) for x in _one_dtype(query, key, value))
    q, scale = with_scale_above_zero(q, float(scaling) if scaling is not None else query.shape[-1] ** -0.5)
    params = Params(
        scale,
        float(softcap) if softcap is not None else None,
        sinks if s_aux is None else s_aux,
        spec.config.deterministic,
    )
    trains = module.training and query.requires_grad
    if indices is not None:
        if score_mod is not None:
            _refuse(errors.UnsupportedArgument, type(module).__name__, "score_mod", _CHOOSES)
        out = _of_indexer(spec, trains, indices, params, q, k, v)
    elif score_mod is not None:
        out = _scored(spec, trains, score_mod, params, q, k, v)
    else:
        options = RingOptions.of(spec.config, _kernel(spec, trains, params, q, k, v))
        out, _ = attend(Call(q, k, v, spec.plan, params, options), _shared(spec, module, key, value, k.dtype))
    if out.requires_grad and not trains and not spec.in_batch and not torch.compiler.is_compiling():
        out.register_hook(lambda _gradient: warn_without_ring())  # it trains: a program need not call model.train()
    if not torch.compiler.is_compiling():
        note_output(out, module, spec.layout)
    return out.to(dtype if not torch.is_autocast_enabled(q.device.type) else out.dtype), None


def _check_lengths(module: nn.Module, spec: MaskSpec, query: Tensor, key: Tensor) -> None:
    """Refuses tokens that are not the rank's share, and keys that a layer adds to them."""
    tokens, keys = query.shape[2], key.shape[2]
    whole = spec.layout.world_size > 1 and tokens != spec.places.shape[0]
    if not whole and keys == tokens:
        return
    if not spec.in_batch:  # the layer adds keys of its own, as compressed ones
        facts = f"{keys} keys for {tokens} tokens"
        _refuse(errors.UnsupportedArgument, type(module).__name__, facts, WITHOUT_BATCH)
    _refuse(errors.UnshardedInput, tokens, keys, spec.layout.local_length, spec.layout.length)


def _refuse_arguments(
    module: nn.Module, spec: MaskSpec, dropout: float, softcap: float | None, others: dict[str, Any]
) -> None:
    """Refuses arguments with which a ring's attention is not exact."""
    where = type(module).__name__
    if dropout:
        _refuse(errors.UnsupportedArgument, where, f"dropout={dropout}", NO_DROPOUT)
    if softcap == 0:
        _refuse(errors.UnsupportedArgument, where, f"softcap={softcap}", _NO_CAP)
    for name, why in REFUSED_ARGUMENTS.items():
        if others.get(name) is not None and others[name] is not False:
            alone = name in OF_SCORES and not spec.in_batch
            _refuse(errors.UnsupportedArgument, where, name, WITHOUT_BATCH if alone else why)
    if is_causal_or_not(module, spec.seen, others.get("is_causal")):
        _refuse(errors.UnsupportedArgument, where, "is_causal=False", CAUSAL_OR_NOT)


_SCORED_LOCALLY = (
    "with a mask that is not the ring's (cached decoding, a vision tower) transformers' own attention would run, which "
    "leaves it out. Pass it to the layers of a text model, called with whole rows (use_cache=False)"
)


_CHOOSES = f"its indexer chooses keys, which takes the place of a function of scores. {NO_RING}"


def _of_chosen(mask: Tensor | None, indices: Tensor, keys: int) -> Tensor:
    """A mask [B, 1, T, keys] of transformers, without the keys that were not chosen."""
    chosen = is_chosen(indices, keys)[:, None]
    if mask is None:
        return chosen
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


@uncompiled("hf_ring_attn attends to an indexer's keys outside of graphs")
def _of_indexer(
    spec: MaskSpec, trains: bool, indices: Tensor, params: Params, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    if indices.shape[:2] != q.shape[:2]:
        raise errors.BadShape("indices", tuple(indices.shape), f"it must be [{q.shape[0]}, {q.shape[1]}, n]")
    function = ChosenKeys(indices, spec.places_on(q.device), spec.layout.padded)
    return _with_mod(spec, trains, function.mod(spec.config.deterministic), params, q, k, v)


# A user's function is run and inspected at every call, so a compiler's graph ends before it.
@uncompiled("hf_ring_attn runs a score_mod outside of graphs")
def _scored(
    spec: MaskSpec, trains: bool, function: ScoreFunction, params: Params, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    mod = ScoreMod.of(function, q.device, spec.config.deterministic)
    agree_on_scores(Ring(spec.plan.ring), mod, q.device)
    context = batch_context.current()
    if context is not None:
        replicas.watch_learned(mod.name, mod.captured, context)
    return _with_mod(spec, trains, mod, params, q, k, v)


def _with_mod(spec: MaskSpec, trains: bool, mod: ScoreMod, params: Params, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    config, length = spec.config, spec.layout.length
    params = replace(params, score_mod=mod)
    request = replace(Request(*_facts(spec, params, q, k, v)), score_mod=True)
    kernel = kernel_for_scores(spec.plan.ring, config.kernel, request, params, spec.mask, q.shape[0], length)
    _note(spec.in_batch, trains, kernel, request)
    out: Tensor = attend_scored(Call(q, k, v, spec.plan, params, RingOptions.of(config, kernel)))[0]
    return out


def _shared(
    spec: MaskSpec, module: nn.Module, key: Tensor, value: Tensor, dtype: torch.dtype
) -> GatheredKV | LayerRole | None:
    """The gathered K/V that layers with these keys and values share; None: each layer gathers by itself."""
    if spec.shared is None:
        return None
    if torch.compiler.is_compiling():
        return spec.shared.traced_role(module)
    return spec.shared.store_of(module, key, value, spec.plan, dtype)


_NO_CAP = (
    "transformers' eager attention divides scores by it, so all tokens weigh alike and gradients are nan. For no cap "
    "set it to None in the model's config (attn_logit_softcapping)"
)


def _kernel(spec: MaskSpec, trains: bool, params: Params, q: Tensor, k: Tensor, v: Tensor) -> str:
    """Returns the kernel's name."""
    asked = (spec.in_batch, trains, spec.plan.ring, spec.config.kernel, *_facts(spec, params, q, k, v))
    if not torch.compiler.is_dynamo_compiling():
        return _chosen(*asked)
    name: str = _chosen_once(*asked)
    return name if name else _refuse(_chosen, *asked)


def _facts(spec: MaskSpec, params: Params, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """The fields of a `Request`, since a compiler can guard numbers and dtypes, but no object of ours."""
    return (
        q.device.type, q.dtype, q.shape[2], k.shape[2], q.shape[3], v.shape[3], params.softcap is not None,
        params.sinks is not None, params.deterministic, spec.plan.holes,
    )  # fmt: skip


# A compiler runs it once per set of arguments, which it guards, and caches the name; tracing the search for installed
# packages would break its graph.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _chosen_once(*asked: Any) -> str:
    try:
        return _chosen(*asked)
    except errors.Refused:  # a compiler would replace the error
        return ""


@uncompiled("hf_ring_attn refuses this attention: uncompiled, it says why")
def _refuse(refusal: Callable[..., Any], *facts: Any) -> Any:
    """Raises a refusal outside compiled code, where it would become a compiler's error."""
    raise refusal(*facts)


def _chosen(scoped: bool, trains: bool, ring: str, name: str, *facts: Any) -> str:
    """The kernel's name for a layer, recorded for the log line at the start."""
    request = Request(*facts)
    kernel = kernel_for(ring, name, request)
    why = why_not_preferred(name, kernel, request)
    _note(scoped, trains, f"{kernel} ({why})" if why else kernel, request)
    return kernel


def _note(scoped: bool, trains: bool, kernel: str, request: Request) -> None:
    """Records the kernel for the log line at the start."""
    context = batch_context.current()
    if not scoped and context is not None and context.before_text:
        return  # a tower, which reads images on every rank
    if not scoped:
        say(f"{'no ring active' if ring_group() is None else 'whole rows on every rank'}; kernel {kernel}")
        if trains:
            warn_without_ring()
    elif context is not None:  # not in a recompute
        context.log.kernel = kernel
        context.log.features.update(name for name in ("softcap", "sinks", "score_mod") if getattr(request, name))
        context.log.scored += request.score_mod
        context.log.plain += not request.score_mod


def _one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts all to one dtype: autocast's if enabled, as torch's attention does; else the widest of them."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = functools.reduce(torch.promote_types, (x.dtype for x in tensors))
    return tuple(x.to(dtype) for x in tensors)


def _is_per_token(query: Tensor, key: Tensor, context: BatchContext) -> bool:
    """Returns True for attention of each token by itself, as to states of earlier layers: tokens are in place of heads,
    and what it looks along is no row."""
    length = context.layout.local_length
    return query.shape[1] == length == key.shape[1] and length not in (query.shape[2], key.shape[2])


def _local(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None,
    dropout: float, softcap: float | None, s_aux: Tensor | None, sinks: Tensor | None, kwargs: dict[str, Any],
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention outside a ring with a mask that is not ours: cached decoding and vision towers."""
    context = batch_context.current()
    if context is not None and not context.before_text and not (mask is None and _is_per_token(query, key, context)):
        raise errors.LayerWithoutSpec(type(module).__name__, "nothing" if mask is None else type(mask).__name__)
    if softcap is None and s_aux is None and sinks is None:
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    # torch's sdpa has neither softcap nor sinks; the model's eager code has them.
    eager = getattr(sys.modules[file_of(module)], "eager_attention_forward", None)
    if eager is None:
        why = f"{file_of(module)} has no eager_attention_forward to decode with"
        raise errors.UnsupportedArgument(class_of(module), "softcap or sinks", why)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    extra = {"softcap": softcap, "s_aux": s_aux, "sinks": sinks}
    kwargs.update({name: x for name, x in extra.items() if x is not None})
    out, _ = eager(module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs)
    return out, None
