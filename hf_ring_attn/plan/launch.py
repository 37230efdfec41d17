"""Files that start a planned run: accelerate's config, and the command."""

from __future__ import annotations

from pathlib import Path

from .. import errors
from .setup import Setup

CONFIG, PROGRAM = "ring.yaml", "train.py"


def command(setup: Setup) -> str:
    nodes = -(-setup.gpus // setup.gpus_per_node)
    more = "" if nodes == 1 else " --machine_rank RANK --main_process_ip FIRST_MACHINE"
    return f"accelerate launch --config_file {CONFIG}{more} {PROGRAM}"


def config(setup: Setup) -> str:
    """The config of accelerate launch, in YAML."""
    nodes, groups = -(-setup.gpus // setup.gpus_per_node), setup.gpus // setup.ring_size
    sharded = setup.is_sharded
    lines = [
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {'FSDP' if sharded else 'MULTI_GPU' if setup.gpus > 1 else 'NO'}",
        f"num_machines: {nodes}",
        "machine_rank: 0",
        f"num_processes: {setup.gpus}",
        f'mixed_precision: "{MIXED[setup.dtype]}"',
    ]
    if sharded:
        lines += [
            "fsdp_config:", "  fsdp_version: 2", "  fsdp_reshard_after_forward: true",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", "  fsdp_cpu_ram_efficient_loading: true",
            "  fsdp_state_dict_type: FULL_STATE_DICT", f"  fsdp_offload_params: {str(setup.offload_params).lower()}",
            "  fsdp_activation_checkpointing: false",
        ]  # fmt: skip
    if setup.gpus > 1:
        lines += [
            "parallelism_config:",
            f"  parallelism_config_dp_replicate_size: {1 if sharded else groups}",
            f"  parallelism_config_dp_shard_size: {groups if sharded else 1}",
            f"  parallelism_config_cp_size: {setup.ring_size}",
        ]
    return "\n".join(lines) + "\n"


MIXED = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}


def write(folder: Path, setup: Setup, text: str, overwrite: bool = False) -> None:
    """Writes both files. ``text``: the program.

    Raises:
        FilesDiffer: a file is there with other content, and ``overwrite`` is False. Nothing was written.
        PlanNotWritten: the folder cannot be made, or written to.
    """
    texts = {CONFIG: config(setup), PROGRAM: text}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not overwrite:
            others = [name for name, text in texts.items() if _has_other(folder / name, text)]
            if others:
                raise errors.FilesDiffer(str(folder), others)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except FileExistsError:
        raise errors.PlanNotWritten(str(folder), "it is a file") from None
    except OSError as error:
        raise errors.PlanNotWritten(str(folder), error.strerror or str(error)) from error


def _has_other(path: Path, text: str) -> bool:
    return path.exists() and path.read_bytes() != text.encode()
