"""A recipe's page forecasts what `plan` does today, by the command on the page, with the options of its config."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # it has no types

from hf_ring_attn import cli
from hf_ring_attn.command_line import count
from tests.plan.shapes import LLAMA_8B, LLAMA_70B, QWEN3_32B
from tests.recipes.programs_of_recipes import NAMES, RECIPES

QWEN3_8B = {
    **QWEN3_32B, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
}  # fmt: skip
GEMMA3_4B = {
    "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "head_dim": 256,
                    "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208,
                    "sliding_window": 1024},
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
                      "num_hidden_layers": 27, "num_attention_heads": 16, "patch_size": 14, "image_size": 896},
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B": LLAMA_8B, "meta-llama/Llama-3.1-70B": LLAMA_70B, "Qwen/Qwen3-32B": QWEN3_32B,
    "Qwen/Qwen3-8B": QWEN3_8B, "Qwen/Qwen3-8B-Base": QWEN3_8B, "google/gemma-3-4b-it": GEMMA3_4B,
}  # fmt: skip
COMMAND = re.compile(r"^    hf-ring-attn (plan (?:.*\\\n)*.*)$", re.MULTILINE)
FIRST = r"forecasts (?P<seconds>[\d.,]+) s a step and (?P<gib>[\d.]+) GiB a GPU on \d+ x "
FOR_FIRST = r"For 8 x H100, `plan` forecasts (?P<seconds>[\d.,]+) s a step and (?P<gib>[\d.]+) GiB a GPU"
ON_TWO = "--gpus 2 --gpu h200"
FORECASTS: list[tuple[str, str, str]] = [
    *((name, "", FOR_FIRST if name == "lora-128k" else FIRST) for name in NAMES),
    *((name, ON_TWO, r"and (?P<seconds>[\d.,]+) s and (?P<gib>[\d.]+) GiB on 2 x H200")
      for name in ("extend-context", "lora-1m", "qlora-32b", "qlora-70b")),
    ("lora-1m", "", r"take\s(?P<host>\d+) GiB of host memory per process on eight GPUs"),
    ("lora-1m", ON_TWO, r"and (?P<host>\d+) GiB on two"),
    ("full-1m", f"{ON_TWO} --optimizer adamw_8bit --offload-above 48", r"(?P<seconds>[\d.,]+) s and (?P<gib>[\d.]+) "
     r"GiB with `ring.offload_above=48` \((?P<host>\d+) GiB"),
    ("full-1m", f"{ON_TWO} --optimizer adamw_8bit --offload-above 0", r"(?P<gib>[\d.]+) GiB with "
     r"`ring.offload_above=0` \((?P<host>\d+) GiB"),
]  # fmt: skip
"""A recipe, flags beside those of its page's command, and what the page says of them."""


def command(name: str) -> list[str]:
    (found,) = COMMAND.findall((RECIPES / name / "README.md").read_text())
    return shlex.split(found.replace("\\\n", " "))


@pytest.mark.parametrize(("name", "flags", "pattern"), FORECASTS, ids=[f"{each[0]} {each[1]}" for each in FORECASTS])
def test_a_page_forecasts_what_plan_does(
    name: str, flags: str, pattern: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(name)
    at = arguments.index("--model") + 1
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPES[arguments[at]]))
    arguments[at] = str(path)
    assert cli.main([*arguments, *flags.split(), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    memory = made["memory_bytes"]
    values = {"seconds": made["seconds"]["total"], "gib": memory["total"] / 2**30,
              "host": sum(memory["host"].values()) / 2**30}  # fmt: skip
    said = re.search(pattern, (RECIPES / name / "README.md").read_text())
    assert said is not None, pattern
    for field, text in said.groupdict().items():
        digits = len(text.partition(".")[2])
        assert f"{values[field]:.{digits}f}" == text.replace(",", ""), (field, "of plan, and of the page")


@pytest.mark.parametrize("name", NAMES)
def test_the_command_of_a_page_has_the_options_of_its_config(name: str) -> None:
    config, words = yaml.safe_load((RECIPES / name / "config.yaml").read_text()), command(name)
    ring, training, said = config.get("ring", {}), config["training"], dict(zip(words, [*words[1:], ""], strict=True))
    assert said["--model"] == config["model"]
    assert count()(said["--tokens"]) == training["max_length"]
    assert ("--save-attention" in words) == ring.get("save_attention", False)
    for key in ("mlp_tokens", "offload_above"):
        assert said.get(f"--{key.replace('_', '-')}") == (str(ring[key]) if key in ring else None)
    assert said.get("--optimizer") == training.get("optim")
    method = "qlora" if "quantization" in config else "lora" if "lora" in config else "full"
    assert said.get("--method", "lora") == method
