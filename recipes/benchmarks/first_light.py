"""What the plugin costs where nothing is shared: its import, one rank's step, and the reference kernel's memory.

    python recipes/benchmarks/first_light.py [import] [step] [memory] [--save FOLDER]
    python recipes/benchmarks/first_light.py commands --time "bash tests/run.sh" --save FOLDER

- import: seconds of `import hf_ring_attn` after `from transformers import Trainer`, in fresh processes. At most 0.5.
- step: forward and backward of a Llama on one rank through "ring_fp32", against the same kernel called by an attention
  function of this file that knows no ring, plan or op. Runs alternate. At most 1.03 times as long.
- memory: peak of the resident memory over forward and backward of the reference kernel, inputs and outputs included,
  less that before them, in fresh processes. At 16K tokens at most 2.2 times that at 8K.
- commands: seconds of whole commands.

Without names the first three are run. ``--save`` writes the raw numbers into results.jsonl, a run for each part.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_ring_attn.bench import results
from hf_ring_attn.bench.provenance import REPOSITORY, facts

Result = dict[str, Any]


def fresh(program: str, *arguments: object) -> Any:
    """What ``program`` prints last, as JSON, in a Python process of its own."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    return json.loads(run.stdout.splitlines()[-1])


# ---- import --------------------------------------------------------------------------------------------------------

IMPORT = """
import time
from transformers import Trainer
began = time.perf_counter()
import hf_ring_attn
print(time.perf_counter() - began)
"""


def measure_import(args: argparse.Namespace) -> Result:
    fresh(IMPORT)  # writes the bytecode
    seconds = [fresh(IMPORT) for _ in range(args.repeats)]
    median = statistics.median(seconds)
    print(f"import of hf_ring_attn after transformers.Trainer: {median:.2f} s (at most 0.5)")
    return {"seconds": seconds, "median_seconds": median, "reach": 0.5}


# ---- step ----------------------------------------------------------------------------------------------------------

BARE = "bare_reference"


class Bare(torch.autograd.Function):
    """The reference kernel on a whole row and nothing else. Shapes: [B, S, H, D] as the kernel has them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, table: Tensor, params: Any) -> Tensor:
        from hf_ring_attn.kernels import KERNELS

        out, lse = KERNELS["reference"].forward(q, k, v, table, params)
        ctx.save_for_backward(q, k, v, out, lse, table)
        ctx.params = params
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from hf_ring_attn.kernels import KERNELS, Gradients

        kernel = KERNELS["reference"]
        q, k, v, out, lse, table = ctx.saved_tensors
        (dout,) = gradients
        delta = torch.einsum("bthd,bthd->bht", dout, out)
        into = Gradients(kernel.new_gradient(q), kernel.new_gradient(k), kernel.new_gradient(v))
        kernel.backward(dout, q, k, v, lse, delta, table, ctx.params, into)
        return into.dq, into.dk, into.dv, None, None


def register_bare(length: int) -> None:
    """Makes attn_implementation="bare_reference" causal attention of one row of ``length`` tokens."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from hf_ring_attn.kernels import Params
    from hf_ring_attn.sharding.layout import Layout
    from hf_ring_attn.sharding.mask import CAUSAL, Mask, tiles

    whole = Layout(length, 1, 0).whole()
    table = tiles(Mask.of(CAUSAL, 1, length), whole, whole)

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return Bare.apply(q, k, v, table, Params(scaling)), None  # type: ignore[no-untyped-call]

    AttentionInterface.register(BARE, attention)
    AttentionMaskInterface.register(BARE, lambda *_, **__: None)


