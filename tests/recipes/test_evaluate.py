"""evaluate.py: losses are those of the model's own logits; numbers are told and asked for where they should be."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset

from tests.helpers.models.tiny_models import tiny
from tests.recipes.programs_of_recipes import program

evaluate, plots, toy = program("evaluate"), program("plots"), program("toy")


def row(length: int) -> list[int]:
    found: list[int] = torch.randint(3, 30, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    return found


def evaluated(name: str, attention: str) -> Any:
    model: Any = tiny(name, attention)
    return model.eval()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_losses_of_tokens_are_those_of_the_models_logits(name: str) -> None:
    model, eager = evaluated(name, "ring_fp32"), evaluated(name, "eager")
    tokens = row(41)
    evaluate.check_logits(model, torch.tensor([tokens]))
    loss, right = evaluate.scores(model, tokens)
    logits = eager(input_ids=torch.tensor([tokens])).logits[0, :-1]
    want = torch.nn.functional.cross_entropy(logits.float(), torch.tensor(tokens[1:]), reduction="none")
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
    assert right.tolist() == (logits.argmax(-1) == torch.tensor(tokens[1:])).tolist()


def test_a_model_that_scales_its_logits_is_refused() -> None:
    with pytest.raises(SystemExit, match="scales its logits"):
        evaluate.check_logits(evaluated("llama", "ring_fp32").apply(_scaled), torch.tensor([row(40)]))


def _scaled(module: Any) -> None:
    if hasattr(module, "lm_head"):
        forward = module.forward

        def scaled(**inputs: Any) -> Any:
            out = forward(**inputs)
            out.logits = out.logits * 2
            return out

        module.forward = scaled


@pytest.mark.parametrize("depth", evaluate.DEPTHS)
def test_a_number_is_told_at_its_depth_and_asked_for_at_the_end(depth: float) -> None:
    tokenizer: Any = toy.tokenizer()

    def encode(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return found

    tokens, answer = evaluate.probe(encode("." * 500), 256, depth, encode, seed=1)
    text = tokenizer.decode(tokens)
    number = tokenizer.decode(answer)
    assert len(tokens) == 256 and text.count(number) == 2 and text.endswith(number)
    begin = text.index("\nThe secret")
    assert begin == pytest.approx(depth * text.count("."), abs=1.5)
    ask = text[text.rindex("\nThe secret") : -len(number)]
    assert text[begin:].startswith(ask + number + ".")


def test_a_row_that_is_longer_than_all_texts_is_refused() -> None:
    """It was filled with what there was, and its table named the length that was asked for."""
    with pytest.raises(SystemExit, match=r"a row of 256 tokens needs \d+ of text, and --rows has 100"):
        evaluate.probe([1] * 100, 256, 0.5, lambda text: [2] * len(text), seed=1)


@pytest.mark.parametrize(("name", "fault"), [("none", "there is no such folder"), (".", "there is no recipe.json")])
def test_a_folder_that_is_no_run_is_refused(name: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=fault):
        evaluate.settings_of(Namespace(run=tmp_path / name))


def test_a_checkpoint_has_the_settings_of_its_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "recipe.json").write_text(json.dumps({"settings": {"lora": None, "dtype": "float32"}}))
    found = evaluate.settings_of(Namespace(run=tmp_path / "checkpoint-2"))
    assert found["model"] == str(tmp_path / "checkpoint-2") and found["dtype"] == "float32"


def test_rows_of_pictures_are_refused() -> None:
    rows = Dataset.from_dict({"messages": ["a"], "images": ["b"]})
    with pytest.raises(SystemExit, match=r"rows have the columns messages, images: give rows of tokens \(input_ids\)"):
        evaluate.evaluate(None, None, rows, 1, None, 0)


def test_rows_of_several_texts_have_no_positions() -> None:
    rows = Dataset.from_dict({"input_ids": [[3, 4]], "seq_lengths": [[1, 1]]})
    with pytest.raises(SystemExit, match="prepare them with --pack wrapped or none"):
        evaluate.evaluate(None, None, rows, 1, None, 1)


def test_without_matplotlib_no_plot_is_a_line_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not plots.draw(tmp_path / "a.svg", lambda axes: None)
    assert capsys.readouterr().out.startswith("no plot a.svg") and not list(tmp_path.iterdir())


def test_tables_and_plots(tmp_path: Path) -> None:
    results = {
        "loss": [{"from": 0, "to": 32, "loss": 3.0}, {"from": 32, "to": 64, "loss": 2.5}],
        "needles": [{"length": n, "depth": d, "found": 0.5, "loss": 1.0} for n in (64, 128) for d in evaluate.DEPTHS],
    }
    text = evaluate.tables(results)
    assert "| 32 to 64 | 2.5000 |" in text and "| 128 | 50% | 50% | 50% | 50% | 50% |" in text
    pytest.importorskip("matplotlib")
    evaluate.plot(results, {"before": results}, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"loss.svg", "needles.svg"}


def test_a_plot_makes_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With matplotlib, and without a folder `data`, each recipe ended before its first step."""

    class Figure:
        def __init__(self, **_options: Any) -> None:
            pass

        def add_subplot(self) -> None:
            return None

        def savefig(self, path: Path) -> None:
            path.write_text("a plot")

    monkeypatch.setitem(sys.modules, "matplotlib.figure", SimpleNamespace(Figure=Figure))
    assert plots.draw(tmp_path / "data" / "rows.svg", lambda _axes: None)
    assert (tmp_path / "data" / "rows.svg").read_text() == "a plot"
