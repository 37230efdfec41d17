r"""Trains a recipe with TRL's SFTTrainer: each row's tokens are spread over the ranks of a ring.

    accelerate launch --config_file recipes/accelerate/gpu_8_fsdp2.yaml recipes/train.py recipes/lora-128k/config.yaml

``--toy`` runs the same recipe with a tiny model and short rows, in seconds. Each recipe's run.sh has both commands.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from peft import LoraConfig
from settings import CHECKPOINTING, BadRecipe, read
from toy import toy
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    BitsAndBytesConfig,
    PrinterCallback,
    TrainerCallback,
    set_seed,
)
from transformers.trainer_callback import ExportableState
from trl import SFTConfig, SFTTrainer

import hf_ring_attn
from hf_ring_attn.integration.hosts.checkpoints import last_complete

ON_CPU = os.environ.get("ACCELERATE_USE_CPU") == "true" or not torch.accelerator.is_available()
SAVED = "recipe.json"
"""The settings of a run, in its output folder: evaluate.py and merge.py read which model an adapter is for."""
PICTURES = "images"
"""The column of rows with pictures."""


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="the config.yaml of a recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes",
                        help="another value for a key, such as training.max_steps=3")  # fmt: skip
    parser.add_argument("--toy", type=Path, nargs="?", const=Path("outputs/toy"), metavar="FOLDER",
                        help="a tiny model and short rows, made in that folder")  # fmt: skip
    parser.add_argument("--resume", action="store_true",
                        help="go on from the last checkpoint in the output folder, if there is one")  # fmt: skip
    return parser.parse_args()


def changed(config: Any, changes: dict[str, Any], name: str = "config") -> Any:
    """Puts entries of a recipe into a model's config; tables are merged with what is there.

    Raises:
        BadRecipe: the config has no such entry.
    """
    for key, value in changes.items():
        if not hasattr(config, key):
            raise BadRecipe("the recipe", [f"{name}.{key}: a {config.model_type} config has no such entry"])
        old = getattr(config, key)
        if isinstance(value, dict) and hasattr(old, "model_type"):
            changed(old, value, f"{name}.{key}")
        else:
            setattr(config, key, {**(old or {}), **value} if isinstance(value, dict) else value)
    return config


def load_config(settings: dict[str, Any]) -> Any:
    """The model's config with the recipe's entries.

    Raises:
        BadRecipe: an entry is unknown, or rows are longer than the model's positions.
    """
    config = changed(AutoConfig.from_pretrained(settings["model"], revision=settings["revision"]), settings["config"])
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and settings["training"]["max_length"] > positions:
        asked = settings["training"]["max_length"]
        fault = f"training.max_length {asked}, with config.max_position_embeddings {positions}: see extend-context"
        raise BadRecipe("the recipe", [fault])
    return config


def saved_at(run: Path) -> Path | None:
    """The file with the settings of a run, by its output folder or one of its checkpoints; None if there is none."""
    return next((folder / SAVED for folder in (run, run.parent) if (folder / SAVED).is_file()), None)


def saved_settings(run: Path) -> dict[str, Any]:
    """The settings of a run, by its output folder or one of its checkpoints.

    Raises:
        SystemExit: it is no run, or has not ended.
    """
    if not run.is_dir():
        raise SystemExit(f"{run}: there is no such folder")
    if (saved := saved_at(run)) is None:
        raise SystemExit(f"{run}: there is no {SAVED}, which train.py writes at its end")
    settings: dict[str, Any] = json.loads(saved.read_text())["settings"]
    return settings


def load_model(settings: dict[str, Any]) -> Any:
    """The model with its ring options; every rank loads it, a quantized one onto its own GPU."""
    more = {}
    if settings["quantization"] is not None:
        more["quantization_config"] = BitsAndBytesConfig(**settings["quantization"])
        if ON_CPU:
            more["device_map"] = {"": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(
        settings["model"], revision=settings["revision"], config=load_config(settings), dtype=settings["dtype"],
        attn_implementation=settings["attention"], **more,
    )  # fmt: skip
    # On some CPUs bitsandbytes packs weights in its first evaluation, and then trains wrongly.
    for part in model.modules():
        if ON_CPU and hasattr(part, "support_avx512bf16_for_cpu"):
            part.support_avx512bf16_for_cpu = False
    if settings["attention"] == "ring_fp32":
        hf_ring_attn.configure(model, hf_ring_attn.RingConfig(**settings["ring"]))
    return model


def compile_layers(model: Any) -> int:
    """Compiles each layer of the decoder in place, and returns how many there are. On a CPU only graphs are traced."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = base.get_decoder().layers
    for layer in layers:
        layer.compile(backend="eager" if ON_CPU else "inductor")
    return len(layers)


