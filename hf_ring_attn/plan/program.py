"""The training program of a planned run, over SFTTrainer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .setup import Setup

OPTIMIZERS = {
    "adamw": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit", "paged_adamw_8bit": "paged_adamw_8bit",
}  # fmt: skip
"""Trainer's names."""
SHARDED_OPTIMIZERS = {**OPTIMIZERS, "adamw_8bit": "adamw_torch_8bit"}
"""The same where FSDP2 shards the weights: bitsandbytes's take none of these, torchao's do."""
LEARNING_RATES = {"lora": 1e-4, "qlora": 1e-4, "full": 1e-5}
"""Those of the recipes."""
DATA, MODEL = "DATA", "MODEL"
IMAGES = "AutoModelForImageTextToText"
PACKING = {
    False: "packing=True,  # fills a row with several texts; False: one text a row, cut at max_length",
    True: "packing=False,  # SFTTrainer packs no model of images; a row is one example, cut at max_length",
}


def program(
    setup: Setup, source: str, auto: str = "AutoModelForCausalLM", notes: Sequence[str] = (),
    rope: Mapping[str, Any] | None = None,
) -> str:  # fmt: skip
    """A training program in Python, in which the user names `to_replace`.

    Args:
        source: the planned model: of the Hub, a folder, or a config file. auto: its auto class of transformers.
        notes: what a forecast says beside its numbers. rope: entries of ``rope_parameters`` that the row needs.
    """
    chosen = {
        "save_attention": setup.save_attention, "keep_layers": setup.keep_layers or None,
        "mlp_tokens": setup.mlp_tokens or None, "offload_above": setup.offload_above,
        "kernel": None if setup.kernel == "auto" else f'"{setup.kernel}"',
        "loss": None if setup.loss == "chunked" else f'"{setup.loss}"',
    }  # fmt: skip
    ring = [f"{name}={value}" for name, value in chosen.items() if value is not None]
    loading = [f"dtype=torch.{setup.dtype}", 'attn_implementation="ring_fp32"']
    loading += ["config=config"] if rope else ["use_cache=False"]  # beside a config it is no argument
    if setup.method == "qlora":
        loading.append(QUANTIZED.replace("DTYPE", f"torch.{setup.dtype}"))
    optimizer = (SHARDED_OPTIMIZERS if setup.is_sharded else OPTIMIZERS)[setup.optimizer]
    arguments = [
        'output_dir="outputs"', f"max_length={setup.tokens}",
        PACKING[auto == IMAGES],
        "per_device_train_batch_size=1", f"learning_rate={LEARNING_RATES[setup.method]:g}", "num_train_epochs=1",
        "seed=0", "logging_steps=1", f'optim="{optimizer}"', f"bf16={setup.dtype == 'bfloat16'}",
        f"fp16={setup.dtype == 'float16'}", f"use_liger_kernel={setup.liger}", "ddp_find_unused_parameters=False",
        f'**{{checkpointing: {setup.checkpointing}, f"{{checkpointing}}_kwargs": {{"use_reentrant": False}}}}',
    ]  # fmt: skip
    name, about = _model(source)
    adapts, quantizes = setup.method != "full", setup.method == "qlora"
    return TEMPLATE.format(
        notes="".join(f"# {note}\n" for note in notes), auto_config="AutoConfig, " if rope else "",
        config=CONFIG.format(tokens=setup.tokens, rope=json.dumps(rope)) if rope else "",
        replace=" and ".join(to_replace(source)), model=json.dumps(name), about=about, auto=auto,
        peft="from peft import LoraConfig\n" if adapts else "", bnb=", BitsAndBytesConfig" if quantizes else "",
        loading=_lines(loading), ring=", ".join(ring), arguments=_lines(arguments),
        adapter=ADAPTER.format(setup.lora_rank, 2 * setup.lora_rank) if adapts else "None",
    )  # fmt: skip


def to_replace(source: str) -> list[str]:
    """The names in the program for which a user puts values: the data, and the model if only its config is known."""
    return [DATA, MODEL] if _model(source)[0] == MODEL else [DATA]


def _model(source: str) -> tuple[str, str]:
    """The argument of from_pretrained, and a comment. A path is written in full: the program runs in another folder."""
    path = Path(source)
    if path.is_file():
        if any(path.parent.glob("*.safetensors")) or any(path.parent.glob("pytorch_model*.bin")):
            return str(path.resolve().parent), "  # the folder of the planned config file"
        return MODEL, f"  # replace it: the plan was made from {path.name}, a config without weights"
    return (str(path.resolve()), "") if path.is_dir() else (source, "")


def _lines(entries: list[str]) -> str:
    return "\n    ".join(entry if "  # " in entry else f"{entry}," for entry in entries)


ADAPTER = 'LoraConfig(r={}, lora_alpha={}, target_modules="all-linear", task_type="CAUSAL_LM")'
QUANTIZED = (
    'quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", '
    "bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=DTYPE, bnb_4bit_quant_storage=DTYPE)"
)
CONFIG = """config = AutoConfig.from_pretrained(MODEL)
config.max_position_embeddings = {tokens}
config.rope_parameters |= {rope}
config.use_cache = False
"""
TEMPLATE = '''"""Made by `hf-ring-attn plan`. Replace {replace}; look at the learning rate, the epochs and packing."""

{notes}import torch
from datasets import load_dataset
{peft}from transformers import {auto_config}{auto}{bnb}, set_seed
from trl import SFTConfig, SFTTrainer

import hf_ring_attn

MODEL = {model}{about}
DATA = "DATA"  # replace it: a data set of the Hub, or a folder of files, with a column "text" or "messages"

set_seed(0)  # before adapters are made: their first values are random, and alike on every rank
{config}model = {auto}.from_pretrained(
    MODEL,
    {loading}
)
hf_ring_attn.configure(model, hf_ring_attn.RingConfig({ring}))
checkpointing = "activation_checkpointing"
if checkpointing not in SFTConfig.__dataclass_fields__:
    checkpointing = "gradient_checkpointing"  # its name until transformers 5.22
arguments = SFTConfig(
    {arguments}
)
adapter = {adapter}
trainer = SFTTrainer(model, arguments, train_dataset=load_dataset(DATA, split="train"), peft_config=adapter)
trainer.train()
trainer.save_model()  # into output_dir; by all ranks: FSDP2 gathers what it has sharded
'''
