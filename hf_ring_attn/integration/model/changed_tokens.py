"""Tokens that a program changes between `shard` and the model: right if each changes by itself, seldom to be seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from ... import errors
from ..context.batch_context import BatchContext
from ..context.introspect import is_dtensor, loss_models_of, name_of
from ..context.tracked_input import TrackedInput
from ..context.trial_step import TrialStep
from ..gradients import loss_gradients
from ..log import warn

CHANGED = (
    "{model} was called in a ring with other {name} than those of the batch. That is right if each token was changed "
    "by itself (its word, its place in position_ids, noise). It is not right if a change depends on other tokens of "
    "this rank (a mean, neighbours, counts) or on places in the tensor. Then change whole rows: before shard(), or in "
    "a Trainer's collator."
)
MOST = 1024
"""The most tokens at either end of a rank's rows whose embeddings are compared."""
STEPS = 64
"""The most steps from embeddings to a model's input through which a gradient is followed."""


def start_comparison(
    model: nn.Module, given: Mapping[str, Any], tracked: Mapping[str, TrackedInput], context: BatchContext
) -> Callable[[], None]:
    """Starts a message by which ranks know if a trainer's own loss calls ``model`` with other ids than the batch's.

    Such a loss gets whole rows, whatever the ids were made of, unless its options say otherwise.

    Returns:
        a function that ends it. It raises OtherInputs, on every rank, if one has other ids.
    """
    if not context.state(TrialStep).name or context.config.loss != "auto":
        return lambda: None
    x, own = given.get("input_ids"), tracked.get("input_ids")
    changed = isinstance(x, Tensor) and own is not None and not own.is_(x) and not own.equals(x)
    tensor = next((x for x in given.values() if isinstance(x, Tensor)), torch.empty(0))
    device = context.ring.small_device(tensor.device)
    end = context.ring.start_agreement({}, device, collect=[int(changed)], doing="compared the ids of a call")

    def finish() -> None:
        with loss_gradients.beside(device):
            (ranks,) = end()
        if any(ranks):
            refusal = errors.OtherInputs(name_of(model), [], ["input_ids"])
            refusal.everywhere = True
            raise refusal

    return finish


def check_tokens(model: nn.Module, given: Mapping[str, Any], tracked: Mapping[str, TrackedInput]) -> None:
    """Warns if a call of ``model`` has other tokens than the batch. ``tracked``: the batch's inputs.

    Raises:
        OtherInputs: embeddings of some tokens were made of those of others.
    """
    for name in ("input_ids", "inputs_embeds"):
        x, own = given.get(name), tracked.get(name)
        if not isinstance(x, Tensor):
            continue
        if own is None:
            changed = name == "inputs_embeds" and "input_ids" in tracked and not _embeds(model, tracked["input_ids"], x)
        else:
            changed = not own.is_(x) and not own.equals(x)
        if changed and name == "inputs_embeds" and _mixes(x):
            raise errors.OtherInputs(name_of(model), [], [f"{name} (mixed tokens)"])
        if changed:
            warn(CHANGED.format(model=name_of(model), name=name))


def _embeds(model: nn.Module, ids: TrackedInput, x: Tensor) -> bool:
    """Returns True if ``x`` is what the model's embeddings make of the batch's ids, or if that is unknown."""
    table = next((one.get_input_embeddings() for one in loss_models_of(model)), None)
    own = ids.value
    if not isinstance(table, nn.Module) or not isinstance(own, Tensor) or any(map(is_dtensor, table.parameters())):
        return True
    if x.shape[:2] != own.shape:
        return False
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        ends = torch.cat([own[:, :MOST], own[:, -MOST:]], 1)
        made = table.forward(ends)
    found = torch.cat([x[:, :MOST], x[:, -MOST:]], 1).detach()
    return made.shape == found.shape and torch.equal(made.to(found.dtype), found)


def _mixes(x: Tensor) -> bool:
    """Returns True if the gradient of a token in ``x`` reaches embeddings of other tokens; False if unknown."""
    found = _embedding_of(x)
    if found is None or x.dim() != 3 or x.shape[1] < 2:
        return False
    for token in {x.shape[1] // 3, x.shape[1] - 1}:
        try:
            with torch.enable_grad():
                one = x[:, token].float().sum()
            reached: Any = torch.autograd.grad(one, [found], retain_graph=True, allow_unused=True)[0]
        except RuntimeError:  # what a compiler made can go backward once
            return False
        if reached is None or reached.shape[:2] != x.shape[:2]:
            return False
        others = torch.arange(x.shape[1], device=x.device) != token
        if bool((reached[:, others] != 0).any()):
            return True
    return False


def _embedding_of(x: Tensor) -> Any:
    """The embeddings that ``x`` was made of by torch's own functions alone, of which there are few; else None."""
    nodes: list[Any] = [x.grad_fn]
    seen: set[Any] = set()
    found: list[Any] = []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction) or len(seen) > STEPS:  # sharded.gather, or another model
            return None
        if node.name() == "EmbeddingBackward0":
            found.append(node)
        else:
            nodes += [before for before, _ in node.next_functions]
    return GradientEdge(found[0], 0) if len(found) == 1 else None
