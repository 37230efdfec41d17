"""Fine-tuning runs for live ranks: SFTTrainer in a ring, or without the plugin, and what each of them gives.

The data is real text, the Python standard library's source, read byte by byte. A run is described by a `Case`; where it
runs is a `Mesh`.
"""

from __future__ import annotations

import dataclasses
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, PrinterCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

import hf_ring_attn
from hf_ring_attn import RingConfig
from tests.helpers.jobs import sft_pictures, trl_runs
from tests.helpers.jobs.cpu_streams import offloading_on_a_cpu
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.trainer_jobs import a_folder, launched, ordered_metrics
from tests.helpers.jobs.trl_runs import OFFLINE, Outcome, arguments, quiet
from tests.helpers.models.tiny_models import SIZES, build

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
TRAIN_ROWS, EVAL_ROWS, BATCH, STEPS = 52, 5, 2, 4
NUMBERS = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")
"""What SFTTrainer logs at each step."""


@dataclass(frozen=True, eq=False)
class Case(trl_runs.Case):
    """One way to fine-tune, and why it is here.

    Args:
        rows: the form of the data: "text", "completion" (prompt and completion), "end" (one that is the end of a text
            alone: a label a row) or "chat".
        images: a model of `tiny_models.VISION`, trained on rows with pictures; without_images: every so many have none.
        means: of a model that leaves each batch's loss a mean.
        stream: give the trainer an IterableDataset.
        metrics: have compute_metrics, which gets the logits and labels of whole rows.
        loss: of RingConfig. loss_function: compute_loss_func is `half`.
    """

    rows: str = "text"
    images: str = ""
    without_images: int = 0
    means: bool = False
    stream: bool = False
    metrics: bool = False
    loss: Any = "auto"
    loss_function: bool = False


# ---- the model, the tokenizer, the text ----------------------------------------------------------------------------


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level: a token for each byte, one that ends and pads, and a chat template with generation tags."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<eos>", "<|user|>", "<|assistant|>"]
    vocabulary = {token: number for number, token in enumerate([*specials, *letters])}
    bytes_ = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    bytes_.add_special_tokens(specials)
    kind: Any = PreTrainedTokenizerFast
    made: PreTrainedTokenizerFast = kind(
        tokenizer_object=bytes_, eos_token="<eos>", pad_token="<eos>", chat_template=CHAT_TEMPLATE
    )
    return made


AFMOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_hidden_layers": 3,
    "num_dense_layers": 1,
}  # fmt: skip


def model(attention: str, kind: str = "LlamaForCausalLM", means: bool = False) -> PreTrainedModel:
    sizes = {**SIZES, "vocab_size": 259, "max_position_embeddings": 256, "eos_token_id": 0}
    made = build(kind, attention, **{**sizes, **(AFMOE if kind == "AfmoeForCausalLM" else {})})
    if means:
        made.accepts_loss_kwargs = False  # type: ignore[assignment]  # as models that take images have it
    return made


@cache
def texts(count: int, start: int = 0) -> list[str]:
    """Pieces of a source file, of 9 to 71 bytes: shorter than a chunk, and longer than several."""
    source = Path(textwrap.__file__).read_text()[start:]
    pieces, at = [], 0
    for number in range(count):
        length = 9 + (number * 37) % 63
        pieces.append(source[at : at + length])
        at += length
    return pieces


