"""What ranks run to be refused: models that a ring cannot compute exactly, and Trainers before their first step."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from accelerate import dispatch_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM, MixtralForCausalLM, Trainer

import hf_ring_attn
from hf_ring_attn import RingAttentionError
from tests.helpers.jobs.plain_jobs import Batch, tokens
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, loaded_by_ranks, trainer_of
from tests.helpers.models.tiny_models import SIZES, build

Change = Callable[[Any], Any]
"""What is done to a model before it runs: it returns the model to call."""


def none(model: Any) -> Any:
    return model


@dataclass(frozen=True, eq=False, kw_only=True)
class Forward:
    """One forward and backward of a model in a ring, which must be refused.

    Args:
        kind: the class of the model; sizes: whether its config knows those of `tiny_models`; config: what else it has.
        change: what is done to the model first; labelled: whether the batch has labels.
        error: the class of the error; text: a part of its text.
    """

    why: str
    kind: str = "LlamaForCausalLM"
    sizes: bool = True
    config: dict[str, Any] = field(default_factory=dict)
    attention: str = "ring_fp32"
    change: Change = none
    batch: Batch = field(default_factory=lambda: tokens(24))
    labelled: bool = True
    error: str = "UnsupportedModel"
    text: str


def named_as_hybrids(model: Any) -> Any:
    model.config.layer_types = ["linear_attention", "full_attention"]
    return model


def refused(forward: Forward) -> tuple[str, str] | None:
    """The class's name and the text of what was raised on this rank; None if nothing was."""
    model = build(forward.kind, forward.attention, **{**(SIZES if forward.sizes else {}), **forward.config})
    called = forward.change(model.train())
    batch = forward.batch if forward.labelled else {n: x for n, x in forward.batch.items() if n != "labels"}
    try:
        sharded = hf_ring_attn.shard(batch)
        with sharded:
            out = called(**sharded.inputs)
        out[0].sum().backward()
    except RingAttentionError as error:
        return type(error).__name__, str(error)
    return None


# ---- changes ---------------------------------------------------------------------------------------------------------


def prompt_tuning(model: Any) -> Any:
    from peft import PromptTuningConfig, TaskType, get_peft_model

    return get_peft_model(model, PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3))


def activated_lora(model: Any) -> Any:
    from peft import LoraConfig, TaskType, get_peft_model

    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type=TaskType.CAUSAL_LM, alora_invocation_tokens=[1, 2])
    return get_peft_model(model, lora)


def neftune(model: Any) -> Any:
    model.get_input_embeddings().neftune_noise_alpha = 5.0
    return model


def in_evaluation_mode(model: Any) -> Any:
    return model.eval()


def its_own_loss(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **_: Any) -> Any:
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return losses / (1 if num_items_in_batch is None else num_items_in_batch)


def with_a_loss_function(model: Any) -> Any:
    model.loss_function = its_own_loss
    return model


def with_a_mixer(model: Any, kind: str) -> Any:
    model.model.layers[0].mixer = getattr(torch.nn, kind)(32, 32 if kind == "GRU" else 4)
    return model


def tuned_otherwise(model: Any) -> Any:
    model.model.layers[0].self_attn.attn_temperature_tuning = True
    return model


class Remote(MixtralForCausalLM):  # type: ignore[no-untyped-call]  # transformers' __init_subclass__
    """A model of another file, whose function of that name is another one."""


def load_balancing_loss_func(gate_logits: Any, *_: Any) -> Any:
    return sum(logits.logsumexp(-1).square().mean() for logits in gate_logits)


def balanced_otherwise(model: Any) -> Any:
    model.__class__ = Remote
    return model


def with_means_of_batches(model: Any) -> Any:
    model.accepts_loss_kwargs = False
    return model


class WithoutKeywords(LlamaForCausalLM):  # type: ignore[no-untyped-call]  # transformers' __init_subclass__
    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


def without_keywords(model: Any) -> Any:
    model.__class__ = WithoutKeywords
    return model


def with_a_4d_mask(model: Any) -> Any:
    def call(**inputs: Any) -> Any:
        rows, local = inputs["input_ids"].shape
        return model(**{**inputs, "attention_mask": torch.zeros(rows, 1, local, local)})

    return call


def with_whole_rows(model: Any) -> Any:
    return lambda **inputs: model(**tokens(24))


def that_generates(model: Any) -> Any:
    return lambda **inputs: model.generate(torch.ones(1, 4, dtype=torch.int64), max_new_tokens=2)


def checkpointed_whole(model: Any) -> Any:
    """The model as a whole, not its layers: its masks are made again in backward, outside the context."""
    return lambda **inputs: checkpoint(
        lambda ids: model(**{**inputs, "input_ids": ids}), inputs["input_ids"], use_reentrant=False
    )


