"""The options set on a model."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ...arguments import check_type
from ...config import RingConfig
from .introspect import configs_of

_OPTIONS = WeakIdKeyDictionary()
"""Options by the identity of a model's config: configs are saved as JSON, so nothing may be hung on them."""


def configure(model: nn.Module, config: RingConfig) -> None:
    """Sets the options with which ``model`` runs in a ring; see `RingConfig`."""
    check_type("model", model, nn.Module, "a torch.nn.Module")
    check_type("config", config, RingConfig, "a RingConfig")
    for part in configs_of(model):
        _OPTIONS[part] = config


def ring_config(config: Any) -> RingConfig:
    """The options set for the model that has this transformers config; the defaults if none were set."""
    options: RingConfig | None = None if config is None else _OPTIONS.get(config)
    return RingConfig() if options is None else options


def options_of(model: nn.Module) -> RingConfig:
    """The options set for ``model``, wrapped or not."""
    for part in configs_of(model):
        if part in _OPTIONS:
            return ring_config(part)
    return RingConfig()
