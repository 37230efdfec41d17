"""Models that take sound: towers hear all of it on every rank, the text model shares the row, as in one process."""

from __future__ import annotations

import pytest
import torch

import hf_ring_attn
from hf_ring_attn import errors
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs.comparison import (
    WITH_TOWERS,
    Ranks,
    alone,
    assert_equal_runs,
    assert_towers_change_nothing,
    by_turns,
    in_rings,
    on_two_or_four,
    without_ring,
)
from tests.helpers.jobs.plain_jobs import Batch, Step
from tests.helpers.jobs.runs import Mesh, Run, Sounds
from tests.helpers.models.tiny_models import BEFORE_IMAGE, IMAGE, tiny

FRAMES, MELS = 32, 8
PLACES = {"voxtral": 4, "glm asr": 4, "flamingo": 8, "qwen2 audio": 8}
"""Tokens that stand for a sound of 32 frames."""
MASKS = {"qwen2 audio": "feature_attention_mask", "glm asr": "input_features_mask", "flamingo": "input_features_mask"}


def with_sound(model: str, left: int = 0, at: int = 9) -> Batch:
    """Two rows of 23 tokens with a sound each, in other places; ``left``: padding before the second."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, BEFORE_IMAGE, (2, 23), generator=generator)
    ids[0, 3 : 3 + PLACES[model]], ids[1, at : at + PLACES[model]] = IMAGE, IMAGE
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100)}
    if left:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, :left], ids[1, :left], batch["labels"][1, :left] = 0, 0, -100
    if model in MASKS:
        batch[MASKS[model]] = torch.ones(2, FRAMES, dtype=torch.int64)
    return batch | {"input_features": torch.randn(2, MELS, FRAMES, generator=generator, dtype=torch.float64)}


STEPS = [
    *[Step(why=model, model=model, batch=with_sound(model)) for model in ("voxtral", "glm asr", "flamingo")],
    Step(why="padded", model="voxtral", batch=with_sound("voxtral", left=5, at=12)),
    Step(why="checkpointing", model="flamingo", batch=with_sound("flamingo"), checkpointing="recomputed"),
]


@pytest.mark.parametrize(("step", "world_size"), on_two_or_four(STEPS, [1]))
@pytest.mark.turns
def test_sound_changes_nothing_about_the_answer(ranks: Ranks, step: Step, world_size: int) -> None:
    assert_towers_change_nothing(ranks, world_size, step)


TRAININGS = [
    Run(  # small steps: at 0.05 the difference of two orders of float32 sums grows tenfold a step on some processors
        why=model,
        model=model,
        rows=Sounds(**sizes),  # type: ignore[arg-type]
        evaluated=Sounds(count=5, seed=2, **sizes),  # type: ignore[arg-type]
        arguments={"learning_rate": 0.01},
    )
    for model in ("voxtral", "glm asr", "flamingo")
    for sizes in ({"places": PLACES[model], "mask": MASKS.get(model, "")},)
]


@pytest.mark.parametrize(("run", "mesh"), by_turns(TRAININGS))
@pytest.mark.turns
def test_a_trainer_trains_on_sound(ranks: Ranks, run: Run, mesh: Mesh) -> None:
    assert_equal_runs(in_rings(ranks, run, mesh)[0], without_ring(ranks, run, mesh))


def test_sound_matters() -> None:
    for step in STEPS[:3]:
        other = {**step.batch, "input_features": step.batch["input_features"].flip(0)}
        changed = alone(Step(why="", model=step.model, batch=other))
        assert relative_error(changed.logits, alone(step).logits) > 1e-3
        assert any(gradient.any() for name, gradient in alone(step).gradients.items() if "audio" in name)


def logits(model: str, batch: Batch) -> torch.Tensor:
    sharded = hf_ring_attn.shard(batch)
    made = tiny(model, "ring_fp32").double()
    with sharded, torch.no_grad():
        return sharded.gather(made(**sharded.inputs).logits)


def refused(model: str, batch: Batch) -> str:
    try:
        logits(model, batch)
    except errors.Refused as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_loss_of_its_own_is_refused_and_logits_are_exact(ranks: Ranks) -> None:
    """Qwen2-Audio takes no loss_function, so its loss cannot be that of whole rows."""
    batch = with_sound("qwen2 audio")
    for text in ranks(2).run(refused, "qwen2 audio", batch):
        assert text.startswith("LossNotSharded: the loss of Qwen2AudioForConditionalGeneration (the self-"), text
    del batch["labels"]
    with torch.no_grad():
        want = tiny("qwen2 audio").double()(**batch).logits
    for got in ranks(2).run(logits, "qwen2 audio", batch):
        assert relative_error(got, want) < WITH_TOWERS


def test_sounds_that_a_model_puts_in_itself_are_refused(ranks: Ranks) -> None:
    """With one placeholder for each sound Qwen2-Audio makes longer rows than those that were to be shared."""
    batch = with_sound("qwen2 audio")
    del batch["labels"]
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, 1)
    batch["input_ids"][:, 4] = IMAGE
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    for text in ranks(2).run(refused, "qwen2 audio", batch):
        assert text.startswith("UnshardedInput: "), text