def measure_step(args: argparse.Namespace) -> Result:
    from transformers import AutoModelForCausalLM, LlamaConfig

    import hf_ring_attn

    register_bare(args.length)
    shape: dict[str, Any] = {
        "vocab_size": 259, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4,
    }  # fmt: skip
    models = {}
    for name in (BARE, "ring_fp32"):
        torch.manual_seed(0)
        config = LlamaConfig(**shape)
        models[name] = AutoModelForCausalLM.from_config(config, attn_implementation=name)  # type: ignore[no-untyped-call]
    tokens = torch.randint(0, 259, (1, args.length), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}

    def plain(name: str) -> Tensor:
        loss: Tensor = models[name](**batch, use_cache=False).loss
        return loss

    def sharded() -> Tensor:
        with (share := hf_ring_attn.shard(batch)):
            loss: Tensor = models["ring_fp32"](**share.inputs).loss
        return loss

    ways: dict[str, Callable[[], Tensor]] = {
        "bare kernel": lambda: plain(BARE),
        "ring_fp32": lambda: plain("ring_fp32"),
        "ring_fp32, shard(batch)": sharded,
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    losses: dict[str, float] = {}
    for turn in range(args.rounds + 1):
        order = list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]
        for way in order:
            began = time.process_time()  # of one thread: what others do on the machine counts less than with wall time
            loss = ways[way]()
            loss.backward()
            if turn > 0:  # the first warms up
                seconds[way].append(time.process_time() - began)
            losses[way] = loss.item()
    assert len(set(losses.values())) == 1, f"these do not compute the same: {losses}"

    bare = seconds["bare kernel"]
    medians, fastest = {}, {}
    for way, times in seconds.items():
        medians[way] = statistics.median(a / b for a, b in zip(times, bare, strict=True))
        fastest[way] = min(times) / min(bare)
        text = f"step, {way:<24}: {statistics.median(times):.3f} s ({min(times):.3f} to {max(times):.3f})"
        print(f"{text}; of the bare kernel's: median {medians[way]:.3f}, fastest {fastest[way]:.3f}")
    print("(at most 1.03)")
    return {
        "model": shape, "length": args.length, "threads": torch.get_num_threads(), "loss": losses["bare kernel"],
        "cpu_seconds": seconds, "median_ratio_to_bare_kernel": medians, "fastest_ratio_to_bare_kernel": fastest,
        "reach": 1.03,
    }  # fmt: skip


# ---- memory --------------------------------------------------------------------------------------------------------

MEMORY = """
import sys
import torch
from pathlib import Path
from hf_ring_attn.kernels import KERNELS, Gradients, Params
from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.sharding.mask import CAUSAL, Mask, tiles

torch.set_num_threads(1)
kernel, params = KERNELS["reference"], Params(64**-0.5)

def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

def forward_and_backward(length):
    q, k, v, dout = (torch.randn(1, length, heads, 64) for heads in (4, 2, 2, 4))
    whole = Layout(length, 1, 0).whole()
    table = tiles(Mask.of(CAUSAL, 1, length), whole, whole)
    out, lse = kernel.forward(q, k, v, table, params)
    delta = torch.einsum("bthd,bthd->bht", dout, out)
    into = Gradients(kernel.new_gradient(q), kernel.new_gradient(k), kernel.new_gradient(v))
    kernel.backward(dout, q, k, v, lse, delta, table, params, into)

forward_and_backward(64)  # libraries set up their own memory
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is resident now
before = peak_bytes()
forward_and_backward(int(sys.argv[1]))
print(peak_bytes() - before)
"""
"""The kernel by itself, in float32. VmHWM is the peak resident size that Linux keeps of a process (man 5 proc)."""


def measure_memory(args: argparse.Namespace) -> Result:
    lengths = (4096, 8192, 16384)
    peaks = {length: [fresh(MEMORY, length) for _ in range(args.memory_repeats)] for length in lengths}
    medians = {length: statistics.median(values) for length, values in peaks.items()}
    ratio = medians[16384] / medians[8192]
    for length, median in medians.items():
        print(f"memory, forward and backward of {length:>5} tokens: {median / 2**20:.0f} MiB")
    print(f"memory at 16K over 8K: {ratio:.2f} (at most 2.2)")
    heads = {"query_heads": 4, "key_heads": 2, "width": 64, "dtype": "float32"}
    return {**heads, "peak_bytes": peaks, "ratio_16K_to_8K": ratio, "reach": 2.2}


# ---- commands ------------------------------------------------------------------------------------------------------


def measure_commands(args: argparse.Namespace) -> Result:
    results = []
    for command in args.time:
        began = time.perf_counter()
        code = subprocess.run(["bash", "-c", command], cwd=REPOSITORY, check=False).returncode
        results.append({"command": command, "seconds": round(time.perf_counter() - began, 1), "exit_code": code})
        print(f"{command}: {results[-1]['seconds']:.0f} s, exit code {code}")
    return {"commands": results}


PARTS = {"import": measure_import, "step": measure_step, "memory": measure_memory, "commands": measure_commands}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--repeats", type=int, default=5, help="processes of import")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of step")
    parser.add_argument("--length", type=int, default=1024, help="tokens of step")
    parser.add_argument("--memory-repeats", type=int, default=3, help="processes of memory, for each length")
    parser.add_argument("--time", action="append", default=[], metavar="COMMAND", help="a command of commands")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the raw numbers into its results.jsonl")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"there is no part {sorted(unknown)}, only {list(PARTS)}")
    torch.set_num_threads(1)
    for part in args.parts or ("import", "step", "memory"):
        head = facts()
        result = {**head, **PARTS[part](args)}
        if args.save:
            results.save(args.save, part, result)


if __name__ == "__main__":
    main()
