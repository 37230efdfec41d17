"""Figures of README.md and docs: python -m docs_tools.figures writes docs/figures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from . import numbers
from .drawing import COLOURS, GREY, INK, OURS, Line, Picture, plot

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "figures"
K = 1024
ZIGZAG = (0, 1, 2, 3, 3, 2, 1, 0)
"""The rank of each of eight chunks in a ring of four."""


def ring() -> str:
    """One row over four GPUs, keys and values around, one loss."""
    p = Picture(760, 330, "One row of tokens on four GPUs: keys and values go around the ring; one loss comes out")
    p.text(30, 32, "one row of tokens", 14, "start", GREY)
    for chunk, rank in enumerate(ZIGZAG):
        p.box(30 + chunk * 87.5, 42, 87.5, 26, COLOURS[rank])
        p.text(30 + chunk * 87.5 + 43.7, 60, f"{chunk}", 13)
    for rank in range(4):
        x = 30 + rank * 182
        p.box(x, 108, 154, 88, COLOURS[rank])
        p.text(x + 77, 130, f"GPU {rank}", 15, bold=True)
        p.text(x + 77, 152, f"chunks {rank} and {7 - rank}", 13)
        p.text(x + 77, 172, "queries stay here", 12, fill=GREY)
        p.arrow(x + 77, 72, x + 77, 104, GREY)
        if rank < 3:
            p.arrow(x + 156, 150, x + 180, 150, OURS)
        p.arrow(x + 77, 200, x + 77, 262, INK, dashed=True)
    p.path("M730 150 H745 V222 H14 V150 H28", OURS)
    p.arrow(16, 150, 28, 150, OURS)
    p.parts.append("<rect x='190' y='226' width='380' height='24' fill='#ffffff'/>")
    p.text(380, 243, "keys and values, then their float32 gradients, go around", 13, fill=OURS)
    p.box(30, 266, 700, 40, "#f3f4fa")
    p.text(380, 291, "one loss: that of the whole row, as on one GPU", 15, bold=True)
    return p.svg()


def gather() -> str:
    """The two passes of a layer."""
    p = Picture(
        760, 330, "Forward: all keys and values are gathered, one softmax a query. Backward: sums go around in float32"
    )
    p.text(30, 32, "Forward: gather, then one softmax for each query", 15, "start", bold=True)
    for rank in range(4):
        p.box(30 + rank * 62, 50, 54, 30, COLOURS[rank])
        p.text(57 + rank * 62, 70, f"k, v {rank}", 12)
        p.arrow(57 + rank * 62, 82, 350, 118, GREY)
    p.box(280, 120, 190, 34, "#f3f4fa")
    p.text(375, 142, "some heads of all keys", 13)
    p.arrow(474, 137, 520, 137)
    p.box(524, 112, 210, 50, COLOURS[0])
    p.text(629, 133, "attention of GPU 0's queries", 13)
    p.text(629, 151, "the bits of one GPU", 12, fill=GREY)
    p.text(30, 210, "Backward: float32 sums of dk and dv go around with the keys", 15, "start", bold=True)
    for rank in range(4):
        x = 30 + rank * 182
        p.box(x, 230, 154, 56, COLOURS[rank])
        p.text(x + 77, 252, f"GPU {rank} adds", 13)
        p.text(x + 77, 271, "its queries' share", 12, fill=GREY)
        if rank < 3:
            p.arrow(x + 156, 258, x + 180, 258, OURS)
    p.text(380, 312, "rounded once, at home: after the last GPU has added its share", 13, fill=OURS)
    return p.svg()


def zigzag() -> str:
    """Who computes what under a causal mask."""
    p = Picture(760, 330, "Visible pairs of a causal row: contiguous shares are uneven, zigzag shares are even")
    for left, title, owner in (
        (40, "contiguous: GPU 3 does 7 times GPU 0's work", (0, 0, 1, 1, 2, 2, 3, 3)),
        (420, "zigzag: every GPU does the same work", ZIGZAG),
    ):
        p.text(left, 30, title, 14, "start", bold=True)
        for query, rank in enumerate(owner):
            for key in range(query + 1):
                p.box(left + 50 + key * 27, 46 + query * 27, 25, 25, COLOURS[rank], "#9aa1b5")
            p.text(left + 42, 63 + query * 27, f"GPU {rank}", 12, "end")
        p.text(left + 158, 286, "keys: chunks 0 to 7", 12, fill=GREY)
    p.text(
        380,
        315,
        "rows: chunks of queries, with the GPU that holds them. A square on the diagonal is half visible.",
        12,
        fill=GREY,
    )
    return p.svg()


def loss() -> str:
    """How labels are shifted and counted."""
    p = Picture(
        760, 300, "Labels are shifted on the whole row before it is cut; each rank sums its tokens; one count divides"
    )
    words = ["The", "cat", "sat", "on", "the", "mat", "."]
    for n, word in enumerate(words):
        p.box(160 + n * 80, 30, 76, 28, "#f3f4fa")
        p.text(198 + n * 80, 49, word, 14)
        target = words[n + 1] if n + 1 < len(words) else "-100"
        p.box(160 + n * 80, 86, 76, 28, COLOURS[(0, 1, 1, 0)[min(n // 2, 3)]])
        p.text(198 + n * 80, 105, target, 14)
        if n + 1 < len(words):
            p.arrow(274 + n * 80, 60, 202 + n * 80, 84, GREY)
    p.text(148, 49, "input_ids", 13, "end")
    p.text(148, 105, "shift_labels", 13, "end")
    p.text(
        160,
        134,
        "shifted first, cut afterwards: the label of a chunk's last token is in the next chunk",
        12,
        "start",
        GREY,
    )
    for rank, x in ((0, 160), (1, 450)):
        p.box(x, 160, 250, 50, COLOURS[rank])
        p.text(x + 125, 181, f"rank {rank}: sum of its tokens' losses", 13)
        p.text(x + 125, 200, "x ring size / labels of the whole batch", 12, fill=GREY)
        p.arrow(x + 125, 214, 430, 246)
    p.box(300, 250, 270, 34, "#f3f4fa")
    p.text(435, 272, "mean over ranks = the loss", 14, bold=True)
    return p.svg()


def memory() -> str:
    """Where the memory of a long step is."""
    p = Picture(760, 310, "What a GPU holds during a step, and the option that makes each part smaller")
    p.text(30, 30, "One GPU, one long row: what it holds, and what makes it smaller", 15, "start", bold=True)
    rows = [
        ("weights, gradients, optimizer", "FSDP2, LoRA, QLoRA, offload_params", "#e8eaf6"),
        ("checkpoints: one input a layer and token", "ring size, offload_above", COLOURS[0]),
        ("MLP of one layer", "ring size, mlp_tokens", COLOURS[1]),
        ("gathered keys and values of some heads", "heads_per_gather, windows", COLOURS[2]),
        ("float32 sums of dk and dv", "ring size", COLOURS[3]),
        ("logits", "loss='chunked': never made", "#ffffff"),
    ]
    for n, (what, how, colour) in enumerate(rows):
        p.box(30, 48 + n * 42, 330, 34, colour)
        p.text(195, 70 + n * 42, what, 13)
        p.arrow(366, 65 + n * 42, 410, 65 + n * 42, GREY)
        p.text(420, 70 + n * 42, how, 13, "start", OURS)
    return p.svg()


def transport() -> str:
    """Copies and messages."""
    p = Picture(760, 250, "Two ways for keys, values and sums: peer-to-peer copies in one machine, messages elsewhere")
    for left, title, how, about in (
        (30, "In one machine: copies", "GPU 1 reads GPU 0's memory", "no kernel runs for it; attention keeps the chip"),
        (
            400,
            "Between machines, on CPUs: messages",
            "NCCL or gloo send and receive",
            "the same order of sums, the same bits",
        ),
    ):
        p.text(left, 30, title, 15, "start", bold=True)
        for rank in range(2):
            p.box(left + rank * 200, 50, 130, 90, COLOURS[rank])
            p.text(left + 65 + rank * 200, 72, f"GPU {rank}", 14, bold=True)
            p.box(left + 15 + rank * 200, 86, 100, 34, "#ffffff")
            p.text(left + 65 + rank * 200, 108, "k, v", 13)
        p.arrow(left + 132, 103, left + 198, 103, OURS)
        p.text(left + 165, 168, how, 13, fill=OURS)
        p.text(left + 165, 190, about, 12, fill=GREY)
    p.text(380, 230, 'RingConfig(traffic="auto") takes copies where they are possible.', 13)
    return p.svg()


def self_check() -> str:
    """What happens before the first step."""
    p = Picture(760, 250, "Before the first step a short random row runs whole and sharded; a difference refuses")
    p.box(30, 90, 130, 60, "#f3f4fa")
    p.text(95, 115, "a short", 13)
    p.text(95, 133, "random row", 13)
    for y, words, colour in ((40, "whole, on each rank", "#f3f4fa"), (140, "sharded, in the ring", COLOURS[0])):
        p.arrow(162, 120, 208, y + 30)
        p.box(212, y, 170, 60, colour)
        p.text(297, y + 26, "your model and loss", 13)
        p.text(297, y + 46, words, 12, fill=GREY)
        p.arrow(386, y + 30, 432, 120)
    p.box(436, 86, 130, 68, "#f3f4fa")
    p.text(501, 108, "outputs, loss,", 13)
    p.text(501, 126, "some gradients:", 13)
    p.text(501, 144, "the same?", 13, bold=True)
    p.arrow(570, 108, 610, 70)
    p.text(616, 72, "yes: step one", 14, "start", OURS, bold=True)
    p.arrow(570, 132, 610, 172)
    p.text(616, 172, "no: refused, with", 14, "start", bold=True)
    p.text(616, 190, "the first module", 14, "start", bold=True)
    p.text(616, 208, "that differs", 14, "start", bold=True)
    return p.svg()


# ---- measured --------------------------------------------------------------------------------------------------------


def errors() -> str:
    """Error of gradients over one GPU's, by ring size."""
    folder, name = "2026-11-21-ring-of-two", "errors_flash4"
    names = {"16-bit sums": "sums in 16 bits", "rounded parts": "parts rounded to 16 bits", "ring_fp32": "ring_fp32"}
    sizes = (4, 8, 16, 32, 64)

    def error(way: str, size: int) -> float:
        fields = {"way": way, "ring_size": size, "dtype": "bfloat16", "inputs": "outliers"}
        return float(numbers.row(folder, name, **fields)["error_over_one_device"])

    lines = [
        Line(words, [(size, error(way, size)) for size in sizes], way == "ring_fp32") for way, words in names.items()
    ]
    head = numbers.run(folder, name).head
    return plot(
        "Error of gradients as the ring grows",
        f"one H200, rings replayed; 8192 tokens, 32/8 heads of 128, bf16; {head['date']}, {head['commit'][:7]}",
        "ring size", "largest error of dq, dk, dv against float64, over one GPU's", lines,
        y_from=0, y_to=6, y_step=1, y_form=".0f", x_names={size: str(size) for size in sizes},
    )  # fmt: skip


