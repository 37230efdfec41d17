"""What ranks run: a whole use of Trainer, with the plugin in a ring or without it."""

from __future__ import annotations

import gc
import itertools
import multiprocessing.process
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import hf_ring_attn
from hf_ring_attn import RingAttentionError
from hf_ring_attn.integration.context.mesh import ring_group
from hf_ring_attn.integration.hosts.whole_row_steps import refused_losses
from tests.helpers.jobs.fsdp2_trainers import under_fsdp2, weights_of
from tests.helpers.jobs.runs import Mesh, Row, Rows, Run
from tests.helpers.models.tiny_models import tiny

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass
class Outcome:
    """What a rank saw of a run.

    ``log``: loss and grad norm of each step, and what evaluation gave, in order. ``parameters``: those that are
    trained, after the run; ``updates``: how far they are from the model's first weights. ``steps``: those made by this
    process, not by one whose checkpoint it resumed from. ``training_loss``: Trainer's mean over these.
    ``refused``: see `refusals_of`.
    """

    ring_size: int
    log: list[dict[str, float]]
    parameters: dict[str, Tensor]
    updates: dict[str, Tensor]
    steps: int
    generated: list[list[int]]
    training_loss: float | None = None
    refused: str = ""
    predictions: Tensor | None = None
    label_ids: Tensor | None = None


# ---- the host, as in a new process ---------------------------------------------------------------------------------


def _reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@cache
def _keep_imports_out_of_collections() -> None:
    """Trainer collects garbage at each start: 0.6 s over all that transformers imports, 0.01 s without it."""
    gc.collect()
    gc.freeze()


@contextmanager
def launched(mesh: Mesh, **environment: str) -> Iterator[None]:
    """A process that ``accelerate launch`` has started for this mesh; without a ring, one without the plugin."""
    _keep_imports_out_of_collections()
    left_out = TORCHRUN if mesh.size == 1 else ()
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    may_have_workers = mock.patch.dict(multiprocessing.process.current_process()._config, daemon=False)  # type: ignore[attr-defined]
    with may_have_workers, mock.patch.dict(os.environ, {**kept, **mesh.launch_config(), **environment}, clear=True):
        _reset()
        if mesh.cp == 1:
            hf_ring_attn.uninstall()
        try:
            yield
        finally:
            hf_ring_attn.install()
            _reset()


@contextmanager
def a_folder(folder: str | None) -> Iterator[str]:
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="ring_run_") as name:
        yield name


def loaded_by_ranks(model: Any, **options: Any) -> Any:
    """The same model, of which each rank loads what the options of `from_pretrained` say."""
    with a_folder(None) as folder:
        torch.distributed.broadcast_object_list(names := [folder])
        model.save_pretrained(names[0])  # the first rank does
        torch.distributed.barrier()
        made = type(model).from_pretrained(names[0], attn_implementation="ring_fp32", **options)
        torch.distributed.barrier()
    return made


def refusal_of(trainer: Any) -> tuple[str, int]:
    """What a trainer is refused with ("": it is not), and the optimizer's steps until then."""
    try:
        trainer.train()
    except RingAttentionError as error:
        return f"{type(error).__name__}: {error}", trainer.state.global_step
    return "", trainer.state.global_step


# ---- a run -----------------------------------------------------------------------------------------------------------


def capped_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss that needs whole rows in order: neighbouring logits are pulled together."""
    logits = outputs.logits.float()
    ahead, told = logits[:, :-1], labels[:, 1:]
    loss = torch.nn.functional.cross_entropy(ahead.reshape(-1, logits.shape[-1]), told.reshape(-1), reduction="sum")
    roughness = (logits[:, 1:] - ahead).square().sum()
    total: Tensor = loss + 0.1 * roughness
    return total / (1 if num_items_in_batch is None else num_items_in_batch)


def ordered_metrics(prediction: Any) -> dict[str, float]:
    """Numbers that change if any two tokens, or any two rows, change places."""
    given = {"predictions": prediction.predictions, "labels": prediction.label_ids}
    given |= {"inputs": prediction.inputs, "losses": prediction.losses}
    found = {}
    for name, values in given.items():
        if values is None:
            continue
        x = torch.as_tensor(values).double()
        places = torch.arange(x.numel(), dtype=torch.float64).reshape(x.shape)
        found[name] = float((x * torch.cos(places)).sum())
        found[f"{name}_count"] = float(x.numel())
    return found


class BatchMetrics:
    """`ordered_metrics` of every batch, added up at the end: for batch_eval_metrics."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def __call__(self, prediction: Any, compute_result: bool) -> dict[str, float]:
        self.seen.append(ordered_metrics(prediction))
        if not compute_result:
            return {}
        seen, self.seen = self.seen, []
        return {name: sum((turn + 1) * one[name] for turn, one in enumerate(seen)) for name in seen[0]}


def argmax(logits: Tensor, labels: Tensor) -> Tensor:
    """A preprocess_logits_for_metrics. It gets whole rows."""
    assert logits.shape[:2] == labels.shape
    return logits.argmax(-1)


