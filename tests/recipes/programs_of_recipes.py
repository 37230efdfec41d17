"""The programs of recipes, for tests: they stand side by side, not in a package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from tests.helpers.programs import REPOSITORY

RECIPES = REPOSITORY / "recipes"
NAMES = sorted(path.parent.name for path in RECIPES.glob("*/config.yaml"))


def program(name: str) -> Any:
    """A program as a module; recipes/long_context_lora has a train.py of its own, which is never meant."""
    if str(RECIPES) not in sys.path:
        sys.path.insert(0, str(RECIPES))
    module = importlib.import_module(name)
    assert Path(str(module.__file__)).parent == RECIPES
    return module
