"""Host time that the plugin adds to a training step beside attention, part by part, and the seconds before step one.

    torchrun --nproc_per_node 2 recipes/benchmarks/guards.py [--device cuda] [--layers 32] [--save FOLDER]

The model is a Llama of narrow layers with random weights (``--lora``: and adapters), in a loop with `shard`. Each part
is timed on rank 0, by the clock and by the CPU time of its thread, which does not count waits for other ranks. On GPUs
the device is synchronised before and after each part, so that it shows its own wait alone. A step runs them one after
another:

    shard     reads the batch, compares it on all ranks, lays it out and cuts it
    enter     the batch's context, before the forward
    admit     the model's structure and the ranks' agreement on it, weights, the self-check's memory, masks
    watch     the hooks that check the model's call
    leave     the context's end
    reduce    the mean of the gradients over the ring, which a model without DDP or FSDP needs
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import hf_ring_attn
from hf_ring_attn.bench import results
from hf_ring_attn.bench.provenance import facts
from hf_ring_attn.command_ranks import world
from hf_ring_attn.integration.batch import binding


class Clock:
    """Milliseconds of each part of each step, by the clock and on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parts: dict[str, list[float]] = {}
        self.busy: dict[str, list[float]] = {}

    def of(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, timed as ``part``."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._wait()
            began, busy = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.busy.setdefault(part, []).append(1e3 * (time.thread_time() - busy))
                self._wait()
                self.parts.setdefault(part, []).append(1e3 * (time.perf_counter() - began))

        return timed

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _set(admit: Callable[..., Any], watch: Callable[..., Any]) -> None:
    binding.admit = admit
    setattr(binding.Binding, "watch", watch)  # noqa: B010  a type checker takes no assignment to a method


def measured(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=args.layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=997,
    )  # fmt: skip
    torch.manual_seed(0)
    model_class: Any = LlamaForCausalLM
    model = model_class._from_config(config, attn_implementation="ring_fp32").to(device).train()
    if args.lora:
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    ids = torch.randint(0, 997, (1, args.tokens), generator=torch.Generator().manual_seed(1)).to(device)
    clock = Clock(device)
    admit, watch = binding.admit, binding.Binding.watch
    steps: list[float] = []
    for _ in range(args.steps):
        dist.barrier()
        began = time.perf_counter()
        sharded = clock.of("shard", hf_ring_attn.shard)({"input_ids": ids, "labels": ids})
        _set(clock.of("admit", admit), clock.of("watch", watch))
        clock.of("enter", sharded.__enter__)()
        loss = model(**sharded.inputs).loss
        clock.of("leave", sharded.__exit__)(None, None, None)
        _set(admit, watch)
        loss.backward()
        clock.of("reduce", sharded.reduce_gradients)(model)
        model.zero_grad()
        clock._wait()
        steps.append(1e3 * (time.perf_counter() - began))
    warm = {part: statistics.median(times[1:]) for part, times in clock.parts.items()}
    busy = {part: statistics.median(times[1:]) for part, times in clock.busy.items()}
    return {
        "layers": args.layers, "modules": sum(1 for _ in model.modules()), "tokens": args.tokens, "device": str(device),
        "ring": dist.get_world_size(), "first_step_ms": steps[0], "median_step_ms": statistics.median(steps[1:]),
        "first_ms": {part: times[0] for part, times in clock.parts.items()}, "median_ms": warm,
        "guards_ms": sum(ms for part, ms in warm.items() if part != "reduce"), "median_cpu_ms": busy,
        "guards_cpu_ms": sum(ms for part, ms in busy.items() if part != "reduce"), "raw_ms": clock.parts,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lora", action="store_true", help="adapters on all linear layers: seven times the modules")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the raw numbers into its results.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    head = facts()
    with world(args.device) as (ring, device):
        result = {**head, **measured(args, device)}
        if ring.rank == 0:
            print(f"{args.layers} layers on {args.device}, ms a step:")
            for what, key, whole in (
                ("by the clock", "median_ms", "guards_ms"),
                ("on the CPU", "median_cpu_ms", "guards_cpu_ms"),
            ):
                parts = ", ".join(f"{part} {ms:.2f}" for part, ms in result[key].items())
                print(f"    {what}: {result[whole]:.2f} without reduce ({parts})")
            print(f"a step {result['median_step_ms']:.1f} ms; the first {result['first_step_ms']:.0f} ms")
            if args.save:
                results.save(args.save, f"guards_{args.device}", result)


if __name__ == "__main__":
    main()
