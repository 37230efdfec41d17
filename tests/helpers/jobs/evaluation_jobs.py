"""What ranks run to see how large the tensors of an evaluation, and of a training step, are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

from transformers import TrainerCallback
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_utils

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.config import Loss
from hf_ring_attn.integration.losses import head
from tests.helpers.jobs import sft_jobs, trl_runs
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, ordered_metrics, trainer_of
from tests.helpers.live_bytes import Largest

ROWS = 2
TOKENS = 80
"""Of a row: so long that logits are the largest tensors, even where each rank makes those of its share."""
CHUNK = 8


def most_values(host: str, metrics: bool, only_loss: bool | None) -> tuple[int, int]:
    """The most values of any tensor of an evaluation, after the first, and how many all logits of a rank have.

    Args:
        host: "Trainer" or "SFTTrainer". only_loss: the argument prediction_loss_only.
    """
    with launched(Mesh(cp=2), **trl_runs.OFFLINE), a_folder(None) as folder, trl_runs.quiet(), short_chunks():
        compute = ordered_metrics if metrics else None
        trainer: Any
        if host == "Trainer":
            run = Run(why="", evaluated=Rows(count=ROWS, length=TOKENS), arguments={"prediction_loss_only": only_loss})
            trainer = trainer_of(run, Mesh(cp=2), folder, compute_metrics=compute)
        else:
            rows = sft_jobs.rows("text", 1).from_list([{"text": "x" * (TOKENS - 1)}] * ROWS)
            case = sft_jobs.Case("", {"prediction_loss_only": only_loss})
            trainer = sft_jobs.trainer(case, folder, "ring_fp32", eval_dataset=rows, compute_metrics=compute)
        trainer.evaluate()
        with Largest() as largest:
            trainer.evaluate()
        return largest.values, ROWS * TOKENS // 2 * trainer.model.config.vocab_size


class _SecondStep(TrainerCallback):
    """Finds the largest tensor of the second forward and backward.

    Before the first ones the self-check has logits of its short row.
    """

    def __init__(self, vocabulary: int) -> None:
        self.largest: Any = Largest(vocabulary)
        self.saw = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            self.largest.__enter__()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            self.largest.__exit__(None, None, None)
            self.saw = True


def most_values_of_a_step(host: str, loss: Loss, options: dict[str, Any], short: bool = True) -> tuple[int, int]:
    """The most values of any tensor of a training step with the vocabulary, and how many all logits of a rank have.

    Args:
        host: "Trainer" or "SFTTrainer". options: of `Run` or `sft_jobs.Case`. short: a chunk has a few tokens, not all.
    """
    chunks = short_chunks() if short else nullcontext()
    with launched(Mesh(cp=2), **trl_runs.OFFLINE), a_folder(None) as folder, trl_runs.quiet(), chunks:
        trainer: Any
        if host == "Trainer":
            run = Run(why="", steps=2, rows=Rows(length=TOKENS), **options)
            trainer = trainer_of(run, Mesh(cp=2), folder)
        else:
            rows = sft_jobs.rows("text", 1).from_list([{"text": "x" * (TOKENS - 1)}] * 2 * ROWS)
            case = sft_jobs.Case("", **options).with_args(max_steps=2)
            trainer = sft_jobs.trainer(case, folder, "ring_fp32", train_dataset=rows)
        hf_ring_attn.configure(trainer.model, RingConfig(loss=loss))
        vocabulary = trainer.model.config.vocab_size
        seen = _SecondStep(vocabulary)
        trainer.add_callback(seen)
        trainer.train()
        assert seen.saw, "no second step"
        return seen.largest.values, ROWS * TOKENS // 2 * vocabulary


@contextmanager
def short_chunks() -> Iterator[None]:
    """Chunks of the loss, and of TRL's fused head, far below the sizes that toys would never reach."""
    with (
        mock.patch.object(head, "rows_per_chunk", return_value=CHUNK),
        mock.patch.object(chunked_logprob, "TOKEN_CHUNK_SIZE", CHUNK),
        mock.patch.object(trl_utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", CHUNK),
    ):
        yield
