"""The command ``plan``: its table, its JSON, what it writes and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # it has no types

from hf_ring_attn import cli
from hf_ring_attn.plan import command, launch
from hf_ring_attn.plan.hardware import LOCKED_GIB_PER_SECOND
from hf_ring_attn.plan.program import OPTIMIZERS as TRAINERS
from hf_ring_attn.plan.program import SHARDED_OPTIMIZERS, program
from hf_ring_attn.plan.setup import METHODS, OPTIMIZERS, SHARDS, Setup
from tests.helpers.programs import older_names, start
from tests.plan.shapes import LLAMA_8B
from tests.recipes.programs_of_recipes import program as recipe_program


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA_8B, "num_hidden_layers": 4}))
    return str(path)


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = cli.main(["plan", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_table_shows_parts_seconds_and_the_launch(capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert cli.main(["plan", "--model", model, "--gpus", "2", "--tokens", "128K"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("LlamaForCausalLM, 1.92 billion parameters, lora, bfloat16: 131,072 tokens in a row")
    for part in ("layer checkpoints", "MLP intermediates", "weights", "peer-to-peer buffers", "attention", "launches"):
        assert f"\n  {part} " in text, part
    assert "fits in 79.1" in text and "accelerate launch --config_file ring.yaml train.py" in text


def test_one_gpu_without_options_is_told_of_its_logits(capsys: pytest.CaptureFixture[str], model: str) -> None:
    for more, told in (([], True), (["--mlp-tokens", "1024"], False), (["--loss", "sharded"], False)):
        _, found = as_json(capsys, "--model", model, "--gpus", "1", "--tokens", "4096", *more)
        assert any("Trainer makes all logits" in note for note in found["notes"]) == told, more


def test_several_gpus_without_a_ring_get_no_options_of_rings(capsys: pytest.CaptureFixture[str], model: str) -> None:
    """Their processes ignore RingConfig, so forecasts with its options were of other runs."""
    _, found = as_json(capsys, "--model", model, "--gpus", "8", "--ring", "1", "--tokens", "16K")
    assert any(note.startswith("a ring of 1 is none") for note in found["notes"])
    offered = " ".join(name for one in found["alternatives"] for name in one["changes"])
    assert offered and not any(name in offered for name in ("--save-attention", "--mlp-tokens", "--offload-above"))


def test_auto_keeps_layers_as_a_number_of_them_does(capsys: pytest.CaptureFixture[str], model: str) -> None:
    common = ("--model", model, "--gpus", "2", "--gpu", "h200", "--tokens", "512K", "--liger")
    _, auto = as_json(capsys, *common, "--keep-layers", "auto")
    count = auto["setup"]["keep_layers"]
    assert 0 < count < 4 and f"{count} of 4 layers keep their activations" in auto["notes"]
    assert as_json(capsys, *common, "--keep-layers", str(count))[1] == auto
    assert f"RingConfig(save_attention=True, keep_layers={count})" in auto["launch"]["program"]


def test_fsdp2_is_told_of_the_storage_of_4_bit_weights(capsys: pytest.CaptureFixture[str], model: str) -> None:
    for more, told in ((["qlora"], True), (["qlora", "--shard", "ddp"], False), (["lora"], False)):
        _, found = as_json(capsys, "--model", model, "--gpus", "2", "--tokens", "4096", "--method", *more)
        assert any('bnb_4bit_quant_storage="bfloat16"' in note for note in found["notes"]) == told, more


def test_the_kernel_is_that_of_the_gpu_and_the_dtype(capsys: pytest.CaptureFixture[str], model: str) -> None:
    long = ("--model", model, "--gpus", "2", "--tokens", "128K")
    seconds = {}
    for more, kernel in (([], "flash4"), (["--kernel", "triton"], "triton"), (["--gpu", "a100"], "triton"),
                         (["--dtype", "float32"], "triton")):  # fmt: skip
        _, found = as_json(capsys, *long, *more)
        assert found["setup"]["kernel"] == kernel, more
        seconds[" ".join(more)] = found["seconds"]["parts"]["attention"]
    assert 1.2 * seconds[""] < seconds["--kernel triton"] < 1.5 * seconds[""]
    cli.main(["plan", *long, "--gpu", "a100"])
    assert "\na step, attention in triton " in capsys.readouterr().out


def test_json_has_all_numbers(capsys: pytest.CaptureFixture[str], model: str) -> None:
    code, found = as_json(capsys, "--model", model, "--gpus", "2", "--tokens", "131072", "--gpu", "h200")
    assert code == 0 and found["fits"] is True
    assert set(found) == {
        "model", "parameters", "gpu", "setup", "memory_bytes", "fits", "seconds", "tokens_per_second_per_gpu", "mfu",
        "alternatives", "longer_rows", "launch", "notes",
    }  # fmt: skip
    assert set(found["memory_bytes"]) == {"parts", "total", "allocated", "moment", "host", "limit", "kept_free"}
    assert sum(found["memory_bytes"]["parts"].values()) == pytest.approx(found["memory_bytes"]["total"])
    assert sum(found["seconds"]["parts"].values()) == pytest.approx(found["seconds"]["total"])
    assert 0 < found["mfu"] < 1 and found["setup"]["tokens"] == 131072


def test_host_memory_is_that_of_a_gpu_and_of_its_node(capsys: pytest.CaptureFixture[str], model: str) -> None:
    asked = ("plan", "--model", model, "--tokens", "1M", "--mlp-tokens", "16384", "--offload-above", "0")
    for gpus, node in (((), 2), (("--gpus-per-node", "1"), 1)):
        cli.main([*asked, "--gpus", "2", *gpus])
        said = capsys.readouterr().out
        lines = [line.rsplit(maxsplit=1) for line in said.splitlines() if "in host memory" in line]
        found = {name.strip(): float(gib) for name, gib in lines}
        assert found.pop("in host memory, for each GPU: layer checkpoints") == 16
        assert found == ({} if node == 1 else {"in host memory, for all 2 GPUs of a node": 32})
        (locks,) = re.findall(r"the first step also locks host memory, about +([0-9.]+)", said)
        assert float(locks) == pytest.approx(16 / LOCKED_GIB_PER_SECOND, abs=0.01)


def test_the_longest_row_agrees_with_the_table(capsys: pytest.CaptureFixture[str], model: str) -> None:
    common = ("--model", model, "--gpus", "2", "--memory", "40")
    code, longest = as_json(capsys, *common, "--max-tokens")
    tokens = longest["setup"]["tokens"]
    assert code == 0 and longest["memory_bytes"]["total"] <= 40 * 2**30
    longer = longest.pop("longer_rows")
    again = as_json(capsys, *common, "--tokens", str(tokens))[1]
    assert longer and again.pop("longer_rows") == [] and again == longest
    code, over = as_json(capsys, *common, "--tokens", str(tokens + 4))
    assert code == 1 and over["fits"] is False and over["alternatives"]


def typed(options: list[str], changes: list[str]) -> list[str]:
    """A command line with these changes, as a user writes it."""
    found = list(options)
    for change in changes:
        name, *value = change.removeprefix("no ").split()
        leaves = {"checkpointing": "--no-checkpointing"}.get(name, name)
        if leaves in found:
            at = found.index(leaves)
            del found[at : at + 1 + len(value)]
        if change.startswith("--"):
            found += [name, *value]
    return found


@pytest.mark.parametrize(
    "options",
    [
        "--shard ddp --memory 40 --host-memory 20",
        *(
            pytest.param(options, marks=pytest.mark.full)
            for options in (
                "--memory 40",
                "--no-checkpointing --gpu h200",
                "--save-attention --offload-above 0 --host-memory 8",
                "--method full --host-memory 30 --memory 30",
                "--keep-layers 2 --no-save-attention --memory 40",
            )
        ),
    ],
)
def test_options_for_longer_rows_are_what_a_second_call_says(
    capsys: pytest.CaptureFixture[str], model: str, options: str
) -> None:
    common = ["--model", model, "--gpus", "2", *options.split()]
    found = as_json(capsys, *common, "--max-tokens")[1]
    assert found["longer_rows"]
    for one in [*found["longer_rows"], *found["alternatives"]]:
        tokens = one.get("tokens", found["setup"]["tokens"])
        same = as_json(capsys, *typed(common, one["changes"]), "--tokens", str(tokens))[1]
        assert same["fits"] and same["memory_bytes"]["total"] == one["memory_bytes"], one
        assert sum(same["memory_bytes"]["host"].values()) == one["host_bytes"]
        assert same["seconds"]["total"] == one["seconds"]
        if "tokens" in one:
            longest = as_json(capsys, *typed(common, one["changes"]), "--max-tokens")[1]
            assert longest["setup"]["tokens"] == tokens, one


def test_host_memory_of_options_is_said(capsys: pytest.CaptureFixture[str], model: str) -> None:
    common = ("plan", "--model", model, "--gpus", "2", "--max-tokens")
    for more, told in (((), True), (("--host-memory", "64"), False)):
        cli.main([*common, *more])
        said = capsys.readouterr().out
        assert ("no limit of host memory was assumed" in said) == told
        assert re.search(r"tokens, +[0-9.]+ GiB \+ +[0-9.]+ of host memory, .* --offload-above", said)


def test_a_model_of_which_no_row_fits_is_not_shown_a_table(capsys: pytest.CaptureFixture[str], model: str) -> None:
    arguments = ["plan", "--model", model, "--gpus", "2", "--method", "full", "--memory", "12", "--max-tokens"]
    assert cli.main(arguments) == 1
    first, *others = capsys.readouterr().out.partition("\n\n")[2].splitlines()
    assert re.match(r"no row fits: 4 tokens take [0-9.]+ of 12.0 GiB a GPU", first)
    assert others[0] == "options with which rows fit:" and all(" tokens, " in line for line in others[1:-1])
    assert len(others) > 2


def test_quantized_weights_are_an_option_where_no_row_fits(
    capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path
) -> None:
    """The frozen weights alone are 3.6 GiB in 16 bits."""
    folder = tmp_path / "none"
    arguments = ["plan", "--model", model, "--gpus", "1", "--memory", "5.2", "--max-tokens", "--write", str(folder)]
    assert cli.main(arguments) == 1
    said = capsys.readouterr().out.splitlines()
    assert any("--method qlora" in line and "it rounds the frozen weights" in line for line in said)
    assert said[-1].startswith("nothing was written, since it does not fit") and not folder.exists()
    assert cli.main([*arguments, "--memory", "2.5"]) == 1
    assert "no options that this command knows make it fit: take more GPUs" in capsys.readouterr().out


def test_advice_leaves_memory_free_unless_nothing_else_fits(
    capsys: pytest.CaptureFixture[str], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = (("--model", model, "--gpus", "2", "--gpu", "h200", "--tokens", n) for n in ("64K", "2M"))
    totals = [other["memory_bytes"] for other in as_json(capsys, *short)[1]["alternatives"]]
    assert totals and max(totals) <= 0.93 * 139.8 * 2**30
    monkeypatch.setattr(command, "KEPT_FREE", 0.999)
    assert as_json(capsys, *short)[1]["alternatives"] == [], "it fits as it is"
    code, found = as_json(capsys, *long)
    assert code == 1 and found["alternatives"], "any that fits"


REFUSED = {
    "neither": (["--gpus", "2"], "give either --tokens or --max-tokens"),
    "no tokens": (["--gpus", "2", "--tokens", "0"], "got 0, which must be a whole number from 1 on"),
    "negative": (["--gpus", "2", "--tokens=-5"], "got -5, which must be a whole number from 1 on"),
    "no GPU": (["--gpus", "0", "--tokens", "8K"], "got 0, which must be a whole number from 1 on"),
    "uneven ring": (["--gpus", "8", "--ring", "3", "--tokens", "8K"], "--gpus 8 must be a multiple of --ring 3"),
    "uneven nodes": (["--gpus", "20", "--tokens", "8K"], "--gpus 20 must be a multiple of --gpus-per-node 8"),
    "scaler": (["--gpus", "1", "--tokens", "8K", "--method", "full", "--dtype", "float16"], "needs --shard fsdp2"),
    "memory": (["--gpus", "2", "--tokens", "8K", "--memory", "none"], "got none, which must be a number above 0"),
    "idle": (["--gpus", "2", "--tokens", "8K", "--save-attention", "--no-checkpointing"], "needs checkpointing"),
    "kernel": (["--gpus", "2", "--tokens", "8K", "--kernel", "flash4", "--gpu", "a100"], "leave it out"),
    "its dtype": (["--gpus", "2", "--tokens", "8K", "--kernel", "flash4", "--dtype", "float32"], "16 bits"),
    "offload": (["--gpus", "2", "--tokens", "8K", "--offload-params", "--shard", "ddp"], "needs --shard fsdp2"),
    "kept": (["--gpus", "2", "--tokens", "8K", "--keep-layers", "few"], "a number of layers from 0 on, or auto"),
    "kept, no ring": (["--gpus", "2", "--ring", "1", "--tokens", "8K", "--keep-layers", "2"], "without a ring"),
    "kept whole": (["--gpus", "2", "--tokens", "8K", "--keep-layers", "2", "--no-checkpointing"], "needs checkpoints"),
    "kept, saved": (["--gpus", "2", "--tokens", "8K", "--keep-layers=auto", "--save-attention"], "is decided with"),
    "no ring": (["--gpus", "2", "--ring", "1", "--tokens", "8K", "--mlp-tokens", "1K"], "no effect without a ring"),
}


@pytest.mark.parametrize(("arguments", "text"), REFUSED.values(), ids=list(REFUSED))
def test_bad_arguments_are_refused_in_words(
    capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "--model", "nobody/nothing", *arguments])
    assert ended.value.code == 2 and text in capsys.readouterr().err


def test_an_unknown_model_is_refused_in_words(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["plan", "--model", str(tmp_path / "none"), "--gpus", "2", "--tokens", "8K"]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shard", SHARDS)
def test_the_launch_is_complete(method: str, shard: str, tmp_path: Path) -> None:
    setup = Setup(gpus=8, tokens=4096, ring=4, method=method, shard=shard, mlp_tokens=512, offload_above=0.0)
    launch.write(tmp_path, setup, program(setup, "some/model"))
    config = yaml.safe_load((tmp_path / launch.CONFIG).read_text())
    sizes = config["parallelism_config"]
    assert sizes["parallelism_config_cp_size"] == 4 and config["num_processes"] == 8
    assert sizes["parallelism_config_dp_replicate_size"] * sizes["parallelism_config_dp_shard_size"] == 2
    assert config["mixed_precision"] == "bf16"
    text = (tmp_path / launch.PROGRAM).read_text()
    compile(text, launch.PROGRAM, "exec")
    assert ("load_in_4bit" in text) == (method == "qlora") and ("LoraConfig(" in text) == (method != "full")
    assert "max_length=4096" in text and "mlp_tokens=512" in text


def test_the_program_has_the_options_of_the_forecast_and_its_notes() -> None:
    setup = Setup(gpus=2, tokens=4096, kernel="triton", loss="sharded")
    text = program(setup, "some/model", notes=["4,096 tokens are beyond it", "another"])
    assert "# 4,096 tokens are beyond it\n# another\nimport torch\n" in text
    assert 'RingConfig(save_attention=False, kernel="triton", loss="sharded")' in text
    assert "RingConfig(save_attention=False)" in program(Setup(gpus=2, tokens=4096), "some/model")


@pytest.mark.slow
def test_the_program_trains_without_a_warning_of_an_older_name(tmp_path: Path) -> None:
    toy = recipe_program("toy")
    toy.write_model(tmp_path / "model")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/rows.jsonl").write_text(json.dumps({"text": "A row of words. " * 20}) + "\n")
    setup = Setup(gpus=1, tokens=256, dtype="float32", save_attention=True)
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
    launch.write(tmp_path, setup, program(setup, str(tmp_path / "model"), rope=yarn))
    written = tmp_path / launch.PROGRAM
    written.write_text(written.read_text().replace('"DATA"', f'"{tmp_path / "rows"}"'))
    said = start(tmp_path, written).output()
    assert "train_loss" in said and not older_names(said), said
    assert list((tmp_path / "outputs").glob("adapter_model.*")), "the program saves what it trained"


@pytest.mark.parametrize("known", ["activation_checkpointing", "gradient_checkpointing"])
def test_the_program_names_checkpointing_as_transformers_does(known: str) -> None:
    """Until transformers 5.22 it has the older name only."""
    text = program(Setup(gpus=1, tokens=256, checkpointing=False), "some/model")
    begins, ends = text.index('checkpointing = "'), text.index("adapter = ")
    config = type("SFTConfig", (dict,), {"__dataclass_fields__": {known: None}})
    found: dict[str, Any] = {"SFTConfig": config}
    exec(text[begins:ends], found)
    assert found["arguments"][known] is False
    assert {key for key in found["arguments"] if "checkpointing" in key} == {known, f"{known}_kwargs"}


def test_yaml_does_not_read_a_no_as_false() -> None:
    setup = Setup(gpus=2, tokens=4096, dtype="float32")
    assert yaml.safe_load(launch.config(setup))["mixed_precision"] == "no"


def test_optimizers_have_trainers_names() -> None:
    from transformers.training_args import OptimizerNames

    assert set(TRAINERS) == set(OPTIMIZERS)
    assert all(OptimizerNames(name) for name in (*TRAINERS.values(), *SHARDED_OPTIMIZERS.values()))


def test_a_program_has_an_optimizer_that_takes_its_weights(capsys: pytest.CaptureFixture[str], model: str) -> None:
    """The first step of bitsandbytes's fails with weights that FSDP2 shards."""
    for shard, name in (("fsdp2", "adamw_torch_8bit"), ("ddp", "adamw_bnb_8bit")):
        setup = Setup(gpus=2, tokens=4096, method="full", optimizer="adamw_8bit", shard=shard)
        assert f'optim="{name}"' in program(setup, model)
    arguments = ["plan", "--model", model, "--gpus", "2", "--tokens", "64K", "--optimizer", "paged_adamw_8bit"]
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert "takes no weights that FSDP2 shards: use adamw_8bit, or --shard ddp" in capsys.readouterr().err
    code, found = as_json(capsys, *arguments[1:], "--shard", "ddp", "--memory", "8.5")
    assert code == 1 and found["alternatives"]
    for one in found["alternatives"]:
        assert "--shard fsdp2" not in one["changes"] or "--optimizer adamw_8bit" in one["changes"], one
