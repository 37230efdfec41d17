"""Saved results: what is written is read again, and each folder of recipes/results can be read and traced."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from docs_tools import numbers
from hf_ring_attn import cli
from hf_ring_attn.bench import results

REPOSITORY = Path(__file__).resolve().parents[2]
FILED = REPOSITORY / "recipes/results"
FOLDERS = sorted(path for path in FILED.iterdir() if path.is_dir())
PROVENANCE = ("command", "hardware", "versions", "date", "commit")
QUOTED = re.compile(r"recipes/results/([\w-]+)")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)\)")


# ---- writing and reading ---------------------------------------------------------------------------------------------


def names(folder: Path) -> list[tuple[str, list[dict[str, Any]]]]:
    return [(run.name, run.rows) for run in results.read(folder / results.FILE)]


def test_a_run_is_read_as_it_was_saved_one_row_a_line(tmp_path: Path) -> None:
    head = {"command": "a", "ranks": 2, "rows": [1, 2]}
    rows: list[dict[str, Any]] = [{"x": 0.1}, {"x": [1e-30, None, True]}]
    results.save(tmp_path / "new", "speed", head, rows)
    assert results.read(tmp_path / "new" / results.FILE) == [results.Run("speed", head, rows)]
    lines = (tmp_path / "new" / results.FILE).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"run": "speed", **head}, *rows]


def test_a_second_command_keeps_the_first_and_the_same_one_replaces_it(tmp_path: Path) -> None:
    results.save(tmp_path, "speed", {"command": "a"}, [{"x": 1}])
    results.save(tmp_path, "speed", {"command": "b"}, [{"x": 2}])
    results.save(tmp_path, "errors", {"command": "a"})
    results.save(tmp_path, "speed", {"command": "b"}, [{"x": 3}])
    assert names(tmp_path) == [("speed", [{"x": 1}]), ("errors", []), ("speed-2", [{"x": 3}])]
    results.save(tmp_path, "speed", {"command": "a"}, [{"x": 4}])
    assert names(tmp_path) == [("errors", []), ("speed-2", [{"x": 3}]), ("speed", [{"x": 4}])]


@pytest.mark.parametrize("text", ['{"x": 1}\n{"run": "speed"}\n', "nothing\n"])
def test_what_is_no_file_of_results_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / results.FILE).write_text(text)
    with pytest.raises(ValueError, match=r"rows before the head of a run|Expecting value"):
        results.read(tmp_path / results.FILE)


def test_bench_refuses_a_place_for_results_before_it_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_ring_attn.bench.speed.measure", lambda *_, **__: pytest.fail("it measures"))
    (tmp_path / results.FILE).write_text("of another program\n")
    for place in (tmp_path, tmp_path / results.FILE):
        assert cli.main(["bench", "--tokens", "32", "--device", "cpu", "--save", str(place)]) == 2
        assert f"no results can be saved in {place} (" in capsys.readouterr().err
    assert (tmp_path / results.FILE).read_text() == "of another program\n"


@pytest.mark.parametrize("arguments", [["--rings", "2"], ["--errors", "--ring", "2"]])
def test_sizes_of_rings_that_bench_would_ignore_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *arguments])
    assert ended.value.code == 2


def test_bench_saves_its_rows_after_one_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--heads", "2", "--kv-heads", "1", "--head-dim", "16", "--device", "cpu", "--dtype", "float32"]
    more = ["--tokens", "32", "64", "--rounds", "1", "--ring", "2", "--save", str(tmp_path)]
    assert cli.main(["bench", *given, *more]) == 0
    (run,) = results.read(tmp_path / results.FILE)
    assert run.name == "speed" and set(PROVENANCE) <= set(run.head) and run.head["rounds"] == 1
    assert [(row["tokens"], row["contender"]) for row in run.rows] == [
        (tokens, contender) for tokens in (32, 64) for contender in ("one device", "rank 1 of 2")
    ]
    assert "rank 1 of 2" in capsys.readouterr().out


# ---- what is filed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_folder_holds_rows_with_their_provenance_and_a_page(folder: Path) -> None:
    found = {path.name for path in folder.iterdir()}
    assert {results.FILE, "README.md"} <= found
    assert all(name.endswith(".svg") for name in found - {results.FILE, "README.md"}), "file programs by commit"
    runs = results.read(folder / results.FILE)
    assert runs and len({run.name for run in runs}) == len(runs)
    for run in runs:
        missing = [name for name in PROVENANCE if not run.head.get(name)]
        assert not missing, f"{run.name} lacks {missing}: say 'not recorded' where nobody knows"
        assert all(isinstance(row, dict) for row in run.rows)


def test_the_index_lists_every_folder() -> None:
    linked = set(LINK.findall((FILED / "README.md").read_text()))
    assert linked == {folder.name for folder in FOLDERS}


def test_a_run_whose_seconds_are_no_measurement_is_quoted_without_them() -> None:
    folder, name = "2026-11-23-chunked-loss", "chunked_256K"
    assert numbers.seconds(folder, name) == "not measured" and numbers.gib(folder, name) == "71.2"


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return [REPOSITORY / name for name in listed.stdout.split("\0") if name]


@pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="a copy without git")
def test_every_result_that_is_quoted_is_filed() -> None:
    known = {folder.name for folder in FOLDERS}
    files = [path for path in tracked() if path.suffix in {".md", ".py", ".toml", ".sh", ".yaml"} and path.exists()]
    quoted = {
        (path.relative_to(REPOSITORY), name)
        for path in files
        if not path.is_relative_to(FILED)
        for name in QUOTED.findall(path.read_text())
    }
    assert quoted and not [(str(path), name) for path, name in quoted if name not in known and name != "README"]


@pytest.mark.parametrize(
    "page", [REPOSITORY / "README.md", *sorted(FILED.rglob("*.md"))], ids=lambda path: path.parent.name
)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    assert not [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