def rows(kind: str, count: int, start: int = 0) -> Dataset:
    pieces = texts(count, start)
    if kind == "text":
        return Dataset.from_list([{"text": piece} for piece in pieces])
    if kind == "completion":
        return Dataset.from_list([{"prompt": p[: len(p) // 3], "completion": p[len(p) // 3 :]} for p in pieces])
    if kind == "end":
        return Dataset.from_list([{"prompt": piece, "completion": ""} for piece in pieces])
    assert kind == "chat", kind
    turns = [("user", 0, 4), ("assistant", 4, 9), ("user", 9, 12), ("assistant", 12, None)]
    return Dataset.from_list(
        [{"messages": [{"role": role, "content": p[a:b]} for role, a, b in turns if p[a:b]]} for p in pieces]
    )


# ---- a run ---------------------------------------------------------------------------------------------------------


def config(folder: str, **args: Any) -> SFTConfig:
    defaults = {"max_steps": STEPS, "max_grad_norm": 1.0, "max_length": 96}
    rows = {"per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH}
    return SFTConfig(**arguments(folder, **{**defaults, **rows, **args}))


def lora() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])


def trainer(case: Case, folder: str, attention: str, kind: type[SFTTrainer] = SFTTrainer, **options: Any) -> SFTTrainer:
    train, evaluate = rows(case.rows, TRAIN_ROWS), rows(case.rows, EVAL_ROWS, start=4000)
    defaults = {
        "model": model(attention, case.kind, case.means),
        "train_dataset": train.to_iterable_dataset() if case.stream else train,
        "eval_dataset": evaluate,
        "peft_config": lora() if case.lora else None,
        "compute_metrics": ordered_metrics if case.metrics else None,
        "processing_class": tokenizer(),
    }
    if case.images:
        defaults |= pictured(case, attention, train, evaluate)
    sft = kind(args=config(folder, **case.args), **{**defaults, **options})
    sft.remove_callback(PrinterCallback)
    return sft


def pictured(case: Case, attention: str, train: Dataset, evaluate: Dataset) -> dict[str, Any]:
    """What a trainer of images is given in place of text."""
    processor = sft_pictures.processor(case.images)
    prompt = sft_pictures.PROMPTS[case.images]
    return {
        "model": sft_pictures.model(case.images, attention),
        "train_dataset": sft_pictures.with_pictures(train, prompt, case.without_images),
        "eval_dataset": sft_pictures.with_pictures(evaluate, prompt),
        "processing_class": processor,
    }


def trained(case: Case, mesh: Mesh) -> Outcome:
    """The steps and an evaluation on this rank; without a ring in one process, with ``mesh.dp`` batches at a time."""
    on_a_cpu = launched(mesh if mesh.cp > 1 else Mesh(), **OFFLINE)
    with on_a_cpu, a_folder(None) as folder, quiet(), offloading_on_a_cpu() as copies:
        rows_at_a_time = {"per_device_eval_batch_size": BATCH // mesh.dp}
        if mesh.cp == 1:
            rows_at_a_time["per_device_train_batch_size"] = BATCH * mesh.dp
        functions: dict[str, Any] = {"compute_loss_func": half} if case.loss_function else {}
        sft = trainer(case.with_args(**rows_at_a_time), folder, "ring_fp32" if mesh.cp > 1 else "sdpa", **functions)
        hf_ring_attn.configure(cast(Any, sft.model), RingConfig(loss=case.loss))
        found = trl_runs.outcome(sft)
        assert (copies[0] > 0) == case.args.get("activation_offloading", False)
        if mesh.cp == 1 and mesh.dp > 1:
            # The loss is a mean over the batches of all ranks; the other numbers are sums over all ranks at each step.
            sft.args.per_device_eval_batch_size = BATCH
            again = {**trl_runs.evaluation(sft), "eval_loss": found.evaluation["eval_loss"]}
            found = dataclasses.replace(found, evaluation=again)
        return found


# ---- subclasses as people write them -------------------------------------------------------------------------------


class Uncounted(SFTTrainer):
    """Leaves out the count of labels."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        parent: Any = super()
        return parent.compute_loss(model, inputs, kwargs.get("return_outputs", False))


class Penalised(SFTTrainer):
    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        parent: Any = super()
        loss = parent.compute_loss(model, *args, **kwargs)
        self.counted = getattr(self, "counted", 0) + 1
        return loss + 0.01 * self.accelerator.unwrap_model(model).lm_head.weight.square().sum()


class Focal(SFTTrainer):
    """Scales the loss by its own size."""

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        parent: Any = super()
        loss = parent.compute_loss(model, *args, **kwargs)
        return loss * (1 - (-loss).exp()) ** 20


def losses_of_a_subclass(case: Case, mesh: Mesh, kind: type[SFTTrainer]) -> list[float]:
    """The loss, the gradient norm, the entropy and the accuracy of each step, and how many losses were counted."""
    with launched(mesh, **OFFLINE), a_folder(None) as folder, quiet():
        sft: Any = trainer(case, folder, "ring_fp32" if mesh.cp > 1 else "sdpa", kind=kind)
        sft.train()
        numbers = [entry[name] for entry in sft.state.log_history for name in NUMBERS if name in entry]
        return [*numbers, sft.evaluate()["eval_loss"], getattr(sft, "counted", 0)]


# ---- refusals ------------------------------------------------------------------------------------------------------


def half(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Any:
    """A compute_loss_func."""
    return outputs.logits.float().square().mean() / 2


def one_step(case: Case, mesh: Mesh, loss: Any = "auto", **options: Any) -> str:
    return trl_runs.first_error(trainer, case, mesh, RingConfig(loss=loss), **options)
