r"""transformers.Trainer with evaluation in a ring: the program needs only the import and "ring_fp32".

    ACCELERATE_USE_CPU=true accelerate launch --config_file recipes/accelerate/cpu_2ranks.yaml \
        examples/trainer.py

The launch config says how many ranks share a row (cp_size). The ring pads rows of 1001 tokens by itself.
"""

from __future__ import annotations

from transformers import Trainer, TrainingArguments

import hf_ring_attn  # noqa: F401  registers "ring_fp32"
from small import small_llama
from text import Rows


def main(attention: str = "ring_fp32") -> None:
    options = TrainingArguments(
        output_dir="outputs/trainer", num_train_epochs=1, per_device_train_batch_size=1,
        gradient_accumulation_steps=2, per_device_eval_batch_size=2, learning_rate=1e-2, logging_steps=1,
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, ddp_find_unused_parameters=False,
    )  # fmt: skip
    trainer = Trainer(small_llama(attention), options, train_dataset=Rows(6, 1001), eval_dataset=Rows(3, 1001, skip=6))
    trainer.train()
    trainer.evaluate()
    if trainer.is_world_process_zero():
        for log in trainer.state.log_history:
            for name in log.keys() & {"loss", "eval_loss"}:
                print(f"step {log['step']}: {name} {log[name]:.7f}")


if __name__ == "__main__":
    main()
