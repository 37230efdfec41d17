"""Trainers whose compute_loss needs whole rows, as people write them for one process, and rows of other names."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, logsigmoid, normalize
from transformers import AutoModelForSequenceClassification, LlamaForCausalLM, Trainer

from tests.helpers.jobs.runs import Row, Rows
from tests.helpers.models.tiny_models import tiny

SEPARATOR = 3


def next_token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """[B, S - 1] of logits and labels of whole rows, which it shifts by hand."""
    return cross_entropy(logits[:, :-1].transpose(1, 2).float(), labels[:, 1:], reduction="none")


def called(model: Any, inputs: Any) -> tuple[Any, Tensor, Tensor]:
    """The outputs of a call without labels, the losses of its tokens, and how many have labels."""
    labels = inputs["labels"]
    outputs = model(**{name: x for name, x in inputs.items() if name != "labels"})
    return outputs, next_token_losses(outputs.logits, labels), (labels[:, 1:] != -100).sum()


class Weighs(Trainer):
    """Weighs tokens by the separators before them and by their place, and takes the mean of a batch."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs, each, labelled = called(model, inputs)
        weights = 1 + (inputs["input_ids"] == SEPARATOR).cumsum(1)[:, 1:] + torch.linspace(0, 1, each.shape[1]).to(each)
        loss = (each * weights).sum() / labelled
        return (loss, outputs) if return_outputs else loss


class Counts(Trainer):
    """Divides a sum by Trainer's count, as transformers does, and gathers numbers to scale by those of all rows."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs, each, labelled = called(model, inputs)
        rows = self.accelerator.gather(each.detach().mean(1))
        assert len(rows) == len(each) * self.accelerator.num_processes
        count = labelled if num_items_in_batch is None else num_items_in_batch
        loss = each.sum() / count * (1 + rows.std())
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


class KeepsSome(Trainer):
    """Its batch says of how many tokens it wants logits, as those of TRL's trainers that sample answers do."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        return {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], "logits_to_keep": 7}

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        each = next_token_losses(outputs.logits, inputs["input_ids"][:, -7:])
        loss = (each * inputs["attention_mask"][:, -6:]).sum(1).square().mean()
        return (loss, outputs) if return_outputs else loss


class AddsToTheModels(Trainer):
    """Adds to the model's own loss how far hidden states spread in a row, and the hardest tokens."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, *given: Any, **named: Any) -> Any:
        outputs = model(**inputs, output_hidden_states=True)
        hardest = next_token_losses(outputs.logits, inputs["labels"]).flatten().topk(5).values.mean()
        loss = outputs.loss + 0.1 * hardest + outputs.hidden_states[1].std(1).mean()
        return (loss, {"loss": loss, "logits": outputs.logits}) if return_outputs else loss


class Distils(Trainer):
    """Compares each row with a teacher, which has transformers' own attention, as a mean over the batch."""

    teacher: Any = None

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, *given: Any, **named: Any) -> Any:
        if self.teacher is None:
            self.teacher = tiny("llama", self.attention, hidden_size=16, num_hidden_layers=1)
            self.teacher.eval().to(inputs["input_ids"].device)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        with torch.no_grad():
            wanted = self.teacher(ids, mask).logits.softmax(-1)
        outputs = model(input_ids=ids, attention_mask=mask)
        each = kl_div(outputs.logits.log_softmax(-1), wanted, reduction="none").sum(-1)
        loss = (each * mask).sum() / mask.sum()
        return (loss, outputs) if return_outputs else loss

    @property
    def attention(self) -> str:
        return "sdpa"


class DistilsInTheRing(Distils):
    """The teacher is in the ring, too, where there is one."""

    @property
    def attention(self) -> str:
        model: Any = self.model
        return str(model.config._attn_implementation)


class TrainingStep(Weighs):
    """Its training_step calls its compute_loss, past Trainer's."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        whole = self._prepare_inputs(inputs)
        loss: Tensor = self.compute_loss(model, whole)
        self.accelerator.backward(loss)
        return loss.detach()


@dataclass(frozen=True, kw_only=True)
class Pairs(Rows):
    """Rows and what they are compared with: the row in reverse, less two tokens.

    Args:
        names: of both kinds. nested: each kind is a dict.
    """

    names: tuple[str, str] = ("chosen_", "rejected_")
    nested: bool = False

    def collate(self, rows: list[Row]) -> Row:
        other = [{name: x.flip(0)[2:] for name, x in row.items()} for row in rows]
        both = super().collate(rows), super().collate(other)
        if self.nested:
            return dict(zip(("chosen", "rejected"), both, strict=True))  # type: ignore[arg-type]
        return {
            f"{name}{key}": x for name, batch in zip(self.names, both, strict=True) for key, x in batch.items()
            if key != "labels"
        }  # fmt: skip


class Prefers(Trainer):
    """ORPO's kind of loss, of two kinds of rows in calls of their own."""

    def log_probs(self, model: Any, inputs: Any, kind: str) -> tuple[Tensor, Tensor]:
        ids, mask = inputs[f"{kind}_input_ids"], inputs[f"{kind}_attention_mask"]
        logits = model(ids, attention_mask=mask).logits
        each = -next_token_losses(logits, ids) * mask[:, 1:]
        return each.sum(1) / mask[:, 1:].sum(1), logits

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, *given: Any, **named: Any) -> Any:
        better, logits = self.log_probs(model, inputs, "chosen")
        worse, _ = self.log_probs(model, inputs, "rejected")
        loss = (-logsigmoid(better - worse) - better).mean()
        return (loss, {"loss": loss, "logits": logits}) if return_outputs else loss


