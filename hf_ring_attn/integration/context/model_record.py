"""The options set on a model, and a record of facts about it, dropped when the model changes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ... import errors
from ...arguments import check_type
from ...config import RingConfig
from ..patching.hooks import is_ours
from .introspect import configs_of, inside, modules_of

S = TypeVar("S")

_OPTIONS = WeakIdKeyDictionary()
"""Options by identity of a model's config, which a mask function gets, and which cannot store them in its JSON."""


def configure(model: nn.Module, config: RingConfig) -> None:
    """Sets the options with which ``model`` runs in a ring, in trainers and in loops with `shard`; see `RingConfig`.

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


def ring_config(config: Any) -> RingConfig:
    """The options set for the model that has this transformers config; the defaults if none were set."""
    return configured([config]) or RingConfig()


def configured(configs: Iterable[Any]) -> RingConfig | None:
    """The options set for a model with these transformers configs; None if none were."""
    return next((_OPTIONS[part] for part in configs if part in _OPTIONS), None)


def options_of(model: nn.Module) -> RingConfig:
    """The options set for ``model``, wrapped or not; else the defaults."""
    return configured(configs_of(model)) or RingConfig()


_SAVED = {"architectures", "dtype", "torch_dtype", "transformers_version"}
"""Fields that save_pretrained sets, on the one rank that saves."""

Stamp = tuple[list[weakref.ref[nn.Module]], list[tuple[Any, ...]], list[object]]


class ModelRecord:
    """Facts about a model with its current structure; each feature stores its state here."""

    configs: list[Any]
    """The transformers configs in the model."""

    def __init__(self, stamp: Stamp, configs: list[Any]) -> None:
        self.stamp, self.configs = stamp, configs
        self.ids = {id(reference()) for reference in stamp[0]} | set(map(id, configs))
        self._states: dict[type, Any] = {}

    def modules(self) -> list[nn.Module]:
        """The model's modules; none of another one, and not its wrappers."""
        return [module for reference in self.stamp[0] if (module := reference()) is not None]

    def weights(self) -> list[nn.Parameter]:
        """The model's parameters; a tied one occurs several times."""
        return [x for module in self.modules() for x in module._parameters.values() if x is not None]

    def uses_ring(self) -> bool:
        """Returns True if the model or its text part has attn_implementation "ring_fp32"."""
        return any(config._attn_implementation == "ring_fp32" for config in self.configs)

    def state(self, kind: type[S]) -> S:
        """A feature's own state of this model: an instance of its class, made at first use."""
        found: S = self._states.setdefault(kind, kind())
        return found


_RECORDS: weakref.WeakKeyDictionary[nn.Module, ModelRecord] = weakref.WeakKeyDictionary()


def record_of(model: nn.Module) -> ModelRecord:
    """The record of ``model``, a new one if its structure has changed. Visits all modules."""
    model = inside(model)
    known, modules = _RECORDS.get(model), modules_of(model)
    configs = list(configs_of(modules))
    stamp = _stamp(modules, configs)
    if known is None or not _same(known.stamp, stamp):
        known = _RECORDS[model] = ModelRecord(stamp, configs)
    return known


def latest_record(model: nn.Module) -> ModelRecord:
    """The record of ``model`` as of its last batch, without visiting its modules."""
    return _RECORDS.get(inside(model)) or record_of(model)


def forget_model(model: nn.Module) -> None:
    """Drops the record of one model."""
    _RECORDS.pop(inside(model), None)


def forget_models() -> None:
    """Drops every record; called by `uninstall`, which removes hooks and patches."""
    _RECORDS.clear()


def _stamp(modules: list[nn.Module], configs: list[Any]) -> Stamp:
    """The structure of a model: its modules, their hooks and weights, and its configs; no training flags."""
    plain = (bool, int, float, str, type(None), list, tuple, dict)  # nested configs count separately
    values: list[object] = [
        (id(config), [(n, repr(x)) for n, x in vars(config).items() if isinstance(x, plain) and n not in _SAVED])
        for config in configs
    ]
    return [weakref.ref(module) for module in modules], [_facts(module) for module in modules], values


def _facts(module: nn.Module) -> tuple[Any, ...]:
    own = module.__dict__
    hooks, trained, weights = 0, 0, own["_parameters"]
    for table in (own["_forward_hooks"], own["_forward_pre_hooks"], own["_backward_hooks"]):
        for hook in table.values():
            hooks += not is_ours(hook)
    for weight in weights.values():
        trained += weight is not None and weight.requires_grad
    return type(module), hooks, id(own.get("forward")), len(weights), trained


def _same(one: Stamp, other: Stamp) -> bool:
    if len(one[0]) != len(other[0]) or one[1:] != other[1:]:
        return False
    return all(a() is b() for a, b in zip(one[0], other[0], strict=True))  # ids alone may be reused
