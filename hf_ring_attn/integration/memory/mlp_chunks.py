"""MLPs and norms in chunks of tokens (`RingConfig.mlp_tokens`): which modules, and how their forward is replaced.

They are found by structure: parts of a decoder layer that take hidden states alone. Each is tried on a few tokens
before its first use: one that mixes tokens is refused. The forward stays replaced, since a checkpoint runs a layer
again after its batch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ... import errors
from ...layers.token_chunks import run_in_chunks
from ..context import batch_context
from ..context.batch_context import BatchContext
from ..context.introspect import class_of, configs_of, is_unit, text_modules
from ..context.model_record import latest_record
from ..context.tracked_input import version_of
from ..log import warn
from ..patching.compiler import uncompiled
from ..patching.modules import OwnForward, Replaced, attached, hooks_of, replace
from ..patching.parameter_slots import Slot, slots_of, with_weights
from .attributes import Attributes

OTHER_INPUTS = {"attention_mask", "position_embeddings", "position_ids", "past_key_values", "cache_params", "cache"}
"""Arguments of modules that look along the sequence."""
SLICE = 16
"""Tokens of a chunk in the trial; it has two."""
TOLERANCE = {8: 1e-9, 4: 1e-3, 2: 5e-2}
"""The largest relative distance of a token in the trial, by bytes of a number: products round by their sizes."""


class _Parts(list[tuple["_ChunkedForward", bool]]):
    """The replaced forwards of a model; True for one that must run whole."""

    found = False


def unsupported(model: nn.Module, context: BatchContext) -> Iterator[str]:
    """Yields the reasons why ``mlp_tokens`` has no effect on ``model``, or would change its answer."""
    if context.config.mlp_tokens is None:
        return
    parts = dict(_parts(model))
    mlps = {name: part for name, part in parts.items() if not _is_norm(part)}
    if not mlps:
        yield "mlp_tokens has no effect, since no decoder layer has an MLP that takes hidden states alone: leave it out"
    if any(getattr(config, "output_router_logits", False) for config in configs_of(model)):
        yield "mlp_tokens computes router logits in chunks, without gradients: set output_router_logits=False"
    for name, part in parts.items():
        inner = [path for path, module in part.named_modules() if path and is_unit(module)]
        if inner:
            yield f"mlp_tokens calls {name} several times, and FSDP2 shards {inner[0]} of it by itself"
            return


def prepare(model: nn.Module, context: BatchContext) -> None:
    """Replaces the forward of each part; without effect while ``mlp_tokens`` is None."""
    tokens, known = context.config.mlp_tokens, latest_record(model).state(_Parts)
    if tokens is not None and not known.found:
        for name, part in _parts(model):
            if not attached(part, "forward"):
                replace(part, "forward", _ChunkedForward(name, part))
            forward = attached(part, "forward")[0].value
            if not isinstance(forward, _ChunkedForward):  # a convolution inside, for which it runs on whole documents
                warn(_LOOKS_ALONG.format(f"{name} ({class_of(part)})"))
                continue
            forward.tried, forward.checked = set[bool](), False  # the part may have changed
            hooked = _hooked_inside(part)
            known.append((forward, hooked is not None))
            if hooked is not None:
                warn(_HOOKED.format(f"{name}.{hooked}", name))
        known.found = True
    for forward, is_whole in known:  # a hook may have come or gone since the batch before
        forward.is_whole = is_whole
    if tokens is not None and tokens < context.local_shape.numel():
        context.log.features.add(f"MLPs {tokens} tokens at a time")


_HOOKED = (
    "a hook on {0}, or its own forward, would see chunks of tokens, and no gradients: mlp_tokens has no effect on {1}, "
    "which runs whole. Remove the hook to save that memory."
)
_LOOKS_ALONG = (
    "mlp_tokens has no effect on {0}, which has a layer that looks along the row (a convolution, perhaps): it runs on "
    "whole documents, and saves no memory."
)
_HOSTS = {"transformers", "accelerate", "peft", "liger_kernel", "bitsandbytes"}
"""Packages whose hooks and forwards inside an MLP compute each token by itself."""


def _hooked_inside(part: nn.Module) -> str | None:
    """Names a module inside ``part`` that has the program's hooks or forward. Hooks on ``part`` get all tokens."""
    name: str
    for name, module in part.named_modules():
        # transformers' own hooks record what a model returns: see `_records_routers`.
        owners = {str(getattr(hook, "__module__", "")).partition(".")[0] for hook in hooks_of(module)}
        if name and not owners <= _HOSTS:
            return name
    return None


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """MLPs and norms of the text model's decoder layers, norms of queries and keys, and norms beside the layers."""
    text = dict(text_modules(model))
    layers = {name for name, module in text.items() if isinstance(module, GradientCheckpointingLayer)}
    lists = {name.removesuffix("._checkpoint_wrapped_module").rpartition(".")[0] for name in layers}
    stacks = {name.rpartition(".")[0] for name in lists}  # of model.layers.0: model
    mlps = {name for name, module in text.items() if name.rpartition(".")[0] in layers and _is_mlp(module)}
    for name, module in text.items():
        around = _around(name)
        is_inside = not layers.isdisjoint(around) and mlps.isdisjoint(around)
        if name in mlps or ((is_inside or around[0] in stacks) and _is_norm(module)):
            yield name, module


