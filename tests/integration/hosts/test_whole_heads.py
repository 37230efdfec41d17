"""Heads of whole rows train in a ring as in one process: classes of rows and tokens, scores, spans, masked tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Trainer

from hf_ring_attn import RingConfig
from tests.helpers.jobs.comparison import MESHES, Ranks, assert_equal_runs, without_ring
from tests.helpers.jobs.runs import Judged, Mesh, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, train, trainer_of

ACCUMULATED = {"gradient_accumulation_steps": 2}


class Around(nn.Module):
    """A program's own module around a head. It names the inputs that it takes, so it failed with `use_cache`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        return {"loss": out.loss + 0.01 * out.logits.pow(2).mean(), "logits": out.logits}


class OfFirstWords(Trainer):
    """Makes its own classes of rows; the batch's labels, of tokens, are for another model. It was `SelfCheckNotRun`."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        ids = inputs["input_ids"]
        out = model(input_ids=ids, attention_mask=inputs["attention_mask"])
        loss = cross_entropy(out.logits, ids[:, 0] % 3)
        return (loss, out) if return_outputs else loss


def run_of(
    why: str, model: str, by: str = "class", pad_to: str = "right", length: int = 23, **more: object
) -> Run:  # fmt: skip
    """A run of rows of uneven lengths, with metrics of its evaluation and predictions."""
    rows = Judged(by=by, shortest=9 if pad_to else None, pad_to=pad_to, length=length)
    given = {"metrics": "logits", "predicts": "labelled", **more}
    return Run(why=why, model=model, rows=rows, evaluated=replace(rows, count=5, seed=2), **given)  # type: ignore[arg-type]


RUNS = [
    run_of("the last token's class", "llama of rows", arguments=ACCUMULATED),
    run_of("the last token's class, padded on the left", "llama of rows", pad_to="left"),
    run_of("a score, regression", "llama of scores", by="score", arguments={"learning_rate": 1e-3}),
    run_of("labels that no one uses", "llama of rows", by="tokens", metrics="", predicts="", kind=OfFirstWords),
    run_of(
        "FSDP2, labels that no one uses",
        "llama of rows",
        by="tokens",
        metrics="",
        predicts="",
        kind=OfFirstWords,
        fsdp2=True,
    ),
    run_of("several classes at once", "llama of rows", by="several"),
    run_of("several classes at once, as many as tokens", "llama of rows", by="several", pad_to="", length=3),
    run_of("LoRA and a trained head", "llama of rows", lora=("score",), arguments=ACCUMULATED),
    run_of("classes of tokens", "llama of tokens", by="tokens"),
    run_of("classes of tokens, means of batches", "bert of tokens", by="tokens", arguments=ACCUMULATED),
    run_of("in a module that takes no use_cache", "llama of tokens", by="tokens", change=Around, arguments=ACCUMULATED),
    run_of("spans", "llama of spans", by="span", arguments={"label_names": ["start_positions", "end_positions"]}),
    run_of("the first token's class, by a pooler", "bert of rows", arguments=ACCUMULATED),
    run_of("the mean's class", "modernbert of rows", pad_to="left"),
    run_of(
        "embeddings, a loss among rows without labels",
        "modernbert of embeddings",
        by="nothing",
        metrics="",
        predicts="unlabelled",
        arguments=ACCUMULATED,
    ),
    run_of(
        "masked tokens and pairs, in one loss",
        "bert of pairs",
        by="pairs",
        metrics="",
        predicts="",
        arguments={**ACCUMULATED, "label_names": ["labels", "next_sentence_label"]},
    ),
    run_of("masked tokens, means of batches", "bert of masked tokens", by="masked", arguments=ACCUMULATED),
    run_of("masked tokens of all batches", "modernbert of masked tokens", by="masked", arguments=ACCUMULATED),
    run_of(
        "masked tokens, labels smoothed, all logits",
        "bert of masked tokens",
        by="masked",
        ring=RingConfig(loss="sharded"),
        arguments={"label_smoothing_factor": 0.1},
    ),
    run_of(
        "classes of tokens, not averaged over devices",
        "llama of tokens",
        by="tokens",
        predicts="unlabelled",
        arguments={**ACCUMULATED, "average_tokens_across_devices": False},
    ),
    run_of(
        "checkpointed, reentrant, predictions without labels",
        "llama of rows",
        predicts="unlabelled",
        arguments={"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ),
    run_of(
        "a loss function of whole rows",
        "llama of tokens",
        by="tokens",
        pad_to="",
        loss_function=True,
        arguments=ACCUMULATED,
    ),
    run_of("masked at random", "bert of masked tokens", by="random", metrics="", predicts=""),
    run_of("masked tokens alone", "modernbert of the masked tokens alone", by="masked", metrics="", predicts=""),
]


@pytest.mark.parametrize(("run", "mesh"), [
    pytest.param(run, mesh, id=f"{run.why}-{mesh}", marks=() if mesh is MESHES[0] else pytest.mark.full)
    for run in RUNS for mesh in MESHES
])  # fmt: skip
@pytest.mark.turns
def test_a_head_of_whole_rows_trains_as_in_one_process(ranks: Ranks, run: Run, mesh: Mesh) -> None:
    want = without_ring(ranks, run, mesh)
    for got in ranks(mesh.size).run(train, run, mesh):
        assert got.ring_size == mesh.cp
        assert_equal_runs(got, want)
        if want.predictions is not None:
            assert got.predictions is not None
            torch.testing.assert_close(got.predictions, want.predictions, rtol=1e-5, atol=1e-5)
        if want.label_ids is not None:
            assert got.label_ids is not None
            assert torch.equal(got.label_ids, want.label_ids)


def masked_by_workers(run: Run, mesh: Mesh) -> list[torch.Tensor]:
    """The labels of this rank's first two batches, masked by workers of its loader."""
    with launched(mesh), a_folder(None) as folder:
        batches = iter(trainer_of(run, mesh, folder).get_train_dataloader())
        return [next(batches)["labels"] for _ in range(2)]


@pytest.mark.turns
def test_workers_of_a_ring_mask_alike(ranks: Ranks) -> None:
    run = run_of("masked by workers", "bert of masked tokens", by="random", arguments={"dataloader_num_workers": 1})
    (alone,) = ranks(1).run(masked_by_workers, run, Mesh())
    first, second = ranks(2).run(masked_by_workers, run, MESHES[0])
    for one, other, want in zip(first, second, alone, strict=True):
        assert torch.equal(one, want)
        assert torch.equal(other, want)
