"""Tables of docs from recipes/results that are not about speed of attention: balance, traffic, kernels, depth, forecasts."""

from __future__ import annotations

import re
from collections.abc import Callable

from .numbers import DEPTHS, FILED, K, commit, row, run


def balance() -> str:
    """Work and bytes of packed rows, zigzag beside balanced."""
    folder, name = "2026-11-21-balance", "traffic"
    lines = [
        "| packed files, 128K tokens | ring | work of the busiest rank over the mean, all rows | worst row | bytes of a gather |",
        "|---|---|---|---|---|",
    ]
    for ring in (2, 4, 8):
        for layout in ("zigzag", "balanced"):
            found = row(folder, name, mask="packed files", ring=ring, layout=layout)
            share = f"{found['forward_bytes_share'] * 100:.0f} %"
            lines.append(f"| {layout} | {ring} | {found['work_mean']:.2f} | {found['work_worst']:.2f} | {share} |")
    return "\n".join([*lines, "", source(folder, name)])


def traffic() -> str:
    """Bytes of a forward by mask."""
    folder, name = "2026-11-21-traffic", "traffic"
    lines = ["| mask, 128K tokens, 8 ranks | bytes received, of a whole gather |", "|---|---|"]
    masks = [
        "causal, one document", "Mistral's window of 4096",
        "Gemma 3: five layers with a window of 1024, one without", "packed files", "packed files, cut at 4096",
    ]  # fmt: skip
    for mask in masks:
        found = row(folder, name, mask=mask, ring=8)
        lines.append(f"| {mask} | {found['forward_bytes_share'] * 100:.1f} % |")
    return "\n".join([*lines, "", source(folder, name)])


def source(folder: str, name: str) -> str:
    """A line that says where a table comes from."""
    head = run(folder, name).head
    return f"Commit {commit(folder, name)}, {head['date']}: [{folder}]({{results}}/{folder}/README.md)."


def kernels() -> str:
    """Speed of one GPU by kernel."""
    stock = row("2026-11-20-flash4", "speed", name="causal 32K")
    lines = [
        "| kernel | where | gradients | forward / backward on one H200, TFLOP/s |",
        "|---|---|---|---|",
        f"| `flash4` | Hopper, with flash-attn-4 | float32 sums | {stock['forward']:.0f} / {stock['backward']:.0f} "
        f"(flash-attn-4's own function {stock['stock forward']:.0f} / {stock['stock backward']:.0f}) |",
    ]
    for words, where, sums in (
        ("triton", "any CUDA or ROCm GPU (tested on Hopper); heads up to 512 wide", "float32 sums"),
        ("flash2", "NVIDIA from Ampere on; only by name",
         "each part rounded to 16 bits, then float32 sums: the error grows with the ring"),
    ):  # fmt: skip
        lines.append(f"| `{words}` | {where} | {sums} | {_filed_speed(words)} |")
    biases = "[biases](../guides/biases.md)"
    lines.append(
        f"| `flex` | GPUs, for most `score_mod`s | each part rounded twice, then float32 sums | see {biases} |"
    )
    lines.append("| `reference` | everywhere; slow; the definition | float32 or float64 sums | |")
    return "\n".join([*lines, "", "Causal, bf16, 32K tokens, 32/8 heads of 128. " + _sources()])


def _filed_speed(kernel: str) -> str:
    """Forward and backward of a kernel of the page of triton, from its table."""
    text = (FILED / "2026-11-21-triton" / "README.md").read_text()
    cells = re.search(r"^\| causal, 32K, 32/8 x 128 \|(.*)\|$", text, re.MULTILINE)
    assert cells, "the page of triton has another table"
    found = [cell.strip() for cell in cells[1].split("|")]
    forward, backward = (found[0], found[3]) if kernel == "triton" else (found[1], found[4])
    if kernel == "triton":
        backward = str(round(_newer_backward()))
    return f"{forward} / {backward}"


def _newer_backward() -> float:
    """triton's backward after its sums for each query head."""
    return float(
        next(
            each["tflops"] for each in run("2026-11-22-one-gpu", "keys").rows
            if each["tokens"] == 32 * K and "each" in each["sums"]
        )
    )  # fmt: skip


