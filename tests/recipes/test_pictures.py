"""pictures.py: rows of pictures and words that fit, as TRL will count them, from drawings and from JSONL."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

from tests.recipes.programs_of_recipes import RECIPES, program

pictures, toy_pictures = program("pictures"), program("toy_pictures")
OF_A_PICTURE = 4 + 2 + 4
"""Tokens: its own, one before and one after, and two pairs of line ends."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    toy_pictures.write_model(folder, 256)
    return folder


def rows(folder: Path, model: Path, *more: str) -> list[dict[str, Any]]:
    output = folder / "out/rows.parquet"
    pictures.main([*more, "--processor", str(model), "--length", "128", "--output", str(output)])
    found: list[dict[str, Any]] = Dataset.from_parquet(str(output), cache_dir=str(folder / "cache")).to_list()
    return found


def test_a_row_holds_as_many_drawings_as_fit(tmp_path: Path, model: Path) -> None:
    for row in rows(tmp_path, model, "--drawn", "--rows", "3"):
        names = row["completion"][0]["content"].rstrip(".").split(", ")
        assert len(names) == len(row["images"]) >= 3
        words = len(pictures.QUESTION) + len(row["completion"][0]["content"])
        assert row["tokens"] == OF_A_PICTURE * len(names) + words + len(["<user>", "<assistant>", "<end>"])
        assert 128 - OF_A_PICTURE - 2 * len("orange triangle, ") < row["tokens"] <= 128


def test_rows_that_are_longer_than_the_recipe_has_it_are_refused(tmp_path: Path, model: Path) -> None:
    longest = max(row["tokens"] for row in rows(tmp_path, model, "--drawn", "--rows", "2"))
    train, data = program("train"), {"train": str(tmp_path / "out/rows.parquet")}
    assert "tokens" not in train.load_rows({"data": data, "training": {"max_length": longest}}, "train").column_names
    with pytest.raises(train.BadRecipe, match=f"a row has {longest} tokens"):
        train.load_rows({"data": data, "training": {"max_length": longest - 1}}, "train")


@pytest.mark.slow
def test_a_frozen_tower_has_no_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though hosts let embeddings require gradients where layers are recomputed."""
    train, found = program("train"), []
    load_model = train.load_model

    def watched(settings: dict[str, Any]) -> Any:
        model = load_model(settings)
        model.model.vision_tower.register_forward_hook(lambda *call: found.append(call[2].last_hidden_state))
        return model

    monkeypatch.setattr(train, "load_model", watched)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr("sys.argv", ["train.py", str(RECIPES / "vlm/config.yaml"), "--toy"])
    train.main()
    assert len(found) == 3 and not any(x.requires_grad for x in found)


@pytest.mark.parametrize(("ring_size", "processes", "dispatches"), [("2", 2, True), ("2", 4, None), ("1", 1, None)])
def test_one_rank_prepares_the_pictures_if_all_share_a_row(
    ring_size: str, processes: int, dispatches: bool | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train = program("train")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", ring_size)
    monkeypatch.setattr(train, "PartialState", lambda: SimpleNamespace(num_processes=processes))
    settings = {"training": {"output_dir": str(tmp_path)}}
    assert train.arguments(settings, ["images"], None).accelerator_config.dispatch_batches is dispatches
    assert train.arguments(settings, ["input_ids"], None).accelerator_config.dispatch_batches is None


def test_conversations_are_learned_by_their_last_turn_and_long_ones_left_out(tmp_path: Path, model: Path) -> None:
    pictures.drawing(pictures.random.Random(1))[0].save(tmp_path / "a.png")
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "A shape."}]
    lines = [{"messages": turns, "images": ["a.png"] * count} for count in (2, 20)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (row,) = rows(tmp_path, model, str(tmp_path / "chats.jsonl"))
    assert (row["prompt"], row["completion"], len(row["images"])) == (turns[:1], turns[1:], 2)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"messages": [{"role": "user", "content": "What?"}]}, "the last one an assistant's"),
        (
            {"messages": [{"role": role, "content": "a"} for role in ("user", "assistant")], "images": ["b.png"]},
            "there is no picture",
        ),
    ],
)
def test_another_form_is_refused(line: dict[str, Any], why: str, tmp_path: Path, model: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps(line))
    with pytest.raises(SystemExit, match=f"chats.jsonl:1: .*{why}"):
        rows(tmp_path, model, str(tmp_path / "chats.jsonl"))
