"""Programs of README and docs on a GPU, by their launch configs: two ranks that share it, and QLoRA in one process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from transformers import TrainingArguments

pytest.importorskip("trl")

from tests.docs.test_launches import LAUNCHES, RANKS, Launch, write_program
from tests.gpu.launch import run
from tests.helpers.blocks import REPOSITORY, blocks_of, tiny_models_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SECONDS = 180
"""For a program: several may run at once."""


@pytest.mark.parametrize("launch", [pytest.param(one, id=f"{one.page}, {at}") for at, one in enumerate(LAUNCHES)])
def test_a_program_of_a_page_on_ranks_that_share_a_gpu(launch: Launch, tmp_path: Path) -> None:
    script = write_program(launch, tmp_path)
    script.write_text(for_these_versions(script.read_text()))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS)]
    if launch.config is not None:
        config = {**launch.config, "mixed_precision": "bf16"}
        (tmp_path / "launch.yaml").write_text(yaml.safe_dump(config))
        command = ["-m", "accelerate.commands.launch", "--config_file", "launch.yaml", "--main_process_port", "0"]
    said = run([*command, "train.py"], SECONDS, tmp_path, nccl_on_one_gpu=True)
    assert ("[hf_ring_attn] ring of 2: " if "transformers" in launch.program else "loss ") in said


def test_qlora_and_merging_its_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, three steps long, on a book of the standard library's text.

    It sees one GPU: where it sees more, Trainer takes them by nn.DataParallel, which SFTTrainer refuses.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
    qlora, merge = program_of("docs/guides/qlora.md"), program_of("docs/guides/save-and-serve.md")
    tiny_models_of(qlora, tmp_path)
    (tmp_path / "book.txt").write_text(Path(os.__file__).read_text())
    short = qlora.replace("max_steps=200", "max_steps=3").replace("131072", "4096")
    (tmp_path / "train.py").write_text(for_these_versions(short))
    said = run(["train.py"], SECONDS, tmp_path)
    assert said.count("'loss':") == 3, said[-3000:]
    (tmp_path / "merge.py").write_text(merge)
    run(["merge.py"], SECONDS, tmp_path)
    assert (tmp_path / "merged" / "model.safetensors").is_file()


def for_these_versions(program: str) -> str:
    """The pages say what transformers before 5.23 calls activation checkpointing."""
    new = "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    return program if new else program.replace("activation_checkpointing", "gradient_checkpointing")


def program_of(page: str) -> str:
    """The Python program of a page that is marked as one for a GPU."""
    blocks = blocks_of((REPOSITORY / page).read_text(), page)
    (code,) = (block.code for block in blocks if block.mark == "gpu" and block.language == "python")
    return code