class PrefersDicts(Prefers):
    def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        flat = {f"{kind}_{name}": x for kind, rows in inputs.items() for name, x in rows.items()}
        return super().compute_loss(model, flat, *given, **named)


@dataclass(frozen=True, kw_only=True)
class Texts(Rows):
    """Batches of texts and a target for each, as a program has whose loss makes the tokens."""

    def collate(self, rows: list[Row]) -> Any:
        texts = [" ".join(map(str, row["input_ids"].tolist())) for row in rows]
        return {"text": texts, "target": torch.tensor([float(len(row["input_ids"]) % 2) for row in rows])}


class MakesTokens(Trainer):
    """Makes tokens of a batch's texts, and scores the last token of each."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, *given: Any, **named: Any) -> Any:
        rows = [{"input_ids": torch.tensor([int(word) for word in text.split()])} for text in inputs["text"]]
        batch = {name: x.to(inputs["target"].device) for name, x in Rows(pad_to="left").collate(rows).items()}
        scores = model(**batch).logits[:, -1].float().logsumexp(-1)
        loss = (scores - inputs["target"]).square().mean()
        return (loss, {"loss": loss, "logits": scores}) if return_outputs else loss


class Regularized(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """Adds a spread of its states to its loss, and keeps another one in an attribute."""

    @classmethod
    def of(cls, model: Any) -> Any:
        model.__class__ = cls
        return model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **_: Any) -> Any:
        states = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        self.kept = states.std()
        logits = self.lm_head(states)
        return {"loss": next_token_losses(logits, labels).mean() + states.std(1).mean(), "logits": logits}


class ReadsAttributes(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, *given: Any, **named: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs["loss"] + self.accelerator.unwrap_model(model).kept
        return (loss, outputs) if return_outputs else loss


class Hooked(Weighs):
    """Its loss uses states that a hook took out of a layer."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, *given: Any, **named: Any) -> Any:
        found: list[Tensor] = []
        layer = self.accelerator.unwrap_model(model).model.layers[0].mlp
        handle = layer.register_forward_hook(lambda _module, _inputs, output: found.append(output))
        loss = super().compute_loss(model, inputs)
        handle.remove()
        return loss + self.term(found[-1], inputs)

    def term(self, states: Tensor, _inputs: Any) -> Tensor:
        return states.square().mean()


class HooksMasked(Hooked):
    """Multiplies these states by a mask of whole rows, which has another shape."""

    def term(self, states: Tensor, inputs: Any) -> Tensor:
        kept: Tensor = states * (inputs["labels"] != -100)[..., None].expand_as(states)
        return kept.square().mean()


class Retriever(nn.Module):
    """Embeds queries and passages: a module of a program's own around a transformers model, whose rows it pools."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder.model
        self.config = encoder.config
        self.scale = nn.Parameter(torch.tensor(5.0))

    def embed(self, rows: Row) -> Tensor:
        hidden, mask = self.encoder(**rows).last_hidden_state, rows["attention_mask"][..., None]
        return normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    def forward(self, query: Row, passage: Row) -> dict[str, Tensor]:
        scores = self.scale * self.embed(query) @ self.embed(passage).T
        return {"loss": cross_entropy(scores, torch.arange(len(scores), device=scores.device)), "logits": scores}


class Retrieves(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, *given: Any, **named: Any) -> Any:
        names = "input_ids", "attention_mask"
        outputs = model(*({name: inputs[f"{kind}_{name}"] for name in names} for kind in ("query", "passage")))
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class Reranker(nn.Module):
    """A classifier in a module of a program's own, which gets a dict of rows, as FlagEmbedding's rerankers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = copy.deepcopy(model.config)
        self.config.update({"num_labels": 1, "pad_token_id": 0})
        self.model = AutoModelForSequenceClassification.from_config(  # type: ignore[no-untyped-call]
            self.config, attn_implementation=model.config._attn_implementation
        )

    def forward(self, chosen: Row, rejected: Row) -> dict[str, Tensor]:
        scores = [self.model(rows["input_ids"], rows["attention_mask"]).logits for rows in (chosen, rejected)]
        return {"loss": -logsigmoid(scores[0] - scores[1]).mean() + scores[0].square().mean(), "logits": scores[0]}


class Reranks(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, *given: Any, **named: Any) -> Any:
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


def sum_of_logs(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    """A loss function of a model's own: of all tokens, by a mean over each row."""
    return (next_token_losses(logits, labels) + log_softmax(logits, 1).square().mean()).mean(1).sum()


def with_a_loss_function(model: Any) -> Any:
    model.loss_function = sum_of_logs
    return model
