"""The positions of a model: how many it has, and a warning of rows that have more."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..context.batch_context import BatchContext
from ..context.introspect import name_of, text_modules
from ..context.model_record import ModelRecord
from ..log import warn

_ROPE = "RoPE scaling such as YaRN (recipes/extend-context)"
_MORE = "a larger factor of its RoPE scaling (recipes/extend-context)"
_TABLE = "a longer table of positions, which has to be trained"


class _Found(list["tuple[int, str] | None"]):
    """The `positions_of` a model with its current structure, once they were asked for."""


def positions_of(config: Any, model: nn.Module) -> tuple[int, str] | None:
    """The number of positions that a model has, and in words what it needs to have more; None: it has no limit.

    Args:
        config: its config. model: may be empty, on the meta device.
    """
    text = config.get_text_config()
    limit, modules = getattr(text, "max_position_embeddings", None), dict(text_modules(model))
    if not isinstance(limit, int):
        return None
    if any("Rotary" in type(module).__name__ for module in modules.values()):
        return reach_of(text), _MORE if any(one.get("factor") for one in ropes_of(text)) else _ROPE
    if any(_is_table(name, module, limit) for name, module in modules.items()):
        return limit, _TABLE
    return None  # it learned no place


def warn_of_rows_beyond(model: nn.Module, record: ModelRecord, context: BatchContext) -> None:
    """Warns once of rows with more positions than the model has: it computes them, but never learned them."""
    largest, known = context.facts.max_position, record.state(_Found)
    if largest is None or not record.configs:
        return
    if not known:
        known.append(positions_of(record.configs[0], model))
    if known[0] is not None and largest >= known[0][0]:
        warn(_BEYOND.format(name_of(model), *known[0]), everywhere=False)


_BEYOND = (
    "rows have tokens beyond the {1:,} positions in the config of {0}. If it was trained at no others, it needs {2}, "
    "in a ring as in one process."
)


def reach_of(text: Any) -> int:
    """The positions that a text model's RoPE reaches."""
    limit = int(text.max_position_embeddings)
    # Gemma 3's positions are counted with the factor of its RoPE.
    scaled = [] if str(text.model_type).startswith("gemma3") else [_scaled(one, limit) for one in ropes_of(text)]
    return max([limit, *scaled])


def ropes_of(text: Any) -> list[dict[str, Any]]:
    """RoPE's parameters, of each kind of layers if they differ."""
    found = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return [one for one in (found, *found.values()) if isinstance(one, dict) and one]


def _scaled(rope: dict[str, Any], limit: int) -> int:
    """The positions that a scaling reaches: its factor times those before it."""
    return int((rope.get("factor") or 1.0) * (rope.get("original_max_position_embeddings") or limit))


def _is_table(name: str, module: nn.Module, limit: int) -> bool:
    of_positions = "position" in name or name.endswith("wpe")
    return of_positions and isinstance(module, nn.Embedding) and module.num_embeddings >= limit
