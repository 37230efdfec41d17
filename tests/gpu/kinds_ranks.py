"""Kinds of fine-tuning in a ring of GPUs against one GPU: the table of tests/integration/hosts/test_kinds.py, and more.

    CUDA_VISIBLE_DEVICES=0 python -m tests.gpu.kinds_ranks --save alone.pt
    torchrun --nproc_per_node 2 -m tests.gpu.kinds_ranks --compare alone.pt

``--only WORD`` takes the kinds that have it in their names. A kind whose library is missing is left out.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.jobs.kinds_jobs import ADAM, KINDS, LORA, NF4, TORCHAO, Kind, Trained, distance, trained
from tests.helpers.jobs.runs import Mesh

LIGER = {**ADAM, "use_liger_kernel": True}
HALF_NF4 = {**NF4, "bnb_4bit_compute_dtype": torch.bfloat16, "bnb_4bit_quant_storage": torch.bfloat16}
MORE = [
    Kind(why="bf16, LoRA under FSDP2", half=True, lora=LORA, fsdp={}, arguments={"bf16": True}),
    Kind(why="fp16, Trainer's scaler", half=True, arguments={"fp16": True}),
    Kind(why="bf16, QLoRA under FSDP2", half=True, lora=LORA, quantized=HALF_NF4, fsdp={}, arguments={"bf16": True}),
    Kind(why="Liger", arguments=LIGER),
    Kind(why="Liger, LoRA under FSDP2", lora=LORA, fsdp={}, arguments=LIGER),
    Kind(why="Liger, bf16", half=True, arguments={"use_liger_kernel": True, "bf16": True}),
]
FLOAT, HALF = (1e-5, 1e-3), (2e-3, 5e-2)
"""Relative bounds of losses, and of how far all steps moved the weights. LLM.int8 rounds activations to 8 bits, where
the last bit of a float32 sum may decide."""


def left_out(kind: Kind, on_gpu: bool) -> bool:
    """Its library is missing; or it scales the loss by hand, for CPUs, where accelerate does not."""
    uses_bits = kind.quantized is not None or "bnb" in str(kind.arguments) or "paged" in str(kind.arguments)
    uses_liger = "use_liger_kernel" in kind.arguments
    missing = (uses_bits and find_spec("bitsandbytes") is None) or (uses_liger and find_spec("liger_kernel") is None)
    missing = missing or (TORCHAO in kind.arguments.values() and find_spec("torchao") is None)
    return missing or (kind.scaled and on_gpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save")
    parser.add_argument("--compare")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    device = f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"
    if size > 1:  # gloo beside NCCL, for parameters on the host
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    want: dict[str, Trained] = torch.load(options.compare, weights_only=False) if options.compare else {}
    found, wrong = {}, 0
    for kind in [kind for kind in (*KINDS, *MORE) if options.only in kind.why and not left_out(kind, on_gpu)]:
        began = time.perf_counter()
        try:
            got = found[kind.why] = trained(kind, Mesh(cp=size), device=device)
        except Exception:  # noqa: BLE001  the other kinds are tried all the same
            wrong += 1
            report(f"{kind.why}: raised\n{traceback.format_exc()}")
            continue
        line = f"{kind.why}: losses {[round(x, 6) for x in got.losses]}, {time.perf_counter() - began:.1f} s"
        if kind.why in want:
            far = differences(got, want[kind.why])
            coarse = kind.half or (kind.quantized is not None and "load_in_8bit" in kind.quantized)
            good = all(x <= bound for x, bound in zip(far, HALF if coarse else FLOAT, strict=True))
            wrong += not good
            verdict = "right" if good else "WRONG"
            line += f", one GPU {[round(x, 6) for x in want[kind.why].losses]}"
            line += f"; loss off by {far[0]:.1e}, weights by {far[1]:.1e}: {verdict}"
        report(line)
    if options.save:
        torch.save(found, options.save)
    report(f"{len(found)} kinds on {device}, {wrong} wrong")
    if size > 1:
        dist.destroy_process_group()
    sys.exit(wrong > 0)


def differences(got: Trained, want: Trained) -> tuple[float, float]:
    losses = max(abs(a - b) / abs(b) for a, b in zip(got.losses, want.losses, strict=True))
    moved = distance(want.after, want.before) or 1.0  # a scaled loss may have skipped all steps
    return losses, distance(got.after, want.after) / moved


def report(line: Any) -> None:
    if int(os.environ.get("RANK", "0")) == 0 or "raised" in line:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
