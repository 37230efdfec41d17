"""The decoder layers of a model: the list of their modules, and each one's kind as transformers' configs name it."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..context.introspect import text_modules


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """The name and the list of the layers of ``model``'s text part; None if they are not in one list."""
    outer: Any = model
    count = outer.config.get_text_config().num_hidden_layers
    return next(
        ((name, x) for name, x in text_modules(model) if isinstance(x, nn.ModuleList) and len(x) == count), None
    )


def named_kinds(config: Any) -> list[str]:
    """The kind of each layer, as a config names them; empty if it names none."""
    return list(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or [])


def layer_kinds(config: Any) -> list[str]:
    """The kind of each decoder layer; a config without them says by its window which kind all layers have."""
    text = config.get_text_config()
    windowed = getattr(text, "use_sliding_window", True) and getattr(text, "sliding_window", None)
    return named_kinds(text) or ["sliding_attention" if windowed else "full_attention"] * text.num_hidden_layers