def load_rows(settings: dict[str, Any], name: str) -> Dataset | None:
    """Rows of a file of prepare.py, or None if the recipe names none.

    Raises:
        BadRecipe: there is no such file, or rows are longer than training.max_length.
    """
    path = settings["data"].get(name)
    if path is None:
        return None
    if not Path(path).is_file():
        raise BadRecipe("the recipe", [f"data.{name}: there is no file {path}; make it with recipes/prepare.py"])
    rows = Dataset.from_parquet(str(path))
    limit = settings["training"]["max_length"]
    counted = "tokens" in rows.column_names  # rows of pictures.py, whose tokens the processor makes in training
    sizes = rows["tokens"] if counted else map(len, rows.with_format("numpy")["input_ids"])
    longest = max(sizes, default=0)
    if longest > limit:
        raise BadRecipe("the recipe", [f"data.{name}: a row has {longest} tokens, training.max_length {limit} less"])
    return rows.remove_columns("tokens") if counted else rows


def is_one_ring() -> bool:
    """Returns True if all processes share each row: several rings would need rows for whole steps."""
    ranks = int(os.environ.get("PARALLELISM_CONFIG_CP_SIZE", "1"))
    return ranks > 1 and ranks == PartialState().num_processes


def arguments(settings: dict[str, Any], columns: Sequence[str], checkpoint: Path | None) -> SFTConfig:
    """SFTConfig as the recipe and the columns of its data say; what a ring wants otherwise is the default here.

    Raises:
        BadRecipe: SFTConfig refuses the arguments.
    """
    packed = "seq_lengths" in columns
    given: dict[str, Any] = {
        "per_device_train_batch_size": 1, "ddp_find_unused_parameters": False, "logging_steps": 1, "report_to": "none",
        "disable_tqdm": True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": False}, "bf16": False,
        **settings["training"], "resume_from_checkpoint": checkpoint and str(checkpoint), "padding_free": packed,
    }  # fmt: skip
    if packed or PICTURES in columns:
        given["max_length"] = None  # rows are as long as they may be; TRL would cut documents or pictures
    if PICTURES in columns and is_one_ring():
        given["accelerator_config"] = {"dispatch_batches": True}  # one rank prepares the pictures, for all
    given["use_cpu"] = ON_CPU
    try:
        return SFTConfig(**given)
    except (TypeError, ValueError) as error:
        raise BadRecipe("the recipe", [f"training: {error}"]) from None


def checkpoint_in(folder: Path) -> Path | None:
    """The last complete checkpoint in a folder, alike on all ranks. Says which ones are incomplete.

    Raises:
        BadRecipe: ranks see other checkpoints, since machines do not share the folder.
    """
    found, incomplete = last_complete(folder)
    seen: list[str] = gather_object([found.name if found else "none"])
    if len(set(seen)) > 1:
        names = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(seen))
        fault = f"training.output_dir: machines have other last checkpoints in {folder} ({names}); use a shared disk"
        raise BadRecipe("--resume", [fault])
    if incomplete and PartialState().is_main_process:
        then = f"Resuming from {found}" if found else "No checkpoint is complete: training starts from its first step"
        print(f"{', '.join(map(str, incomplete))} is incomplete: saving was interrupted. {then}", flush=True)
    return found


