"""Models that take images: the text model shares the row, images are read on every rank, and the answer is the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_ring_attn
from hf_ring_attn import RingConfig, errors
from hf_ring_attn.integration.hosts.prediction import whole_sequences
from hf_ring_attn.integration.model import structure
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs import plain_jobs
from tests.helpers.jobs.comparison import (
    WITH_TOWERS,
    Ranks,
    alone,
    assert_equal_runs,
    assert_towers_change_nothing,
    by_turns,
    in_rings,
    without_ring,
)
from tests.helpers.jobs.in_float64 import pictures_learnt_by_trainer
from tests.helpers.jobs.plain_jobs import Batch, Step
from tests.helpers.jobs.runs import Mesh, Pictures, Run
from tests.helpers.models.tiny_models import BEFORE_IMAGE, IMAGE, VIDEO, VOCABULARY, tiny
from tests.helpers.models.vision_models import KINDS, build


def with_images(model: str, length: int = 23, left: int = 0, gap: int = 9) -> Batch:
    """Two rows with an image each, at another place and, where the model allows it, of another size.

    Args:
        left: tokens of padding before the second row, with a 2-D mask.
        gap: tokens between the images' places: with 12, an image lies across the border of two ranks' chunks.
    """
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, BEFORE_IMAGE, (2, length), generator=generator)
    ids[0, 4], ids[0, 5:9] = BEFORE_IMAGE, IMAGE
    ids[1, gap], ids[1, gap + 1 : gap + (3 if "qwen" in model else 5)] = BEFORE_IMAGE, IMAGE
    labels = ids.masked_fill(ids >= BEFORE_IMAGE, -100)
    batch = {"input_ids": ids, "labels": labels}
    if left:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, :left], batch["input_ids"][1, :left], batch["labels"][1, :left] = 0, 0, -100
    if "qwen" in model:
        grid = torch.tensor([[1, 4, 4], [1, 4, 2]])
        patches = int(grid.prod(1).sum())
        batch |= {"image_grid_thw": grid, "mm_token_type_ids": (ids == IMAGE).int()}
        return batch | {"pixel_values": torch.randn(patches, 96, generator=generator, dtype=torch.float64)}
    pixels = 8 if model == "llava" else 16
    if model != "llava":
        batch["token_type_ids"] = (ids == IMAGE).long()
    return batch | {"pixel_values": torch.randn(2, 3, pixels, pixels, generator=generator, dtype=torch.float64)}


def with_video(model: str) -> Batch:
    """A video of two frames in the second row, an image in the first; Qwen3-VL and later have text between frames."""
    batch = with_images(model, length=29)
    ids, between = batch["input_ids"], 0 if "2.5" in model else 2
    ids[1, 8:] = ids[1, 8:].clamp(max=BEFORE_IMAGE - 1)
    for start in (9, 13 + between):
        ids[1, start : start + 4] = VIDEO
    videos = {
        "pixel_values_videos": torch.randn(32, 96, generator=torch.Generator().manual_seed(4), dtype=torch.float64),
        "video_grid_thw": torch.tensor([[2, 4, 4]]),
        "image_grid_thw": batch["image_grid_thw"][:1],
        "pixel_values": batch["pixel_values"][:16],
        "mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int(),
        "labels": ids.masked_fill(ids >= BEFORE_IMAGE, -100),
    }
    return batch | videos | ({"second_per_grid_ts": torch.tensor([0.5])} if "2.5" in model else {})


def numbered_by_mask(batch: Batch) -> Batch:
    """With the position ids that OPT makes of a padding mask."""
    mask = batch["attention_mask"]
    return batch | {"position_ids": mask.cumsum(1) * mask - 1}


def without_images(model: str) -> Batch:
    """Rows of text alone with positions by time, height and width, as Qwen's own trainer makes them of every batch."""
    batch = with_images(model, left=5)
    ids, mask = batch["input_ids"] % BEFORE_IMAGE, batch["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0).expand(3, -1, -1)
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask,
            "position_ids": positions}  # fmt: skip


MODELS = ("gemma3 vision", "qwen2.5 vision", "qwen3 vision", "qwen3.5 vision")
STEPS = [
    *[Step(why=model, model=model, batch=with_images(model)) for model in MODELS],
    *[Step(why=f"{model}, padded", model=model, batch=with_images(model, left=5, gap=12)) for model in MODELS],
    *[Step(why=f"{model}, checkpointing", model=model, batch=with_images(model), checkpointing="recomputed")
      for model in MODELS],
    *[Step(why=f"{model}, video", model=model, batch=with_video(model)) for model in MODELS[1:]],
    *[Step(why=f"{model}, text with its positions", model=model, batch=without_images(model)) for model in MODELS[1:]],
    Step(why="positions by the mask, none hidden", model="llava", batch=with_images("llava")),
    Step(why="positions by the mask, given", model="llava", batch=numbered_by_mask(with_images("llava", left=5))),
    Step(why="backward by gather", model=MODELS[0], batch=with_images(MODELS[0]), ring=RingConfig(backward="gather")),
]  # fmt: skip

