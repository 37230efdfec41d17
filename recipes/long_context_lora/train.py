r"""One long sequence a step: LoRA on a Llama-3-8B, its tokens spread over all GPUs by ring attention.

    accelerate launch --config_file recipes/accelerate/gpu_8_fsdp2.yaml \
        recipes/long_context_lora/train.py --shape 8B --tokens 131072 --steps 10

The launch config alone says how many ranks share the sequence (cp_size). README.md beside this file has more commands.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from measure import Meter, flops_per_step
from peft import LoraConfig, get_peft_model
from shapes import SHAPES, config_of, random_model, random_model_in_4_bits
from texts import Rows, by_bytes
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    Trainer,
    TrainingArguments,
    set_seed,
)

ANSWER = 64
"""Tokens of an answer in --trainer dpo: the prompt is the long part."""


def layers_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model of the Hub or a folder; without it: --shape, with random weights")
    parser.add_argument("--shape", choices=SHAPES, default="8B", help="of a Llama with random weights")
    parser.add_argument("--layers", type=int, metavar="N", help="of the shape: what a layer takes at a long row")
    parser.add_argument("--tokens", type=int, default=131072,
                        help="in the one sequence of a step; with --trainer dpo in each of its two")  # fmt: skip
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--implementation", choices=("ring_fp32", "sdpa"), default="ring_fp32",
                        help="sdpa: accelerate's own context parallelism, to compare with")  # fmt: skip
    parser.add_argument("--trainer", choices=("trainer", "sft", "dpo"), default="trainer",
                        help="dpo: pairs of answers to long prompts; the reference is the model without its adapter"
                        )  # fmt: skip
    parser.add_argument("--loss", choices=("auto", "chunked", "sharded", "gathered"), default="auto",
                        help="sharded: all logits of a rank's tokens; gathered: a loss of the program's own, of the "
                        "logits of whole rows (ring_fp32, Trainer)")  # fmt: skip
    parser.add_argument("--backward", choices=("ring", "gather"), default="ring",
                        help="gather: keys and values are gathered again (ring_fp32)")  # fmt: skip
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--rank", type=int, default=16, help="of the LoRA matrices")
    parser.add_argument("--no-checkpointing", action="store_true", help="save all activations: the fastest that fits")
    parser.add_argument("--save-attention", action=argparse.BooleanOptionalAction, default=None,
                        help="checkpointing keeps attention results (ring_fp32; default: if they fit)")  # fmt: skip
    parser.add_argument("--keep-layers", type=layers_or_auto, default=0, metavar="N",
                        help="the last N layers are not checkpointed; auto: as many as fit (ring_fp32)")  # fmt: skip
    parser.add_argument("--mlp-tokens", type=int, metavar="N",
                        help="MLPs and norms run over chunks of N tokens, such as 16384 (ring_fp32)")  # fmt: skip
    parser.add_argument("--offload-above", type=float, metavar="GIB",
                        help="GiB of checkpoints that stay on a GPU; others wait on the host (ring_fp32)")  # fmt: skip
    parser.add_argument("--qlora", action="store_true", help="frozen weights in 4 bits (--shape; needs bitsandbytes)")
    parser.add_argument("--full", action="store_true", help="train all weights, not LoRA")
    parser.add_argument("--optim", default="adamw_torch", help="the optimizer, by its name in TrainingArguments")
    parser.add_argument("--window", type=int, metavar="N",
                        help="layers attend to N tokens: a long row's memory without its time (--shape)")  # fmt: skip
    parser.add_argument("--liger", action="store_true", help="Liger's norms, RoPE and gated MLPs; not its loss")
    parser.add_argument("--compile-layers", nargs="?", choices=("whole", "parts"), const="whole", default="",
                        help="torch.compile each layer; parts: its norms and its MLP, each by itself")  # fmt: skip
    parser.add_argument("--no-lora-casts", action="store_true",
                        help="LoRA's inputs stay in bf16; PEFT casts them to float32, autocast back")  # fmt: skip
    parser.add_argument("--deterministic", action="store_true", help="the same bits from run to run (ring_fp32)")
    parser.add_argument("--profile", action="store_true", help="the last step tells where its time goes, on GPUs")
    parser.add_argument("--memory", action="store_true", help="the last step tells what fills a GPU's memory")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="save the trained adapter there, at the end")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    if options.trainer != "trainer" and options.loss != "auto":
        parser.error("TRL's trainers compute losses of their own: leave --loss out")
    if options.trainer == "dpo" and (options.full or options.compile_layers):
        parser.error("--trainer dpo: its reference is the model without LoRA: leave --full and --compile-layers out")
    of_ring = ("save_attention", "keep_layers", "backward", "deterministic", "loss", "mlp_tokens", "offload_above")
    chosen = [f"--{name.replace('_', '-')}" for name in of_ring if getattr(options, name) != parser.get_default(name)]
    if chosen and options.implementation != "ring_fp32":
        parser.error(f"{', '.join(chosen)}: only with --implementation ring_fp32")
    checkpoints = options.save_attention or options.keep_layers or options.offload_above is not None
    if options.no_checkpointing and checkpoints:
        parser.error("--save-attention, --keep-layers and --offload-above are for checkpointing: leave "
                     "--no-checkpointing out")  # fmt: skip
    if options.model is not None and (options.window or options.layers or options.qlora):
        parser.error("--window, --layers and --qlora are for a --shape, whose weights are random")
    if options.qlora and options.full:
        parser.error("--qlora trains adapters beside weights in 4 bits: leave --full out")
    return options


def build(options: argparse.Namespace) -> Any:
    """The model: loaded, or with random weights."""
    dtype = getattr(torch, options.dtype)
    if options.model is not None:
        return AutoModelForCausalLM.from_pretrained(
            options.model, dtype=dtype, attn_implementation=options.implementation
        )
    config = config_of(options.shape, options.tokens, options.window, options.layers)
    build_random = random_model_in_4_bits if options.qlora else random_model
    return build_random(config, dtype, options.implementation)


def adapter(options: argparse.Namespace) -> LoraConfig:
    projections = ["q_proj", "k_proj", "v_proj", "o_proj"]
    projections += ["in_proj_qkv", "in_proj_z", "out_proj"]  # of gated delta rules
    if not {"num_experts", "num_local_experts"} & SHAPES[options.shape].keys():
        projections += ["gate_proj", "up_proj", "down_proj"]  # PEFT would make these adapters of all experts
    return LoraConfig(
        r=options.rank, lora_alpha=2 * options.rank, lora_dropout=0.0, target_modules=projections,
        task_type="CAUSAL_LM",
    )  # fmt: skip


def common(options: argparse.Namespace, on_gpu: bool) -> dict[str, Any]:
    """What Trainer and SFTTrainer are told alike."""
    checkpointing = "activation_checkpointing"
    if checkpointing not in TrainingArguments.__dataclass_fields__:
        checkpointing = "gradient_checkpointing"  # its name until transformers 5.22
    return {
        "output_dir": "outputs/long_context_lora", "max_steps": options.steps, "per_device_train_batch_size": 1,
        "learning_rate": options.learning_rate, "lr_scheduler_type": "constant", "weight_decay": 0.0,
        "bf16": options.dtype == "bfloat16", checkpointing: not options.no_checkpointing,
        f"{checkpointing}_kwargs": {"use_reentrant": False}, "ddp_find_unused_parameters": False,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": not on_gpu,
        "seed": 0, "optim": options.optim, "train_sampling_strategy": "sequential", "use_liger_kernel": options.liger,
        # A ring turns Liger's losses off by itself; accelerate's own context parallelism does not, and fails: Liger's
        # reads lm_head's weight, which accelerate's FSDP2 gathers in lm_head's own forward alone (1.15).
        "liger_kernel_config": {"fused_linear_cross_entropy": False, "cross_entropy": False},
    }  # fmt: skip


def of_whole_rows(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Of logits [1, S, V] and labels [1, S] in the order of the row: any loss could stand here."""
    losses = cross_entropy(outputs.logits[0, :-1].float(), labels[0, 1:], reduction="sum")
    return losses / num_items_in_batch