class Progress(TrainerCallback, ExportableState):
    """One line a step, by the first rank: loss, gradient norm, seconds, and the peak memory of its GPU.

    Checkpoints hold the steps, so that a resumed run has all of them.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.began: float | None = None
        self.begun = 0

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": self.steps}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        of_checkpoint = state.stateful_callbacks.get(type(self).__name__, {"attributes": {"steps": []}})
        self.steps = list(of_checkpoint["attributes"]["steps"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.began is None:
            self.began, self.begun = time.perf_counter(), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "eval_loss" in (logs or {}) and state.is_world_process_zero:
            print(f"step {state.global_step}: evaluation loss {logs['eval_loss']:.6f}", flush=True)
        if "loss" not in (logs or {}) or self.began is None:
            return
        # A log reads the loss, so the GPU has done its steps.
        found = {"step": state.global_step, "loss": logs["loss"], "grad_norm": logs.get("grad_norm", float("nan"))}
        found["seconds"] = (time.perf_counter() - self.began) / (state.global_step - self.begun)
        self.began = None
        if torch.cuda.is_available():
            found["gib"] = torch.cuda.max_memory_allocated() / 2**30
        self.steps.append(found)
        if state.is_world_process_zero:
            memory = f", {found['gib']:.1f} GiB" if "gib" in found else ""
            print(f"step {found['step']} of {state.max_steps}: loss {found['loss']:.6f}, gradient norm "
                  f"{found['grad_norm']:.4f}, {found['seconds']:.2f} s{memory}", flush=True)  # fmt: skip


def train(settings: dict[str, Any], resume: bool = False) -> Any:
    """Trains as the settings say, and saves into the output folder.

    Returns:
        The SFTTrainer.

    Raises:
        BadRecipe: the settings, the model and the data do not fit each other.
    """
    folder = Path(settings["training"]["output_dir"])
    checkpoint = checkpoint_in(folder) if resume else None
    rows, evaluation = load_rows(settings, "train"), load_rows(settings, "eval")
    assert rows is not None
    args = arguments(settings, rows.column_names, checkpoint)
    kind = AutoProcessor if PICTURES in rows.column_names else AutoTokenizer
    tokenizer = kind.from_pretrained(settings["model"], revision=settings["revision"])
    model = load_model(settings)
    if PICTURES in rows.column_names:
        # TRL and transformers let embeddings require gradients for reentrant checkpoints, which these are not. Then a
        # frozen tower would have a backward.
        model.enable_input_require_grads = lambda: None
    lora = LoraConfig(**{"task_type": "CAUSAL_LM", **settings["lora"]}) if settings["lora"] is not None else None
    set_seed(args.seed)  # LoRA's first matrix is random: alike on every rank
    progress = Progress()
    trainer = SFTTrainer(
        model, args, train_dataset=rows, eval_dataset=evaluation, processing_class=tokenizer, peft_config=lora,
        callbacks=[progress],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)  # Progress prints the same
    if settings["compile"]:
        layers = compile_layers(trainer.model)
        if trainer.is_world_process_zero():
            print(f"{layers} layers are compiled", flush=True)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()  # by all ranks: FSDP2 gathers what it has sharded, rank 0 writes
    if trainer.is_world_process_zero():
        (folder / SAVED).write_text(json.dumps({"settings": settings, "steps": progress.steps}, indent=1) + "\n")
        print(f"saved in {folder}", flush=True)
    trainer.accelerator.wait_for_everyone()  # whoever goes on may read it
    return trainer


def main() -> None:
    options = parsed()
    try:
        settings = read(options.recipe, options.changes)
        settings["training"].setdefault("output_dir", f"outputs/{options.recipe.resolve().parent.name}")
        PartialState(cpu=ON_CPU)  # tells each process its device
        # SFTConfig sees the recipe's values before toy changes them, except two that may need a GPU.
        arguments({**settings, "training": {**settings["training"], "bf16": False, "fp16": False}}, (), None)
        if options.toy is not None:
            settings = toy(settings, options.toy)
        trainer = train(settings, options.resume)
    except BadRecipe as error:
        raise SystemExit(str(error)) from None
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