def _sources() -> str:
    folders = ("2026-11-20-flash4", "2026-11-21-triton", "2026-11-22-one-gpu")
    return "From " + ", ".join(f"[{folder}]({{results}}/{folder}/README.md)" for folder in folders) + "."


def depth() -> str:
    """Error at the bottom of a stack, with the range over seeds."""
    ways = ("ring_fp32", "rounded backward", "rounded forward and backward")
    lines = [f"| layers (seeds) | {' | '.join(ways)} |", "|---|---|---|---|"]
    for layers, (folder, name) in DEPTHS.items():
        cells = []
        for way in ways:
            found = row(folder, name, depth=layers, way=way, ring_size=8)
            ratios = [each["over_one_device"] for each in found["runs"]]
            cells.append(f"{found['over_one_device']:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
        lines.append(f"| {layers} ({len(ratios)}) | {' | '.join(cells)} |")
    return "\n".join([*lines, "", source(*DEPTHS[126])])


def forecasts() -> str:
    """The rows of the page of plan whose forecast was furthest off: by 5 % of the memory or 10 % of the time."""
    text = (FILED / "2026-11-23-plan" / "README.md").read_text()
    table = re.search(r"^\| run \| memory.*?\n\n", text, re.MULTILINE | re.DOTALL)
    assert table, "the page of plan has another table"
    head, line, *rows = table[0].strip().splitlines()
    far = [row for row in rows if _off(row, 3) >= 5 or _off(row, 5) >= 10]
    return "\n".join([head, line, *far, "", source("2026-11-23-plan", "forecasts")])


def _off(row: str, column: int) -> int:
    """Returns by how many percent a forecast was off; 0 where the row has no percent."""
    percent = re.match(r" [+-]?(\d+) %", row.split("|")[column])
    return int(percent[1]) if percent else 0


def losses() -> str:
    """The table of ten losses of rings and of one GPU."""
    text = (FILED / "2026-11-22-four-gpus" / "README.md").read_text()
    table = re.search(r"^\| pairs \| largest.*?\n\n", text, re.MULTILINE | re.DOTALL)
    assert table, "the page of four GPUs has another table"
    return "\n".join([table[0].strip(), "", source("2026-11-22-four-gpus", "losses_four")])


def transfers() -> str:
    """A copy beside a message between neighbours."""
    lines = ["| size | NCCL send/recv | copy |", "|---|---|---|"]
    for each in run("2026-11-21-pulls", "neighbours").rows:
        ways = [f"{each[f'{way}_ms']:.3f} ms ({each[f'{way}_GB_per_second']} GB/s)" for way in ("messages", "copy")]
        lines.append(f"| {each['MiB']} MiB | {' | '.join(ways)} |")
    return "\n".join([*lines, "", source("2026-11-21-pulls", "neighbours")])


def pr821() -> str:
    """TransformerEngine PR 821's case beside what the PR reports."""
    words = {"16-bit sums": "sums in 16 bits", "rounded parts": "rounded parts", "ring_fp32": "`ring_fp32`"}
    lines = ["| | out | dq / dk / dv | the PR reports: out, gradients |", "|---|---|---|---|"]
    for way, text in words.items():
        found = row("2026-11-22-one-gpu", "pr821", way=way)
        mismatch = {
            name: f"{value * 100:.{2 if way == 'ring_fp32' else 1}f}" for name, value in found["mismatch"].items()
        }
        theirs = found["the_pr_reports"]
        said = f"{theirs['out'] * 100:.1f} %, {theirs['gradients'] * 100:.1f} %" if theirs else ""
        gradients = " / ".join(mismatch[name] for name in ("dq", "dk", "dv"))
        lines.append(f"| {text} | {mismatch['out']} % | {gradients} % | {said} |")
    return "\n".join([*lines, "", source("2026-11-22-one-gpu", "pr821")])


MORE: dict[str, Callable[[], str]] = {
    "balance": balance,
    "traffic": traffic,
    "kernels": kernels,
    "depth": depth,
    "forecasts": forecasts,
    "losses": losses,
    "transfers": transfers,
    "pr821": pr821,
}
