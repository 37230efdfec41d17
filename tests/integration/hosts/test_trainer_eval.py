"""Evaluation and prediction in a ring: whole sequences, in their order, with Trainer's values without the plugin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import LlamaForCausalLM, Seq2SeqTrainer, Seq2SeqTrainingArguments

from hf_ring_attn import RingConfig
from tests.helpers.jobs import evaluation_jobs
from tests.helpers.jobs.comparison import Ranks, assert_equal_runs, by_turns, without_ring
from tests.helpers.jobs.runs import Mesh, Row, Rows, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, numbers, train, trainer_of

FIVE = Rows(count=5, labelled="answers", length=23, seed=2)
"""Batches of two rows a replica: the last one is incomplete on one replica, and on two."""
RAGGED = Rows(count=5, shortest=9, pad_to="right", labelled="answers", seed=4)
GATHERED = RingConfig(loss="gathered")

RUNS = [
    Run(why="the loss alone", steps=0, evaluated=FIVE),
    Run(why="compute_metrics and predict", steps=0, evaluated=FIVE, metrics="logits", predicts="labelled"),
    Run(
        why="rows of other lengths in each batch, left padding", steps=0, metrics="logits", predicts="labelled",
        rows=Rows(shortest=9, pad_to="left"), evaluated=RAGGED,
    ),
    Run(why="preprocess_logits_for_metrics", steps=0, evaluated=FIVE, metrics="argmax", predicts="labelled"),
    Run(
        why="batch_eval_metrics", steps=0, evaluated=FIVE, metrics="batches",
        arguments={"batch_eval_metrics": True, "include_for_metrics": ["loss"]},
    ),
    Run(
        why="metrics of inputs and losses, moved to the CPU at each step", steps=0, evaluated=FIVE, metrics="logits",
        arguments={"include_for_metrics": ["inputs", "loss"], "eval_accumulation_steps": 1},
    ),
    Run(why="predict without labels", steps=0, evaluated=FIVE, predicts="unlabelled"),
    Run(
        why="labels that the trainer does not know, so that the model's loss is a prediction", steps=0, evaluated=FIVE,
        metrics="logits", arguments={"label_names": []},
    ),
    Run(
        why="metrics while training", steps=6, evaluated=FIVE, metrics="logits", predicts="labelled",
        arguments={"eval_steps": 3},
    ),
    Run(why="one row, fewer than replicas", steps=0, evaluated=Rows(count=1), metrics="logits", predicts="labelled"),
    Run(
        why="packed rows and a window", steps=0, model="mistral", evaluated=Rows(count=5, packed=True, length=27),
        metrics="logits", predicts="unlabelled",
    ),
    Run(why="gathered loss", steps=0, evaluated=FIVE, metrics="logits", predicts="labelled", ring=GATHERED),
    Run(
        why="label smoothing", steps=0, evaluated=FIVE, metrics="logits", predicts="labelled", ring=GATHERED,
        arguments={"label_smoothing_factor": 0.1},
    ),
    Run(
        why="label smoothing in chunks", steps=0, evaluated=FIVE, metrics="logits", predicts="labelled",
        arguments={"label_smoothing_factor": 0.1},
    ),
    Run(
        why="compute_loss_func, tokens not averaged over devices", steps=0, evaluated=FIVE, ring=GATHERED,
        loss_function=True, metrics="logits", arguments={"average_tokens_across_devices": False},
    ),
    Run(
        why="tokens not averaged over devices", steps=0, evaluated=FIVE,
        arguments={"average_tokens_across_devices": False},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("run", "mesh"), by_turns(RUNS))
@pytest.mark.turns
def test_a_ring_evaluates_as_one_process_does(ranks: Ranks, run: Run, mesh: Mesh) -> None:
    outcomes = ranks(mesh.size).run(train, run, mesh)
    want = without_ring(ranks, run, mesh)
    for got in outcomes:
        assert got.ring_size == mesh.cp
        assert_equal_runs(got, want)
        if want.predictions is not None:
            assert got.predictions is not None
            assert got.predictions.shape == want.predictions.shape
            torch.testing.assert_close(got.predictions, want.predictions, rtol=1e-5, atol=1e-5)
        assert (got.label_ids is None) == (want.label_ids is None)
        if got.label_ids is not None and want.label_ids is not None:
            assert torch.equal(got.label_ids, want.label_ids)
    assert bool(run.predicts) == (want.predictions is not None)


@pytest.mark.turns
@pytest.mark.parametrize("host", ["Trainer", "SFTTrainer"])
@pytest.mark.parametrize(("metrics", "only_loss"), [(False, None), (False, True), (True, True), (True, False)], ids=str)
def test_an_evaluation_makes_logits_for_metrics_only(
    ranks: Ranks, host: str, metrics: bool, only_loss: bool | None
) -> None:
    for largest, logits in ranks(2).run(evaluation_jobs.most_values, host, metrics, only_loss):
        assert (largest >= logits) == (metrics and not only_loss), (largest, logits)


@pytest.mark.parametrize(
    "options", [{}, {"bf16": True}, {"torch_compile": True, "torch_compile_backend": "eager"}], ids=str
)
@pytest.mark.turns
def test_an_evaluation_before_training_changes_nothing(ranks: Ranks, options: dict[str, object]) -> None:
    """`evaluate` had prepared the bare model, so nothing wrapped it for training and nobody averaged gradients."""
    run = Run(why="", steps=2, evaluated=FIVE, arguments={"eval_strategy": "no", **options})
    want = ranks(2).run(trained_after, run, 0)
    for got in ranks(2).run(trained_after, run, 2):
        assert got[0] == want[0][0]
        assert all(torch.equal(x, want[0][1][name]) for name, x in got[1].items())
        assert got[2] == [want[0][2][0]] * 2


def trained_after(run: Run, evaluations: int) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], list[float]]:
    """The log of a training that so many evaluations precede, the weights after it, and the losses of the former."""
    mesh = Mesh(cp=2)
    with launched(mesh), a_folder(None) as folder:
        trainer = trainer_of(run, mesh, folder)
        losses = [trainer.evaluate()["eval_loss"] for _ in range(max(evaluations, 0))]
        trainer.state.log_history.clear()
        trainer.train()
        assert trainer.model is not None
        weights = {name: x.detach().clone() for name, x in trainer.model.named_parameters()}
        log = numbers([entry for entry in trainer.state.log_history if "loss" in entry])
        return log, weights, losses or [trainer_of(run, mesh, folder).evaluate()["eval_loss"]]


class Counted(LlamaForCausalLM):  # type: ignore[no-untyped-call]  # transformers' __init_subclass__
    """Returns some numbers of each row beside its logits."""

    def forward(self, input_ids: Any = None, labels: Any = None, **given: Any) -> Any:
        out = super().forward(input_ids=input_ids, labels=labels, **given)
        out["counts"] = self.lm_head.weight[: self.counts, 0].expand(len(input_ids), -1)
        return out


def shapes_beside_logits(mesh: Mesh, numbers_of_a_row: int) -> list[tuple[int, ...]]:
    with launched(mesh), a_folder(None) as folder:
        trainer: Any = trainer_of(Run(why="", evaluated=FIVE), mesh, folder)
        trainer.model.__class__, trainer.model.counts = Counted, numbers_of_a_row
        return [torch.as_tensor(x).shape for x in trainer.predict(FIVE.make()).predictions]


@pytest.mark.parametrize("numbers_of_a_row", [12, 7])
def test_numbers_of_rows_are_predicted_once(ranks: Ranks, numbers_of_a_row: int) -> None:
    """As many as a rank has tokens were gathered as if they were tokens, and others were refused."""
    want = ranks(1).run(shapes_beside_logits, Mesh(), numbers_of_a_row)[0]
    assert want == [(5, 23, 97), (5, numbers_of_a_row)]
    assert ranks(2).run(shapes_beside_logits, Mesh(cp=2), numbers_of_a_row) == [want] * 2


def predicted_by_experts(mesh: Mesh) -> list[torch.Tensor]:
    with launched(mesh), a_folder(None) as folder:
        trainer: Any = trainer_of(Run(why="", model="mixtral", evaluated=FIVE), mesh, folder)
        found = trainer.predict(FIVE.make())
        logits, aux_loss, *routers = found.predictions
        return [torch.as_tensor(x) for x in (logits, aux_loss, *routers[0])]


@pytest.mark.parametrize("mesh", [Mesh(cp=2), Mesh(dp=2, cp=2)], ids=str)
def test_router_logits_of_a_last_batch_are_predicted(ranks: Ranks, mesh: Mesh) -> None:
    """Those of 22 of 23 tokens were dropped, as if they were rows that fill up the batch."""
    want = ranks(mesh.dp).run(predicted_by_experts, mesh.alone)[0]
    for got in ranks(mesh.size).run(predicted_by_experts, mesh):
        assert len(got) == len(want) > 3
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


# ---- last batches ----------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Row]):
    """Rows without a length."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows.make())


