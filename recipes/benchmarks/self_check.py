"""What the self-check costs: its seconds and its forwards, beside those of a training step of the same model.

    torchrun --nproc_per_node 2 recipes/benchmarks/self_check.py [--fsdp] [--dtype bfloat16] [--save FOLDER]
    torchrun --nproc_per_node 8 recipes/benchmarks/self_check.py --model 8B --fsdp --dtype bfloat16 --tokens 131072

On GPUs if there are any, else on the CPU. The model is a Llama with random weights. Seconds are of rank 0, between
barriers. The first check of a process also loads what the model's first forward loads (kernels, communicators), so two
checks are timed: one as a user meets it, and one of the same model, forgotten and checked again, after warm-up.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.bench import results
from hf_ring_attn.bench.provenance import facts
from hf_ring_attn.command_ranks import world
from hf_ring_attn.integration.context.model_record import forget_model
from hf_ring_attn.integration.model.admission import bind
from hf_ring_attn.integration.selfcheck import check as selfcheck
from hf_ring_attn.integration.selfcheck.row import SelfCheckState

MODELS: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 97,
    },
    "small": {
        "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 2, "vocab_size": 8192,
    },
    "8B": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 1 << 20,
    },
}  # fmt: skip
"""Sizes of a Llama."""


def made(args: argparse.Namespace, device: torch.device) -> Any:
    """The model, under FSDP2 if asked to: then no rank ever holds all of its weights."""
    model_class: Any = LlamaForCausalLM
    dtype = getattr(torch, args.dtype)
    with torch.device("meta" if args.fsdp else device):
        config = LlamaConfig(**MODELS[args.model])
        model = model_class._from_config(config, attn_implementation="ring_fp32", dtype=dtype)
    if args.fsdp:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # its buffers were made on "meta" too
    return model.train()


def measured(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    model = made(args, device)
    config = RingConfig(kernel=args.kernel)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, MODELS[args.model]["vocab_size"], (1, args.tokens), generator=generator).to(device)
    forwards: list[int] = []
    model.register_forward_pre_hook(lambda *_: forwards.append(0))

    def seconds(self_check: bool, backward: bool = True) -> float:
        sharded = hf_ring_attn.shard({"input_ids": ids, "labels": ids}, config=config)
        if not self_check:
            sharded.context.state(SelfCheckState).sample = None
        dist.barrier()
        began = time.perf_counter()
        with sharded:
            loss = model(**sharded.inputs).loss
        if backward:
            loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        took = time.perf_counter() - began
        model.zero_grad()
        return took

    def check() -> float:
        """The check alone: as `selfcheck.check` is called before a forward."""
        sharded = hf_ring_attn.shard({"input_ids": ids, "labels": ids}, config=config)
        record = bind(model, sharded.context)
        dist.barrier()
        began = time.perf_counter()
        selfcheck.check(model, sharded.context, record)
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        state = sharded.context.state(SelfCheckState)
        assert state.verdict == "passed", state.verdict
        return time.perf_counter() - began

    first = check()
    count = len(forwards)
    warm, steps = [], []
    seconds(False)
    for _ in range(args.rounds):
        forget_model(model)
        warm.append(check())
        steps.append(seconds(False))
    return {
        "model": args.model, "fsdp": args.fsdp, "dtype": args.dtype, "tokens": args.tokens,
        "ring": dist.get_world_size(), "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "forwards_of_a_check": count, "first_check_seconds": first, "check_seconds": warm, "step_seconds": steps,
        "median_check_seconds": statistics.median(warm), "median_step_seconds": statistics.median(steps),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kernel", default="auto", help="as in RingConfig")
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 over all ranks")
    parser.add_argument("--tokens", type=int, default=1024, help="of the step")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the raw numbers into its results.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    head = facts()
    with world(None) as (ring, device):
        result = {**head, **measured(args, device)}
        if ring.rank == 0:
            print(
                f"self-check of {args.model}: {result['forwards_of_a_check']} forwards, "
                f"{result['first_check_seconds']:.3f} s at first, {result['median_check_seconds']:.4f} s then; "
                f"a step of {args.tokens} tokens {result['median_step_seconds']:.4f} s"
            )
            if args.save:
                results.save(args.save, f"self_check_{args.model}", result)


if __name__ == "__main__":
    main()
