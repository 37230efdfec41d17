"""compute_loss as people write it for one process: what it may leave out of the model's call, and do with the loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer

import hf_ring_attn
from hf_ring_attn import RingConfig, errors
from tests.helpers.jobs.comparison import LOSS, Ranks
from tests.helpers.jobs.plain_jobs import tokens
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.jobs.self_check_jobs import lora
from tests.helpers.jobs.trainer_jobs import a_folder, launched, numbers, refusal_of, trainer_of
from tests.helpers.models.tiny_models import tiny

PADDED = Rows(shortest=9, pad_to="right", labelled="answers")
RUN = Run(why="", steps=4, rows=PADDED)


# ---- calls -----------------------------------------------------------------------------------------------------------


def of_inputs(model: Any, inputs: Any) -> Any:
    return model(**inputs)


def by_name(model: Any, inputs: Any) -> Any:
    return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=inputs["labels"])


def by_place(model: Any, inputs: Any) -> Any:
    return model(inputs["input_ids"], inputs["attention_mask"], labels=inputs["labels"])


def as_a_tuple(model: Any, inputs: Any) -> Any:
    return model(**inputs, return_dict=False)


def without_a_cache(model: Any, inputs: Any) -> Any:
    return model(**inputs, use_cache=False)


CALLS = {f.__name__: f for f in (of_inputs, by_name, by_place, as_a_tuple, without_a_cache)}


# ---- what is done with the loss --------------------------------------------------------------------------------------


class Uses:
    """Functions of a loss, of which some know those before."""

    def __init__(self) -> None:
        self.mean: float | None = None
        self.largest = 0.0
        self.seen: list[float] = []

    def logged(self, loss: Tensor) -> Tensor:
        return loss

    def clamped(self, loss: Tensor) -> Tensor:
        return loss.clamp(max=5.4)

    def flooded(self, loss: Tensor) -> Tensor:
        return (loss - 5.4).abs() + 5.4

    def focal(self, loss: Tensor) -> Tensor:
        return (1 - (-loss).exp()) ** 20 * loss

    def scaled_by_its_mean(self, loss: Tensor) -> Tensor:
        self.mean = loss.item() if self.mean is None else 0.9 * self.mean + 0.1 * loss.item()
        return loss / self.mean

    def skipped_if_large(self, loss: Tensor) -> Tensor:
        self.largest = max(self.largest, loss.item())
        return loss * 0.0 if loss.item() == self.largest else loss

    def in_place(self, loss: Tensor) -> Tensor:
        return loss.mul_(2.0)


USES = [name for name in vars(Uses) if not name.startswith("_")]


def trained(call: str, use: str, mesh: Mesh, steps: int = 1) -> tuple[list[float], list[dict[str, float]], Tensor]:
    """The losses that the program read, what Trainer logged, and the weights afterwards."""
    uses = Uses()

    class Own(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            out = CALLS[call](model, inputs)
            loss = out[0] if isinstance(out, tuple) else out.loss
            if model.training:
                uses.seen.append(loss.item())
                loss = getattr(uses, use)(loss)
            return (loss, out) if return_outputs else loss

    with launched(mesh), a_folder(None) as folder:
        arguments = {**RUN.arguments, "gradient_accumulation_steps": steps}
        run = replace(RUN, arguments=arguments, ring=RingConfig(loss="chunked"))  # not of whole rows
        trainer: Any = trainer_of(run, mesh, folder, kind=Own)
        trainer.train()
        # The self-check runs the program's function, too.
        seen = uses.seen[-RUN.steps * steps :]
        weights = torch.cat([x.detach().flatten() for x in trainer.model.parameters()])
        return seen, numbers(trainer.state.log_history), weights


def compare(ranks: Ranks, call: str, use: str, steps: int = 1) -> None:
    losses, log, weights = ranks(1).run(trained, call, use, Mesh(), steps)[0]
    for got in ranks(2).run(trained, call, use, Mesh(cp=2), steps):
        assert got[0] == pytest.approx(losses, rel=LOSS)
        assert [pytest.approx(entry, rel=1e-5) for entry in log] == got[1]
        torch.testing.assert_close(got[2], weights, rtol=1e-5, atol=1e-6)


@pytest.mark.turns(4)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_may_leave_out_what_one_process_does_not_know(ranks: Ranks, call: str) -> None:
    """Without the count each rank took a mean of its own, and without the rest it could not know: all were refused."""
    compare(ranks, call, "logged")


@pytest.mark.turns(4)
@pytest.mark.parametrize("use", USES[1:])
def test_a_loss_may_be_used_as_in_one_process(ranks: Ranks, use: str) -> None:
    """A rank got its part, of which a clamp or a ratio is no part of the whole one's: all were refused."""
    compare(ranks, "of_inputs", use)


