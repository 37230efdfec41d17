"""`generation_batch_size` in a config of GRPO or RLOO: rings generate as many completions as one process would.

The config turns it into steps, and divides it by the number of processes, which a trainer cannot see later: the same
two numbers come from `steps_per_generation`, where they are right. So it is counted in each process before.
"""

from __future__ import annotations

from typing import Any

from ...config import launched_ring
from ..context.mesh import parallelism_of_process
from ..patching.changes import Original, Patch, around


@around
def _post_init(original: Original, self: Any) -> None:
    if getattr(self, "generation_batch_size", None) is not None and self.steps_per_generation is None:
        config = self.parallelism_config or parallelism_of_process()
        # `grpo_trainer.start` counts it by rings again.
        self.generation_batch_size *= launched_ring() if config is None else int(config.cp_size)
    original(self)


PATCHES = (Patch("transformers.training_args:TrainingArguments.__post_init__", "(self)", _post_init),)
