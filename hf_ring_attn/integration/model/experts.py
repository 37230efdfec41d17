"""The auxiliary loss of mixtures of experts: its means are over the tokens of whole rows, the same on every rank.

transformers has one function for it in the file of every model, and TRL's fused head uses Mixtral's. A file's function
is recognized by its results. Its means are sums over tokens, so ranks add these up before the product; the gradient of
that sum is the sum of all ranks' gradients of it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ... import errors
from ...layers.collectives import sum_over_ring
from ..context import batch_context
from ..context.batch_context import BatchContext
from ..context.introspect import configs_of, file_of
from ..patching.changes import Patch, install, render
from ..patching.compiler import uncompiled


@dataclass
class AuxiliaryLoss:
    """The auxiliary loss of a batch: every rank computes all of it, times ``factor``. ``computed``: it was computed."""

    factor: float = 1.0
    computed: bool = False


FUNCTION = "load_balancing_loss_func"
SHARED = "transformers.models.mixtral.modeling_mixtral"
"""The file whose function TRL's fused head calls, for all models."""
_TODO = "set output_router_logits=False (SFTConfig: router_aux_loss_coef=0.0)"
_UNKNOWN = f"its MoE auxiliary loss is not a known one, so it is not exact on one rank's tokens; {_TODO}"


def balancing_loss(
    gate_logits: Sequence[Tensor], experts: int, top_k: int, weights: Tensor, sum_up: Callable[[Tensor], Tensor]
) -> Tensor:
    """experts * sum over experts of (choices of it a token) * (its mean probability): Switch Transformer, 4 to 6.

    Args:
        gate_logits: of each layer [tokens, experts]. weights: [tokens], float32: 1 for a token that counts, else 0.
        sum_up: maps sums over these tokens to sums over all tokens; differentiable.
    """
    sums = weights.new_zeros(2 * experts + 1)
    for logits in gate_logits:
        probabilities = torch.softmax(logits, dim=-1)
        chosen = probabilities.topk(top_k, dim=-1).indices
        choices = weights.new_zeros(experts).scatter_add(0, chosen.flatten(), weights.repeat_interleave(top_k))
        mass = (probabilities.float() * weights[:, None]).sum(0)
        sums = sums + torch.cat([choices, mass, weights.sum()[None]])
    choices, mass, tokens = sum_up(sums).split([experts, experts, 1])
    total: Tensor = experts * (choices / tokens * (mass / tokens)).sum()
    return total


@functools.lru_cache(maxsize=256)
def is_known_balance(function: Callable[..., Any]) -> bool:
    """Returns True if a model's function has the results and gradients of `balancing_loss`, with and without a mask."""
    generator = torch.Generator().manual_seed(0)
    layers = [torch.randn(12, 5, generator=generator, dtype=torch.float32, device="cpu") for _ in range(3)]
    mask = torch.tensor([[1, 1, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]], device="cpu")
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        for given in (None, mask):
            weights = torch.ones(12, device="cpu") if given is None else given.flatten().float()
            want = _answer(
                functools.partial(balancing_loss, experts=5, top_k=2, weights=weights, sum_up=lambda x: x), layers
            )
            try:
                got = _answer(functools.partial(function, num_experts=5, top_k=2, attention_mask=given), layers)
            except Exception:  # noqa: BLE001  a function of another kind may fail in any way
                return False
            if not all(x.shape == y.shape and torch.allclose(x, y, 1e-4, 1e-7) for x, y in zip(got, want, strict=True)):
                return False
    return True


def _answer(loss_of: Callable[[tuple[Tensor, ...]], Tensor], layers: Sequence[Tensor]) -> list[Tensor]:
    leaves = tuple(x.clone().requires_grad_() for x in layers)
    loss = loss_of(leaves)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def _files(model: nn.Module) -> dict[str, Any]:
    """The function in each file of the transformers models inside ``model``."""
    names = {file_of(module) for module in model.modules() if isinstance(module, PreTrainedModel)}
    functions = {name: getattr(sys.modules.get(name), FUNCTION, None) for name in sorted(names)}
    return {name: function for name, function in functions.items() if function is not None}


def prepare(model: nn.Module, _context: BatchContext) -> None:
    """Changes the function in the files of ``model``; the change does nothing outside a sharded batch."""
    files = _files(model)
    # TRL's fused head may be asked for the loss of a model whose file has none.
    if "trl" in sys.modules and (files or any(hasattr(x, "output_router_logits") for x in configs_of(model))):
        files[SHARED] = getattr(import_module(SHARED), FUNCTION)
    install([Patch(f"{name}:{FUNCTION}", render(function), _in_a_ring) for name, function in files.items()])


def unsupported(model: nn.Module, context: BatchContext) -> Iterator[str]:
    """Yields the reason why the auxiliary loss would not be that of whole rows."""
    functions = _files(model)
    adds_it = any(getattr(config, "output_router_logits", False) for config in configs_of(model))
    if context.ring.size == 1 or not functions or not adds_it:
        return
    if not all(is_known_balance(inspect.unwrap(function)) for function in functions.values()):
        yield _UNKNOWN


def _in_a_ring(original: Callable[..., Any]) -> Any:
    @uncompiled("hf_ring_attn adds up over ranks here, which is not compiled")
    def load_balancing_loss_func(*args: Any, **kwargs: Any) -> Any:
        context = batch_context.current()
        if context is None:
            return original(*args, **kwargs)
        factor = context.state(AuxiliaryLoss).factor
        if context.ring.size == 1:
            context.state(AuxiliaryLoss).computed = True
            return original(*args, **kwargs) * factor
        if not is_known_balance(inspect.unwrap(original)):
            raise errors.UnsupportedArgument("the model", "output_router_logits=True", _UNKNOWN, "was called with")
        gate_logits, num_experts, top_k, attention_mask = _arguments(*args, **kwargs)
        if not isinstance(gate_logits, tuple):
            return original(*args, **kwargs)
        weights = _weights(context, attention_mask is not None).to(gate_logits[0].device)
        if any(logits.shape[0] != len(weights) for logits in gate_logits):
            found = [tuple(logits.shape) for logits in gate_logits]
            raise errors.BadShape("router_logits", found[0], f"it must have the {len(weights)} tokens of this rank")
        experts = num_experts or gate_logits[0].shape[-1]
        context.state(AuxiliaryLoss).computed = True
        add_up = functools.partial(sum_over_ring, ring=context.ring)
        return factor * balancing_loss(gate_logits, experts, top_k, weights, add_up)

    return load_balancing_loss_func


def _arguments(
    gate_logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: Tensor | None = None
) -> tuple[Any, int | None, int, Tensor | None]:
    """The arguments of a known function."""
    return gate_logits, num_experts, top_k, attention_mask


def _weights(context: BatchContext, masked: bool) -> Tensor:
    """[B * T] float32: 1 for tokens of this rank that count, 0 for the ring's padding and tokens that a mask hides."""
    layout = context.layout
    real = (torch.arange(layout.padded) < layout.length).expand(context.facts.rows, -1)
    if masked and context.facts.hidden is not None:
        real = real & ~context.facts.hidden
    return layout.shard(real, 1).flatten().float()
