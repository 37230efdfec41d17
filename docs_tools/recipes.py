"""The measured steps of each recipe: seconds, GiB a GPU and the first loss, or what was not measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .numbers import (
    FOUR,
    FULL_1M,
    FULL_ON_TWO,
    H100,
    H100_1M,
    H100_32B,
    H100_256K,
    H100_FLASH4,
    H100_SHORT,
    H200_FULL,
    LONGEST,
    LONGEST_70B,
    LOSS,
    MILLION,
    ONE_GPU,
    THREE,
    WHOLE,
    WHOLE_FULL,
    commit,
    gib,
    run,
    seconds,
    step,
)

QLORA = "2026-11-24-qlora"
OWN_RUNS = "2026-11-30-recipes-two-gpus"
"""Recipes by their own run.sh."""


class Measured(NamedTuple):
    """A filed run that stands for a recipe; ``shape`` is that of its random weights."""

    tokens: str
    gpus: str
    shape: str
    options: str
    folder: str
    name: str


LLAMA, SMALL_QWEN, QWEN, LARGE = "Llama 3.1 8B", "Qwen3 8B", "Qwen3 32B", "Llama 3.1 70B"
GEMMA = "Gemma 3 4B"
RUNS = {
    "lora-128k": [
        Measured("131,072", "2 x H200", LLAMA, "this recipe by its run.sh", OWN_RUNS, "lora_128k"),
        Measured("131,072", "2 x H200", LLAMA, "the same with `offload_above=0`", LONGEST_70B, "lora_128k_host"),
        Measured("131,072", "2 x H200", LLAMA, "LoRA, `save_attention`", LOSS, "chunked_128K"),
        Measured("131,072", "4 x H200", LLAMA, "LoRA, `save_attention`", FOUR, "s128_saved"),
    ],
    "packed-chat": [
        Measured("32,768", "2 x H200", SMALL_QWEN, "this recipe by its run.sh, short conversations", OWN_RUNS, "packed_chat"),
    ],
    "vlm": [
        Measured("32,768", "2 x H200", GEMMA, "this recipe by its run.sh", MILLION, "vlm"),
        Measured("32,768", "2 x H200", GEMMA, "the same before 0.3.8, each GPU with all pictures", THREE, "vlm"),
        Measured("32,768", "1 x H200", GEMMA, "this recipe by its run.sh, no ring", ONE_GPU, "vlm"),
    ],
    "extend-context": [
        Measured("131,072", "2 x H200", SMALL_QWEN, "this recipe by its run.sh", THREE, "extend_context"),
        Measured("131,072", "1 x H200", SMALL_QWEN, "this recipe by its run.sh with `ring.offload_above=0`, `optim=adamw_torch_8bit`, no ring", ONE_GPU, "extend_context"),
    ],
    "lora-1m": [
        Measured("1,048,576", "2 x H200", SMALL_QWEN, "this recipe by its run.sh with `ring.save_attention=false`, `ring.offload_above=48`", MILLION, "lora_1m"),
        Measured("1,048,576", "2 x H200", LLAMA, "LoRA, `mlp_tokens=16384`, `offload_above=48`", WHOLE, "ring_1M"),
        Measured("1,048,576", "2 x H100", LLAMA, "LoRA, `mlp_tokens=16384`, `offload_above=16`, Liger", H100_1M, "lora_1M"),
    ],
    "qlora-32b": [
        Measured("131,072", "2 x H200", QWEN, "this recipe by its run.sh", LONGEST_70B, "qlora_32b"),
        Measured("131,072", "1 x H200", QWEN, "QLoRA, `mlp_tokens=8192`, no ring", QLORA, "q32_128K"),
        Measured("262,144", "2 x H100", QWEN, "QLoRA, `mlp_tokens=16384`, `offload_above=0`, Liger, FSDP2", H100_256K, "qlora32_256K"),
        Measured("425,984", "2 x H100", QWEN, "QLoRA of one layer, `mlp_tokens=16384`, Liger, FSDP2", H100_32B, "qlora32_416K_layer"),
        Measured("425,984", "2 x H100", QWEN, "QLoRA of two layers, the same", H100_32B, "qlora32_416K_layers"),
    ],
    "qlora-70b": [
        Measured("131,072", "2 x H200", LARGE, "this recipe by its run.sh", THREE, "qlora_70b"),
        Measured("276,480", "2 x H200", LARGE, "QLoRA of one layer, `mlp_tokens=16384`, Liger", LONGEST_70B, "qlora70_270K_layer"),
        Measured("276,480", "2 x H200", LARGE, "QLoRA of two layers, the same", LONGEST_70B, "qlora70_270K_layers"),
        Measured("276,480", "2 x H200", LARGE, "all layers with a window of 4096, `offload_above=70`, the same", LONGEST_70B, "qlora70_270K_window"),
        Measured("131,072", "2 x H100", LARGE, "QLoRA, `mlp_tokens=16384`, `offload_above=0`, Liger", H100_FLASH4, "qlora70_128K"),
        Measured("131,072", "2 x H100", LARGE, "the same, kernel `triton`", H100, "qlora70_128K"),
        Measured("131,072", "2 x H100", LARGE, "the same, 20 of 80 layers", H100_1M, "qlora70_quarter"),
        Measured("57,344", "1 x H200", LARGE, "QLoRA, `mlp_tokens=8192`, no ring", QLORA, "q70_56K"),
    ],
    "full-1m": [
        Measured("1,048,576", "2 x H200", SMALL_QWEN, "this recipe by its run.sh with `optim=adamw_torch_8bit`, `ring.offload_above=48`", FULL_ON_TWO, "full_1m"),
        Measured("1,048,576", "2 x H200", LLAMA, "all weights, `mlp_tokens=16384`, `offload_above=32`, Liger, `adamw_torch_8bit`", FULL_1M, "full_1M"),
        Measured("1,048,576", "2 x H200", LLAMA, "all weights of two layers, no `offload_above`, the rest the same", LONGEST, "full_1M_layers"),
        Measured("524,288", "1 x H200", LLAMA, "all weights with a window of 4096, `offload_above=28`, the rest the same, no ring", H200_FULL, "full_512K_window"),
        Measured("262,144", "2 x H200", LLAMA, "all weights, `offload_above=8`, attention saved (by \"auto\"), the rest the same", FULL_1M, "full_256K_auto"),
        Measured("262,144", "2 x H100", LLAMA, "all weights, `offload_above=8`, attention not saved, the rest the same", WHOLE_FULL, "full_256K"),
    ],
    "long_context_lora": [
        Measured("32,768", "2 x H200", LLAMA, "LoRA, `--save-attention --liger`", WHOLE, "ring_liger_32K"),
        Measured("32,768", "2 x H100", LLAMA, "LoRA, `--save-attention --liger --no-lora-casts`", H100_SHORT, "ring_saved_32K"),
        Measured("131,072", "2 x H100", LLAMA, "LoRA, `--save-attention --liger --no-lora-casts`", H100_FLASH4, "ring_fast_128K"),
        Measured("524,288", "2 x H200", LLAMA, "LoRA, `--save-attention --mlp-tokens 16384 --offload-above 8`", WHOLE, "ring_512K"),
        Measured("524,288", "2 x H100", LLAMA, "LoRA, `--mlp-tokens 16384 --offload-above 0 --liger --no-lora-casts`", H100_FLASH4, "lora_512K"),
        Measured("1,048,576", "2 x H200", LLAMA, "LoRA, `--mlp-tokens 16384 --offload-above 48`", WHOLE, "ring_1M"),
        Measured("1,048,576", "2 x H100", LLAMA, "LoRA, `--mlp-tokens 16384 --offload-above 16 --liger --no-lora-casts`", H100_1M, "lora_1M"),
    ],
}  # fmt: skip
MISSING = "Not measured: seconds a step, GiB a GPU and the first loss"
NOT_MEASURED = {
    "multi-node": f"{MISSING} of rings on several machines. On GPUs it ran as two nodes that share one, with the losses of one "
    "process ([results](../../recipes/results/2026-11-30-nodes-of-rings)).",
}
"""What was not measured, before the table of what was."""


def part(name: str) -> str:
    """A recipe's part of its page: what was not measured, the table of what was, or both."""
    blocks = [NOT_MEASURED[name]] if name in NOT_MEASURED else []
    if name in RUNS:
        blocks.append(_table(RUNS[name]))
        shapes = " and ".join(dict.fromkeys(each.shape for each in RUNS[name]))
        blocks.append(
            f"The weights were random, in the shape of {shapes}, so the losses say nothing about a trained model."
        )
    return "\n\n".join(blocks)


def _table(runs: list[Measured]) -> str:
    lines = [
        "| tokens | GPUs | what | s a step | GiB a GPU | first loss | commit, date |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in runs:
        where = (each.folder, each.name)
        found = step(*where)
        once = " (the first step)" if len(found["seconds"]) == 1 else ""
        source = f"{commit(*where)}, [{run(*where).head['date']}]({{results}}/{each.folder}/README.md)"
        lines.append(
            f"| {each.tokens} | {each.gpus} | {each.options} | {seconds(*where)}{once} | {gib(*where)} | "
            f"{found['losses'][0]:.3f} | {source} |"
        )
    return "\n".join(lines)


def _part(name: str) -> Callable[[], str]:
    return lambda: part(name)


PARTS = {f"recipe.{name.replace('-', '_')}": _part(name) for name in sorted({*RUNS, *NOT_MEASURED})}
