"""Families of models that take images, each once: the answer is that of one process. Details are in test_vision.py."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

import hf_ring_attn
from hf_ring_attn.integration.attention import function
from hf_ring_attn.testing import relative_error
from tests.helpers.hosts import LLAMA_4_FAILS
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.runs import Mesh
from tests.helpers.models import vision_models
from tests.helpers.models.vision_models import KINDS, Answer

alone = cache(vision_models.alone)


def family(name: str) -> Any:
    """The parameter of a family; it is marked where transformers itself fails."""
    fails = name == "Llama 4" and LLAMA_4_FAILS
    mark = pytest.mark.xfail(fails, reason="transformers' own Llama 4 fails", raises=AttributeError)
    return pytest.param(name, marks=mark)


def assert_equal(got: Answer, want: Answer, bound: float, real: torch.Tensor) -> None:
    assert relative_error(got[0][real], want[0][real]) < bound
    assert relative_error(got[1], want[1]) < bound
    for name, gradient in want[2].items():
        # The bias of keys has no gradient but rounding, since a softmax does not see it.
        if not name.endswith("k_proj.bias"):
            nothing = max(float(got[2][name].abs().max()), float(gradient.abs().max())) < 1e-12
            assert relative_error(got[2][name], gradient) < 4 * bound or nothing, name


def bound_of(name: str) -> float:
    """In float64 too transformers keeps RMS norms, RoPE and the loss in float32."""
    return 3e-6 if KINDS[name].dtype == torch.float64 else 1e-5


@pytest.mark.parametrize("name", [family(name) for name in KINDS])
@pytest.mark.turns
def test_a_family_is_exact(ranks: Ranks, name: str) -> None:
    want = alone(name)
    for got in ranks(2).run(vision_models.in_a_ring, name):
        assert_equal(got, want, bound_of(name), torch.ones(2, KINDS[name].length, dtype=torch.bool))


@pytest.mark.turns
@pytest.mark.parametrize("name", ["Gemma 4, inputs for each layer", "Gemma 4, images both ways", "GLM-4V", "Idefics 3"])
def test_on_four_ranks_with_padding(ranks: Ranks, name: str) -> None:
    want = alone(name, right=5)
    real = torch.ones(2, KINDS[name].length, dtype=torch.bool)
    real[1, -5:] = False
    for got in ranks(4).run(vision_models.in_a_ring, name, 5):
        assert_equal(got, want, bound_of(name), real)


TRAINED = ("Idefics 3", "InternVL", "Qwen2-VL", "Llama 4", "Gemma 4, images both ways")


@pytest.mark.parametrize(
    "name", [family(name) if name in TRAINED else pytest.param(name, marks=pytest.mark.full) for name in KINDS]
)
@pytest.mark.turns
def test_a_trainer_trains_a_family(ranks: Ranks, name: str) -> None:
    want = vision_models.trained(name, Mesh())
    assert len(want) == 5 and {"loss", "grad_norm", "eval_loss"} <= {key for entry in want for key in entry}
    for got in ranks(2).run(vision_models.trained, name, Mesh(cp=2)):
        assert len(got) == len(want)
        for mine, theirs in zip(got, want, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("name", [family(name) for name in KINDS])
@pytest.mark.turns
def test_its_images_matter(name: str) -> None:
    other = vision_models.alone(name, flipped=True)[0]
    assert relative_error(other, alone(name)[0]) > 1e-2


def warnings_of(name: str) -> int:
    """How often a family that trains in a ring is said to train without one."""
    made: Any = vision_models.build(KINDS[name], "ring_fp32").train()
    with mock.patch.object(function, "warn_without_ring") as warned:
        sharded = hf_ring_attn.shard(vision_models.labelled(vision_models.batch_of(KINDS[name])))
        with sharded:
            loss = made(**sharded.inputs).loss
        loss.backward()
    return warned.call_count


@pytest.mark.parametrize("name", ["Gemma 4, images both ways", "Idefics 3"])
def test_a_tower_that_makes_masks_is_in_a_ring(ranks: Ranks, name: str) -> None:
    """A warning said that the model trained without one."""
    assert ranks(2).run(warnings_of, name) == [0, 0]


def after_a_part(name: str, part: str, attention: str) -> float:
    """The square of a family's loss, where a program calls its embeddings or its tower before it."""
    made: Any = vision_models.build(KINDS[name], attention).train()
    batch = vision_models.labelled(vision_models.batch_of(KINDS[name]))
    sharded = hf_ring_attn.shard(batch) if attention == "ring_fp32" else None
    with torch.no_grad(), sharded or nullcontext():
        if part == "embeddings":
            made.get_input_embeddings()(batch["input_ids"])
        else:
            made.get_image_features(**{key: x for key, x in batch.items() if "pixel" in key or "grid" in key})
        return float(made(**(sharded.inputs if sharded else {**batch, "use_cache": False})).loss ** 2)


@pytest.mark.parametrize("part", ["embeddings", "tower"])
@pytest.mark.parametrize("name", ["InternVL", "Qwen2-VL"])
def test_a_part_may_be_called_before_the_family(ranks: Ranks, name: str, part: str) -> None:
    """It was refused: the part alone has no text model."""
    want = after_a_part(name, part, "eager")
    assert ranks(2).run(after_a_part, name, part, "ring_fp32") == pytest.approx([want, want], rel=1e-5)
