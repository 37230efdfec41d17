"""Every error a user can meet, its text in one place: what was got, why that cannot be exact, what to do."""

from __future__ import annotations

from .base import *  # noqa: F403  each class is listed once, in its file
from .batches import *  # noqa: F403  of batches, masks, models and trainers
from .core import *  # noqa: F403  of options, kernels and ranks
from .hosts import *  # noqa: F403  of accelerate, patches and command lines
from .losses import *  # noqa: F403  of losses and logits

for _class in [value for value in globals().values() if isinstance(value, type)]:
    if _class.__module__.startswith(f"{__name__}."):  # what the files import stays as it is
        _class.__module__ = __name__  # tracebacks and pickles name the one place, not the file inside it
