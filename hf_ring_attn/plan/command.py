"""The command ``plan``: its arguments, its table, its JSON and the files that it writes."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from ..command_line import count
from ..errors import CannotPlan, UnsupportedModel
from ..integration.model import admission, loading
from . import launch, report
from .hardware import GPUS, KEPT_FREE, Gpu
from .notes import notes_on
from .positions import scaling
from .program import program
from .reading import shape_of
from .search import alternatives, decided, forecast, kept, longer_rows, most_tokens
from .setup import ITEMSIZES, KERNELS, LOSSES, METHODS, OPTIMIZERS, SHARDS, Setup

AUTO = "auto"
_NO_TOWER = "--pictures needs a vision tower for pictures of one size, by vision_config.image_size; leave it out"


def positive(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, which must be a number above 0")
    return found


def layers(text: str) -> int | str:
    """Reads a number of layers from 0 on, or "auto"."""
    if text == AUTO:
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text}, which must be a number of layers from 0 on, or auto")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is trained")
    what.add_argument("--model", required=True, help="name on the Hub, folder or config file; only the config is read")
    what.add_argument("--tokens", type=count(), help="length of a row: 131072, 128K, 1M")
    what.add_argument("--pictures", type=count(), default=0, metavar="N", help="pictures of a row, of one size")
    free = (
        f"find the longest row that fits; leaves {100 * KEPT_FREE:.0f} %% of the memory free, unless --memory is given"
    )
    what.add_argument("--max-tokens", action="store_true", help=free)
    what.add_argument(
        "--method",
        choices=METHODS,
        default="lora",
        help="LoRA or QLoRA on all linear layers, or full fine-tuning (default: lora)",
    )
    what.add_argument("--lora-rank", type=count(), default=16, help="rank of the adapters (default: 16)")
    what.add_argument("--dtype", choices=ITEMSIZES, default="bfloat16", help="dtype of the model (default: bfloat16)")
    what.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="optimizer (default: adamw)")
    where = parser.add_argument_group("where")
    where.add_argument("--gpus", type=count(), required=True, help="number of GPUs, of all nodes together")
    where.add_argument("--gpus-per-node", type=count(), default=8, help="GPUs of one node (default: 8)")
    where.add_argument("--ring", type=count(), help="number of GPUs that share a row (default: all)")
    where.add_argument(
        "--gpu",
        choices=GPUS,
        default="h100",
        help="kind of GPU (default: h100); for another, give its numbers as below",
    )
    where.add_argument("--memory", type=positive, metavar="GIB", help="memory of a GPU (default: that of --gpu)")
    where.add_argument(
        "--host-memory", type=positive, metavar="GIB", help="host memory for each GPU's process (default: no limit)"
    )
    where.add_argument(
        "--tflops",
        type=positive,
        help="peak of a GPU in 16 bits, by its data sheet (default: that of --gpu, as for the speeds below)",
    )
    where.add_argument("--bandwidth", type=positive, metavar="GB/S", help="bandwidth of a GPU's memory")
    where.add_argument(
        "--link", type=positive, metavar="GB/S", help="bandwidth between GPUs of a node, in one direction"
    )
    where.add_argument(
        "--network", type=positive, metavar="GB/S", help="bandwidth between nodes for each GPU, in one direction"
    )
    where.add_argument("--host-link", type=positive, metavar="GB/S", help="bandwidth between a GPU and host memory")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--shard",
        choices=SHARDS,
        default="fsdp2",
        help="shard the weights over all GPUs, or replicate them (default: fsdp2)",
    )
    how.add_argument(
        "--no-checkpointing",
        action="store_true",
        help="no activation checkpointing: save all activations, compute nothing twice",
    )
    kernels = "attention kernel (default: flash4, installed here or not, if the GPU supports it; else triton)"
    how.add_argument("--kernel", choices=KERNELS, default="auto", help=kernels)
    saved = 'RingConfig(save_attention=...) (default: as "auto" decides)'
    how.add_argument("--save-attention", action=argparse.BooleanOptionalAction, default=None, help=saved)
    how.add_argument("--keep-layers", type=layers, default=0, metavar="N|auto", help="RingConfig(keep_layers=...)")
    how.add_argument("--loss", choices=LOSSES, default="chunked", help="RingConfig(loss=...) (default: chunked)")
    how.add_argument("--mlp-tokens", type=count(), metavar="TOKENS", help="RingConfig(mlp_tokens=...)")
    how.add_argument("--offload-above", type=float, metavar="GIB", help="RingConfig(offload_above=...); 0 offloads all")
    how.add_argument("--liger", action="store_true", help="use Liger's fused norms, RoPE and gated MLPs")
    how.add_argument("--offload-params", action="store_true", help="move FSDP2's weights and optimizer to host memory")
    parser.add_argument("--json", action="store_true", help="print the forecast as JSON")
    files = f"write {launch.CONFIG} and {launch.PROGRAM} into this folder, if the row fits"
    parser.add_argument("--write", type=Path, metavar="FOLDER", help=files)
    parser.add_argument("--overwrite", action="store_true", help="let --write replace existing files")
    parser.set_defaults(run=run, check=check)


def check(given: argparse.Namespace) -> str | None:
    """Returns what is wrong with arguments that do not go together, or None."""
    if (given.tokens is None) != given.max_tokens:
        return "give either --tokens or --max-tokens"
    if given.gpus % (given.ring or given.gpus):
        return f"--gpus {given.gpus} must be a multiple of --ring {given.ring}"
    if given.gpus > given.gpus_per_node and given.gpus % given.gpus_per_node:
        return f"--gpus {given.gpus} must be a multiple of --gpus-per-node {given.gpus_per_node}: all nodes are alike"
    if given.save_attention and given.no_checkpointing:
        return "--save-attention needs checkpointing: leave out --no-checkpointing"
    if given.offload_above is not None and (given.no_checkpointing or not 0 <= given.offload_above < float("inf")):
        return "--offload-above is a number of GiB from 0 on, and needs checkpointing"
    if given.keep_layers and (wrong := _of_kept(given)):
        return f"--keep-layers {given.keep_layers} {wrong}"
    if given.offload_params and (given.shard != "fsdp2" or given.gpus == 1):
        return "--offload-params is FSDP2's: it needs --shard fsdp2 and several GPUs"
    if given.optimizer.startswith("paged") and given.shard == "fsdp2" and given.gpus > 1:
        return f"--optimizer {given.optimizer} takes no weights that FSDP2 shards: use adamw_8bit, or --shard ddp"
    if given.method == "full" and given.dtype == "float16" and (given.shard != "fsdp2" or given.gpus == 1):
        return "--method full --dtype float16 needs --shard fsdp2: torch's GradScaler takes no weights in float16"
    if given.gpus > 1 and given.ring == 1 and (useless := _of_rings(given)):
        return f"{useless} has no effect without a ring: leave it out, or give a larger --ring than 1"
    if given.kernel == "flash4" and (given.dtype == "float32" or not GPUS[given.gpu].has_flash4):
        return "--kernel flash4 is for Hopper GPUs (h100, h200) and 16 bits: leave it out"
    if given.overwrite and given.write is None:
        return "--overwrite needs --write FOLDER"
    return None


def _of_kept(given: argparse.Namespace) -> str:
    """Returns what is wrong with kept layers beside the other options, or ""."""
    if given.no_checkpointing or given.offload_above is not None:
        return "needs checkpoints on the GPU: leave out --no-checkpointing and --offload-above"
    if given.keep_layers == AUTO and given.save_attention is not None:
        return "is decided with saved attention: leave out --save-attention and --no-save-attention"
    return ""


def _of_rings(given: argparse.Namespace) -> str:
    """The first given option that several GPUs without a ring ignore, or ""."""
    asked = {
        "--save-attention": given.save_attention, "--mlp-tokens": given.mlp_tokens is not None,
        "--offload-above": given.offload_above is not None, f"--loss {given.loss}": given.loss != "chunked",
        "--keep-layers": given.keep_layers,
    }  # fmt: skip
    return next((name for name, is_asked in asked.items() if is_asked), "")


def run(given: argparse.Namespace) -> int:
    """Prints the forecast; returns 1 if it does not fit, or if no ring can train the model.

    Raises:
        Refused: the model is unknown, or of a kind that cannot be forecast. FilesDiffer, PlanNotWritten.
    """
    config = loading.load_config(given.model)
    try:
        meta = loading.empty_model(config, "ring_fp32")
        admission.refuse_in_ring(meta)
    except UnsupportedModel as refusal:
        sys.stdout.write((json.dumps({"refused": str(refusal)}, indent=1) if given.json else str(refusal)) + "\n")
        return 1
    model, setup = shape_of(config, meta), _setup(given)
    if setup.pictures and model.tower is None:
        raise CannotPlan(model.name, _NO_TOWER)
    kept_free = KEPT_FREE if given.memory is None else 0.0
    advised = (1 - kept_free) * setup.gpu.memory_gib  # forecasts miss by up to that part
    if given.max_tokens:
        longest = most_tokens(model, lambda tokens: replace(setup, tokens=tokens), advised)
        setup = replace(setup, tokens=longest or 2 * setup.ring_size)
    if given.save_attention is None:
        setup = decided(model, setup, keeps=given.keep_layers == AUTO)
    if given.keep_layers == AUTO and setup.save_attention:
        setup = replace(setup, keep_layers=kept(model, setup))
    one = forecast(model, setup, setup.gpu.memory_gib)
    others = alternatives(model, one, advised)
    if not others and not one.fits:
        others = alternatives(model, one, setup.gpu.memory_gib)
    longer = longer_rows(model, one, advised) if given.max_tokens else []
    notes = notes_on(config, meta, model, setup)
    made = program(setup, given.model, loading.class_name(config), notes, scaling(config, setup.tokens))
    plan = report.Plan(
        model, one, others, longer, notes, given.gpu, given.model, made,
        kept_free if given.max_tokens else 0.0, given.max_tokens and not one.fits,
        given.write if one.fits else None, given.write is not None,
    )  # fmt: skip
    if plan.written is not None:
        launch.write(plan.written, setup, made, given.overwrite)
    text = json.dumps(report.as_json(plan), indent=1) if given.json else report.table(plan)
    sys.stdout.write(text + "\n")
    return 0 if one.fits else 1


def _setup(given: argparse.Namespace) -> Setup:
    return Setup(
        gpus=given.gpus, tokens=given.tokens or 1, gpu=_gpu(given), gpus_per_node=given.gpus_per_node,
        ring=given.ring or given.gpus, method=given.method, lora_rank=given.lora_rank, shard=given.shard,
        dtype=given.dtype, optimizer=given.optimizer, checkpointing=not given.no_checkpointing,
        save_attention=given.save_attention is True, keep_layers=0 if given.keep_layers == AUTO else given.keep_layers,
        loss=given.loss, mlp_tokens=given.mlp_tokens or 0, offload_above=given.offload_above,
        offload_params=given.offload_params, liger=given.liger, kernel=given.kernel, pictures=given.pictures,
    )  # fmt: skip


def _gpu(given: argparse.Namespace) -> Gpu:
    chosen = {
        "memory_gib": given.memory, "host_memory_gib": given.host_memory,
        "tflops": given.tflops, "bandwidth_gbs": given.bandwidth, "link_gbs": given.link,
        "network_gbs": given.network, "host_gbs": given.host_link,
    }  # fmt: skip
    return replace(GPUS[given.gpu], **{name: value for name, value in chosen.items() if value is not None})
