"""dispatch_batches=True in rings: one rank reads, and all train as processes without rings that dispatch batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer

from hf_ring_attn import errors
from hf_ring_attn.integration.hosts.one_reader import ReadOnce
from tests.helpers.jobs import reward_jobs, trl_runs
from tests.helpers.jobs.comparison import LOSS, Ranks, assert_trains_as_without_ring
from tests.helpers.jobs.runs import Mesh, Row, Rows, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, numbers, train, trainer_of
from tests.helpers.models.tiny_models import VOCABULARY, tiny

DISPATCHED = {"accelerator_config": {"dispatch_batches": True}}
PADDED = Rows(shortest=9, pad_to="right", labelled="answers")
RUNS = [
    Run(why="accumulation, rows of unequal length", rows=PADDED, metrics="logits", predicts="labelled",
        arguments={**DISPATCHED, "gradient_accumulation_steps": 3}),
    Run(why="workers", rows=PADDED, arguments={**DISPATCHED, "dataloader_num_workers": 2}),
    Run(why="workers that stay", arguments={**DISPATCHED, "dataloader_num_workers": 1,
                                            "dataloader_persistent_workers": True}),
    Run(why="split batches", arguments={"accelerator_config": {"dispatch_batches": True, "split_batches": True}}),
]  # fmt: skip
SEVERAL_RINGS = Run(
    why="two rings, whole steps", arguments=DISPATCHED, rows=Rows(count=8), evaluated=Rows(count=4, seed=2)
)


@pytest.mark.turns
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.why)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_ring_trains_as_one_process(ranks: Ranks, run: Run, size: int) -> None:
    assert_trains_as_without_ring(ranks, run, Mesh(cp=size))


@pytest.mark.full
def test_rings_train_as_processes(ranks: Ranks) -> None:
    assert_trains_as_without_ring(ranks, SEVERAL_RINGS, Mesh(dp=2, cp=2))


def test_a_run_goes_on_in_the_middle_of_an_epoch(ranks: Ranks, tmp_path: Path) -> None:
    saving = {**DISPATCHED, "save_strategy": "steps", "save_steps": 1, "save_only_model": False}
    run = Run(why="", rows=Rows(count=8), steps=3, arguments=saving)
    whole = ranks(2).run(train, run, Mesh(cp=2), str(tmp_path))[0]
    rest = ranks(2).run(train, run, Mesh(cp=2), str(tmp_path), str(tmp_path / "checkpoint-1"))
    for outcome in rest:
        assert outcome.steps == 2
        for name, parameter in whole.parameters.items():
            torch.testing.assert_close(outcome.parameters[name], parameter, rtol=1e-6, atol=1e-7)


def test_an_evaluation_of_pairs_counts_all_rows_of_its_last_batch(ranks: Ranks) -> None:
    """Six pairs, four a batch: the dispatcher counts four rows in the last batch, other loaders two pairs."""
    case = reward_jobs.Case("", {**DISPATCHED, "per_device_eval_batch_size": 4})
    want = ranks(1).run(evaluated_pairs, case, Mesh())[0]
    for loss in ranks(2).run(evaluated_pairs, case, Mesh(cp=2)):
        assert loss == pytest.approx(want, rel=LOSS)


def evaluated_pairs(case: reward_jobs.Case, mesh: Mesh) -> float:
    with launched(mesh, **trl_runs.OFFLINE), a_folder(None) as folder, trl_runs.quiet():
        attention = "ring_fp32" if mesh.cp > 1 else "sdpa"
        return trl_runs.evaluation(reward_jobs.trainer(case, folder, attention))["eval_loss"]


# ---- what is read ----------------------------------------------------------------------------------------------------


class Augmented(Dataset[Row]):
    """Rows with random tokens in some places, drawn at each reading."""

    column_names = ("input_ids", "labels")

    def __init__(self, rows: Rows, broken: int | None = None) -> None:
        self.rows, self.broken, self.reads = rows.make(), broken, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        self.reads += 1
        if index == self.broken:
            raise OSError(f"row {index} cannot be read")
        row = self.rows[index]
        noise = torch.randint(0, VOCABULARY, row["input_ids"].shape)
        return {**row, "input_ids": torch.where(torch.rand(noise.shape) < 0.2, noise, row["input_ids"])}


class Masks(Trainer):
    """Masks tokens at random in its own step, too."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        hidden = torch.rand(inputs["input_ids"].shape) < 0.15
        inputs = {**inputs, "input_ids": inputs["input_ids"].masked_fill(hidden, 5)}
        return super().training_step(model, inputs, num_items_in_batch)


RUN = Run(why="", rows=Rows(count=8), arguments={**DISPATCHED, "eval_strategy": "no"})


def trained(
    mesh: Mesh, kind: type[Trainer] = Trainer, broken: int | None = None
) -> tuple[list[dict[str, float]], int, str]:
    """The log, how many rows this rank read, and its error."""
    torch.manual_seed(0)
    with launched(mesh), a_folder(None) as folder:
        data, error = Augmented(RUN.rows, broken), ""
        trainer = trainer_of(RUN, mesh, folder, kind=kind, train_dataset=data)
        try:
            trainer.train()
        except (OSError, errors.Refused) as raised:
            error = f"{type(raised).__name__}: {raised}"
        return numbers(trainer.state.log_history), data.reads, error


