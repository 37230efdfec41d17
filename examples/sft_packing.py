r"""TRL's SFTTrainer with LoRA and packing in a ring: texts in one row do not see each other, on any number of ranks.

    ACCELERATE_USE_CPU=true accelerate launch --config_file recipes/accelerate/cpu_2ranks.yaml \
        examples/sft_packing.py
"""

from __future__ import annotations

from datasets import Dataset
from peft import LoraConfig
from transformers import set_seed
from trl import SFTConfig, SFTTrainer

import hf_ring_attn  # noqa: F401  registers "ring_fp32"
from small import checkpointing, small_llama
from text import documents, tokenizer


def main(attention: str = "ring_fp32") -> None:
    options = SFTConfig(
        output_dir="outputs/sft_packing", packing=True, packing_strategy="bfd", max_length=1000, max_steps=4,
        per_device_train_batch_size=1, learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True, use_cpu=True, bf16=False, ddp_find_unused_parameters=False, **checkpointing(True),
    )  # fmt: skip
    model = small_llama(attention)
    set_seed(0)  # the adapter starts from random numbers, on all ranks the same
    trainer = SFTTrainer(
        model,
        options,
        train_dataset=Dataset.from_dict({"input_ids": [tokenizer().encode(text) for text in documents(20)]}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        for log in trainer.state.log_history:
            if "loss" in log:
                print(f"step {log['step']}: loss {log['loss']:.7f}")


if __name__ == "__main__":
    main()
