r"""TRL's GRPOTrainer in a ring: it samples completions of long prompts, scores them, and trains on them.

ACCELERATE_USE_CPU=true accelerate launch --config_file recipes/accelerate/cpu_2ranks.yaml examples/grpo.py
"""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import hf_ring_attn  # noqa: F401  registers "ring_fp32"
from small import small_llama
from text import documents, tokenizer


def vowels(completions: list[str], **_: Any) -> list[float | None]:
    """The reward: the share of vowels."""
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]


def main(attention: str = "ring_fp32") -> None:
    options = GRPOConfig(
        output_dir="outputs/grpo", max_completion_length=24, num_generations=4, max_steps=4, learning_rate=1e-2,
        per_device_train_batch_size=4, gradient_accumulation_steps=2, num_iterations=2, beta=0.0, logging_steps=1,
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    prompts = [text[:1000] for text in documents(24) if len(text) > 200]
    trainer = GRPOTrainer(
        small_llama(attention),
        reward_funcs=vowels,
        args=options,
        train_dataset=Dataset.from_dict({"prompt": prompts[:8]}),
        processing_class=tokenizer(),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        for log in trainer.state.log_history:
            if "grad_norm" in log:
                rewarded = f"step {log['step']}: reward {log['reward']:.7f}\n" if "reward" in log else ""
                print(f"{rewarded}step {log['step']}: gradient norm {log['grad_norm']:.7f}")


if __name__ == "__main__":
    main()
