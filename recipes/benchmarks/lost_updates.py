"""How much of LoRA's first updates eager layers lose in bf16, and compiled ones keep: losses of three steps. No ring.

python recipes/benchmarks/lost_updates.py --learning-rate 3e-5
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from hf_ring_attn.bench import results
from hf_ring_attn.bench.provenance import facts

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def losses(dtype: torch.dtype, compiled: str, learning_rate: float) -> list[float]:
    """The losses of three steps on one row; ``compiled``: "" for none, "parts" (norms and MLP) or "whole" layers."""
    torch._dynamo.reset()
    set_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=2000, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    base: Any = LlamaForCausalLM(config).to(dtype)
    set_seed(1)
    model: Any = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=PROJECTIONS))
    model.train()
    for layer in base.model.layers if compiled else ():
        parts = [layer.input_layernorm, layer.post_attention_layernorm, layer.mlp]
        for part in [layer] if compiled == "whole" else parts:
            part.compile()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0)
    ids = torch.randint(0, 2000, (1, 64), generator=torch.Generator().manual_seed(3)).repeat(1, 4)
    found = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        found.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the raw numbers into its results.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(2)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for compiled in ("", "parts", "whole"):
            row = {"learning_rate": args.learning_rate, "dtype": str(dtype).removeprefix("torch.")}
            row |= {"layers": compiled or "eager", "losses": losses(dtype, compiled, args.learning_rate)}
            rows.append(row)
            print(f"{row['dtype']}, {row['layers']}: {', '.join(f'{loss:.5f}' for loss in row['losses'])}", flush=True)
    if args.save:
        results.save(args.save, "lost_updates", facts(), rows)


if __name__ == "__main__":
    main()
