"""Plots of saved results: throughput by tokens, error by ring size, error by depth; one plot a run."""

from __future__ import annotations

import importlib
import io
import itertools
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import NoMatplotlib, NotAResult
from . import results

Rows = list[dict[str, Any]]
Line = tuple[str, list[float], list[float]]
"""A name, x values and y values."""
OURS = "ring_fp32"
COLOURS = ("#5d6579", "#a0672c", "#3f8f5f", "#a04a86", "#2f8ea3", "#b3871b", "#777777")
STYLES = ("-", "--", ":")


def throughput(rows: Rows) -> tuple[str, str, str, list[Line]]:
    """Speed of each contender's forward and backward, as a share of the same kernel on one device in the same run."""
    done = [row for row in rows if "failed" not in row]
    lines = []
    for contender in dict.fromkeys(row["contender"] for row in done):
        mine = sorted((row["tokens"], row["both"]["share"]) for row in done if row["contender"] == contender)
        lines.append((contender, [tokens for tokens, _ in mine], [share for _, share in mine]))
    return "forward + backward", "tokens in the row", "speed of a device, share of one device alone", lines


def by_ring_size(rows: Rows) -> tuple[str, str, str, list[Line]]:
    """The largest error of dq, dk and dv against float64, of the first inputs and dtype in the run."""
    first = rows[0]
    mine = [row for row in rows if (row["inputs"], row["dtype"]) == (first["inputs"], first["dtype"])]
    lines = []
    for name in dict.fromkeys(_name(row) for row in mine):
        places = sorted((row["ring_size"], _worst(row)) for row in mine if _name(row) == name)
        lines.append((name, [size for size, _ in places], [error for _, error in places]))
    title = f"{first['kernel']}, {first['dtype']}, {first['tokens']} tokens, {first['inputs']}"
    return title, "ring size", "largest error of dq, dk, dv against float64", lines


def by_depth(rows: Rows) -> tuple[str, str, str, list[Line]]:
    """The error of the bottom layer's gradient by depth, for the first residual stream of the run."""
    first = rows[0]
    mine = [row for row in rows if row["stream"] == first["stream"]]
    lines = []
    for way, size in dict.fromkeys((row["way"], row["ring_size"]) for row in mine):
        places = sorted((row["depth"], row["error"]) for row in mine if (row["way"], row["ring_size"]) == (way, size))
        name = "one device" if size == 1 else f"{way}, ring {size}"
        lines.append((name, [depth for depth, _ in places], [error for _, error in places]))
    return f"{first['kernel']}, residuals in {first['stream']}", "layers", "error of the gradient at the bottom", lines


KINDS: dict[str, Callable[[Rows], tuple[str, str, str, list[Line]]]] = {
    "contender": throughput, "inputs": by_ring_size, "depth": by_depth,
}  # fmt: skip
"""The field that identifies each kind of result, and its plot."""


def save(files: Sequence[Path]) -> list[Path]:
    """Draws each run that has a plot; name.svg stands beside the results.jsonl, with its text as text.

    Raises:
        NoMatplotlib: if matplotlib is not installed.
        NotAResult: if a file has no run of `bench` or recipes/benchmarks/depth.py.
    """
    shown = [one for path in files for one in _plots(path)]
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError:
        raise NoMatplotlib() from None
    written = []
    for path, about, (title, across, up, lines) in shown:
        figure = figures.Figure(figsize=(9, 5), layout="constrained")
        axes = figure.add_subplot()
        for (name, x, y), look in zip(lines, _looks([name for name, *_ in lines]), strict=True):
            axes.plot(x, y, marker="o", label=name, **look)
        axes.set_xscale("log", base=2)
        places = sorted({place for _, x, _ in lines for place in x})
        axes.set_xticks(places, [f"{place:,}" for place in places])
        axes.minorticks_off()
        axes.set(xlabel=across, ylabel=up, ylim=(0, None))
        axes.set_title(about, fontsize="small", color="#5d6579")
        axes.grid(alpha=0.3)
        figure.suptitle(title)
        figure.legend(loc="outside right upper", fontsize="small")  # beside the axes, where it covers no point
        text = io.StringIO()
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
            figure.savefig(text, format="svg", metadata={"Date": None})
        path.write_text(" ".join(text.getvalue().split()) + "\n")  # one line, since its diff is unreadable anyway
        written.append(path)
    return written


def _looks(names: Sequence[str]) -> list[dict[str, Any]]:
    """The look of each line: ours thick and blue, the next of ours dashed, others thin in other colours."""
    looks: list[dict[str, Any]] = []
    for name in names:
        ours = name.startswith(OURS)
        before = sum(one.startswith(OURS) == ours for one in names[: len(looks)])
        if ours:
            looks.append({"color": "#3949ab", "linewidth": 3, "linestyle": STYLES[before % len(STYLES)], "zorder": 3})
        else:
            looks.append({"color": COLOURS[before % len(COLOURS)], "linewidth": 1.2, "markersize": 4})
    return looks


def about(head: dict[str, Any], rows: Rows) -> str:
    """Hardware, heads, dtype, date and commit of a run, as far as its head and rows have them."""
    words = [part for word in shlex.split(head.get("command", "")) for part in word.split("=", 1)]
    asked = dict(itertools.pairwise(words))
    gpus = head.get("hardware", {}).get("gpus", [])
    heads = rows[0].get("heads") or head.get("heads") or [asked.get("--heads", 32), asked.get("--kv-heads", 8)]
    width = rows[0].get("widths", [head.get("width") or asked.get("--head-dim", 128)])[0]
    dtype = rows[0].get("dtype") or rows[0].get("stream") or asked.get("--dtype", "bfloat16")
    facts = [
        f"{len(gpus)} x {gpus[0]}" if gpus else str(head.get("hardware", {}).get("processor", "CPU")),
        f"{heads[0]}/{heads[1]} heads of {width}, {dtype}",
        f"{head.get('date', 'no date')}, {str(head.get('commit') or 'no commit')[:7]}",
    ]
    return "; ".join(facts)


def _plots(path: Path) -> list[tuple[Path, str, tuple[str, str, str, list[Line]]]]:
    """The plots of a results file: path, what stands under the title, and content."""
    found = []
    try:
        for run in results.read(path):
            kind = next((kind for kind in KINDS if run.rows and kind in run.rows[0]), None)
            if kind is not None:
                found.append((path.with_name(f"{run.name}.svg"), about(run.head, run.rows), KINDS[kind](run.rows)))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise NotAResult(str(path), f"{type(error).__name__}: {error}") from None
    if not found:
        raise NotAResult(str(path), "it has no speed, errors or depth")
    return found


def _name(row: dict[str, Any]) -> str:
    return f"{row['way']}, the ring itself" if row["live"] else str(row["way"])


def _worst(row: dict[str, Any]) -> float:
    return float(max(row["error"][name] for name in ("dq", "dk", "dv")))