@pytest.mark.parametrize("kind", [Trainer, Masks])
def test_random_augmentations_are_those_of_one_process_and_read_once(ranks: Ranks, kind: type[Trainer]) -> None:
    """The other ranks drew on where the first had drawn more, so that masks of the program's own step differed."""
    want, reads, error = ranks(1).run(trained, Mesh(), kind)[0]
    assert not error and reads >= 8
    first, second = ranks(2).run(trained, Mesh(cp=2), kind)
    assert (first[1], second[1]) == (reads, 0)
    for log, _, error in (first, second):
        assert not error and log == [pytest.approx(entry, rel=LOSS) for entry in want]


def test_a_row_that_cannot_be_read_ends_all_ranks(ranks: Ranks) -> None:
    first, second = ranks(2).run(trained, Mesh(cp=2), Trainer, 3)
    assert first[2] == "OSError: row 3 cannot be read"
    assert second[2].startswith("RefusedElsewhere: ") and "rank 0: OSError: row 3 cannot be read" in second[2]


# ---- loops of accelerate ---------------------------------------------------------------------------------------------

IDS = torch.arange(5 * 6).view(5, 6)


def collate(rows: list[int]) -> dict[str, Any]:
    """A batch of all that batches hold."""
    ids = IDS[rows]
    halves = {"seen": ids > 9, "weights": (ids.to(torch.bfloat16), torch.tensor(0.5, dtype=torch.float64))}
    return {"input_ids": ids.t().contiguous().t(), "names": [f"row {row}" for row in rows], "more": halves,
            "none": None, "empty": ids.new_zeros(0, 3)}  # fmt: skip


def prepared(mesh: Mesh, rows: int = 5, **options: Any) -> tuple[Any, Any]:
    # Without a ring accelerate joins and cuts the batches that it dispatches, and fails at some of these entries.
    options = {"dispatch_batches": mesh.cp > 1, **options}
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    loader: Any = DataLoader(range(rows), batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    return accelerator, accelerator.prepare(tiny("llama", "ring_fp32" if mesh.cp > 1 else None), loader)[1]


def looped(mesh: Mesh) -> tuple[list[Any], Tensor, list[Any], bool]:
    with launched(mesh):
        accelerator, loader = prepared(mesh)
        assert accelerator.prepare(loader) is loader
        batches, gathered = [], []
        for batch in loader:
            batches.append(batch)
            gathered.append(accelerator.gather_for_metrics(batch["input_ids"]))
        later = [batch["names"] for batch in accelerator.skip_first_batches(loader, 1)]
        return batches, torch.cat(gathered), later, isinstance(loader.dataset, ReadOnce)


def test_a_loop_gets_all_that_a_batch_holds(ranks: Ranks) -> None:
    want = ranks(1).run(looped, Mesh())[0]
    assert not want[3] and torch.equal(want[1], IDS)
    for batches, gathered, later, is_read_once in ranks(2).run(looped, Mesh(cp=2)):
        assert is_read_once and torch.equal(gathered, IDS) and later == want[2] == [["row 2", "row 3"], ["row 4"]]
        for got, one in zip(batches, want[0], strict=True):
            assert got.keys() == one.keys() and got["names"] == one["names"] and got["none"] is None
            torch.testing.assert_close(
                [got["input_ids"], got["empty"], got["more"]["seen"], *got["more"]["weights"]],
                [one["input_ids"], one["empty"], one["more"]["seen"], *one["more"]["weights"]], rtol=0, atol=0,
            )  # fmt: skip


def refused(mesh: Mesh, rows: int, **options: Any) -> str:
    with launched(mesh), pytest.raises(errors.DispatchedBatches) as refusal:
        prepared(mesh, rows, **options)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("mesh", "options", "text"),
    [(Mesh(dp=2, cp=2), {"rows": 5}, "with 2 rings and a last batch that is not full, or a batch sampler"),
     (Mesh(cp=2), {"rows": 4, "use_stateful_dataloader": True}, "ranks would save unlike states")],
)  # fmt: skip
def test_what_one_reader_would_change_is_refused(ranks: Ranks, mesh: Mesh, options: Any, text: str) -> None:
    if options.get("use_stateful_dataloader"):
        pytest.importorskip("torchdata")
    assert all(text in words for words in ranks(mesh.size).run(refused, mesh, **options))


class Unlike(torch.utils.data.Sampler[int]):
    """A sampler that is not the same on all ranks."""

    def __iter__(self) -> Any:
        return iter(range(4 + 2 * torch.distributed.get_rank()))

    def __len__(self) -> int:
        return 4 + 2 * torch.distributed.get_rank()


def of_unlike_length() -> str:
    with launched(Mesh(cp=2)):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
        loader: Any = DataLoader(range(9), batch_size=2, collate_fn=collate, sampler=Unlike())  # type: ignore[arg-type]
        _, loader = accelerator.prepare(tiny("llama", "ring_fp32"), loader)
        try:
            for batch in loader:
                accelerator.gather_for_metrics(batch["input_ids"])
        except errors.RanksDiffer as error:
            return str(error)
        return ""


def test_loaders_of_unlike_length_end_with_words(ranks: Ranks) -> None:
    assert "end of the data, but got rank 0: True, rank 1: False" in ranks(2).run(of_unlike_length)[1]