def speed() -> str:
    """Attention on four GPUs beside its peers."""
    newest, wide = ("2026-11-22-two-streams", "speed"), ("2026-11-22-four-gpus", "speed")
    lengths = [n * K for n in (32, 64, 128)]
    what = [
        (newest, numbers.RING, "ring_fp32"),
        (newest, numbers.ULYSSES, "Ulysses, flash-attn-4"),
        (newest, "Ulysses, cuDNN", "Ulysses, cuDNN"),
        (wide, "torch CP, cuDNN", "torch CP, cuDNN (run before)"),
        (wide, "torch CP, flash", "torch CP, flash (run before)"),
        (wide, "ring-flash-attn zigzag", "ring-flash-attn (run before)"),
    ]
    lines = []
    for run, contender, name in what:
        shares = [numbers.row(*run, contender=contender, tokens=n)["both"]["share"] * 100 for n in lengths]
        lines.append(Line(name, list(zip(lengths, shares, strict=True)), name == "ring_fp32"))
    first, second = (numbers.run(*run).head for run in (newest, wide))
    return plot(
        "Attention on four H200, forward and backward, as a share of one GPU",
        f"32/8 heads of 128, bf16, causal; medians of five rounds; {first['date']}, {first['commit'][:7]}; "
        f"run before: {second['commit'][:7]}",
        "tokens", "% of flash4 on one GPU, a GPU", lines,
        y_from=0, y_to=100, y_step=20, y_form=".0f", x_names={n: f"{n // K}K" for n in lengths},
    )  # fmt: skip