@pytest.mark.turns
@pytest.mark.parametrize("use", ["logged", "flooded"])
def test_also_with_several_batches_a_step(ranks: Ranks, use: str) -> None:
    compare(ranks, "of_inputs", use, steps=2)


# ---- sums over a rank's labels ---------------------------------------------------------------------------------------


def summed(times: str, averages: bool, mesh: Mesh, loss: Any = "auto") -> tuple[str, list[dict[str, float]]]:
    """What a loss that adds up over labels is refused with, or what Trainer logged.

    Args:
        times: the loss is multiplied by the "processes". averages: average_tokens_across_devices.
    """

    class Own(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            out = model(**inputs)
            labels = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
            told = inputs.get("shift_labels", labels) != -100
            loss = (out.logits.logsumexp(-1) * told).sum() / num_items_in_batch
            loss = loss * self.accelerator.num_processes if times else loss
            return (loss, out) if return_outputs else loss

    options = {"average_tokens_across_devices": averages, "eval_strategy": "no"}
    with launched(mesh), a_folder(None) as folder:
        run = replace(RUN, arguments={**RUN.arguments, **options}, ring=RingConfig(loss=loss))
        trainer = trainer_of(run, mesh, folder, kind=Own)
        error, _ = refusal_of(trainer)
        return error, numbers(trainer.state.log_history)


@pytest.mark.parametrize(("times", "averages"), [("", False), ("processes", True)])
def test_a_sum_over_labels_is_that_of_all_ranks(ranks: Ranks, times: str, averages: bool) -> None:
    _, log = ranks(1).run(summed, times, averages, Mesh())[0]
    for error, got in ranks(2).run(summed, times, averages, Mesh(cp=2)):
        assert not error
        assert [pytest.approx(entry, rel=LOSS) for entry in log] == got


@pytest.mark.parametrize(("times", "averages"), [("", True), ("processes", False)])
def test_a_sum_times_another_number_of_processes_is_refused(ranks: Ranks, times: str, averages: bool) -> None:
    """Without averaged counts the check's whole row had a rank's count, too: the loss was doubled, silently."""
    for error, _ in ranks(2).run(summed, times, averages, Mesh(cp=2), "chunked"):
        assert error.startswith("LossNotSharded"), error


# ---- names of weights ------------------------------------------------------------------------------------------------


def near_the_first_weights(mesh: Mesh) -> tuple[list[dict[str, float]], Tensor]:
    """What Trainer logged, and the weights, where a loss keeps them near those of its first call, which it finds by
    their names."""

    class Own(Trainer):
        first: dict[str, Tensor] | None = None

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            if self.first is None:
                self.first = {name: x.detach().clone() for name, x in model.named_parameters()}
            far = sum((x - self.first[name]).square().sum() for name, x in model.named_parameters())
            config = self.accelerator.unwrap_model(model).config
            out = model(**inputs)
            loss = out.loss + config.initializer_range * far
            return (loss, out) if return_outputs else loss

    run = replace(RUN, arguments={**RUN.arguments, "eval_strategy": "no"})  # Trainer evaluates the model inside DDP
    with launched(mesh), a_folder(None) as folder:
        trainer: Any = trainer_of(run, mesh, folder, kind=Own)
        trainer.train()
        return numbers(trainer.state.log_history), torch.cat([x.detach().flatten() for x in trainer.model.parameters()])


def test_a_loss_may_know_weights_by_the_names_in_its_wrapper(ranks: Ranks) -> None:
    """The self-check of a later step called it with the model inside DDP, whose names it did not know."""
    log, weights = ranks(1).run(near_the_first_weights, Mesh())[0]
    for got in ranks(2).run(near_the_first_weights, Mesh(cp=2)):
        assert [pytest.approx(entry, rel=1e-5) for entry in log] == got[0]
        torch.testing.assert_close(got[1], weights, rtol=1e-5, atol=1e-6)


# ---- other labels ----------------------------------------------------------------------------------------------------


def half_of_the_labels(inputs: Any) -> Tensor:
    labels: Tensor = inputs["labels"]
    return labels.masked_fill(inputs["input_ids"] % 2 == 0, -100)


def given_anew(trainer: Any, model: Any, inputs: Any, count: Any) -> Any:
    return Trainer.compute_loss(trainer, model, {**inputs, "labels": half_of_the_labels(inputs)}, False, count)


def alone(_trainer: Any, model: Any, inputs: Any, _count: Any) -> Any:
    mask, labels = inputs["attention_mask"], half_of_the_labels(inputs)
    return model(input_ids=inputs["input_ids"], attention_mask=mask, labels=labels).loss


def in_place(trainer: Any, model: Any, inputs: Any, count: Any) -> Any:
    inputs["labels"].copy_(half_of_the_labels(inputs))
    return Trainer.compute_loss(trainer, model, inputs, False, count)


CHANGES = {f.__name__: f for f in (given_anew, alone, in_place)}


def refusal(change: str) -> tuple[str, int]:
    class Own(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            return CHANGES[change](self, model, inputs, num_items_in_batch)

    with launched(Mesh(cp=2)), a_folder(None) as folder:
        run = replace(RUN, ring=RingConfig(loss="chunked"))  # by default such a loss gets whole rows
        return refusal_of(trainer_of(run, Mesh(cp=2), folder, kind=Own))


@pytest.mark.parametrize("change", CHANGES)
def test_labels_that_compute_loss_changes_are_refused(ranks: Ranks, change: str) -> None:
    """shift_labels stand for them in a model's loss, so the change had no effect, silently."""
    for error, steps in ranks(2).run(refusal, change):
        assert error.startswith(("OtherInputs: LlamaForCausalLM was called in a ring", "LossNotSharded")), error
        assert steps == 0


# ---- padding ---------------------------------------------------------------------------------------------------------


def of_the_longest(inputs: Any) -> dict[str, Any]:
    longest = int(inputs["attention_mask"].sum(1).max())
    return {name: x[:, :longest] if isinstance(x, Tensor) and x.dim() > 1 else x for name, x in inputs.items()}


class TrimsWholeRows(Trainer):
    def _prepare_inputs(self, inputs: Any) -> Any:
        return of_the_longest(super()._prepare_inputs(inputs))


class TrimsInItsStep(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return super().training_step(model, of_the_longest(inputs), num_items_in_batch)


class TrimsALoss(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return super().compute_loss(model, of_the_longest(inputs), return_outputs, num_items_in_batch)


TRIMS: dict[str, Any] = {kind.__name__: kind for kind in (TrimsWholeRows, TrimsInItsStep, TrimsALoss)}


def trimmed(kind: str, mesh: Mesh, loss: Any = "auto") -> tuple[str, list[dict[str, float]]]:
    """What a trainer that trims padding is refused with, or what it logged. Rows are padded by five more tokens."""
    with launched(mesh), a_folder(None) as folder:
        run = replace(RUN, arguments={**RUN.arguments, "eval_strategy": "no"}, ring=RingConfig(loss=loss))
        trainer: Any = trainer_of(run, mesh, folder, kind=TRIMS[kind])
        collate = trainer.data_collator

        def padded(rows: Any) -> dict[str, Tensor]:
            ends = {"labels": -100}
            return {
                name: torch.nn.functional.pad(x, (0, 5), value=ends.get(name, 0)) for name, x in collate(rows).items()
            }

        trainer.data_collator = padded
        error, _ = refusal_of(trainer)
        return error, numbers(trainer.state.log_history)


@pytest.mark.parametrize("kind", ["TrimsWholeRows", "TrimsInItsStep", "TrimsALoss"])
def test_padding_is_trimmed_on_whole_rows(ranks: Ranks, kind: str) -> None:
    _, log = ranks(1).run(trimmed, kind, Mesh())[0]
    for error, got in ranks(2).run(trimmed, kind, Mesh(cp=2)):
        assert not error
        assert [pytest.approx(entry, rel=1e-5) for entry in log] == got


def test_a_loss_that_trims_a_ranks_tokens_is_told_where(ranks: Ranks) -> None:
    for error, _ in ranks(2).run(trimmed, "TrimsALoss", Mesh(cp=2), "chunked"):
        assert error.startswith("UnshardedInput") and "Trim padding of whole rows: in a collator" in error


# ---- loops -----------------------------------------------------------------------------------------------------------


def called_again_with_a_copy(of: str) -> str:
    model: Any = tiny("llama", "ring_fp32")
    model = lora(model) if of == "LoRA" else model
    sharded = hf_ring_attn.shard(tokens(23), model=model)
    ids, labels = sharded.inputs["input_ids"], sharded.inputs["labels"]
    with sharded:
        model(input_ids=ids, labels=labels)
        try:
            model(input_ids=ids, labels=labels.clone())
        except errors.OtherInputs as error:
            return str(error)
    return ""


@pytest.mark.parametrize("of", ["plain", "LoRA"])
def test_an_input_that_only_an_earlier_call_got_is_missing(ranks: Ranks, of: str) -> None:
    """The second loss was of labels that each rank shifted by itself, and a mean of its own, silently."""
    for error in ranks(2).run(called_again_with_a_copy, of):
        assert "without shift_labels and num_items_in_batch" in error


def loop_of(kind: str) -> tuple[list[float], Tensor]:
    """Losses as a rank reads them, and the gradient of the last one's square."""
    model: Any = tiny("llama", "ring_fp32")
    if kind == "LoRA":
        model = lora(model, from_zero=False)
    called: Any = torch.compile(model, backend="eager") if kind == "compiled" else model
    if kind.startswith("compiled in place"):
        model.compile(backend="eager")
    losses, config = [], RingConfig(loss="sharded" if "compiled" in kind else "auto")
    for seed in (1, 2):
        model.zero_grad()
        sharded = hf_ring_attn.shard(
            tokens(23, seed=seed), model=None if "not named" in kind else called, config=config
        )
        with sharded:
            loss = called(**sharded.inputs).loss
            losses.append(loss.item())
        assert torch.equal(loss.detach(), sharded.reduce(loss))
        loss.square().backward()
        sharded.reduce_gradients(model)
    return losses, torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])


def loop_alone(kind: str) -> tuple[list[float], Tensor]:
    model: Any = tiny("llama", None)
    model = lora(model, from_zero=False) if kind == "LoRA" else model
    losses = []
    for seed in (1, 2):
        model.zero_grad()
        loss = model(**tokens(23, seed=seed), use_cache=False).loss
        losses.append(loss.item())
        loss.square().backward()
    return losses, torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])


@pytest.mark.turns(4)
@pytest.mark.parametrize("kind", ["plain", "LoRA", "compiled", "compiled in place", "compiled in place, not named"])
def test_a_loop_reads_the_loss_of_the_batch(ranks: Ranks, kind: str) -> None:
    losses, gradient = loop_alone(kind)
    for got in ranks(2).run(loop_of, kind):
        assert got[0] == pytest.approx(losses, rel=LOSS)
        torch.testing.assert_close(got[1], gradient, rtol=1e-4, atol=1e-5)
