"""The command ``verify``: exit codes, table and JSON, on two CPU ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_ring_attn import cli
from hf_ring_attn.integration.model import loading
from hf_ring_attn.verify.command import _as_json, _keep_first, _kinds_not_seen, _table, _windows_not_seen
from hf_ring_attn.verify.verdict import Finding
from tests.helpers.jobs.verify_jobs import looks_around
from tests.helpers.models.tiny_models import SIZES, tiny
from tests.helpers.programs import start
from tests.helpers.torchrun import on_nodes
from tests.sweep.configs import entries, tiny_config

FACTS = {
    "model": "LlamaForCausalLM", "weights": "random", "ranks": 2, "device": "cpu", "dtype": "float32", "tokens": 64,
    "layers": 2,
}  # fmt: skip
GOOD, BAD = Finding("leak: a", 0.0, 1e-6), Finding("layers of kind full_attention", 0.1, 1e-4, "model.layers.1")
PROGRAM = """
import json, sys
from pathlib import Path
from hf_ring_attn.cli import main
code = main(["verify", "--model", "config.json", "--tokens", "48", "--layers", "1", "--device", "cpu", *sys.argv[1:]])
Path('code.txt').write_text(str(code))
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **SIZES, "eos_token_id": [1, 2]}))
    return path


def test_a_tiny_llama_passes_on_two_ranks(tmp_path: Path, config: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    text = start(tmp_path, script, ranks=2).output()
    assert "LlamaForCausalLM, 1 layers, random weights, float32: 48 tokens, 2 ranks on cpu" in text
    (line,) = [line for line in text.splitlines() if line.startswith("[hf_ring_attn]")]
    assert "ring of 2: 24 of 48 tokens a rank, kernel reference" in line and line.endswith("self-check passed")
    assert "leak: a later token changes earlier logits" in text and text.rstrip().endswith("\nexact")
    assert (tmp_path / "code.txt").read_text() == "0"


LEAKS = """
from hf_ring_attn.integration.model import loading
from tests.helpers.jobs.verify_jobs import looks_around
made = loading.random_model

def leaking(*arguments):
    model = made(*arguments)
    model.model.layers[0].self_attn.register_forward_hook(looks_around)
    return model

loading.random_model = leaking
"""


@pytest.mark.slow
@pytest.mark.turns
@pytest.mark.parametrize("leaks", [False, True])
def test_two_nodes_of_torchrun_have_one_verdict(tmp_path: Path, config: Path, leaks: bool) -> None:
    arguments = ["--model", config.name, "--tokens", "48", "--layers", "1", "--device", "cpu"]
    command = ["-m", "hf_ring_attn", "verify", *arguments]
    if leaks:
        (tmp_path / "program.py").write_text(LEAKS + PROGRAM + "sys.exit(code)\n")
        command = ["program.py"]
    nodes = on_nodes(2, tmp_path, command)
    text = "".join(said for _, said in nodes)
    assert text.count("48 tokens, 2 ranks on cpu") == 1, text
    assert [line for line in text.splitlines() if line in ("exact", "NOT exact")] == ["NOT exact" if leaks else "exact"]
    assert [code for code, _ in nodes] == [int(leaks)] * 2, text


def test_a_leak_gives_exit_code_1_and_is_named(
    capsys: pytest.CaptureFixture[str], config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = loading.random_model

    def leaking(*arguments: Any) -> Any:
        model: Any = made(*arguments)
        model.model.layers[0].self_attn.register_forward_hook(looks_around)
        return model

    monkeypatch.setattr(loading, "random_model", leaking)
    assert cli.main(["verify", "--model", str(config), "--tokens", "48", "--ranks", "1", "--device", "cpu"]) == 1
    text = capsys.readouterr().out
    assert "DIFFERS" in text and text.endswith("NOT exact\n")


def test_one_rank_is_not_called_exact(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    assert cli.main(["verify", "--model", str(config), "--tokens", "48", "--ranks", "1", "--device", "cpu"]) == 1
    assert "give --ranks 2 or more" in capsys.readouterr().out


@pytest.mark.full
def test_the_command_starts_its_own_ranks(capfd: pytest.CaptureFixture[str], config: Path) -> None:
    assert cli.main(["verify", "--model", str(config), "--tokens", "48", "--device", "cpu", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["exact"] is True and found["ranks"] == 2 and found["layers"] == 2


def test_what_differs_is_shown_with_its_place() -> None:
    text = _table(FACTS, [GOOD, BAD], "", ["sliding_window = 4096 begins beyond the row"])
    assert "DIFFERS   model.layers.1" in text and "not seen: sliding_window" in text and text.endswith("NOT exact")
    assert _table(FACTS, [GOOD], "", []).endswith("\nexact")
    assert _table(FACTS, [GOOD], "", ["a window"]).endswith("\nnot seen: a window\nexact, but not all was seen")
    assert "self-check: refused" in _table(FACTS, [GOOD], "refused", [])


def test_json_has_every_comparison() -> None:
    found = json.loads(_as_json(FACTS, [GOOD, BAD], "", []))
    assert set(found) == {*FACTS, "exact", "findings", "self_check", "not_seen"} and found["exact"] is False
    assert found["findings"][1] == {
        "what": "layers of kind full_attention", "error": 0.1, "limit": 1e-4, "exact": False, "where": "model.layers.1",
    }  # fmt: skip


def test_windows_beyond_the_row_are_said() -> None:
    config = tiny("mistral", "eager").config  # a window of 7
    assert _windows_not_seen(config, 8) == []
    assert _windows_not_seen(config, 7) == ["sliding_window = 7 begins beyond the row: --tokens 14 would show it"]


SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
KINDS = {
    "Gemma 3": ([*[SLIDING] * 5, FULL] * 2, 3, {FULL: 6}),
    "Gemma 3 with each kind": ([*[SLIDING] * 5, FULL] * 2, 6, {}),
    "gpt-oss": ([SLIDING, FULL] * 2, 1, {FULL: 2}),
    "three kinds": ([LINEAR, SLIDING, SLIDING, FULL], 1, {SLIDING: 2, FULL: 4}),
    "all layers": ([SLIDING, FULL], 2, {}),
}


@pytest.mark.parametrize("case", KINDS)
def test_kinds_of_layers_that_did_not_run_are_said(case: str) -> None:
    kinds, layers, missing = KINDS[case]
    assert _kinds_not_seen(kinds, layers) == [
        f"layers of kind {kind}, which begin after the first {layers}: --layers {needed} would show one"
        for kind, needed in missing.items()
    ]


WINDOWED = {"model_type": "gemma3_text", **SIZES, "num_hidden_layers": 6, "sliding_window": 7}
MISSING = ["layers of kind full_attention, which begin after the first 3: --layers 6 would show one"]


@pytest.mark.parametrize(
    ("layers", "ran", "not_seen", "said"),
    [(3, 3, MISSING, ""), (9, 6, [], "--layers 9 is more than the model has: all 6 layers ran\n")],
)
def test_the_command_compares_its_layers_with_the_whole_model(
    capsys: pytest.CaptureFixture[str], config: Path, layers: int, ran: int, not_seen: list[str], said: str
) -> None:
    """Three layers of Gemma 3 were "exact", and nothing said that its full attention had not run."""
    config.write_text(json.dumps(WINDOWED))
    arguments = ["--tokens", "32", "--ranks", "1", "--device", "cpu", "--json", "--layers", str(layers)]
    cli.main(["verify", "--model", str(config), *arguments])
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert (found["layers"], found["not_seen"], shown.err) == (ran, not_seen, said)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--ranks", "0"], "from 1 on"), (["--tokens", "8"], "from 32 on"), (["--device", "tpu"], "must be cuda or cpu")],
)
def test_bad_arguments_are_refused_in_words(
    capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", "--model", "nothing", *arguments])
    assert ended.value.code == 2 and text in capsys.readouterr().err


def test_ranks_get_the_same_command(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def start_ranks(*what: Any) -> int:
        started.append(what)
        return 0

    monkeypatch.setattr("hf_ring_attn.verify.command.start_ranks", start_ranks)
    line = ["verify", "--model", str(config), "--tokens=48", "--ranks", "3", "--dtype", "bfloat16", "--json"]
    assert cli.main(line) == 0
    assert started == [(3, line)]


def test_an_unknown_model_is_refused_before_ranks_start(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["verify", "--model", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "layers", "kept"),
    [
        ("jamba", 1, {"layer_types": ["linear_attention"]}),  # it computes its kinds of layers
        ("falcon_h1", 1, {"time_step_limit": (0.0, float("inf"))}),  # as long as its list of layers
        ("gemma4_text", 2, {"num_kv_shared_layers": 0}),
    ],
)
def test_the_first_layers_of_any_config(kind: str, layers: int, kept: dict[str, Any]) -> None:
    config: Any = tiny_config(next(entry for entry in entries() if entry.model_type == kind))
    _keep_first(config, layers)
    assert config.num_hidden_layers == layers
    assert {name: getattr(config, name) for name in kept} == kept
    loading.random_model(config, torch.float32, "eager")


def test_layers_that_do_not_attend_are_too_few(tmp_path: Path) -> None:
    entry = next(entry for entry in entries() if entry.model_type == "jamba")
    tiny_config(entry).save_pretrained(tmp_path)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with pytest.raises(AssertionError, match="--layers=1 is not possible: it must be 2 or more: no layer before that"):
        start(tmp_path, program, ranks=2).output()