def depth() -> str:
    """Error of a stack's lowest gradient, by depth."""
    names = {
        "ring_fp32": "ring_fp32",
        "rounded backward": "backward rounds",
        "rounded forward and backward": "both passes round",
    }
    lines = []
    for way, words in names.items():
        points = []
        for layers, run in numbers.DEPTHS.items():
            points.append((float(layers), numbers.row(*run, depth=layers, way=way, ring_size=8)["over_one_device"]))
        lines.append(Line(words, points, way == "ring_fp32"))
    head = numbers.run(*numbers.DEPTHS[126]).head
    return plot(
        "Error at the bottom of a stack of layers, over one GPU's",
        "one H200, ring of 8 replayed; 2048 tokens, 8/2 heads of 64, bf16; 4 to 8 seeds; "
        f"{head['date']}, {head['commit'][:7]}",
        "layers", "root mean square over seeds, over one GPU's", lines,
        y_from=0.85, y_to=1.1, y_step=0.05, y_form=".2f", x_names={layers: str(layers) for layers in numbers.DEPTHS},
    )  # fmt: skip


FIGURES: dict[str, Callable[[], str]] = {
    "ring": ring,
    "gather": gather,
    "zigzag": zigzag,
    "loss": loss,
    "memory": memory,
    "transport": transport,
    "self-check": self_check,
    "errors": errors,
    "speed": speed,
    "depth": depth,
}


def main() -> int:
    """Writes every figure; with --check returns 1 if a file differs."""
    FOLDER.mkdir(exist_ok=True)
    stale = [
        name for name, draw in FIGURES.items()
        if not (path := FOLDER / f"{name}.svg").exists() or path.read_text() != draw()
    ]  # fmt: skip
    if "--check" in sys.argv:
        sys.stderr.writelines(f"docs/figures/{name}.svg: run python -m docs_tools.figures\n" for name in stale)
        return 1 if stale else 0
    for name in stale:
        (FOLDER / f"{name}.svg").write_text(FIGURES[name]())
    return 0


if __name__ == "__main__":
    sys.exit(main())