TRAININGS = [
    Run(why="Gemma 3", model="gemma3 vision", rows=Pictures(), evaluated=Pictures(count=5, seed=2)),
    Run(
        why="Qwen3-VL, checkpointing, accumulation",
        model="qwen3 vision",
        rows=Pictures(qwen=True),
        evaluated=Pictures(count=5, seed=2, qwen=True),
        # Small steps: at 0.002 the difference of two orders of float32 sums grows tenfold a step on some processors.
        arguments={"gradient_checkpointing": True, "gradient_accumulation_steps": 2, "learning_rate": 0.0005},
    ),
    Run(
        why="Qwen3-VL, predictions",
        model="qwen3 vision",
        rows=Pictures(qwen=True),
        evaluated=Pictures(count=4, seed=2, qwen=True),
        predicts="labelled",
        arguments={"per_device_eval_batch_size": 4},
    ),
    Run(
        why="Qwen2.5-VL, gathered loss",
        model="qwen2.5 vision",
        rows=Pictures(qwen=True),
        evaluated=Pictures(count=5, seed=2, qwen=True),
        ring=RingConfig(loss="gathered"),
    ),
]


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.why)
@pytest.mark.turns
def test_images_change_nothing_about_the_answer(ranks: Ranks, step: Step, world_size: int) -> None:
    assert_towers_change_nothing(ranks, world_size, step)


@pytest.mark.parametrize(("run", "mesh"), by_turns(TRAININGS))
@pytest.mark.turns
def test_a_trainer_trains_on_images(ranks: Ranks, run: Run, mesh: Mesh) -> None:
    outcomes, want = in_rings(ranks, run, mesh), without_ring(ranks, run, mesh)
    for outcome in (outcomes[0], want):  # a softmax does not see the bias of keys, whose gradient is rounding
        outcome.updates = {name: x for name, x in outcome.updates.items() if not name.endswith("k_proj.bias")}
        outcome.parameters = {name: outcome.parameters[name] for name in outcome.updates}
    assert_equal_runs(outcomes[0], want)


@pytest.mark.turns
def test_a_trainer_trains_linear_attention_on_images(ranks: Ranks) -> None:
    """In float64: float32 leaves 1e-4 of a gradient's norm apart."""
    run = Run(
        why="Qwen3.5", model="qwen3.5 vision", rows=Pictures(qwen=True), evaluated=Pictures(count=5, seed=2, qwen=True)
    )
    (want,) = ranks(1).run(pictures_learnt_by_trainer, run, Mesh())
    assert any(update.abs().max() > 1e-4 for update in want.updates.values()), "nothing was learnt"
    for got in ranks(2).run(pictures_learnt_by_trainer, run, Mesh(cp=2)):
        assert got.ring_size == 2 and len(got.log) == len(want.log)
        for one, other in zip(got.log, want.log, strict=True):
            assert one == pytest.approx(other, rel=1e-10)
        for name, parameter in want.parameters.items():
            assert parameter.dtype == torch.float64
            assert (got.parameters[name] - parameter).abs().max() < 1e-10, name


def gathered_by_a_towers_name(batch: Batch) -> Tensor:
    sharded = hf_ring_attn.shard(batch)
    found: Tensor = whole_sequences(sharded, "image_outputs", sharded.inputs["input_ids"][..., None])
    return found[..., 0]


def test_tokens_under_the_name_of_a_towers_outputs_are_gathered(ranks: Ranks) -> None:
    """A model of one's own may call them so; what transformers calls so is a mapping, of whole rows."""
    batch = plain_jobs.tokens(23)
    for got in ranks(2).run(gathered_by_a_towers_name, batch):
        assert torch.equal(got, batch["input_ids"])


@pytest.mark.parametrize("model", MODELS)
def test_images_matter(model: str) -> None:
    """What the tests above compare depends on the image, and on its tokens that see later ones."""
    step = Step(why="", model=model, batch=with_images(model))
    other = {**step.batch, "pixel_values": step.batch["pixel_values"].flip(0)}
    assert relative_error(alone(Step(why="", model=model, batch=other)).logits, alone(step).logits) > 1e-3


@pytest.mark.parametrize("model", MODELS[1:])
def test_videos_matter(model: str) -> None:
    batch = with_video(model)
    other = {**batch, "pixel_values_videos": batch["pixel_values_videos"].flip(0)}
    changed = alone(Step(why="", model=model, batch=other))
    assert relative_error(changed.logits, alone(Step(why="", model=model, batch=batch)).logits) > 1e-3


def text_alone(batch: Batch) -> Tensor:
    model = tiny("gemma3 vision", "ring_fp32").double()
    sharded = hf_ring_attn.shard(batch)
    with sharded, torch.no_grad():
        return sharded.gather(model(**sharded.inputs).logits)