def of_last_batches(mesh: Mesh, options: dict[str, Any]) -> list[dict[str, float]]:
    """The numbers of an evaluation on a stream, or of one of listed rows if it gathers objects."""
    rows = FIVE.make() if "eval_use_gather_object" in options else Stream(FIVE)
    with launched(mesh), a_folder(None) as folder:
        run = Run(why="", evaluated=FIVE, metrics="logits", arguments=options)
        return numbers([trainer_of(run, mesh, folder, eval_dataset=rows).evaluate()])


@pytest.mark.parametrize(
    "options", [{}, {"accelerator_config": {"dispatch_batches": False}}, {"eval_use_gather_object": True}], ids=str
)
def test_the_rows_of_a_last_batch_count_as_in_one_process(ranks: Ranks, options: dict[str, Any]) -> None:
    """A stream's last batch counted as a full one (a loss of 4.73 for 4.63), and gathered objects lost rows."""
    want = ranks(1).run(of_last_batches, Mesh(), options)[0]
    for got in ranks(2).run(of_last_batches, Mesh(cp=2), options):
        assert got == [pytest.approx(entry, rel=1e-4) for entry in want]


# ---- Seq2SeqTrainer --------------------------------------------------------------------------------------------------


def of_seq2seq(mesh: Mesh, generates: bool) -> tuple[list[dict[str, float]], tuple[int, ...]]:
    """The log of an evaluation in the middle of a training by Seq2SeqTrainer, and the shape of its predictions."""
    run = Run(why="", steps=2, rows=RAGGED, evaluated=Rows(count=3, shortest=9, pad_to="left"), metrics="logits")
    with launched(mesh), a_folder(None) as folder:
        usual = trainer_of(run, mesh, folder)
        assert usual.model is not None
        options: dict[str, Any] = {
            "max_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "logging_steps": 1,
            "optim": "sgd",
        }
        args = Seq2SeqTrainingArguments(
            folder, predict_with_generate=generates, generation_max_length=40, per_device_eval_batch_size=3,
            per_device_train_batch_size=2, use_cpu=True, disable_tqdm=True, report_to="none", save_strategy="no",
            remove_unused_columns=False, **options,
        )  # fmt: skip
        rows: Any = run.evaluated.make()
        given: Any = {"train_dataset": run.rows.make(), "data_collator": run.rows.collate}
        trainer = Seq2SeqTrainer(usual.model, args, eval_dataset=rows, compute_metrics=usual.compute_metrics, **given)
        trainer.train()
        found = trainer.predict(rows)
        log = [*numbers(trainer.state.log_history), *numbers([found.metrics or {}])]
        return log, torch.as_tensor(found.predictions).shape


