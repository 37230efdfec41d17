r"""TRL's DPOTrainer with LoRA in a ring: pairs of answers to long prompts, the reference without the adapter.

ACCELERATE_USE_CPU=true accelerate launch --config_file recipes/accelerate/cpu_2ranks.yaml examples/dpo.py
"""

from __future__ import annotations

from datasets import Dataset
from peft import LoraConfig
from transformers import set_seed
from trl import DPOConfig, DPOTrainer

import hf_ring_attn  # noqa: F401  registers "ring_fp32"
from small import checkpointing, small_llama
from text import documents, tokenizer


def pairs(count: int) -> Dataset:
    """A text's first four fifths, its end, and the end of another text."""
    texts = [text for text in documents(6 * count) if len(text) > 200][:count]
    ends = [text[len(text) * 4 // 5 :] for text in texts]
    return Dataset.from_list(
        [
            {"prompt": text[: len(text) * 4 // 5], "chosen": end, "rejected": other}
            for text, end, other in zip(texts, ends, ends[1:] + ends[:1], strict=True)
        ]
    )


def main(attention: str = "ring_fp32") -> None:
    options = DPOConfig(
        output_dir="outputs/dpo", max_length=1000, max_steps=4, per_device_train_batch_size=2, learning_rate=1e-3,
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, bf16=False,
        ddp_find_unused_parameters=False, **checkpointing(False),
    )  # fmt: skip
    model = small_llama(attention)
    set_seed(0)  # the adapter starts from random numbers, on all ranks the same
    trainer = DPOTrainer(
        model,
        args=options,
        train_dataset=pairs(8),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        for log in trainer.state.log_history:
            if "loss" in log:
                print(f"step {log['step']}: loss {log['loss']:.7f}")


if __name__ == "__main__":
    main()
