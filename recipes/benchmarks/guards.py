"""Host time that the plugin adds to a training step beside attention, part by part, and the seconds before step one.

    torchrun --nproc_per_node 2 recipes/benchmarks/guards.py [--device cuda] [--layers 32] [--save FOLDER]

The model is a Llama of narrow layers with random weights, in a loop with `shard`. Each part is timed on rank 0 between
two reads of the clock, on GPUs after a device synchronisation, so a part that waits for the device shows its own wait
alone. A step runs them one after another:

    shard     reads the batch, compares it on all ranks, lays it out and cuts it
    enter     the batch's context, before the forward
    admit     the model's structure and the ranks' agreement on it, weights, the self-check's memory, masks
    leave     the context's end
    reduce    the mean of the gradients over the ring, which a model without DDP or FSDP needs
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import hf_ring_attn
from hf_ring_attn.bench import results
from hf_ring_attn.bench.provenance import facts
from hf_ring_attn.integration.batch import shard as batch_shard


class Clock:
    """Milliseconds of each part of each step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parts: dict[str, list[float]] = {}

    def of(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, timed as ``part``."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._wait()
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._wait()
                self.parts.setdefault(part, []).append(1e3 * (time.perf_counter() - began))

        return timed

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measured(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=args.layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=997,
    )  # fmt: skip
    torch.manual_seed(0)
    model_class: Any = LlamaForCausalLM
    model = model_class._from_config(config, attn_implementation="ring_fp32").to(device).train()
    ids = torch.randint(0, 997, (1, args.tokens), generator=torch.Generator().manual_seed(1)).to(device)
    clock = Clock(device)
    admit = batch_shard._admit
    steps: list[float] = []
    for _ in range(args.steps):
        dist.barrier()
        began = time.perf_counter()
        sharded = clock.of("shard", hf_ring_attn.shard)({"input_ids": ids, "labels": ids})
        batch_shard._admit = clock.of("admit", admit)
        clock.of("enter", sharded.__enter__)()
        loss = model(**sharded.inputs).loss
        clock.of("leave", sharded.__exit__)(None, None, None)
        batch_shard._admit = admit
        loss.backward()
        clock.of("reduce", sharded.reduce_gradients)(model)
        model.zero_grad()
        clock._wait()
        steps.append(1e3 * (time.perf_counter() - began))
    warm = {part: statistics.median(times[1:]) for part, times in clock.parts.items()}
    return {
        "layers": args.layers, "modules": sum(1 for _ in model.modules()), "tokens": args.tokens, "device": str(device),
        "ring": dist.get_world_size(), "first_step_ms": steps[0], "median_step_ms": statistics.median(steps[1:]),
        "first_ms": {part: times[0] for part, times in clock.parts.items()}, "median_ms": warm,
        "guards_ms": sum(ms for part, ms in warm.items() if part != "reduce"), "raw_ms": clock.parts,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the raw numbers into its results.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu") if args.device == "cpu" else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    head = facts()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    result = {**head, **measured(args, device)}
    if dist.get_rank() == 0:
        parts = ", ".join(f"{part} {ms:.2f}" for part, ms in result["median_ms"].items())
        print(f"{args.layers} layers on {args.device}: {result['guards_ms']:.2f} ms of guards a step ({parts} ms)")
        print(f"a step {result['median_step_ms']:.1f} ms; the first {result['first_step_ms']:.0f} ms")
        if args.save:
            results.save(args.save, f"guards_{args.device}", result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
