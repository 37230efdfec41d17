"""Reasons in a model's structure against sharding its sequence, found by mechanism and not by name.

A rank sees its own tokens only, so a model is exact if only attention looks along the sequence, and if each token gets
its position. Modules and signatures show exceptions, so newer models are covered, too.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ... import errors
from ..context.batch_context import BatchContext
from ..context.introspect import (
    NAME,
    configs_of,
    inner_text_model,
    place_of,
    takes_tokens,
    text_modules,
    uses_interface,
    uses_ring,
)
from ..patching.changes import Original, Patch, around
from .recurrent import recurrent_of
from .whole_layers import carries_state

_MIXES = "mixes neighbouring tokens, which are on other ranks"
_NEAR = 4
"""The largest dilation of a convolution that the short row of the self-check is sure to show."""


def unsupported(model: nn.Module, context: BatchContext) -> Iterator[str]:
    """Yields every reason why ``model`` would not be exact on a part of the sequence."""
    if context.ring.size > 1:
        configs = list(configs_of(model))
        if configs and not uses_ring(model):
            yield f'its attn_implementation is {configs[0]._attn_implementation!r}; load it with "{NAME}"'
        yield from _token_reasons(model)
    if context.facts.numbered:  # also in a ring of one: `shard` numbered its rows
        yield from position_reasons(model, context.facts.hidden is not None)


def _token_reasons(model: nn.Module) -> Iterator[str]:
    for name, module in _searched(model):
        where = place_of(name, module)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (option := _option_of_batches(module)):
            yield f"{where} has {option}, which looks at all tokens of a batch, and each rank has others: leave it out"
            break
        if isinstance(module, nn.Conv1d) and module.kernel_size != (1,) and module.dilation[0] > _NEAR:
            yield f"{where} {_MIXES}"
            break
        if getattr(module, "trigram_input", False) is True:
            yield f"{where} joins each token's embedding with its neighbours', which are on other ranks (trigram_input)"
            break


def _searched(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that see a rank's tokens, without known recurrent layers and what is in these."""
    recurrent = recurrent_of(model)
    known = {*recurrent.layers, *recurrent.whole}.difference(recurrent.unsure)
    for name, module in text_modules(model):
        if not any(name.startswith(f"{layer}.") for layer in known):
            yield name, module


def _beside_text(model: nn.Module) -> Callable[[str], bool]:
    """A function that tells by its name if a module stands beside an inner text model, as a projector of images."""
    text = inner_text_model(model)
    path = next((name for name, module in model.named_modules() if module is text), "")
    parent, dot, _ = path.rpartition(".")
    return lambda name: bool(dot) and name.startswith(parent + dot) and not f"{name}.".startswith(f"{path}.")


@dataclass(frozen=True, eq=False)
class Suspicion:
    """A reason in a model's structure that may not matter in this program: the self-check decides.

    Args:
        where, what: the part of the model, and the reason.
        attends: it is decided only if ring attention ran.
        module: it is decided only if this module ran; None: if the model did.
        beside: the module stands beside an inner text model. If the check does not run it, it reads images, which
            every rank has whole.
    """

    where: str
    what: str
    attends: bool = False
    module: weakref.ref[nn.Module] | None = None
    beside: bool = False


class Suspicions(list[Suspicion]):
    """The suspicions against a model with its current structure."""

    def of_text(self, ran: Container[Suspicion] = ()) -> Suspicions:
        """Those of modules that are not beside a text model, or that ``ran`` in a ring."""
        return Suspicions(one for one in self if not one.beside or one in ran)

    def reasons(self) -> list[str]:
        """The reasons in words, each with the first part that it is true of."""
        first: dict[str, str] = {}
        for one in self:
            first.setdefault(one.what, one.where)
        return [f"{where} {what}" for what, where in first.items()]


def suspicions(model: nn.Module, context: BatchContext) -> Iterator[Suspicion]:
    """Yields what a model has that mostly looks along the sequence by itself: a convolution, for example."""
    if context.ring.size == 1:
        return
    recurrent = recurrent_of(model)
    if recurrent.attends:
        if next(configs_of(model), None) is not None and not uses_interface(model):
            what = "does not use transformers' attention interface, so its attention would stay on each rank"
            yield Suspicion("its code", what, attends=True)
        parts = [part for _, part in text_modules(model) if isinstance(part, PreTrainedModel)]
        if parts and not any("position_ids" in inspect.signature(type(part).forward).parameters for part in parts):
            yield Suspicion("no part of it", "takes position_ids, so each rank would number its own tokens from 0")
    beside = _beside_text(model)
    for name, module in _searched(model):
        if isinstance(module, nn.Conv1d) and module.kernel_size != (1,):
            what = _MIXES
        elif isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            what = "reads other tokens than its own, which are on other ranks"
        else:
            continue
        yield Suspicion(place_of(name, module), what, module=weakref.ref(module), beside=beside(name))
    states = [name for name in recurrent.unsure if carries_state(model.get_submodule(name))]
    for name in (*recurrent.unknown, *states):
        module = model.get_submodule(name)
        what = "carries state along the sequence"
        yield Suspicion(place_of(name, module), what, module=weakref.ref(module), beside=beside(name))


def _option_of_batches(embedding: nn.Embedding | nn.EmbeddingBag) -> str:
    """The option of an embedding by which its weight or its gradient depends on which tokens a batch has."""
    if embedding.max_norm is not None:  # it scales the rows of its weight that it looks up
        return f"max_norm={embedding.max_norm}"
    return "scale_grad_by_freq=True" if embedding.scale_grad_by_freq and embedding.weight.requires_grad else ""


def position_reasons(model: nn.Module, hidden: bool) -> Iterator[str]:
    """Yields the modules that would not number tokens 0, 1, 2, ..., as a ring does without position_ids.

    Args:
        hidden: a padding mask hides tokens.
    """
    for name, module in text_modules(model):  # a Pixtral tower sums the lengths of images
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is None or "position_ids" not in code.co_varnames:
            continue
        by_tokens = "create_position_ids_from_input_ids" in code.co_names  # RoBERTa and kin: from pad_token_id + 1
        if by_tokens or ("cumsum" in code.co_names and hidden):  # OPT: by the padding mask
            how = "input_ids" if by_tokens else "the padding mask"
            yield f"{place_of(name, module)} numbers positions by {how}; put its position_ids into the batch"


@around
def _attention_of(original: Original, self: Any, requested_attention: str | None, is_init_check: bool = False) -> Any:
    if requested_attention == NAME:
        for table, classes in _tables(type(self)).items():
            if "VISION" not in table:
                why = f"its code takes its attention from its own table ({table}), not from transformers' interface"
                raise errors.UnsupportedModel(type(self).__name__, [why])
            if not takes_tokens(self):  # a tower, which sees whole images on every rank
                requested_attention = "sdpa" if "sdpa" in classes else "eager"
    return original(self, requested_attention, is_init_check)


def _tables(model_class: type) -> dict[str, dict[str, type]]:
    """The tables of attention classes in the model's file, by name."""
    values = getattr(sys.modules.get(model_class.__module__), "__dict__", {}).items()
    return {name: x for name, x in values if isinstance(x, dict) and isinstance(dict.get(x, "eager"), type)}


PATCHES = [
    Patch(
        "transformers.modeling_utils:PreTrainedModel.get_correct_attn_implementation",
        "(self, requested_attention, is_init_check=)",
        _attention_of,
    ),
]
