"""The positions of a model: does a row have more, and the RoPE scaling that reaches them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..integration.context.introspect import text_modules

ROPE = "RoPE scaling such as YaRN (recipes/extend-context)"
MORE = "a larger factor of its RoPE scaling (recipes/extend-context)"
TABLE = "a longer table of positions, which has to be trained"
FACTORS = {"linear", "llama3", "yarn"}
"""Types of RoPE scaling whose factor says how many times the original positions they reach."""


def beyond(config: Any, model: nn.Module, tokens: int) -> Iterator[str]:
    """Yields a line if a row of so many tokens is beyond the model's positions."""
    text = config.get_text_config()
    limit, modules = getattr(text, "max_position_embeddings", None), dict(text_modules(model))
    if not isinstance(limit, int):
        return
    if any("Rotary" in type(module).__name__ for module in modules.values()):
        limit, need = _reach(text), MORE if any(one.get("factor") for one in _rope(text)) else ROPE
    elif any(_is_table(name, module, limit) for name, module in modules.items()):
        need = TABLE
    else:  # it learned no place
        return
    if tokens > limit:
        yield f"{tokens:,} tokens are beyond the model's {limit:,} positions: it needs {need}"


def scaling(config: Any, tokens: int) -> dict[str, Any]:
    """The entries of ``rope_parameters`` by which RoPE reaches so many tokens: YaRN, or a larger factor of its scaling.

    Empty if it reaches them, or if there is no one way: each kind of layers has its own RoPE, or it is of another type.
    """
    limit, ropes = getattr(config, "max_position_embeddings", None), _rope(config)
    if len(ropes) != 1 or not isinstance(limit, int) or tokens <= (reach := _reach(config)):
        return {}
    (rope,) = ropes
    if not rope.get("factor") and rope.get("rope_type", "default") == "default":
        return {"rope_type": "yarn", "factor": _factor(tokens, reach), "original_max_position_embeddings": reach}
    if rope.get("factor") and rope.get("rope_type") in FACTORS and rope.get("original_max_position_embeddings"):
        return {"factor": _factor(tokens, rope["original_max_position_embeddings"])}
    return {}


def _factor(tokens: int, original: int) -> float:
    return math.ceil(100 * tokens / original) / 100


def _reach(text: Any) -> int:
    """The positions that a text model's RoPE reaches."""
    limit = int(text.max_position_embeddings)
    # Gemma 3's positions are counted with the factor of its RoPE.
    scaled = [] if str(text.model_type).startswith("gemma3") else [_scaled(one, limit) for one in _rope(text)]
    return max([limit, *scaled])


def _rope(text: Any) -> list[dict[str, Any]]:
    """RoPE's parameters, of each kind of layers if they differ."""
    found = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return [one for one in (found, *found.values()) if isinstance(one, dict) and one]


def _scaled(rope: dict[str, Any], limit: int) -> int:
    """The positions that a scaling reaches: its factor times those before it."""
    return int((rope.get("factor") or 1.0) * (rope.get("original_max_position_embeddings") or limit))


def _is_table(name: str, module: nn.Module, limit: int) -> bool:
    of_positions = "position" in name or name.endswith("wpe")
    return of_positions and isinstance(module, nn.Embedding) and module.num_embeddings >= limit