def that_returns_a_tuple(model: Any) -> Any:
    model.register_forward_hook(lambda module, args, output: tuple(output.values()))
    return model


class DeepSpeedEngine(nn.Module):
    """Stands for DeepSpeed's, which needs a GPU: it is told by its name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Any) -> Any:
        return self.module(**inputs)


class FullyShardedDataParallel(DeepSpeedEngine):
    """Stands for FSDP1's."""


def split_by_torch(model: Any) -> Any:
    """A model with a part under tensor parallelism."""
    plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    parallelize_module(model.model.layers[0].mlp, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    return model


def split_by_transformers(model: Any) -> Any:
    """The same model, of which each rank has loaded a part."""
    return loaded_by_ranks(model, tp_plan="auto")


def with_a_layer_on_disk(model: Any) -> Any:
    """The model as accelerate has it for a device_map with "disk"."""
    parts = {name: "cpu" for name, part in model.model.named_children() if name != "layers"}
    layers = {f"layers.{index}": "cpu" if index else "disk" for index in range(len(model.model.layers))}
    places = {f"model.{name}": place for name, place in {**parts, **layers}.items()}
    with tempfile.TemporaryDirectory() as folder:
        dispatch: Any = dispatch_model
        return dispatch(model, {**places, "lm_head": "cpu"}, main_device="cpu", offload_dir=folder, force_hooks=True)


class Linear(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Linear(1, 1)

    def forward(self, input_ids: Any, **_: Any) -> Any:
        return (self.weight(input_ids[..., None].float()),)


# ---- Trainers --------------------------------------------------------------------------------------------------------


class WithLomo(Trainer):
    """As with optim="lomo", whose package is not installed here."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.has_lomo_optimizer = True


class OwnLoss(Trainer):
    """Each rank takes a mean over its own labels."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        logits = model(**{name: x for name, x in inputs.items() if "labels" not in name}).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["shift_labels"].flatten())


class OwnLossOfALaterModel(OwnLoss):
    """It is given a function that makes its model: none is there when it is constructed."""

    def __init__(self, model: Any, **given: Any) -> None:
        super().__init__(model_init=lambda: model, **given)


class WithoutWrapper(Trainer):
    """Its model runs as it is, as under FSDP2: DDP is a module that is in training mode from the start."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = lambda model, *_, **__: model


class OtherOrder(Trainer):
    """Every rank reads its samples in another order, as programs do that shard their data themselves."""

    def get_train_dataloader(self) -> Any:
        rows = Rows(count=8, seed=dist.get_rank()).make()
        return [{name: torch.stack([row[name] for row in rows[:2]]) for name in rows[0]}] * 8


def one_rank_has_a_cache(rows: list[Any]) -> Any:
    batch: dict[str, Any] = Rows().collate(rows)
    if dist.get_rank() == 1:
        batch["past_key_values"] = torch.zeros(1)
    return batch


def with_other_labels(rows: list[Any]) -> Any:
    """Answers of another length than the rows."""
    batch: dict[str, Any] = Rows().collate(rows)
    return {**batch, "labels": batch["labels"][:, :9]}


@dataclass(frozen=True, eq=False, kw_only=True)
class Training:
    """A Trainer that must be refused before its first step.

    ``model``, ``config`` and ``change`` make its model, as in `Forward`; ``more`` is given to `trainer_of`.
    ``only``: the one rank whose own error it is; None: all have it.
    """

    why: str
    only: int | None = None
    run: Run = field(default_factory=lambda: Run(why="", steps=2))
    kind: type[Trainer] = Trainer
    model: str = "LlamaForCausalLM"
    config: dict[str, Any] = field(default_factory=dict)
    change: Change = none
    more: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    mesh: Mesh = Mesh(cp=2)  # noqa: RUF009  Mesh is frozen, sharing it is safe
    predicts: bool = False
    error: str
    text: str


def refused_training(training: Training) -> tuple[str, str, int] | None:
    """Class, text and the steps made until then of what was raised on this rank; None if nothing was."""
    steps = 0
    with launched(training.mesh, **training.environment), a_folder(None) as folder:
        try:
            model = training.change(build(training.model, **{**SIZES, **training.config}))
            trainer = trainer_of(training.run, training.mesh, folder, model, kind=training.kind, **training.more)
            if training.predicts:
                rows: Any = training.run.evaluated.make()
                trainer.predict(rows)
            else:
                trainer.train()
        except RingAttentionError as error:
            if "trainer" in locals():
                steps = trainer.state.global_step
            return type(error).__name__, str(error), steps
    return None
