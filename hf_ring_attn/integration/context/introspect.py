"""Queries on a model: its configs, its inner model, its name, its forward's parameters and names."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..patching.modules import programs_own

NAME = "ring_fp32"
"""Ring attention's name in transformers' registries."""
TOKENS = ("input_ids", "inputs_embeds")
DDP, _FABRIC = "DistributedDataParallel", "_FabricModule"
_IN_WRAPPERS = frozenset(("module", "_forward_module", "_orig_mod"))
"""The names that wrappers of DDP, Fabric and torch.compile have for the model inside them."""
_OF_WRAPPERS = ("torch.distributed.", "lightning.fabric.", "lightning_fabric.")
CACHES = ("cache", "past_key_values")
"""The argument that holds a model's cache: its name since transformers 5.24, and before."""


def modules_of(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of ``model`` as `nn.Module.modules` orders them, in a sixth of its time."""
    found: set[int] = set()
    to_visit: list[nn.Module | None] = [model]
    while to_visit:
        module = to_visit.pop()
        if module is not None and id(module) not in found:
            found.add(id(module))
            yield module
            to_visit += reversed(module._modules.values())


def configs_of(model: nn.Module | Iterable[nn.Module]) -> Iterator[Any]:
    """The distinct transformers configs of a model's modules, wrappers looked through, as they are found."""
    found: set[int] = set()
    for module in modules_of(model) if isinstance(model, nn.Module) else model:
        config = module.__dict__.get("config")
        if config is not None and id(config) not in found and hasattr(config, "_attn_implementation"):
            found.add(id(config))
            yield config


def uses_ring(model: nn.Module) -> bool:
    """Returns True if ``model`` or its text part has attn_implementation "ring_fp32"."""
    return any(config._attn_implementation == NAME for config in configs_of(model))


def unwrapped(model: nn.Module) -> list[nn.Module]:
    """``model``, and the models inside it, through wrappers of DDP, Fabric and torch.compile; the last is none."""
    if _IN_WRAPPERS.isdisjoint(model._modules):  # this is asked of each part that checkpointing calls
        return [model]
    if is_ddp(model):
        # A program's own kind of DDP may compute something else in its forward.
        place = type(model).forward.__module__.partition(".")[0]
        name = "module" if place in ("torch", __name__.partition(".")[0]) else ""
    else:
        name = "_forward_module" if type(model).__name__ == _FABRIC else "_orig_mod"
    inner = model._modules.get(name)
    return [model] if inner is None else [model, *unwrapped(inner)]


def forward_context(model: nn.Module) -> AbstractContextManager[Any]:
    """The context in which Fabric's wrapper, if it is in ``model``, runs the model inside: its precision."""
    wrapper: Any = next((one for one in unwrapped(model) if type(one).__name__ == _FABRIC), None)
    return nullcontext() if wrapper is None else wrapper._strategy.precision.forward_context()


def is_of_wrapper(hook: Any) -> bool:
    """Returns True for a hook that a wrapper has on all that its model returns: FSDP2's gathers weights when the
    backward begins, Fabric's asks who began it."""
    return str(getattr(function_of(hook), "__module__", "")).startswith(_OF_WRAPPERS)


def function_of(x: Any) -> Any:
    """The function of a `functools.partial`, which may be one of another; anything else as it is."""
    while isinstance(x, functools.partial):
        x = x.func
    return x


def may_train(model: nn.Module) -> bool:
    """Returns True if a call of ``model`` may train it now, in evaluation mode, too: `from_pretrained` sets that."""
    return model.training or torch.is_grad_enabled()


def is_a(x: object, name: str) -> bool:
    """Returns True for an object of a class of this name, or of a subclass: its module need not be imported."""
    return any(kind.__name__ == name for kind in type(x).__mro__)


def is_ddp(module: nn.Module) -> bool:
    """Returns True for a wrapper of DDP, or of a program's own kind of it."""
    return is_a(module, DDP)


def inside(model: nn.Module) -> nn.Module:
    """The model inside DDP (which would record a forward without gradients) and torch.compile's wrapper."""
    return unwrapped(model)[-1]


def callable_inside(model: nn.Module) -> nn.Module:
    """`inside`, but not past FSDP2's root, whose hooks gather weights: accelerate shards what torch.compile wrapped."""
    return next((one for one in unwrapped(model) if is_unit(one)), inside(model))


def parameters_of(model: nn.Module, names: Iterable[str] = ()) -> list[str]:
    """The parameters of a model's forward, in order; with ``names`` if it takes **kwargs."""
    parameters = inspect.signature(inside(model).forward).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return [*(parameter.name for parameter in parameters), *(names if takes_any else ())]


def by_name(names: Iterable[str], args: Iterable[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name. ``names``: of the function's parameters, in their order."""
    return {**dict(zip(names, args, strict=False)), **given}


def bound_by_name(function: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, without defaults; those of ``*args`` as the tuple."""
    if not args:  # a signature takes time
        return dict(given)
    return {**inspect.signature(function).bind_partial(*args).arguments, **given}


def forward_of(module: nn.Module) -> Any:
    """The forward of a module's class, inside its wrappers."""
    return inspect.unwrap(type(module).forward)


def forwards_of(module: nn.Module) -> Iterator[Any]:
    """The forwards of a module's class and of those it is made of, inside their wrappers: one may call the next."""
    return (inspect.unwrap(vars(kind)["forward"]) for kind in type(module).__mro__ if "forward" in vars(kind))


def globals_in(forward: Any) -> frozenset[str]:
    """The names that a function looks up in its file."""
    code = getattr(forward, "__code__", None)
    return frozenset() if code is None else _globals_in(code)


def globals_used(module: nn.Module) -> frozenset[str]:
    """The names that a module's forward looks up in its file."""
    return globals_in(forward_of(module))


@functools.cache
def _globals_in(code: Any) -> frozenset[str]:
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL")


def name_of(model: nn.Module) -> str:
    """The class name of the user's model, inside DDP and other wrappers."""
    return class_of(_outermost(model))


def _outermost(model: nn.Module) -> nn.Module:
    """The outermost module of a model that has a config; the model itself if none has."""
    return next((module for module in model.modules() if "config" in module.__dict__), model)


def class_of(module: nn.Module) -> str:
    """The name of a module's class as its author wrote it."""
    return _class_of(module).__name__


def file_of(x: object) -> str:
    """The name of the Python module in which the class of a module, or of another object, was written."""
    return _class_of(x).__module__


def place_of(name: str, module: nn.Module) -> str:
    """A part of a model in words: "model.layers.0.conv (Conv1d)". ``name``: "" for the model itself."""
    return f"{name or 'it'} ({class_of(module)})"


def _class_of(x: object) -> type:
    """Returns the class of ``x`` as its author wrote it: fully_shard makes a subclass of a module's, in torch."""
    return next(cls for cls in type(x).__mro__ if not cls.__name__.startswith("FSDP"))


def is_stock_layer(module: nn.Module) -> bool:
    """Returns True for a decoder layer of transformers, if all classes in it are of transformers, torch or PEFT."""
    if not isinstance(module, GradientCheckpointingLayer):
        return False
    owners = {file_of(part).partition(".")[0] for part in module.modules()}
    return owners <= {"transformers", "torch", "peft"}


def loss_model_of(model: nn.Module) -> Any:
    """The transformers model inside wrappers, which computes the loss; None if there is none."""
    return next(_loss_models(model), None)


def loss_models_of(model: nn.Module) -> list[Any]:
    """The transformers models inside a model that compute losses: mostly one. Not those that are a part of another."""
    found = list(_loss_models(model))
    if len(found) > 1:  # a part of one may be registered beside it, too
        parts = {part for one in found for part in one.modules() if part is not one}
        found = [one for one in found if one not in parts]
    return found


def values_around(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """The plain attributes of the modules around the models that compute losses: what a program's forward may ask."""
    around = [module for module in _down_to_loss_models(model) if "loss_type" not in module.__dict__]
    values = [(name, x) for module in around for name, x in vars(module).items()]
    return tuple((name, repr(x)) for name, x in values if isinstance(x, (bool, int, float, str)))


def _loss_models(model: nn.Module) -> Iterator[Any]:
    # By __dict__: a PEFT model forwards every attribute.
    return (module for module in _down_to_loss_models(model) if "loss_type" in module.__dict__)


def _down_to_loss_models(model: nn.Module) -> Iterator[nn.Module]:
    """Looks into no model that computes a loss: a batch asks several times, and most modules are inside."""
    to_visit, seen = [model], set[nn.Module]()
    while to_visit:
        module = to_visit.pop()
        if module in seen:
            continue
        seen.add(module)
        yield module
        if "loss_type" not in module.__dict__:
            to_visit += reversed([part for part in module._modules.values() if part is not None])


def compiled_call(module: nn.Module) -> Any:
    """The function of a module's call that torch.compile made of it in place; None if it did not."""
    return programs_own(module.__dict__.get("_compiled_call_impl"))


def is_compiled(module: nn.Module) -> bool:
    """Returns True if torch.compile made ``module``, or was called on it in place."""
    return compiled_call(module) is not None or "_orig_mod" in module._modules


def compiled_part(model: nn.Module) -> nn.Module | None:
    """The model, or one in its wrappers, that torch.compile was called on as a whole; None if there is none."""
    return next((part for part in unwrapped(model) if is_compiled(part)), None)


def is_unit(module: nn.Module) -> bool:
    """Returns True for a module that `fully_shard` was applied to."""
    return is_a(module, "FSDPModule")


def is_dtensor(x: Any) -> bool:
    """Returns True for a shard of FSDP2, among others; by name, so as not to import torch.distributed."""
    return type(x).__name__ == "DTensor"


def local_of(x: Any) -> Any:
    """This rank's part of a tensor, in the same memory."""
    return x._local_tensor if is_dtensor(x) else x


def mesh_ranks(x: Any) -> set[int]:
    """The ranks that have a part or a replica of a DTensor."""
    return set(x.device_mesh.mesh.flatten().tolist())


def split_across(weights: Iterable[Any], ranks: set[int]) -> set[int]:
    """The identities of DTensors that no other of ``ranks``, those of a ring, has a part or a replica of."""
    alone: dict[int, bool] = {}
    found = set[int]()
    for x in filter(is_dtensor, weights):
        mesh = id(x.device_mesh)
        if mesh not in alone:
            alone[mesh] = len(ranks & mesh_ranks(x)) == 1
        if alone[mesh]:
            found.add(id(x))
    return found


_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""The name of transformers' attention interface in the files of models."""


def uses_interface(model: nn.Module) -> bool:
    """Returns True if the file of any transformers model in ``model`` refers to the attention interface."""
    files = {file_of(module) for module in model.modules() if "config" in module.__dict__}
    return any(hasattr(sys.modules.get(file), _INTERFACE) for file in files)


def calls_interface(forward: Any) -> bool:
    """Returns True for a forward that refers to the attention interface by itself."""
    return _INTERFACE in globals_in(forward)


def holds_attention(module: nn.Module) -> bool:
    """Returns True if the forward of a module, or of a part of it, refers to the attention interface."""
    return any(calls_interface(forward_of(part)) for part in module.modules())


def text_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules except those in towers for images or sound, which see whole inputs."""
    towers: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(tower) for tower in towers):
            continue
        if isinstance(module, PreTrainedModel) and not takes_tokens(module):
            towers.append(f"{name}.")
        else:
            yield name, module


def inner_text_model(model: nn.Module) -> Any:
    """The text model inside ``model`` that can be called with a part of the row; None if there is none."""
    outer: Any = _outermost(model)
    text = outer.get_decoder() if hasattr(outer, "get_decoder") else None
    config = None if text is None else text.__dict__.get("config")  # BERT's decoder is the layer that makes its logits
    inner = config is not None and config is not outer.config and config is outer.config.get_text_config()
    return text if inner else None


def takes_tokens(model: PreTrainedModel) -> bool:
    """Returns False for a tower of images or sound."""
    return model.main_input_name in TOKENS and getattr(model.config.get_text_config(), "vocab_size", None) is not None
