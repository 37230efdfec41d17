"""Files that start a planned run: accelerate's config, a program over SFTTrainer, and the command."""

from __future__ import annotations

from pathlib import Path

from .setup import Setup

CONFIG, PROGRAM = "ring.yaml", "train.py"
OPTIMIZERS = {
    "adamw": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit", "paged_adamw_8bit": "paged_adamw_8bit",
}  # fmt: skip
"""Trainer's names."""


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


def program(setup: Setup, model: str) -> str:
    """A training program in Python, whose data set the user names."""
    chosen = {
        "save_attention": setup.save_attention, "mlp_tokens": setup.mlp_tokens or None,
        "offload_above": setup.offload_above,
    }  # fmt: skip
    ring = [f"{name}={value}" for name, value in chosen.items() if value is not None]
    loading = [f"dtype=torch.{setup.dtype}", 'attn_implementation="ring_fp32"', "use_cache=False"]
    if setup.method == "qlora":
        loading.append(QUANTIZED.replace("DTYPE", f"torch.{setup.dtype}"))
    arguments = [
        'output_dir="outputs"', f"max_length={setup.tokens}", "per_device_train_batch_size=1",
        f'optim="{OPTIMIZERS[setup.optimizer]}"', f"bf16={setup.dtype == 'bfloat16'}",
        f"fp16={setup.dtype == 'float16'}", f"use_liger_kernel={setup.liger}", "ddp_find_unused_parameters=False",
        f'**{{checkpointing: {setup.checkpointing}, f"{{checkpointing}}_kwargs": {{"use_reentrant": False}}}}',
    ]  # fmt: skip
    adapter = "None"
    if setup.method != "full":
        adapter = ADAPTER.format(setup.lora_rank, 2 * setup.lora_rank)
    return TEMPLATE.format(
        model=model, loading=",\n    ".join(loading), ring=", ".join(ring), arguments=",\n    ".join(arguments),
        adapter=adapter,
    )  # fmt: skip


ADAPTER = 'LoraConfig(r={}, lora_alpha={}, target_modules="all-linear", task_type="CAUSAL_LM")'
QUANTIZED = (
    'quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", '
    "bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=DTYPE, bnb_4bit_quant_storage=DTYPE)"
)
TEMPLATE = '''"""Made by `hf-ring-attn plan`. Put your data set in place of DATA."""
import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

import hf_ring_attn

model = AutoModelForCausalLM.from_pretrained(
    "{model}",
    {loading},
)
hf_ring_attn.configure(model, hf_ring_attn.RingConfig({ring}))
checkpointing = "activation_checkpointing"
if checkpointing not in SFTConfig.__dataclass_fields__:
    checkpointing = "gradient_checkpointing"  # its name until transformers 5.22
arguments = SFTConfig(
    {arguments},
)
adapter = {adapter}
SFTTrainer(model, arguments, train_dataset=load_dataset("DATA", split="train"), peft_config=adapter).train()
'''


def write(folder: Path, setup: Setup, model: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(config(setup))
    (folder / PROGRAM).write_text(program(setup, model))
