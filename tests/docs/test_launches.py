"""Programs of README and docs, started with the launch config that the page names, its sizes cut to two CPU ranks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import accelerate  # noqa: F401  the fork server imports it once for all programs
import pytest
import trl.trainer.sft_trainer  # noqa: F401  the fork server imports it once, too
import yaml  # type: ignore[import-untyped]
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from tests.helpers import programs
from tests.helpers.blocks import PAGES, REPOSITORY, Block, blocks_of, tiny_models_of

ACCELERATE = re.compile(r"^accelerate launch --config_file (\S+\.yaml) (\w+\.py)", re.MULTILINE)
TORCHRUN = re.compile(r"^torchrun --nproc_per_node 8 (\w+\.py)", re.MULTILINE)
RANKS = 2
ANY_CONFIG = "recipes/accelerate/gpu_8_fsdp2.yaml"
"""For a page that leaves the launch config to its reader."""
ROWS = """from datasets import Dataset
rows = Dataset.from_list([{"input_ids": [(7 * n + row) % 250 + 1 for n in range(50)]} for row in range(4)])
"""
"""For README, whose readers bring their own."""


class Launch(NamedTuple):
    """A program of a page, and the launch config to start it with; None: torchrun, which has none."""

    page: str
    program: str
    config: dict[str, Any] | None


def launches() -> Iterator[Launch]:
    for path in PAGES:
        page = str(path.relative_to(REPOSITORY))
        blocks = blocks_of(path.read_text(), page)
        for at, block in enumerate(blocks):
            before = [one.code for one in blocks[:at] if one.language == "python" and one.ranks == RANKS]
            if block.language != "bash" or block.mark != "gpu" or not before:
                continue
            for name, _ in ACCELERATE.findall(block.code):
                yield Launch(page, before[-1], config_named(name, blocks))
            if TORCHRUN.search(block.code):
                yield Launch(page, before[-1], None)


def config_named(name: str, blocks: list[Block]) -> dict[str, Any]:
    """The launch config of that name, of the page or of the repository, for two CPU ranks."""
    shown = [block.code for block in blocks if block.language == "yaml" and block.code.startswith(f"# {name}")]
    config: dict[str, Any] = yaml.safe_load(shown[0] if shown else (REPOSITORY / name).read_text())
    parallel = config["parallelism_config"]
    assert parallel["parallelism_config_cp_size"] > 1
    parallel |= {"parallelism_config_dp_replicate_size": 1, "parallelism_config_cp_size": RANKS}
    return config | {"num_processes": RANKS, "num_machines": 1, "machine_rank": 0, "mixed_precision": "no"}


def write_program(launch: Launch, folder: Path) -> Path:
    """The program as a file in a folder, with the models that it loads."""
    tiny_models_of(launch.program, folder)
    brings_rows = "train_dataset=rows" not in launch.program or "\nrows = " in launch.program
    script = folder / "train.py"
    script.write_text(launch.program if brings_rows else ROWS + launch.program)
    return script


LAUNCHES = list(launches())


def accelerate_commands() -> Iterator[Any]:
    """Every `accelerate launch` of a page: its blocks and the arguments."""
    for path in PAGES:
        page = str(path.relative_to(REPOSITORY))
        blocks = blocks_of(path.read_text(), page)
        for block in blocks:
            lines = block.code.replace("\\\n", " ").splitlines() if block.language == "bash" else []
            for line in lines:
                words = shlex.split(line, comments=True)
                if "launch" in words[:3] and "accelerate" in words:
                    arguments = words[words.index("launch") + 1 :]
                    yield pytest.param(blocks, arguments, id=f"{page}:{block.line} {' '.join(arguments)}"[:120])


def test_most_guides_are_launched() -> None:
    assert len({launch.page for launch in LAUNCHES}) >= 15


@pytest.mark.turns
@pytest.mark.parametrize(
    "launch", [pytest.param(one, id=f"{one.page}, {number}") for number, one in enumerate(LAUNCHES)]
)
def test_a_program_of_a_page_starts_with_its_config(launch: Launch, tmp_path: Path) -> None:
    script = write_program(launch, tmp_path)
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if launch.config is not None:
        config = tmp_path / "launch.yaml"
        config.write_text(yaml.safe_dump(launch.config))
        environment |= programs.launched_by(config)
    said = programs.start(tmp_path, script, ranks=RANKS, environment=environment).output()
    assert ("[hf_ring_attn] ring of 2: " if "transformers" in launch.program else "loss ") in said


@pytest.mark.parametrize(("blocks", "arguments"), list(accelerate_commands()))
def test_accelerate_takes_the_command_of_a_page(blocks: list[Block], arguments: list[str], tmp_path: Path) -> None:
    """A command without a launch config was refused: `--use_parallelism_config` needs FSDP2 on the command line."""
    given = launch_command_parser().parse_args(arguments)
    if given.config_file and not Path(REPOSITORY, given.config_file).is_file():
        shown = [block.code for block in blocks if block.language == "yaml" and given.config_file in block.code]
        given.config_file = str(tmp_path / "shown.yaml")
        Path(given.config_file).write_text((shown or [Path(REPOSITORY, ANY_CONFIG).read_text()])[0])
    elif given.config_file:
        given.config_file = str(REPOSITORY / given.config_file)
    _validate_launch_command(given)