def compile_layers(model: Any, what: str) -> None:
    """Compiles each layer in place: ``what`` is "whole", "parts" or "" for none."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in base.model.layers if what else ():
        for part in [layer] if what == "whole" else [layer.input_layernorm, layer.post_attention_layernorm, layer.mlp]:
            part.compile()


def without_casts(model: Any) -> Any:
    """The same bits, with fewer copies: bf16 -> float32 -> bf16 changes nothing."""
    for layer in model.modules():
        if hasattr(layer, "cast_input_dtype_enabled"):
            layer.cast_input_dtype_enabled = False
    return model


def make_trainer(options: argparse.Namespace) -> Any:
    model = build(options)
    on_gpu = PartialState().device.type != "cpu"
    if options.model is None:
        tokenizer, encode = ByT5Tokenizer(extra_ids=0), by_bytes
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    if options.implementation == "ring_fp32":
        import hf_ring_attn

        ring = hf_ring_attn.RingConfig(
            save_attention="auto" if options.save_attention is None else options.save_attention,
            deterministic=options.deterministic, loss=options.loss, backward=options.backward,
            keep_layers=options.keep_layers, mlp_tokens=options.mlp_tokens, offload_above=options.offload_above,
        )  # fmt: skip
        hf_ring_attn.configure(model, ring)
    set_seed(1)  # LoRA's first matrix is random: alike on every rank, too
    if options.trainer == "dpo":
        return dpo_trainer(options, model, tokenizer, Rows(encode, options.steps, options.tokens + ANSWER), on_gpu)
    rows = Rows(encode, options.steps, options.tokens)
    adapted = model if options.full else get_peft_model(model, adapter(options))
    compile_layers(adapted, options.compile_layers)
    if options.no_lora_casts:
        without_casts(adapted)
    if options.trainer == "sft":
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        return SFTTrainer(
            adapted,
            SFTConfig(**common(options, on_gpu), max_length=options.tokens, shuffle_dataset=False),
            train_dataset=Dataset.from_dict({"input_ids": rows.tokens.tolist()}),
            processing_class=tokenizer,
        )
    return Trainer(
        adapted, TrainingArguments(**common(options, on_gpu)), train_dataset=rows,
        compute_loss_func=of_whole_rows if options.loss == "gathered" else None,
    )  # fmt: skip


def dpo_trainer(options: argparse.Namespace, model: Any, tokenizer: Any, rows: Rows, on_gpu: bool) -> Any:
    """Each pair is a row without its last `ANSWER` tokens, and one without those before them."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    pairs = [
        {
            "prompt": tokenizer.decode(row[: -2 * ANSWER]),
            "chosen": tokenizer.decode(row[-2 * ANSWER : -ANSWER]),
            "rejected": tokenizer.decode(row[-ANSWER:]),
        }
        for row in rows.tokens
    ]
    trainer = DPOTrainer(
        model,
        args=DPOConfig(**common(options, on_gpu), max_length=options.tokens),
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer,
        peft_config=adapter(options),
    )
    if options.no_lora_casts:
        without_casts(trainer.model)
    return trainer


def main() -> None:
    options = parsed()
    if options.implementation == "ring_fp32":
        import hf_ring_attn  # noqa: F401  registers "ring_fp32"
    trainer = make_trainer(options)
    config, model = trainer.model.config, trainer.model
    work = flops_per_step(model, config, options.tokens)
    tokens = options.tokens
    if options.trainer == "dpo":
        work, tokens = 2 * (work + flops_per_step(model, config, tokens, forward_only=True)), 2 * tokens
    meter = Meter(tokens, work, options.profile, options.memory)
    trainer.add_callback(meter)
    trainer.train()
    results = meter.results()  # of all ranks
    if options.save is not None:
        trainer.save_model(str(options.save))  # by all ranks: FSDP2 gathers what it has sharded, rank 0 writes
    if trainer.is_world_process_zero():
        results = {
            "command": shlex.join(["train.py", *sys.argv[1:]]),
            "options": {name: str(value) for name, value in vars(options).items()},
            **results,
        }
        if options.output is not None:
            options.output.write_text(json.dumps(results, indent=1) + "\n")
        shown = {name: x for name, x in results.items() if name not in ("profile", "fullest_moment")}
        print(json.dumps(shown), flush=True)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