class Watcher(TrainerCallback):
    """Counts steps, and may generate in the middle of training, as people do to look at progress."""

    def __init__(self, generates: bool) -> None:
        self.generates = generates
        self.steps = 0
        self.texts: list[list[int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.steps += 1
        if not self.generates or self.steps % 2:
            return
        model = given["model"]
        prompt = torch.arange(5)[None] * 7 + self.steps
        was_training = model.training
        text = model.eval().generate(prompt, max_new_tokens=6, do_sample=False, use_cache=True, pad_token_id=0)
        model.train(was_training)
        self.texts.append(text[0].tolist())


class Stream(IterableDataset[Row]):
    """Rows one after the other, over and over."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Row]:
        return itertools.cycle(self.rows.make())


def trainer_of(
    run: Run, mesh: Mesh, folder: str, model: Any = None, kind: type[Trainer] | None = None, **more: Any
) -> Trainer:
    """The Trainer of a run. ``more``: arguments of Trainer in place of those of the run."""
    if model is None:
        model = tiny(run.model, "ring_fp32" if mesh.cp > 1 else None)
        model = model if run.change is None else run.change(model)
    if run.lora:
        from peft import AdaLoraConfig, LoraConfig, get_peft_model

        torch.manual_seed(5)
        targets, whole = ["q_proj", "v_proj", "down_proj"], list(run.lora) if isinstance(run.lora, tuple) else None
        every = run.lora if run.lora == "all-linear" else targets
        lora = LoraConfig(r=4, target_modules=every, init_lora_weights=False, modules_to_save=whole)
        if run.lora == "ada":
            lora = AdaLoraConfig(
                init_r=4, target_modules=targets, total_step=9, orth_reg_weight=2.0, task_type="CAUSAL_LM"
            )
        model = get_peft_model(model, lora)
    if mesh.cp > 1:
        hf_ring_attn.configure(model, run.ring)
    arguments = {
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_steps": run.steps or 1, "optim": "sgd",
        "learning_rate": 0.05, "max_grad_norm": 1000.0, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "use_cpu": True, "disable_tqdm": True, "seed": 3, "eval_strategy": "steps", "eval_steps": 4,
        "include_num_input_tokens_seen": "all", "remove_unused_columns": False, **run.arguments,
    }  # fmt: skip
    metrics = {"": None, "logits": ordered_metrics, "argmax": ordered_metrics, "batches": BatchMetrics()}[run.metrics]
    given: dict[str, Any] = {
        "train_dataset": Stream(run.rows) if run.streamed else run.rows.make(),
        "eval_dataset": run.evaluated.make(), "data_collator": run.rows.collate,
        "compute_metrics": metrics, "compute_loss_func": capped_loss if run.loss_function else None,
        "preprocess_logits_for_metrics": argmax if run.metrics == "argmax" else None,
    }  # fmt: skip
    trainer = (kind or run.kind)(
        model=model, args=TrainingArguments(output_dir=folder, **arguments), **{**given, **more}
    )
    trainer.remove_callback(PrinterCallback)
    if run.fsdp2 and mesh.cp > 1:
        under_fsdp2(trainer, {})
    return trainer


LOGGED = ("loss", "grad_norm", "num_input_tokens_seen")


def train(
    run: Run, mesh: Mesh, folder: str | None = None, resume_from: str | bool | None = None, **environment: str
) -> Outcome:
    """The whole run, on this rank of the mesh."""
    with launched(mesh, **environment), a_folder(folder) as output:
        watcher = Watcher(run.generates)
        trainer = trainer_of(run, mesh, output, callbacks=[watcher])
        assert trainer.model is not None
        before = weights_of(trainer.model)
        training_loss = None
        if run.steps:
            training_loss = trainer.train(resume_from_checkpoint=resume_from).training_loss
        else:
            trainer.evaluate()
        after = weights_of(trainer.model)
        outcome = Outcome(
            ring_size=1 if (group := ring_group(trainer.accelerator)) is None else group.size(),
            log=numbers(trainer.state.log_history),
            parameters=after,
            updates={name: x - before[name] for name, x in after.items()},
            steps=watcher.steps,
            generated=watcher.texts,
            training_loss=training_loss,
            refused=refusals_of(trainer),
        )
        if run.predicts:
            rows: Any = run.evaluated.make()
            if run.predicts == "unlabelled":
                rows = [{name: x for name, x in row.items() if name != "labels"} for row in rows]
            found = trainer.predict(rows)
            # Since transformers 5.24 predictions of pictures have the towers' outputs behind the logits.
            logits = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
            outcome.predictions = torch.as_tensor(logits)
            outcome.label_ids = None if found.label_ids is None else torch.as_tensor(found.label_ids)
            outcome.log += numbers([found.metrics or {}])
        return outcome


def refusals_of(trainer: Any) -> str:
    """Why a trainer's losses are of whole rows, if the trial step refused those of a rank's tokens."""
    return "; ".join(map(repr, refused_losses(trainer).values()))


def numbers(log: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Of each entry what does not depend on the clock or on the number of processes."""
    clock = ("_runtime", "_per_second", "_time")
    return [
        {
            name: float(x)
            for name, x in entry.items()
            if (name in LOGGED or name.startswith(("eval_", "test_"))) and not name.endswith(clock)
        }
        for entry in log
    ]