def _around(name: str) -> list[str]:
    """The names of the modules around one, the innermost first."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1)] + [""]


def _is_norm(module: nn.Module) -> bool:
    weights = list(module.parameters())
    is_flat = all(w.dim() <= 1 for w in weights) and not module._modules
    return "norm" in class_of(module).lower() and is_flat and _takes_hidden_states_alone(module, most=1)


def _is_mlp(module: nn.Module) -> bool:
    """Returns True if its parts hold matrices, and it is no linear layer, with an adapter or without."""
    base = getattr(module, "base_layer", module)
    is_linear = hasattr(base, "in_features") or hasattr(base, "nf") or isinstance(base, nn.Linear | nn.Embedding)
    has_matrices = any(w.dim() > 1 for part in module.modules() if part is not module for w in _weights(part))
    return has_matrices and not is_linear and _takes_hidden_states_alone(module)


def _weights(module: nn.Module) -> list[nn.Parameter]:
    return [w for w in module._parameters.values() if w is not None]


def _takes_hidden_states_alone(module: nn.Module, most: int = 9) -> bool:
    """Returns True if the forward of the module's class needs one argument, and has at most ``most``."""
    inner = module._modules.get("original_module") or module  # of PEFT's modules_to_save
    parameters = dict(inspect.signature(type(inner).forward).parameters)
    parameters.pop("self", None)
    named = [p for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = [p for p in named if p.default is p.empty]
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return False  # attention, perhaps, with its mask among them
    return len(required) == 1 and len(named) <= most and not OTHER_INPUTS & parameters.keys()


class _ChunkedForward(OwnForward):
    """A module's forward in chunks of tokens.

    Attributes:
        tokens: the option of the latest batch in which it was called: a recompute may come after the batch.
        tried: the modes (``training``) in which it was tried. is_whole: it must not run in chunks.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(module)
        self.name = f"{name} ({class_of(module)})"
        self.tokens: int | None = None
        self.tried = set[bool]()
        self.checked = self.is_whole = False

    def __getstate__(self) -> dict[str, Any]:
        """A copied model has options of its own: without any, its recompute must not be in chunks."""
        return {**vars(self), "tokens": None}

    @uncompiled("hf_ring_attn runs a module in chunks, whose number varies")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = batch_context.current()
        if context is not None:
            self.tokens = context.config.mlp_tokens
        inputs, tokens = [*args, *kwargs.values()], self.tokens
        x = inputs[0] if inputs else None
        if tokens is None or self.is_whole or not isinstance(x, Tensor):
            return self.forward(*args, **kwargs)
        most = tokens * (min(x.shape[1:3]) if x.dim() == 4 else 1)  # with heads: [B, T, H, D], or [B, H, T, D]
        if x.numel() <= most * x.shape[-1]:
            return self.forward(*args, **kwargs)
        if len(inputs) > 1:
            raise errors.NotByToken(self.name, f"was called with {len(inputs)} arguments")
        if _records_routers():
            raise errors.NotByToken(self.name, "was asked for its router's logits (output_router_logits=True)")
        rows, call = x.reshape(-1, x.shape[-1]), _Call(self)
        if self.module.training in self.tried:
            return self._whole(run_in_chunks(call, rows, list(call.trained), most), x)
        before = list(map(version_of, self.module.buffers()))
        self._try(rows.detach())
        found = run_in_chunks(call, rows, list(call.trained), most)
        if before != list(map(version_of, self.module.buffers())):
            raise errors.NotByToken(self.name, "changes its buffers in each call")
        for _, name in call.attributes.new_tensors():
            raise errors.NotByToken(self.name, f"keeps a tensor of each call in its attribute {name}")
        self.tried.add(self.module.training)
        return self._whole(found, x)

    def outputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """The outputs for tokens [n, D], each [n, ...]."""
        found = self.forward(x[None])
        self.is_tuple = isinstance(found, tuple)
        outputs = found if isinstance(found, tuple) else (found,)
        self.batched = [isinstance(one, Tensor) and one.shape[:2] == (1, len(x)) for one in outputs]
        for one, batched in zip(outputs, self.batched, strict=True):
            if not isinstance(one, Tensor) or not (batched or one.shape[:1] == (len(x),)):
                what = f"a {type(one).__name__} {tuple(getattr(one, 'shape', ()))}"
                raise errors.NotByToken(self.name, f"returns {what} for {len(x)} tokens")
        return tuple(one[0] if batched else one for one, batched in zip(outputs, self.batched, strict=True))

    def _whole(self, found: Sequence[Tensor], x: Tensor) -> Any:
        shaped = [
            one.reshape(*x.shape[:-1], *one.shape[1:]) if batched else one
            for one, batched in zip(found, self.batched, strict=True)
        ]
        return tuple(shaped) if self.is_tuple else shaped[0]

    def _try(self, rows: Tensor) -> None:
        """Compares a few tokens at once with the same in two chunks, without dropout.

        Raises:
            NotByToken: they differ, for each of three choices of tokens: a router may flip by rounding.
        """
        with torch.no_grad(), ExitStack() as modes:
            for part in self.module.modules():
                modes.enter_context(Replaced(part, "training", False))
            call = _Call(self)
            weights = list(call.trained)
            for begin in (0, len(rows) // 3, len(rows) // 2):
                few = rows[begin : begin + 2 * SLICE]
                half = -(-len(few) // 2)
                once = call.run(few.clone(), weights)
                twice = zip(*(call.run(x.clone(), weights) for x in few.split(half)), strict=True)
                pairs = zip(twice, once, strict=True)
                if max(_distance(torch.cat(parts), want) for parts, want in pairs) <= 1:
                    return
        raise errors.NotByToken(self.name, "mixes tokens: some of them alone have other results than with the rest")


class _Call:
    """A function of tokens: one call of a chunked forward.

    The backward puts weights where they were in the call, though by then others may train, and
    `torch.func.functional_call` has taken its own away; and it has the module's attributes of the call.

    Attributes:
        trained: the weights that train, and their slots. frozen: the slots of the others.
    """

    def __init__(self, of: _ChunkedForward) -> None:
        self.of, self.name, self.attributes = of, of.name, Attributes(of.module)
        self.trained: dict[Tensor, list[Slot]] = {}
        self.frozen: list[Slot] = []
        for slot, weight in slots_of(of.module):
            (self.trained.setdefault(weight, []) if weight.requires_grad else self.frozen).append(slot)

    @property
    def checked(self) -> bool:
        return self.of.checked

    @checked.setter
    def checked(self, is_checked: bool) -> None:
        self.of.checked = is_checked

    def run(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        pairs = zip(self.trained.values(), weights, strict=True)
        placed = [(slot, weight) for slots, weight in pairs for slot in slots]
        held = ((slot, slot[0]._parameters[slot[1]]) for slot in self.frozen)
        placed += [(slot, now.detach()) for slot, now in held if now is not None and now.requires_grad]
        slots, now_there = [slot for slot, _ in placed], [weight for _, weight in placed]
        with self.attributes.in_place(), with_weights(slots, now_there):
            return self.of.outputs(x)


def _distance(got: Tensor, want: Tensor) -> float:
    """The largest relative distance of a token, as a multiple of the tolerance; of integers, if any differs."""
    if not want.is_floating_point():
        return 0.0 if torch.equal(got, want) else 2.0
    one, other = (x.flatten(1).double() for x in (got, want))
    apart = (one - other).norm(dim=1) / other.norm(dim=1).clamp_min(1e-30)
    return float(apart.nan_to_num(0.0).max()) / TOLERANCE[want.element_size()]


def _records_routers() -> bool:
    """Returns True while transformers records router logits, by hooks that would see chunks."""
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    collected = capturing._active_collector.get() if hasattr(capturing, "_active_collector") else None
    return collected is not None and "router_logits" in collected
