"""The launch configs of recipes/accelerate: accelerate reads them, and they mean the mesh that they promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate import ParallelismConfig
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed.fsdp import StateDictType

from hf_ring_attn.integration.context.mesh import ring_enabled
from hf_ring_attn.integration.hosts.parallelism_config import turn_into_ring
from tests.helpers.patience import patient

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPES = REPOSITORY / "recipes" / "accelerate"

MESHES = {
    "cpu_2ranks": (("cp",), (2,), "MULTI_GPU"),
    "gpu_8_ddp": (("cp",), (8,), "MULTI_GPU"),
    "gpu_8_fsdp2": (("cp",), (8,), "FSDP"),
    "two_nodes_ddp_x_cp": (("dp_replicate", "cp"), (2, 8), "MULTI_GPU"),
}
"""Config -> the names and sizes of its mesh, and how accelerate wraps the model."""


def test_every_config_is_tested() -> None:
    assert {path.stem for path in RECIPES.glob("*.yaml")} == set(MESHES)


@pytest.mark.parametrize("name", MESHES)
def test_a_launch_config_means_its_mesh(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(RECIPES / f"{name}.yaml")
    dims, sizes, kind = MESHES[name]
    config = load_config_from_file(path)
    assert config.distributed_type.value == kind

    # The second machine's launcher, which looks for no free port.
    flags = ["--machine_rank", "1"] if config.num_machines > 1 else ["--main_process_port", "0"]
    parsed = launch_command_parser().parse_args(["--config_file", path, *flags, "train.py"])
    args, _, _ = _validate_launch_command(parsed)
    assert args.multi_gpu is (kind == "MULTI_GPU")
    assert args.use_fsdp is (kind == "FSDP")
    for key, value in prepare_multi_gpu_env(args).items():
        monkeypatch.setenv(key, value)
    assert os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    assert int(args.nproc_per_node) * config.num_machines == config.num_processes

    parallel = ParallelismConfig()
    assert parallel.total_size == config.num_processes
    assert turn_into_ring(parallel)
    assert parallel._get_mesh() == (dims, sizes)
    assert ring_enabled(parallel)
    if kind == "FSDP":
        plugin = FullyShardedDataParallelPlugin()
        assert plugin.fsdp_version == 2
        # Trainer.save_model() saves nothing with any other
        assert plugin.state_dict_type is StateDictType.FULL_STATE_DICT
        assert parallel.fsdp_dim_names == ["dp_shard_cp"]
        assert parallel.dp_shard_cp_dim_names == ["cp"], "parameters are sharded over the ring"


SHOW = """
import torch
from accelerate import Accelerator
import hf_ring_attn
from hf_ring_attn.integration.context.mesh import ring_group
config = Accelerator().parallelism_config
world, backend = torch.distributed.get_world_size(), torch.distributed.get_backend()
line = f"rank {torch.distributed.get_rank()} of {world} {backend} cp_size {config.cp_size} ring {ring_group().size()}"
print(line + chr(10), end="", flush=True)   # one write, so that ranks do not mix lines
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.turns
def test_the_cpu_config_starts_two_gloo_ranks_that_share_a_ring(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(RECIPES / "cpu_2ranks.yaml")]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(
        [*command, "--main_process_port", "0", str(script)],
        env=environment, capture_output=True, text=True, timeout=patient(220), check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == [f"rank {rank} of 2 gloo cp_size 2 ring 2" for rank in range(2)]