def test_a_batch_without_images_is_cut_as_any_other(ranks: Ranks) -> None:
    ids = plain_jobs.tokens(23)["input_ids"] % BEFORE_IMAGE
    batch = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids)}
    with torch.no_grad():
        want = tiny("gemma3 vision").double()(**batch).logits
    for got in ranks(2).run(text_alone, batch):
        assert relative_error(got, want) < WITH_TOWERS


def refused(batch: Batch, model: str) -> str:
    sharded = hf_ring_attn.shard(batch)
    try:
        with sharded:
            tiny(model, "ring_fp32").double()(**sharded.inputs)
    except errors.Refused as error:
        return str(error)
    return ""


def test_a_text_model_that_is_given_images_is_refused(ranks: Ranks) -> None:
    for text in ranks(2).run(refused, with_images("qwen2.5 vision"), "llama"):
        assert "LlamaForCausalLM" in text
        assert "its batch holds images, sound or position_ids [3, B, S], but it has no inner text model that " in text


def test_a_text_model_that_numbers_by_the_padding_mask_is_refused(ranks: Ranks) -> None:
    """LLaVA over OPT was given 0, 1, 2, ... instead, by the self-check's whole row too: 0.7 of the logits differed."""
    want = "OPTModel cannot be trained in a ring exactly: decoder (OPTDecoder) numbers positions by the padding mask; "
    for size in (1, 2):
        for text in ranks(size).run(refused, with_images("llava", left=5), "llava"):
            assert text.startswith(want + "put its position_ids into the batch")


def test_a_tower_that_sums_lengths_numbers_no_tokens() -> None:
    """Padded rows of text in Mistral 3 were refused, as if its Pixtral tower numbered them by the mask."""
    model = build(KINDS["Mistral 3"], "ring_fp32")
    assert list(structure.position_reasons(model, hidden=True)) == []


def whole_mask(embeds: Tensor) -> Tensor:
    """[B, 1, S, S] of a model that makes its masks by itself: causal, but the third token sees no other."""
    rows, length = embeds.shape[:2]
    seen = torch.ones(length, length).tril()
    seen[2, :2] = 0
    return seen.expand(rows, 1, -1, -1)


OF_ITS_OWN: dict[str, tuple[Callable[[Tensor], dict[str, object]], str]] = {
    "a 4-D mask": (
        lambda x: {"attention_mask": whole_mask(x)},
        r"attention_mask: it has shape \(\d, 1, (\d+), \1\), but a ring takes \[\d, \1\], one entry a token, or "
        r"a mask that transformers.masking_utils makes of it; train this model without a "
        r"ring, or its text model alone.",
    ),
    "a mask of one row for all": (
        lambda x: {"attention_mask": whole_mask(x)[0, 0, -1:].repeat(len(x) + 1, 1)},
        r"attention_mask: it has shape \(\d, (\d+)\), but a ring takes \[\d, \1\], one entry a token",
    ),
    "no tensor": (
        lambda x: {"attention_mask": whole_mask(x).tolist()},
        r"attention_mask: it is a list, but a ring takes \[\d, \d+\], one entry a token",
    ),
    "a cache": (
        lambda _: {"use_cache": True},
        r"use_cache=True: a cache would hold this rank's tokens only; leave use_cache=False, as sharded.inputs has it.",
    ),
    "embeddings for each layer": (
        lambda x: {"features": [torch.zeros(3), x]},
        r"features: a ring does not know how to cut \(\d, \d+, 32\); train this model without a ring, or its text ",
    ),
}
"""What a model around hands to its text model beside, or in place of, what the batch holds; and how it is refused."""


def handed_over(batch: Batch, why: str, config: RingConfig) -> tuple[str, int]:
    """What is refused, and how many layers of the text model were called before that."""
    model: Any = tiny("gemma3 vision", "ring_fp32").double()
    change, _ = OF_ITS_OWN[why]
    text = model.get_decoder()
    text.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, **change(kwargs["inputs_embeds"])}), with_kwargs=True
    )
    layers: list[object] = []
    for layer in text.layers:
        layer.register_forward_pre_hook(lambda *_: layers.append(0))
    sharded = hf_ring_attn.shard(batch, config=config)
    try:
        with sharded:
            model(**sharded.inputs)
    except errors.UnsupportedArgument as error:
        return str(error), len(layers)
    return "", len(layers)


@pytest.mark.parametrize("self_check", [True, False])
@pytest.mark.parametrize("why", OF_ITS_OWN)
def test_what_a_text_model_is_given_is_never_left_out(ranks: Ranks, why: str, self_check: bool) -> None:
    """A mask of any other kind was taken for none: no difference to see, no error."""
    config = RingConfig(self_check=self_check)
    for text, layers in ranks(2).run(handed_over, with_images("gemma3 vision"), why, config):
        assert re.match("Gemma3TextModel was called with " + OF_ITS_OWN[why][1], text), text
        assert layers == 0


def test_vocabulary_holds_the_markers() -> None:
    assert BEFORE_IMAGE < IMAGE < VOCABULARY
