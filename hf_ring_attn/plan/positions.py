"""Rows with more positions than a model has, and the RoPE scaling that reaches them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..integration.model.positions import positions_of, reach_of, ropes_of

FACTORS = {"linear", "llama3", "yarn"}
"""Types of RoPE scaling whose factor says how many times the original positions they reach."""


def beyond(config: Any, model: nn.Module, tokens: int) -> Iterator[str]:
    """Yields a line if a row of so many tokens is beyond the model's positions."""
    found = positions_of(config, model)
    if found is not None and tokens > found[0]:
        yield f"{tokens:,} tokens are beyond the model's {found[0]:,} positions: it needs {found[1]}"


def scaling(config: Any, tokens: int) -> dict[str, Any]:
    """The entries of ``rope_parameters`` by which RoPE reaches so many tokens: YaRN, or a larger factor of its scaling.

    Empty if it reaches them, or if there is no one way: each kind of layers has its own RoPE, or it is of another type.
    """
    limit, ropes = getattr(config, "max_position_embeddings", None), ropes_of(config)
    if len(ropes) != 1 or not isinstance(limit, int) or tokens <= (reach := reach_of(config)):
        return {}
    (rope,) = ropes
    if not rope.get("factor") and rope.get("rope_type", "default") == "default":
        return {"rope_type": "yarn", "factor": _factor(tokens, reach), "original_max_position_embeddings": reach}
    if rope.get("factor") and rope.get("rope_type") in FACTORS and rope.get("original_max_position_embeddings"):
        return {"factor": _factor(tokens, rope["original_max_position_embeddings"])}
    return {}


def _factor(tokens: int, original: int) -> float:
    return math.ceil(100 * tokens / original) / 100
