"""Models of images and sound: every rank gets these whole, and the row is sharded at the input of the text model.

Placeholders of images are counted and filled in whole rows, and positions numbered there, so such a batch cannot be
sharded before the model is called. A hook on the text model shards its inputs. All modules before it, such as the
vision tower, run outside the ring on every rank, with the same random numbers (`ring_random`), and on this rank's
share of the pictures where that is exact (`shared_pictures`). Labels are sharded beforehand. The gradient of a tower is
this rank's share, as that of any weight.

A head of whole rows uses the same cut, at the input of the model below it, whose output is gathered (`whole_heads`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ... import errors
from ...sharding.layout import Layout
from ..context import batch_context
from ..context.batch_context import BatchContext, MaskSpec
from ..context.introspect import TOKENS, bound_by_name, inner_text_model
from ..context.tensor_tree import tensors_of
from ..context.whole_batch import LOSS_INPUTS, mask_facts, padding_of, text_positions
from ..losses import whole_heads
from ..patching.modules import Arguments, attach
from . import structure
from .call_inputs import CACHED

PER_TOKEN = {*TOKENS, "visual_pos_masks", "per_layer_inputs"}
"""The inputs [B, S, ...] of a text model that are sharded along the row."""
_OF_IMAGES = "deepstack_visual_embeds"
_CALLED = "was called with"
_ALONE = "train this model without a ring, or its text model alone"


def unsupported(model: nn.Module, context: BatchContext) -> Iterator[str]:
    """Yields a reason if a batch is sharded at the input of a text model, and the model has none."""
    if context.whole_head and whole_heads.body_of(model) is None:
        yield "its batch was sharded for the head of another model, which gets whole rows"
    elif context.text is not None and not context.whole_head and inner_text_model(model) is None:
        what = "images, sound or position_ids [3, B, S]"
        yield f"its batch holds {what}, but it has no inner text model that could take a part of the row"


def prepare(model: nn.Module, context: BatchContext) -> None:
    """Hooks the text model inside ``model``, at whose input its batch is sharded."""
    if context.text is not None:
        text = whole_heads.body_of(model) if context.whole_head else inner_text_model(model)
        if not context.text.knows(text.config):
            context.text.configs.append(text.config)
        attach(text, "text model", _enter, _leave)
        if context.whole_head:
            whole_heads.prepare_pooler(text)


def _context_of(module: Any) -> BatchContext | None:
    """The active batch that is sharded at the input of this text model."""
    context = batch_context.current()
    known = context is not None and context.text is not None and context.text.knows(module.config)
    return context if known else None


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    context = _context_of(module)
    if context is None or context.text is None:
        return None
    context.text.running = True
    if context.text.random is not None:
        context.text.random.enter_text()
    local = local_inputs(module, bound_by_name(module.forward, args, kwargs), context)
    return (), whole_heads.inputs_taken(module, local) if context.whole_head else local


def _leave(module: nn.Module, _args: Any, output: Any) -> Any:
    context = _context_of(module)
    if context is None or context.text is None:
        return None
    context.text.running = False
    if context.text.random is not None:
        context.text.random.leave_text()
    return whole_heads.gather_hidden_states(output, context) if context.whole_head and output is not None else None


def local_inputs(text: nn.Module, named: dict[str, Any], context: BatchContext) -> dict[str, Any]:
    """This rank's share of the inputs of a text model.

    Raises:
        UnsupportedArgument: an unknown tensor with an entry per token, a mask that the outer model made by itself, or a
            cache.
        UnsupportedModel: it got no position_ids, and the text model would not number its tokens 0, 1, 2, ...
    """
    where = type(text).__name__
    layout, embeds = context.layout, named.get("inputs_embeds")
    tokens = embeds if embeds is not None else named["input_ids"]
    rows, length = tokens.shape[:2]
    if length != layout.length:
        raise errors.UnshardedInput(length, length, layout.local_length, layout.length)
    mask, positions = named.get("attention_mask"), named.get("position_ids")
    if named.get("use_cache"):
        raise errors.UnsupportedArgument(where, "use_cache=True", CACHED, _CALLED)
    if not isinstance(mask, dict | MaskSpec):  # else the outer model made it of the whole row
        _refuse_mask(where, mask, rows, length)
        facts = mask_facts(layout, rows, text_positions(positions), mask)
        context.learn(documents=facts.documents, hidden=facts.hidden, positions=facts.positions)
        if mask is None or not context.whole_head:
            mask = torch.ones(rows, length, dtype=torch.int64, device=tokens.device)
        mask = _share(layout, mask, 1, int(not context.whole_head))  # ESM multiplies embeddings by it
    if positions is None:
        if reasons := list(structure.position_reasons(text, context.facts.hidden is not None)):
            raise errors.UnsupportedModel(where, reasons)
        positions = torch.arange(length, device=tokens.device)[None]
    context.learn(max_position=int(positions.max()))

    local: dict[str, Any] = {"attention_mask": mask, "position_ids": _share(layout, positions, -1), "use_cache": False}
    others = {name: x for name, x in named.items() if name not in {*local, _OF_IMAGES}}
    local |= {name: _local_input(where, name, x, (rows, length), context) for name, x in others.items()}
    if (features := named.get(_OF_IMAGES)) is not None:
        local[_OF_IMAGES] = _of_images(layout, named["visual_pos_masks"], features)
    return local


def _local_input(where: str, name: str, x: Any, size: tuple[int, int], context: BatchContext) -> Any:
    """This rank's share of an input of tokens; any other input as it is. ``size``: [B, S] of the whole rows."""
    if name in LOSS_INPUTS:  # sharded before the call
        return x
    of_tokens = isinstance(x, Tensor) and tuple(x.shape[:2]) == size
    if (name in PER_TOKEN and x is not None) or (of_tokens and context.whole_head):
        return _share(context.layout, x, 1, padding_of(name, x))
    for _, tensor in tensors_of(x):
        if size[1] in tensor.shape[context.whole_head :]:  # a head's own input has an entry a row
            why = f"a ring does not know how to cut {tuple(tensor.shape)}; {_ALONE}"
            raise errors.UnsupportedArgument(where, name, why, _CALLED)
    return x


def _refuse_mask(where: str, mask: Any, rows: int, length: int) -> None:
    """Refuses a mask without one entry for each token."""
    if mask is None or (isinstance(mask, Tensor) and tuple(mask.shape) == (rows, length)):
        return
    got = f"has shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"is a {type(mask).__name__}"
    why = (
        f"it {got}, but a ring takes [{rows}, {length}], one entry a token, or a mask that transformers.masking_utils "
        f"makes of it; {_ALONE}"
    )
    raise errors.UnsupportedArgument(where, "attention_mask", why, _CALLED)


def _share(layout: Layout, x: Tensor, dim: int, value: int | None = 0) -> Tensor:
    return layout.shard(layout.pad(x, dim, value), dim)


def _of_images(layout: Layout, places: Tensor, features: list[Tensor]) -> list[Tensor]:
    """This rank's part, in its order, of features [N, width] of the N tokens in ``places`` [B, S]."""
    numbers = torch.full(places.shape, -1, device=places.device)
    numbers[places] = torch.arange(int(places.sum()), device=places.device)
    mine = layout.shard(layout.pad(numbers, 1, -1), 1)
    mine = mine[mine >= 0]
    return [x[mine.to(x.device)] for x in features]
