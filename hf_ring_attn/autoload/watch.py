"""Imports hf_ring_attn after transformers or accelerate. ``hf-ring-attn autoload --enable`` copies this file.

torch calls `start` at the end of its own import, often while other packages are half imported, and hf_ring_attn needs
whole ones. So it is imported when the outermost import that runs has ended. An error here never reaches a program.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PLUGIN = "hf_ring_attn"
HOSTS = ("transformers.modeling_utils", "accelerate.accelerator")
"""The modules after which the plugin is imported: a program that only makes tokens pays nothing."""
_NEEDED = {"torch", "transformers", "accelerate", "peft", "trl"}


def start() -> None:
    """Begins to watch for `HOSTS`. torch calls it (entry point of the group "torch.backends")."""
    try:
        if any(host in sys.modules for host in HOSTS):  # they are being imported, and import torch
            _settle()
        else:
            sys.meta_path.insert(0, _Finder)
    except Exception:  # noqa: BLE001  nothing here may break `import torch`
        pass


class _Finder:
    """Leaves every import to the other finders, and watches the first one of `HOSTS`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in HOSTS:
            return None
        for finder in [other for other in sys.meta_path if other is not _Finder]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                sys.meta_path[:] = [other for other in sys.meta_path if other is not _Finder]
                _watch(spec)
                return spec
        return None


class _Watched(ModuleSpec):
    """The spec of a module that is being imported: importlib sets ``_initializing`` to False when that has ended."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]  # its own class again
            _settle()


def _watch(spec: ModuleSpec) -> None:
    try:
        spec.__class__ = _Watched
    except TypeError:  # a spec of another kind: the program goes on, without the plugin
        pass


def _settle() -> None:
    """Imports the plugin, or waits for the outermost import of a package that it may need."""
    try:
        for module in list(sys.modules.values()):  # in the order in which their imports began
            spec = getattr(module, "__dict__", {}).get("__spec__")  # a program may have put anything there
            if spec is not None and getattr(spec, "_initializing", False) and _is_needed(spec):
                _watch(spec)
                return
        if PLUGIN not in sys.modules:
            __import__(PLUGIN)
    except Exception as error:  # noqa: BLE001  whatever it is: the program did not ask for this import
        _tell(error)


def _is_needed(spec: ModuleSpec) -> bool:
    """Returns True for a module of a host or of an installed package; False for a program's own, which may train."""
    installed = any(place in (spec.origin or "") for place in ("site-packages", "dist-packages"))
    return installed or spec.name.partition(".")[0] in _NEEDED


def _tell(error: Exception) -> None:
    try:
        sys.stderr.write(
            f'hf_ring_attn was not loaded, so "ring_fp32" is not registered ({type(error).__name__}: {error}). '
            "To stop trying: hf-ring-attn autoload --disable, or TORCH_DEVICE_BACKEND_AUTOLOAD=0.\n"
        )
    except Exception:  # noqa: BLE001  a program without stderr
        pass
