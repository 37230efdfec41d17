"""Jobs of tests/integration/hosts/test_fused_head.py: SFTTrainer under FSDP2, which accelerate keeps for GPUs."""

from __future__ import annotations

from pathlib import Path

from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from peft import LoraConfig

from hf_ring_attn import errors
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.sft_jobs import Case, trainer
from tests.helpers.jobs.trainer_jobs import a_folder, launched
from tests.helpers.jobs.trl_runs import OFFLINE, quiet


def sharded_step(whole: list[str] | None, saved: str) -> str:
    """One step of LoRA and of the modules ``whole`` under FSDP2: what it is refused with, or the files it saves."""
    mesh = Mesh(cp=2)
    adapter = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=whole, task_type="CAUSAL_LM")
    with launched(mesh, FSDP_STATE_DICT_TYPE="FULL_STATE_DICT", **OFFLINE), a_folder(None) as folder, quiet():
        sft = trainer(Case("FSDP2", {"max_steps": 1}), folder, "ring_fp32", peft_config=adapter)
        state = sft.accelerator.state
        state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # which every AcceleratorState() copies
        sft.is_fsdp_enabled = True
        try:
            sft.train()
        except errors.Refused as error:
            return f"{type(error).__name__}: {error}"
        sft.save_model(saved)
        sft.accelerator.wait_for_everyone()
        return " ".join(sorted(path.name for path in Path(saved).glob("adapter*")))
