"""Each rank computes the features of some pictures: which ones, when all of them, and that answers stay the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers.models.gemma3.modeling_gemma3 import Gemma3CausalLMOutputWithPast

import hf_ring_attn
from hf_ring_attn.integration.model.shared_pictures import Pictures, dealt, pictures_in
from tests.helpers.jobs import plain_jobs
from tests.helpers.jobs.comparison import PARAMETER, WITH_TOWERS, Ranks, alone, assert_towers_change_nothing
from tests.helpers.jobs.plain_jobs import Batch, Shards, Step, attempt, ready
from tests.helpers.models.tiny_models import BEFORE_IMAGE, IMAGE, VIDEO

MODELS = ("gemma3 vision", "qwen2.5 vision", "qwen3 vision", "qwen3.5 vision")
GRIDS = ([1, 4, 4], [1, 4, 2], [1, 4, 8], [1, 2, 2], [1, 8, 4])
"""Patches of Qwen's pictures; four make a token."""


def one_row(model: str, count: int = 5) -> Batch:
    """A row with pictures, of other sizes where the model allows it."""
    generator = torch.Generator().manual_seed(2)
    grids = torch.tensor(GRIDS[:count])
    tokens = (grids.prod(1) // 4).tolist() if "qwen" in model else [4] * count
    ids = torch.randint(1, BEFORE_IMAGE, (3,), generator=generator).tolist()
    for many in tokens:
        ids += [BEFORE_IMAGE, *[IMAGE] * many, *torch.randint(1, BEFORE_IMAGE, (2,), generator=generator).tolist()]
    row = torch.tensor([ids])
    batch = {"input_ids": row, "labels": row.masked_fill(row >= BEFORE_IMAGE, -100)}
    if "qwen" not in model:
        pixels = torch.randn(count, 3, 16, 16, generator=generator, dtype=torch.float64)
        return batch | {"token_type_ids": (row == IMAGE).long(), "pixel_values": pixels}
    pixels = torch.randn(int(grids.prod(1).sum()), 96, generator=generator, dtype=torch.float64)
    return batch | {"image_grid_thw": grids, "mm_token_type_ids": (row == IMAGE).int(), "pixel_values": pixels}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("count", [1, 2, pytest.param(3, marks=pytest.mark.full), 5])
@pytest.mark.turns
def test_shared_pictures_change_nothing_about_the_answer(ranks: Ranks, model: str, count: int, world_size: int) -> None:
    """The tower is trained, too. Checkpointing: the model is then in training mode."""
    step = Step(why="", model=model, batch=one_row(model, count), checkpointing="recomputed")
    assert_towers_change_nothing(ranks, world_size, step)


def one_row_of_videos(model: str) -> Batch:
    """A row with four videos, none like another."""
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(1, BEFORE_IMAGE, (5, 3), generator=generator).tolist()
    ids = [*text[0], *(token for words in text[1:] for token in (BEFORE_IMAGE, *[VIDEO] * 4, *words))]
    row = torch.tensor([ids])
    batch = {
        "input_ids": row, "labels": row.masked_fill(row >= BEFORE_IMAGE, -100),
        "mm_token_type_ids": 2 * (row == VIDEO).int(), "video_grid_thw": torch.tensor([[1, 4, 4]] * 4),
        "pixel_values_videos": torch.randn(64, 96, generator=generator, dtype=torch.float64),
    }  # fmt: skip
    return batch | ({"second_per_grid_ts": torch.tensor([0.5] * 4)} if "2.5" in model else {})


@pytest.mark.parametrize("model", MODELS[1:])
def test_several_videos_change_nothing_about_the_answer(ranks: Ranks, model: str) -> None:
    """Qwen3-VL's method for videos calls that for images, which dealt them once more: losses were 0.01 and 0.14 off."""
    step = Step(why="", model=model, batch=one_row_of_videos(model), checkpointing="recomputed")
    assert_towers_change_nothing(ranks, 2, step)


@pytest.mark.parametrize("model", MODELS)
def test_the_order_of_pictures_matters(model: str) -> None:
    """So the test above sees features that are exchanged."""
    step = Step(why="", model=model, batch=one_row(model, 4), checkpointing="recomputed")
    batch = dict(step.batch)
    if "image_grid_thw" in batch:  # the first picture's upper half for its lower
        batch["pixel_values"] = torch.cat([batch["pixel_values"][:16].flip(0), batch["pixel_values"][16:]])
    else:
        batch["pixel_values"] = batch["pixel_values"][[1, 0, 2, 3]]
    changed = (alone(replace(step, batch=batch)).logits - alone(step).logits).abs().max()
    assert changed > 1e-6


def rows_of_tower(model: Any, pixels: str = "pixel_values") -> Callable[[], list[int]]:
    """Notes the first axis of what the tower gets in each call."""
    seen: list[int] = []
    (maker,) = (m for m in model.modules() if hasattr(m, "get_image_features") and "language_model" in m._modules)
    tower = maker.visual if hasattr(maker, "visual") else maker.vision_tower

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(len(args[0] if args else kwargs[pixels]))

    note.__module__ = "torch"  # beside a program's hook all ranks compute all pictures
    tower.register_forward_pre_hook(note, with_kwargs=True)
    return lambda: seen


def told_apart(batch: Batch, name: str, change: str) -> list[int]:
    model = ready(Step(why="", model=name, checkpointing="recomputed"), "ring_fp32")
    if change == "evaluation":
        model.eval()
    elif change == "dropout":
        for layer in model.model.vision_tower.modules():
            if type(layer).__name__.endswith("Attention"):
                layer.dropout = 0.5
    elif change == "batch norm":
        model.model.vision_tower.register_module("unused", nn.BatchNorm1d(2).double())
    rows = rows_of_tower(model)
    for _ in range(2):
        with (sharded := hf_ring_attn.shard(batch, config=hf_ring_attn.RingConfig(self_check=False))):
            model(**sharded.inputs)
        assert ("images shared" in sharded.context.log.features) == (rows()[-1] < len(batch["pixel_values"]))
    return rows()


@pytest.mark.parametrize(
    ("model", "change", "want"),
    [
        ("gemma3 vision", "", [[3, 3], [3, 3]]),
        ("qwen3 vision", "", [[44, 44], [52, 52]]),
        ("gemma3 vision", "evaluation", [[5, 5], [5, 5]]),
        ("gemma3 vision", "dropout", [[3, 5, 5], [3, 5, 5]]),
        ("gemma3 vision", "batch norm", [[5, 5], [5, 5]]),
    ],
)
def test_a_rank_computes_its_pictures_or_all(ranks: Ranks, model: str, change: str, want: list[list[int]]) -> None:
    """Of Qwen's pictures of 16, 8, 32, 4 and 32 patches; the smallest twice. Dropout is found out by the first try."""
    assert ranks(2).run(told_apart, one_row(model), model, change) == want


def trained_in_two_rings(batches: list[Batch], name: str) -> Any:
    """Under FSDP2, with a tower that draws random numbers, and drops nothing of note."""

    def drawing(step: Step, attention: str | None) -> Any:
        model = ready(step, attention)
        for layer in model.model.vision_tower.modules():
            if type(layer).__name__.endswith("Attention"):
                layer.dropout = 1e-12
        return model

    with mock.patch.object(plain_jobs, "ready", drawing):
        shards = Shards({"dp_replicate_size": 1, "dp_shard_size": 2, "cp_size": 2}, ("dp_shard_cp",), 4)
        return plain_jobs.fsdp2(shards, batches, "recomputed", name=name)


def test_rings_with_other_numbers_of_pictures_call_a_tower_equally_often(ranks: Ranks) -> None:
    """The ring of five pictures calls it twice, since it draws. That of one picture did so once, and both waited."""
    batches = [one_row("gemma3 vision", 1), one_row("gemma3 vision", 5)]
    losses, parameters = plain_jobs.without_fsdp(batches, name="gemma3 vision")
    for rank, (got, weights) in enumerate(ranks(4).run(trained_in_two_rings, batches, "gemma3 vision")):
        assert torch.tensor(got) == pytest.approx(torch.tensor(losses[rank // 2]), rel=WITH_TOWERS)
        assert all((weights[name] - x).abs().max() < PARAMETER for name, x in parameters.items())


def seen_by_program(batch: Batch, name: str, way: str) -> tuple[list[int], list[int]]:
    """What the program sees of all pictures of a row in two steps, and what the tower computes."""
    model = ready(Step(why="", model=name, checkpointing="recomputed"), "ring_fp32")
    rows, seen = rows_of_tower(model), list[int]()
    maker = model.model
    if way == "hook":
        maker.vision_tower.register_forward_hook(lambda _m, _x, output: seen.append(len(output.last_hidden_state)))
    elif way == "class":
        maker.__class__ = type("Mine", (type(maker),), {"__module__": __name__, "get_image_features": noting(seen)})
    elif way == "hook on all modules":
        tower = maker.vision_tower
        note = register_module_forward_hook(lambda m, _x, out: seen.append(len(out[0])) if m is tower else None)
    for _ in range(2):
        with (sharded := hf_ring_attn.shard(batch, config=hf_ring_attn.RingConfig(self_check=False))):
            if way == "call" and sharded.ring.rank == 1:
                seen.append(len(maker.get_image_features(batch["pixel_values"]).last_hidden_state))
            model(**sharded.inputs)
    if way == "hook on all modules":
        note.remove()
    return seen, rows()


def noting(seen: list[int]) -> Callable[..., Any]:
    def get_image_features(self: Any, pixel_values: Any, **kwargs: Any) -> Any:
        found = super(type(self), self).get_image_features(pixel_values, **kwargs)
        seen.append(len(found.last_hidden_state))
        return found

    return get_image_features


@pytest.mark.parametrize(
    ("way", "want"),
    [
        ("hook", [([5, 5], [5, 5])] * 2),
        ("class", [([5, 5], [5, 5])] * 2),
        ("hook on all modules", [([5, 5], [5, 5])] * 2),
        ("call", [([], [3, 3]), ([5, 5], [5, 3, 5, 3])]),
    ],
)
def test_a_program_sees_all_pictures(ranks: Ranks, way: str, want: list[tuple[list[int], list[int]]]) -> None:
    """In a hook on the tower or on all modules, in a class of its own, and in its own call, on one rank as well."""
    assert ranks(2).run(seen_by_program, one_row("gemma3 vision"), "gemma3 vision", way) == want


def states_of_a_tower(batch: Batch, name: str) -> tuple[tuple[str, str] | None, tuple[int, ...]]:
    model = ready(Step(why="", model=name, checkpointing="recomputed"), "ring_fp32")
    with (sharded := hf_ring_attn.shard(batch)):
        output = model(**sharded.inputs).image_outputs
    return attempt(lambda: output.last_hidden_state.mean()), tuple(map(len, output.pooler_output))


def test_states_of_a_tower_are_refused_in_an_output(ranks: Ranks) -> None:
    """A rank has those of its own pictures only. Features are those of all."""
    if "image_outputs" not in {field.name for field in fields(Gemma3CausalLMOutputWithPast)}:
        pytest.skip("older versions of transformers return features alone")
    for told, features in ranks(2).run(states_of_a_tower, one_row("gemma3 vision"), "gemma3 vision"):
        assert told is not None and told[0] == "StatesLeftOut" and "forward hook" in told[1]
        assert features == (4,) * 5


def generated(batch: Batch, name: str, attention: str | None) -> list[int]:
    """What a model generates about the pictures of a row, in a ring after a batch that trains."""
    model = ready(Step(why="", model=name), attention)
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    if attention is not None:
        model.train()
        with (sharded := hf_ring_attn.shard(batch)):
            model(**sharded.inputs)
    with torch.no_grad():
        tokens: list[int] = model.eval().generate(**inputs, max_new_tokens=4, do_sample=False)[0, -4:].tolist()
    return tokens


@pytest.mark.parametrize("model", ["gemma3 vision", "qwen2.5 vision"])
def test_a_model_generates_between_batches(ranks: Ranks, model: str) -> None:
    """transformers computes features beforehand, by the method's named arguments: "You cannot specify both ..."."""
    batch = one_row(model, 3)
    assert ranks(2).run(generated, batch, model, "ring_fp32") == [generated(batch, model, None)] * 2


def compiled_parts(batch: Batch, name: str) -> tuple[int, list[float]]:
    """How many convolutions a compiler saw in training, and the losses of the row in training and in evaluation."""
    model = ready(Step(why="", model=name), "ring_fp32").train()
    torch._dynamo.reset()
    seen: list[str] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    model.compile(backend=backend)
    losses, convolutions = [], 0
    for training in (True, False):
        model.train(training)
        with (sharded := hf_ring_attn.shard(batch, config=hf_ring_attn.RingConfig(self_check=False))):
            losses.append(float(sharded.reduce(model(**sharded.inputs).loss)))
        convolutions = convolutions or sum("conv" in target for target in seen)
    return convolutions, losses


@pytest.mark.slow
@pytest.mark.turns
def test_a_tower_is_compiled_with_its_model(ranks: Ranks) -> None:
    """It was left out. And a compiler that makes a bound method anew looked up ours, which called itself for ever."""
    batch = one_row("qwen3 vision", 1)
    want = float(alone(Step(why="", model="qwen3 vision", batch=batch)).loss)
    for convolutions, losses in ranks(2).run(compiled_parts, batch, "qwen3 vision"):
        assert convolutions == 1 and losses == pytest.approx([want, want], rel=1e-6)


def test_pictures_are_dealt_evenly() -> None:
    assert dealt([1, 1, 1, 1, 1], 2) == [[0, 3, 4], [1, 2, 4]]
    sizes = [7, 100, 3, 50, 60, 8, 8, 9, 90]
    for ranks in (2, 3, 4, 16):
        hands = dealt(sizes, ranks)
        assert len({len(hand) for hand in hands}) == 1 and {at for hand in hands for at in hand} == set(range(9))
        loads = [sum(sizes[at] for at in hand) for hand in hands]
        assert max(loads) - min(loads) <= max(sizes)


PIXELS = torch.ones(4, 3, 8, 8)


@pytest.mark.parametrize(
    ("named", "want"),
    [
        ({"pixel_values": PIXELS}, ([1] * 4, [], True)),
        ({"pixel_values": PIXELS, "image_sizes": torch.ones(4, 2)}, ([1] * 4, ["image_sizes"], True)),
        ({"pixel_values": PIXELS, "layer": -2, "return_dict": True, "why": None}, ([1] * 4, [], True)),
        ({"pixel_values": PIXELS, "vision_feature_layer": [-2, -1]}, ([1] * 4, [], True)),
        ({"pixel_values": PIXELS, "image_sizes": [[8, 8]] * 4}, None),
        ({"pixel_values": PIXELS, "batch_num_images": torch.tensor([0, 1, 1, 2])}, None),
        ({"pixel_values": PIXELS, "num_local_patches": [4, 0, 0, 0], "pixel_values_local": PIXELS}, None),
        ({"pixel_values": PIXELS, "shift_labels": torch.ones(1, 9)}, ([1] * 4, [], True)),
        ({"pixel_values": PIXELS[:, None]}, ([1] * 4, [], False)),
        ({"pixel_values": PIXELS[0, 0], "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 2]])},
         ([4, 4], ["image_grid_thw"], False)),
        ({"pixel_values": PIXELS[0, 0], "image_grid_thw": torch.tensor([[1, 2, 2]])}, None),
        ({"pixel_values": PIXELS, "places": torch.ones(5)}, None),
        ({"pixel_values": PIXELS, "places": [torch.ones(4)]}, None),
        ({"pixel_values": torch.cat([PIXELS[:, None], torch.zeros(1, 1, 3, 8, 8)])}, None),
        ({"pixel_values": list(PIXELS)}, None),
        ({"pixel_values": None}, None),
    ],
)  # fmt: skip
def test_pictures_are_told_apart(named: dict[str, Any], want: tuple[list[int], list[str], bool] | None) -> None:
    found = pictures_in(named, "pixel_values", "image_grid_thw")
    assert found == (None if want is None else Pictures(want[0], "pixel_values", *want[1:]))


def test_pictures_are_taken_in_the_order_that_was_asked_for() -> None:
    pixels = torch.arange(10)[:, None]
    named = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2, 2], [1, 1, 1], [1, 5, 1]]), "more": 3}
    taken = pictures_in(named, "pixel_values", "image_grid_thw").taken(named, [2, 0])  # type: ignore[union-attr]
    assert taken["pixel_values"].flatten().tolist() == [5, 6, 7, 8, 9, 0, 1, 2, 3]
    assert taken["image_grid_thw"].tolist() == [[1, 5, 1], [1, 2, 2]] and taken["more"] == 3
