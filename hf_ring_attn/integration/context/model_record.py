"""The options set on a model, and a record of facts about it, dropped when the model changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from types import FunctionType
from typing import Any, TypeVar

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ... import errors
from ...arguments import check_type
from ...comm.groups import state_in
from ...config import RingConfig
from ..patching.changes import at_uninstall
from ..patching.modules import HOOKS, is_ours, programs_own
from .introspect import NAME, compiled_call, configs_of, function_of, inside, is_compiled, modules_of
from .references import alive

S = TypeVar("S")

DEFAULT = RingConfig()
_OPTIONS = WeakIdKeyDictionary()
"""Options by the identity of a model's config: mask functions get the config, whose JSON must not hold them."""
_CARRIED = "_ring_fp32_options"
"""The attribute in which a copy of a module has them. The program set them, so `uninstall` leaves it."""


class _Carried:
    """Options in an attribute of each module with a config, for copies of the model. It is not saved."""

    def __init__(self, config: RingConfig) -> None:
        self.config = config

    def __deepcopy__(self, _memo: Any) -> _Carried:
        return self

    def __reduce__(self) -> Any:
        return dict, ()


def configure(model: nn.Module, config: RingConfig) -> None:
    """Sets the options with which ``model`` runs in a ring, in trainers and in loops; see `RingConfig`.

    Call it on every rank, before the training. A later call replaces all options.

    Args:
        model: a model of transformers, also inside PEFT, DDP or FSDP2.
        config: the options, the same on every rank.

    Raises:
        BadOption: ``config`` is not a RingConfig, or ``model`` has no transformers config.
    """
    check_type("model", model, nn.Module, "a model of transformers, wrapped or not")
    check_type("config", config, RingConfig, "a hf_ring_attn.RingConfig")
    parts = list(configs_of(model))
    if not parts:
        raise errors.BadOption("model", type(model).__name__, "a model of transformers, wrapped or not")
    for part in parts:
        _OPTIONS[part] = config
    for module in modules_of(model):
        if module.__dict__.get("config") in _OPTIONS:
            module.__dict__[_CARRIED] = _Carried(config)


def _copy_options(modules: Iterable[nn.Module]) -> None:
    """Gives copies of a configured model its options."""
    for module in modules:
        carried, config = module.__dict__.get(_CARRIED), module.__dict__.get("config")
        if isinstance(carried, _Carried) and config not in _OPTIONS:
            _OPTIONS[config] = carried.config


def configured(configs: Iterable[Any]) -> RingConfig | None:
    """The options set for a model with these transformers configs; None if none were."""
    return next((_OPTIONS[part] for part in configs if part in _OPTIONS), None) if _OPTIONS else None


def options_of(model: nn.Module) -> RingConfig:
    """The options set for ``model``, wrapped or not; else the defaults."""
    if inside(model) not in _RECORDS:
        _copy_options(modules_of(model))
    return configured(configs_of(model)) or DEFAULT


_SAVED = {"architectures", "dtype", "torch_dtype", "transformers_version"}
"""Fields that save_pretrained sets, on the one rank that saves."""


@dataclass(eq=False)
class Visit:
    """One visit of all modules of a model.

    Args:
        structure: parts, flags of weights, hooks and functions; no values, no training flags.
        modules: in the order of `nn.Module.modules`.
        weights: the parameters; a tied one occurs several times. trained: those that train.
        checkpointing: the modules with a checkpoint function. forwards: those that a program set on modules.
    """

    structure: list[object] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    weights: list[nn.Parameter] = field(default_factory=list)
    trained: list[nn.Parameter] = field(default_factory=list)
    checkpointing: list[nn.Module] = field(default_factory=list)
    forwards: list[Any] = field(default_factory=list)

    def add_weights(self, weights: Iterable[Any]) -> None:
        """Adds the weights of a module, with their hooks, which a program set."""
        add = self.structure.append
        for weight in weights:
            if weight is None:
                add(False)
                continue
            trains = weight.requires_grad
            add(trains)
            self.weights.append(weight)
            if weight._backward_hooks:
                self.add_hooks(weight._backward_hooks.values())
            if trains:
                self.trained.append(weight)
                if after_grad := weight._post_accumulate_grad_hooks:
                    self.add_hooks(after_grad.values())

    def add_hooks(self, hooks: Iterable[Any]) -> None:
        """Adds the program's hooks, by their code, and none of ours."""
        self.structure += [code_of(hook) for hook in hooks if not is_ours(hook)]


