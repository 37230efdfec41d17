"""Plots of recipes, if matplotlib is there."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def draw(path: Path, onto: Callable[[Any], None], size: tuple[float, float] = (8, 5)) -> bool:
    """Saves a plot, or prints what to install for it.

    Args:
        path: ends in .svg or .png.
        onto: draws on matplotlib's axes.

    Returns:
        True if the plot was saved.
    """
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        print(f"no plot {path.name}, since matplotlib is not installed: pip install matplotlib")
        return False
    figure = figures.Figure(figsize=size, layout="constrained")
    onto(figure.add_subplot())
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(f"plot: {path}")
    return True
