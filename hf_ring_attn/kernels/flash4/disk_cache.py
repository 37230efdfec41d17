"""flash-attn-4's own cache of compiled kernels on disk: without it, seven kernels take 10 s in each process."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

ENABLED, FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
"""flash-attn-4's environment variables, which it reads as it is imported. ENABLED=0 turns its cache off here, too."""


def use_disk_cache() -> None:
    """Turns the cache on, in a folder of this user, unless the environment says otherwise or the folder is unusable.

    flash-attn-4's own default is a folder of /tmp, where another user could put compiled code under our names.
    """
    if ENABLED in os.environ or "flash_attn.cute.cache_utils" in sys.modules:
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get(FOLDER) or cache / "flash_attention_cute_dsl_cache")
    if _lockable(folder):
        os.environ.update({ENABLED: "1", FOLDER: str(folder)})


def _lockable(folder: Path) -> bool:
    """Returns True if files can be made and locked in ``folder``: flash-attn-4 raises where they cannot."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (folder / "hf_ring_attn.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