class Visits(dict["ModelRecord", Visit]):
    """The visits of models that a batch is admitting now, so that each is visited once."""


class ModelRecord:
    """Facts about a model with its current structure; each feature stores its state here.

    Attributes:
        configs: the transformers configs in the model. values: their plain fields, by name, as text.
    """

    def __init__(self, visit: Visit) -> None:
        self._gone: list[object] = []
        self._modules = [weakref.ref(module, self._gone.append) for module in visit.modules]
        self._forwards = [weakref.ref(x, self._gone.append) for x in visit.forwards if type(x).__weakrefoffset__]
        self._structure = visit.structure
        _copy_options(visit.modules)
        self.configs = list(configs_of(visit.modules))
        self.values = _values(self.configs)
        self._by_id = {id(module): known for module, known in zip(visit.modules, self._modules, strict=True)}
        self._states: dict[object, Any] = {}

    def modules(self) -> list[nn.Module]:
        """The model's modules; none of another one, and not its wrappers."""
        return alive(self._modules)

    def holds(self, module: nn.Module) -> bool:
        """Returns True for a module of the model, and False for a newer module that has a freed one's id."""
        known = self._by_id.get(id(module))
        return known is not None and known() is module

    def weights(self) -> list[nn.Parameter]:
        """The model's parameters; a tied one occurs several times."""
        return [x for module in self.modules() for x in module._parameters.values() if x is not None]

    @cached_property
    def classes(self) -> set[str]:
        """The names of the classes of the model's modules and weights, and of their base classes."""
        kinds = {*map(type, self.modules()), *map(type, self.weights())}
        return {cls.__name__ for kind in kinds for cls in kind.__mro__}

    @cached_property
    def compiled(self) -> bool:
        """True if torch.compile was called on the model or on a part of it."""
        return any(map(is_compiled, self.modules()))

    def uses_ring(self) -> bool:
        """Returns True if the model or its text part has attn_implementation "ring_fp32"."""
        return any(config._attn_implementation == NAME for config in self.configs)

    def state(self, kind: type[S]) -> S:
        """A feature's own state of this model: an instance of its class, made at first use."""
        return state_in(self._states, kind)

    def once(self, find: Callable[[nn.Module], S], model: nn.Module) -> S:
        """The result of ``find`` for the model, called once for this structure. It must not hold the model."""
        if find not in self._states:
            self._states[find] = find(model)
        found: S = self._states[find]
        return found

    def matches(self, visit: Visit) -> bool:
        """Returns True if the model has not changed. It compares ids, which no other object gets in the meantime."""
        return not self._gone and visit.structure == self._structure and _values(self.configs) == self.values


@dataclass
class SeenOutputs:
    """The paths of a model's outputs whose dims are not [B, tokens, ...], as the self-check saw them.

    Args:
        pooled: without a dim of tokens; they were compared. odd: others of several dims.
    """

    pooled: set[str] = field(default_factory=set)
    odd: set[str] = field(default_factory=set)

    def add(self, other: SeenOutputs) -> None:
        self.pooled |= other.pooled
        self.odd |= other.odd


_RECORDS: weakref.WeakKeyDictionary[nn.Module, list[ModelRecord]] = weakref.WeakKeyDictionary()
at_uninstall(_RECORDS.clear)
_KEPT = 3
"""The most records of a model: an adapter that is switched off and on would have a new one at each turn."""


