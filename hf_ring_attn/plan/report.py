"""A forecast as a table, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

from . import launch
from .hardware import GIB, LOCKED_GIB_PER_SECOND
from .memory import CHECKPOINTS, SAVED
from .program import to_replace
from .search import QLORA, Forecast
from .setup import Setup
from .shape import ModelShape


@dataclass(frozen=True)
class Plan:
    """All that a report shows.

    Args:
        others, longer: as `search.alternatives` and `search.longer_rows` give them. notes: as `notes.notes_on`.
        gpu, source: as the user named them. program: the training program.
        kept_free: the share of the memory that the longest row leaves. none_fits: no row does.
        written: where the launch config and the program were written. asked: the user asked for it.
    """

    model: ModelShape
    one: Forecast
    others: list[Forecast]
    longer: list[Forecast]
    notes: list[str]
    gpu: str
    source: str
    program: str
    kept_free: float = 0.0
    none_fits: bool = False
    written: Path | None = None
    asked: bool = False


def table(plan: Plan) -> str:
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    model, one, others, gpu = plan.model, plan.one, plan.others, plan.gpu
    setup, memory, seconds = one.setup, one.memory, one.seconds
    rows = setup.gpus // setup.ring_size
    yield (
        f"{model.name}, {model.parameters / 1e9:.2f} billion parameters, {setup.method}, {setup.dtype}: "
        f"{setup.tokens:,} tokens in a row, {setup.tokens_per_rank:,} a GPU; "
        f"{setup.gpus} x {gpu}, ring of {setup.ring_size}" + (f", {rows} rows at a time" if rows > 1 else "")
    )
    yield from (f"note: {note}" for note in plan.notes)
    yield ""
    if plan.none_fits:
        takes = f"{memory.total / GIB:.2f} of {one.memory_gib:.1f} GiB a GPU"
        yield f"no row fits: {setup.tokens} tokens take {takes}"
        yield from _longer(plan, "options with which rows fit:")
        yield from _unfit(plan)
        return
    yield f"{'peak memory of a GPU, in the ' + memory.moment:48s}{'GiB':>9s}"
    for name, size in sorted(memory.parts.items(), key=lambda part: -part[1]):
        yield f"  {name:46s}{size / GIB:9.2f}"
    verdict = "fits" if one.fits else "does not fit"
    yield f"  {'total':46s}{memory.total / GIB:9.2f}   {verdict} in {one.memory_gib:.1f} GiB"
    if plan.kept_free:
        share = f"{100 * plan.kept_free:.0f} %"
        yield f"  {share} stay free: measured steps took up to {share} more than their forecasts"
    yield f"  {'as counted by torch.cuda.max_memory_allocated':46s}{memory.allocated / GIB:9.2f}"
    for name, size in memory.host.items():
        yield f"  {'in host memory, for each GPU: ' + name:46s}{size / GIB:9.2f}"
    if memory.host and (near := min(setup.gpus, setup.gpus_per_node)) > 1:
        of_node = near * sum(memory.host.values()) / GIB
        yield f"  {f'in host memory, for all {near} GPUs of a node':46s}{of_node:9.2f}"
    yield ""
    yield f"{f'a step, attention in {kernels(model, setup)}':48s}{'seconds':>9s}"
    for name, part in sorted(seconds.parts.items(), key=lambda part: -part[1]):
        yield f"  {name:46s}{part:9.2f}"
    on_h200 = "" if gpu == "h200" else " (speeds were measured on an H200)"
    if seconds.left_out:
        yield f"  {'total without ' + ', '.join(seconds.left_out):46s}{seconds.total:9.2f}  {on_h200}".rstrip()
    else:
        yield f"  {'total':46s}{seconds.total:9.2f}   {_speed(one):,.0f} tokens/s a GPU, MFU {_mfu(one):.0%}{on_h200}"
    if lock := sum(memory.host.get(name, 0) for name in (CHECKPOINTS, SAVED)) / GIB / LOCKED_GIB_PER_SECOND:
        yield f"  {'the first step also locks host memory, about':46s}{lock:9.2f}   (the speed of one host)"
    if seconds.launches > 0.1 * seconds.total:
        yield "  on a slow host such a short step takes up to twice as long"
    yield ""
    if others:
        yield "faster options that fit:" if one.fits else "options that make it fit, the fastest first:"
    yield from (f"  {_option(other)}" for other in others)
    yield from _longer(plan, "options for longer rows:")
    yield from _start(plan) if one.fits else _unfit(plan)


def _unfit(plan: Plan) -> Iterator[str]:
    if not plan.others and not plan.longer:
        yield "no options that this command knows make it fit: take more GPUs, or a shorter row (--max-tokens)"
    if plan.asked:
        yield "nothing was written, since it does not fit (if a GPU has more memory, give --memory GIB)"


def _longer(plan: Plan, heading: str) -> Iterator[str]:
    """Options for longer rows, and what all of them assume."""
    if plan.longer:
        yield heading
    yield from (f"  {other.setup.tokens:11,} tokens, {_option(other)}" for other in plan.longer)
    if any(other.memory.host for other in [*plan.others, *plan.longer]) and plan.one.setup.gpu.host_memory_gib == inf:
        yield "no limit of host memory was assumed: set that of each GPU's process with --host-memory GIB"


def _option(other: Forecast) -> str:
    gib, host = other.memory.total / GIB, sum(other.memory.host.values()) / GIB
    about = " (it rounds the frozen weights, so it trains another model)" if QLORA in other.changes else ""
    changes = ", ".join(other.changes)
    return f"{gib:7.2f} GiB + {host:6.1f} of host memory, {other.seconds.total:9.2f} s   {changes}{about}"


def _start(plan: Plan) -> Iterator[str]:
    run, files = launch.command(plan.one.setup), (launch.CONFIG, launch.PROGRAM)
    if plan.written is None:
        yield f"to start it: --write FOLDER writes {' and '.join(files)}; run there: {run}"
        return
    yield f"written: {', '.join(str(plan.written / name) for name in files)}"
    names = " and ".join(to_replace(plan.source))
    yield f"replace {names} in {launch.PROGRAM}, then start it in that folder with: {run}"


def kernels(model: ModelShape, setup: Setup) -> str:
    """The kernels of attention by name; more than one if layers have heads of other widths."""
    return " and ".join(sorted({setup.kernel_of(one) for one in model.attentions}))


def as_json(plan: Plan) -> dict[str, Any]:
    """All numbers, in bytes and seconds; ``alternatives`` are as in the table. Speeds: None if a time is left out."""
    model, one = plan.model, plan.one
    setup = {name: value for name, value in asdict(one.setup).items() if name != "gpu"}
    setup["kernel"] = kernels(model, one.setup)
    return {
        "model": model.name, "parameters": model.parameters, "gpu": plan.gpu, "setup": setup,
        "notes": plan.notes,
        "memory_bytes": {
            "parts": one.memory.parts, "total": one.memory.total, "allocated": one.memory.allocated,
            "moment": one.memory.moment, "host": one.memory.host, "limit": one.memory_gib * GIB,
            "kept_free": plan.kept_free,
        },
        "fits": one.fits,
        "seconds": {"parts": one.seconds.parts, "total": one.seconds.total, "left_out": one.seconds.left_out},
        "tokens_per_second_per_gpu": None if one.seconds.left_out else _speed(one),
        "mfu": None if one.seconds.left_out else _mfu(one),
        "alternatives": [_as_json(x) for x in plan.others],
        "longer_rows": [{"tokens": x.setup.tokens, **_as_json(x)} for x in plan.longer],
        "launch": {
            "command": launch.command(one.setup), "config": launch.config(one.setup),
            "program": plan.program,
            "written": None if plan.written is None else str(plan.written),
        },
    }  # fmt: skip


def _as_json(other: Forecast) -> dict[str, Any]:
    return {
        "changes": other.changes, "memory_bytes": other.memory.total,
        "host_bytes": sum(other.memory.host.values()), "seconds": other.seconds.total,
    }  # fmt: skip


def _speed(one: Forecast) -> float:
    """Tokens per second of a GPU."""
    return one.setup.tokens / one.seconds.total / one.setup.ring_size


def _mfu(one: Forecast) -> float:
    return one.seconds.flops / one.seconds.total / one.setup.gpus / one.setup.peak_flops
