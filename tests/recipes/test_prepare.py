"""prepare.py: tokens and labels of each kind of text, packed rows that lose nothing unsaid, the histogram."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from tests.recipes.programs_of_recipes import program

prepare, toy = program("prepare"), program("toy")
TURNS = [
    {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}, {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "5"},
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    toy.tokenizer().save_pretrained(folder)
    return folder


def made(folder: Path, tokenizer: Path, lines: list[dict[str, Any]], *more: str) -> Dataset:
    texts = folder / "texts.jsonl"
    texts.write_text("\n".join(map(json.dumps, lines)) + "\n")
    output = folder / "out/rows.parquet"
    prepare.main([str(texts), "--tokenizer", str(tokenizer), "--output", str(output), *more])
    return Dataset.from_parquet(str(output), cache_dir=str(folder / "cache"))


def learned(row: dict[str, list[int]]) -> str:
    """The text of the tokens that are learned."""
    text: str = toy.tokenizer().decode([token for token in row["labels"] if token != -100])
    return text


@pytest.mark.parametrize(
    ("line", "whole", "learnt"),
    [
        ({"text": "abc"}, "abc<end>", "abc<end>"),
        ({"prompt": "2 + 2 =", "completion": " 4"}, "2 + 2 = 4<end>", " 4<end>"),
        ({"messages": TURNS}, "<user>2 + 2?<assistant>4<end><user>And?<assistant>5<end>", "4<end>5<end>"),
    ],
)
def test_what_is_learned_of_a_text(
    line: dict[str, Any], whole: str, learnt: str, tmp_path: Path, tokenizer: Path
) -> None:
    (row,) = made(tmp_path, tokenizer, [line], "--length", "64").to_list()
    assert toy.tokenizer().decode(row["input_ids"]) == whole
    assert learned(row) == learnt
    assert all(label in (-100, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))
    assert row["seq_lengths"] == [len(row["input_ids"])]


@pytest.mark.parametrize("pack", ["bfd", "bfd_split", "wrapped", "none"])
def test_rows_of_each_way_to_pack(
    pack: str, tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Texts of 4, 7, 11 and 3 tokens in rows of 10."""
    lines = [{"text": letter * (count - 1)} for letter, count in zip("abcd", (4, 7, 11, 3), strict=True)]
    rows = made(tmp_path, tokenizer, lines, "--length", "10", "--pack", pack).to_list()
    tokens = [token for row in rows for token in row["input_ids"]]
    lost = 1 if pack in ("bfd", "none") else 0
    assert len(tokens) == 25 - lost and max(len(row["input_ids"]) for row in rows) == 10
    text = capsys.readouterr().out
    assert f"{len(rows)} rows of up to 10 tokens, {25 - lost} in all; {lost} were cut off" in text
    if pack.startswith("bfd"):
        assert all(sum(row["seq_lengths"]) == len(row["input_ids"]) for row in rows)
        assert any(len(row["seq_lengths"]) > 1 for row in rows)
    else:
        assert "seq_lengths" not in rows[0]
    if pack == "wrapped":
        assert [len(row["input_ids"]) for row in rows] == [10, 10, 5]


def test_texts_without_a_learned_token_are_left_out_and_others_held_out(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"prompt": "long " * 9, "completion": "x"}, *({"prompt": "a", "completion": "b"} for _ in range(5))]
    rows = made(tmp_path, tokenizer, lines, "--length", "16", "--pack", "none", "--eval-every", "3")
    assert len(rows) == 3
    assert len(Dataset.from_parquet(str(tmp_path / "out/rows-eval.parquet"), cache_dir=str(tmp_path))) == 2
    assert "1 texts were left out" in capsys.readouterr().out


@pytest.mark.parametrize("pack", ["bfd", "none"])
def test_as_many_rows_as_asked_for_of_texts_that_are_cut_off(pack: str, tmp_path: Path, tokenizer: Path) -> None:
    """What was cut off counted as given, so the first text of 100 tokens ended a file of 4 rows of 10."""
    lines = [{"text": "a" * 99} for _ in range(20)]
    assert len(made(tmp_path, tokenizer, lines, "--length", "10", "--pack", pack, "--rows", "4")) == 4


@pytest.mark.parametrize("wrong", [("--eval-every", "1"), ("--eval-every", "-2"), ("--rows", "0")])
def test_numbers_that_leave_no_rows_are_refused(wrong: tuple[str, str], tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        made(tmp_path, tokenizer, [{"text": "abc"}], "--length", "10", *wrong)
    assert ended.value.code == 2


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        prepare.main(["no.txt", "--tokenizer", "none", "--length", "16", "--output", "out.parquet"])
    assert ended.value.code == 2 and ": no.txt\n" in capsys.readouterr().err


def test_lines_of_no_known_form_are_named(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(SystemExit, match=r"texts\.jsonl:2: it has neither text"):
        made(tmp_path, tokenizer, [{"text": "a"}, {"body": "b"}], "--length", "16")


def test_the_histogram_counts_by_power_of_two() -> None:
    assert prepare.histogram([1, 2, 3, 4, 5, 8, 9]) == [(1, 1), (2, 1), (4, 2), (8, 2), (16, 1)]
