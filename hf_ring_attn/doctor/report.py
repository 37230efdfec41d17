"""Lists installed packages, the machine, and for each kernel if it supports an attention, or why not."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from .. import __version__
from ..attention import kernel_trial
from ..autoload import command as autoload
from ..autoload import switch
from ..errors import NotInstalled
from ..integration.patching.changes import TESTED, is_tested, requirement, tested_range
from ..kernels import BY_NAME_ONLY, KERNELS, Request, kernels_named
from ..kernels.flash4 import library
from . import machine

PACKAGES = (
    "torch", "transformers", "accelerate", "trl", "peft", "triton", "flash-attn-4", "flash-attn", "liger-kernel",
    "bitsandbytes",
)  # fmt: skip


def report(request: Request) -> tuple[str, bool]:
    """Returns a text (packages, machine, kernels for one request), and True if some kernel supports the request."""
    reasons = {
        name: kernel.unsupported(request) or list(kernel_trial.failures_of(name, request))
        for name, kernel in KERNELS.items()
    }
    taken = next((name for name in kernels_named("auto") if not reasons[name]), None)
    lines = [*_packages(), "", *machine.lines(), "", *_kernels(request, reasons)]
    lines.append("none of them can: see the reasons above" if taken is None else f'"auto" takes {taken}')
    return "\n".join(lines), taken is not None


def _packages() -> Iterator[str]:
    """A line a package: installed version, tested versions, and "NOT TESTED" if it is none of them."""
    yield f"hf-ring-attn {__version__}, python {platform.python_version()} on {platform.system()} {platform.machine()}"
    try:
        yield autoload.state(switch.find())
    except NotInstalled:
        yield "autoload: off (not installed: this is a folder with the package)"
    yield f"  {'':14s} {'installed':18s} tested"
    for name in PACKAGES:
        try:
            found = version(name)
        except PackageNotFoundError:
            found = ""
        tested, fits = _tested(name, found)
        verdict = "" if not found or fits else "   NOT TESTED"
        verdict += f": pip install '{requirement(name)}'" if verdict and name in TESTED else ""
        yield f"  {name:14s} {found or 'not installed':18s} {tested}{verdict}".rstrip()


def _tested(name: str, found: str) -> tuple[str, bool]:
    """The tested versions of a package, and True if ``found`` is one of them, or if the package has no such row."""
    if name == library.PACKAGE:
        return ", ".join(library.TESTED), found in library.TESTED
    if name not in TESTED:
        return "", True
    return tested_range(name), bool(found) and is_tested(name, found)


def _kernels(request: Request, reasons: Mapping[str, list[str]]) -> Iterator[str]:
    dims = str(request.head_dim) if request.head_dim == request.value_dim else f"{request.head_dim}/{request.value_dim}"
    asked = {
        "softcap": request.softcap, "sinks": request.sinks, "deterministic": request.deterministic,
        "keys in several runs": request.holes, "score_mod": request.score_mod,
    }  # fmt: skip
    more = "".join(f", {name}" for name, is_asked in asked.items() if is_asked)
    dtype = str(request.dtype).removeprefix("torch.")
    yield f"kernels for {request.heads} heads over {request.kv_heads}, {dims} wide, {dtype} on {request.device}{more}:"
    for name, kernel in KERNELS.items():
        if why := reasons[name]:
            yield f"  {name:10s} no: {why[0]}"
            yield from (f"  {'':14s}{reason}" for reason in why[1:])
        else:
            sums = "each contribution to a gradient is rounded" if kernel.rounds_gradients else "float32 sums"
            yield f"  {name:10s} yes{', by name only' if name in BY_NAME_ONLY else ''}: {sums}"