@pytest.mark.parametrize("generates", [False, True], ids=["logits", "generated"])
def test_seq2seq_trainer_counts_each_row_once(ranks: Ranks, generates: bool) -> None:
    """It gathers without dropping samples, so each rank of a ring gave its rows again."""
    want, shape = ranks(1).run(of_seq2seq, Mesh(), generates)[0]
    for log, found in ranks(2).run(of_seq2seq, Mesh(cp=2), generates):
        assert found == shape
        assert [pytest.approx(entry, rel=1e-4) for entry in want] == log


def steps_of_evaluations(mesh: Mesh) -> list[int]:
    """The steps that an evaluation and a prediction say they took, and those of the training between."""
    with launched(mesh), a_folder(None) as folder:
        trainer: Any = trainer_of(Run(why="", steps=2, arguments={"eval_strategy": "no"}), mesh, folder)
        found = [trainer.evaluate(FIVE.make()), trainer.train().metrics, trainer.predict(FIVE.make()).metrics]
        names = ("eval", "train", "test")
        each: Any = zip(names, found, strict=True)
        return [round(numbers[f"{name}_steps_per_second"] * numbers[f"{name}_runtime"]) for name, numbers in each]


def test_the_steps_per_second_are_those_of_one_process(ranks: Ranks) -> None:
    """Trainer divides an evaluation's rows by the batches of all processes: two steps for three."""
    want = ranks(1).run(steps_of_evaluations, Mesh())
    assert ranks(2).run(steps_of_evaluations, Mesh(cp=2)) == [want[0]] * 2
