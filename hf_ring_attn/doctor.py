"""``hf-ring-attn doctor``: lists installed packages, and for each kernel if it supports an attention, or why not."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

import torch

from .attention import kernel_trial
from .integration.patching.changes import TESTED
from .kernels import BY_NAME_ONLY, KERNELS, Request, named

PACKAGES = (
    "hf-ring-attn", "torch", "transformers", "accelerate", "peft", "trl", "triton", "flash-attn-4", "flash-attn",
)  # fmt: skip


def report(request: Request) -> tuple[str, bool]:
    """Returns a text (packages, devices, kernels for one request), and True if some kernel supports the request."""
    reasons = {
        name: kernel.unsupported(request) or list(kernel_trial.fails(name, request)) for name, kernel in KERNELS.items()
    }
    taken = next((name for name in named("auto") if not reasons[name]), None)
    lines = [*_packages(), "", *_devices(), "", *_kernels(request, reasons)]
    lines.append("none of them can: see the reasons above" if taken is None else f'"auto" takes {taken}')
    return "\n".join(lines), taken is not None


def _packages() -> Iterator[str]:
    yield f"python {platform.python_version()} on {platform.system()} {platform.machine()}"
    for name in PACKAGES:
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "not installed"
        oldest, newest = TESTED.get(name, ("", ""))
        tested = "" if not oldest else f"tested with {oldest}" + ("" if oldest == newest else f" to {newest}")
        yield f"  {name:14s} {found:18s} {tested}".rstrip()


def _devices() -> Iterator[str]:
    if not torch.cuda.is_available():
        yield "no GPU that torch can use"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield (
            f"cuda:{index} {properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB"
        )


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
            sums = "each contribution to a gradient is rounded" if kernel.rounds_gradients(request) else "float32 sums"
            yield f"  {name:10s} yes{', by name only' if name in BY_NAME_ONLY else ''}: {sums}"
