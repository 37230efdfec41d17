"""A vision tower's sizes, time and memory. The ranks of a ring share the pictures of a row (`shared_pictures`).

Only towers are known whose pictures have one size: `image_size` and `patch_size` in the vision config. LoRA leaves a
tower frozen, so it has no backward; full fine-tuning trains it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..integration.context.introspect import text_modules
from .hardware import FLOAT32, MATMUL, TOWER_ATTENTION
from .setup import Setup
from .shape import TowerShape

CHANNELS = 3


def tower_of(config: Any, model: nn.Module) -> TowerShape | None:
    """Reads the vision tower of a model on the meta device; None: it has none, or not all its sizes are known."""
    vision = getattr(config, "vision_config", None)
    sizes = [
        next((x for name in names if isinstance(x := getattr(vision, name, None), int)), 0)
        for names in (
            ("num_hidden_layers", "depth"), ("hidden_size",), ("intermediate_size",), ("image_size",), ("patch_size",),
        )
    ]  # fmt: skip
    tower = next((module for module in towers(model) if getattr(module[1], "config", None) is vision), None)
    if vision is None or tower is None or not all(sizes):
        return None
    layers, hidden, mlp, side, patch = sizes
    blocks = [x for x in tower[1].modules() if isinstance(x, nn.ModuleList) and len(x) == layers]
    linear = [x for each in blocks for x in each.modules() if isinstance(x, nn.Linear)]
    return TowerShape(
        name=tower[0], layers=layers, hidden=hidden, mlp=mlp, patches=(side // patch) ** 2, pixels=CHANNELS * side**2,
        active=sum(x.in_features * x.out_features for x in linear),
    )  # fmt: skip


def towers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost parts of a model that see no tokens, by name."""
    text = {id(module) for _, module in text_modules(model)}
    return [
        (name, module)
        for name, module in model.named_modules()
        if id(module) not in text and id(model.get_submodule(name.rpartition(".")[0])) in text
    ]


def _patches(tower: TowerShape, setup: Setup) -> int:
    """Patches of which a rank computes the features."""
    return -(-setup.pictures // setup.ring_size) * tower.patches


def tower_flops(tower: TowerShape, setup: Setup) -> float:
    """Operations of a rank's forward."""
    return _patches(tower, setup) * 2.0 * (tower.active + 2 * tower.layers * tower.patches * tower.hidden)


def tower_seconds(tower: TowerShape, setup: Setup) -> float:
    """Seconds of a rank's pictures in a step. Elementwise kernels: norms, residuals and the MLP's activation."""
    patches, attended = _patches(tower, setup), 4 * tower.patches * tower.hidden * tower.layers
    numbers = tower.layers * (2 * 18 * tower.hidden + 2 * 3 * tower.hidden + 2 * tower.mlp)
    flops = 2 * tower.active / MATMUL + attended / TOWER_ATTENTION
    moved = numbers * setup.itemsize / setup.gpu.memory_speed
    forward = patches * (flops / setup.peak_flops + moved)
    return forward * (3 + setup.checkpointing if setup.method == "full" else 1)


def tower_bytes(tower: TowerShape, setup: Setup) -> float:
    """Bytes of the forward of the last layer's MLP: pixels, states, their norm in float32, and the MLP's; with layers'
    inputs where the tower trains."""
    kept = tower.layers if setup.method == "full" else 0
    numbers = tower.hidden * (3 + kept) * setup.itemsize + tower.hidden * FLOAT32 + 2 * tower.mlp * setup.itemsize
    return setup.pictures * tower.pixels * FLOAT32 + float(_patches(tower, setup) * numbers)