def visit(model: nn.Module) -> tuple[ModelRecord, Visit]:
    """Visits all modules of ``model``. Returns the record of its current structure, maybe a new one, and the visit."""
    model = inside(model)
    records, found = _RECORDS.setdefault(model, []), _visited(model)
    record = next((one for one in records if one.matches(found)), None) or ModelRecord(found)
    if not records or record is not records[0]:
        records[:] = [record, *(one for one in records if one is not record)][:_KEPT]
    return record, found


def latest_record(model: nn.Module) -> ModelRecord:
    """The record of ``model`` as of its last batch, without visiting its modules."""
    records = _RECORDS.get(inside(model))
    return records[0] if records else visit(model)[0]


def weights_of_models() -> set[int]:
    """The ids of the weights of all models that have a record."""
    return {id(x) for records in _RECORDS.values() for record in records for x in record.weights()}


def forget_model(model: nn.Module) -> None:
    """Drops the record of one model."""
    _RECORDS.pop(inside(model), None)


CHECKPOINT_FUNCTIONS = OF_TRANSFORMERS, OF_TORCH = "_gradient_checkpointing_func", "checkpoint_fn"
"""The attributes of a module in which transformers, and torch's CheckpointWrapper, have its checkpoint function."""

_TABLES = itemgetter("_modules", "_parameters", *HOOKS)
_WITHOUT_FUNCTIONS = {nn.Linear, nn.Embedding, nn.Dropout, nn.Identity, nn.ModuleList, nn.ModuleDict, nn.ParameterDict}
"""Classes whose forward, if they have one, calls no function in an attribute. LoRA has most modules of these."""


def _visited(model: nn.Module) -> Visit:
    """Visits all modules once. Runs for every batch, mostly waiting for memory: after a step no cache holds them."""
    visit, to_visit, distinct = Visit(), [model], set[nn.Module | None]([None])
    found, modules = visit.structure, visit.modules
    add, extend, add_weights = found.append, found.extend, visit.add_weights
    while to_visit:
        module = to_visit.pop()
        if module in distinct:
            continue
        distinct.add(module)
        modules.append(module)
        own = module.__dict__
        parts, weights, after, before, back, pre_back = _TABLES(own)
        if parts:
            extend(map(id, parts.values()))
            to_visit.extend(reversed(parts.values()))
        if weights:
            add_weights(weights.values())
        if after or before or back or pre_back:
            visit.add_hooks((*after.values(), *before.values(), *back.values(), *pre_back.values()))
        add(id(own["config"]) if "config" in own else None)
        if "forward" in own:
            forward = programs_own(own["forward"])
            if forward is not None:
                extend((id(forward), code_of(forward)))
                visit.forwards.append(forward)
        if type(module) not in _WITHOUT_FUNCTIONS and FunctionType in map(type, own.values()):  # an activation, perhaps
            extend(code_of(x) for x in own.values() if type(x) is FunctionType and not is_ours(x))
        if "_compiled_call_impl" in own and compiled_call(module) is not None:
            add("compiled")
        if OF_TRANSFORMERS in own or OF_TORCH in own:
            visit.checkpointing.append(module)
    kinds = list(map(type, modules))
    found += kinds
    found += [code_of(kind.forward) for kind in dict.fromkeys(kinds)]  # type: ignore[attr-defined]
    return visit


def code_of(function: Any) -> object:
    """The code of a function, which is the same when a program makes the function again; else its class."""
    function = function_of(function)
    return getattr(function, "__code__", type(function))


def _values(configs: list[Any]) -> list[tuple[int, list[tuple[str, str]]]]:
    plain = (bool, int, float, str, type(None), list, tuple, dict)  # nested configs count separately
    return [
        (id(config), [(n, _text(x)) for n, x in vars(config).items() if isinstance(x, plain) and n not in _SAVED])
        for config in configs
    ]


def _text(value: object) -> str:
    """A plain value as text. A dict's keys are sorted: a config may make one of a set, in an order of the process."""
    if not isinstance(value, dict):
        return repr(value)
    return "{" + ", ".join(sorted(f"{key!r}: {_text(x)}" for key, x in value.items())) + "}"
