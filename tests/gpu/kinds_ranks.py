"""Kinds of fine-tuning in a ring of GPUs against one GPU: the table of tests/integration/hosts/test_kinds.py, and more.

Options: see `compared`. A kind whose library is missing is left out.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import torch

from tests.gpu.compared import compare
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


def _train(kind: Kind, mesh: Mesh, device: str) -> Trained:
    return trained(kind, mesh, device=device)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    kinds = {kind.why: kind for kind in (*KINDS, *MORE) if not left_out(kind, on_gpu)}

    def bounds(why: str) -> tuple[float, float]:
        kind = kinds[why]
        return HALF if kind.half or (kind.quantized is not None and "load_in_8bit" in kind.quantized) else FLOAT

    compare(
        {why: partial(_train, kind) for why, kind in kinds.items()},
        lambda got: got.losses, differences, bounds,
    )  # fmt: skip


def differences(got: Trained, want: Trained) -> tuple[float, float]:
    losses = max(abs(a - b) / abs(b) for a, b in zip(got.losses, want.losses, strict=True))
    moved = distance(want.after, want.before) or 1.0  # a scaled loss may have skipped all steps
    return losses, distance(got.after, want.after) / moved


if __name__ == "__main__":
    main()
