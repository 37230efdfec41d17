"""accelerate with a ring: stock configs promoted, its refusals kept for other models, its own loop exact.

What needs ranks is in accelerate_ranks.py, which runs once on two ranks and once on dp 2 x cp 2. What needs GPUs is
simulated up to the point where accelerate decides what kind of run it is.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    TorchContextParallelConfig,
    TorchDynamoPlugin,
)
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import hf_ring_attn
from hf_ring_attn import errors
from hf_ring_attn.integration.context.mesh import ring_enabled, ring_group
from hf_ring_attn.integration.hosts import accelerate as ours
from hf_ring_attn.integration.hosts.buffers import _leave_sharded, prepared, shard_buffers_in_place
from hf_ring_attn.integration.hosts.parallelism_config import deferring_cp_checks, turn_into_ring
from hf_ring_attn.sharding.layout import Layout
from tests.helpers.jobs.states import of_two_gpus
from tests.helpers.patience import patient
from tests.helpers.programs import REPOSITORY, start

PROGRAM = REPOSITORY / "tests/helpers/jobs/accelerate_ranks.py"


def model(attention: str = "ring_fp32") -> LlamaForCausalLM:
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    made = LlamaForCausalLM(LlamaConfig.from_dict({**sizes, "num_hidden_layers": 1}))
    made.set_attn_implementation(attention)
    return made


# ---- on ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.turns
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "replicas"),
    [pytest.param(2, 1, id="cp 2", marks=pytest.mark.full), pytest.param(4, 2, id="dp 2 x cp 2")],
)
def test_accelerate_on_ranks(world_size: int, replicas: int, tmp_path: Path) -> None:
    environment = {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_CP_SIZE": "2",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(replicas),
    }
    program = start(tmp_path, PROGRAM, ranks=world_size, environment=environment)
    assert program.output().count("passed all") == world_size


# ---- the config ----------------------------------------------------------------------------------------------------


def test_the_backend_ring_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    direct = ParallelismConfig(cp_size=4, cp_backend="ring")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "4")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_BACKEND", "ring")
    for config in (direct, ParallelismConfig()):
        assert (config.cp_size, config.cp_backend, config.cp_handler) == (4, "ring", None)
        assert (ring_enabled(config), config.cp_enabled, config.total_size) == (True, False, 4)
        assert config.active_mesh_dims == config.non_dp_dim_names == ["cp"]


def test_a_ring_may_stand_beside_pure_data_parallelism() -> None:
    config = ParallelismConfig(cp_size=2, dp_replicate_size=3, cp_backend="ring")
    assert config._get_mesh() == (("dp_replicate", "cp"), (3, 2))
    assert (config.dp_dim_names, config.dp_cp_dim_names) == (["dp_replicate"], ["dp_replicate", "cp"])
    waiting = ParallelismConfig(cp_size=2, dp_replicate_size=3)
    assert (waiting.cp_backend, type(waiting.cp_handler)) == ("torch", TorchContextParallelConfig)
    assert waiting._get_mesh() == (("dp_replicate", "cp"), (3, 2))
    sharded = ParallelismConfig(cp_size=2, dp_replicate_size=3, dp_shard_size=2, cp_backend="ring")
    assert sharded._get_mesh() == (("dp_replicate", "dp_shard", "cp"), (3, 2, 2))
    assert sharded.dp_shard_cp_dim_names == ["dp_shard", "cp"]
    assert sharded.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]


def test_a_ring_of_one_is_no_ring() -> None:
    config = ParallelismConfig(cp_size=1, cp_backend="ring", dp_replicate_size=2)
    assert (ring_enabled(config), config.cp_enabled, config.non_dp_dim_names) == (False, False, [])
    assert not turn_into_ring(config)
    assert not turn_into_ring(None)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"cp_backend": "rings"}, r"cp_backend must be one of \['torch'\], but got rings"),
        ({"cp_size": 0, "cp_backend": "ring"}, "cp_size must be at least 1, but got 0"),
        ({"cp_size": 2, "sp_size": 2}, "mutually exclusive"),
        ({"tp_size": 2, "dp_replicate_size": 2}, "cannot be used with pure data parallelism"),
        ({"tp_size": 2, "dp_replicate_size": 2, "cp_size": 2}, "cannot be used with pure data parallelism"),
        ({"dp_replicate_size": 0, "cp_size": 2, "cp_backend": "ring"}, "dp_replicate_size must be at least 1"),
        (
            {"cp_size": 2, "cp_backend": "ring", "cp_handler": TorchContextParallelConfig()},
            r"cp_handler=TorchContextParallelConfig\(...\).* Leave cp_handler out",
        ),
        ({"cp_size": 2, "cp_backend": "ring", "tp_size": 2}, r"tensor parallelism \(tp_size=2\) is refused.*tp_size=1"),
        ({"cp_size": 2, "cp_backend": "ring", "sp_size": 2}, r"by DeepSpeed \(sp_size=2\) is refused.*set sp_size=1"),
    ],
)
def test_a_config_that_cannot_be_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ParallelismConfig(**arguments)


def test_promotion_refuses_what_was_never_tested() -> None:
    with pytest.raises(errors.UntestedParallelism, match=r"ring_fp32 with tensor .* never tested: set tp_size=1"):
        turn_into_ring(ParallelismConfig(cp_size=2, tp_size=2))
    with pytest.raises(errors.UntestedParallelism, match="set sp_size=1, and cp_size instead"):
        turn_into_ring(ParallelismConfig(sp_size=2))


def test_a_pickled_config_loads_without_the_plugin(tmp_path: Path) -> None:
    config = ParallelismConfig(cp_size=2)
    assert turn_into_ring(config)
    assert not turn_into_ring(config)
    (tmp_path / "config").write_bytes(pickle.dumps(config))
    program = (
        "import pickle, sys; config = pickle.load(open(sys.argv[1], 'rb')); "
        "assert (config.cp_size, config.cp_backend) == (2, 'ring'); assert 'hf_ring_attn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "config")], check=True, timeout=patient(100))


# ---- what kind of run it is, as on GPUs ----------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A process of a run on two GPUs that no launch config has reached."""
    process = of_two_gpus(monkeypatch)
    for name in ("ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP", "ACCELERATE_ALLOW_CP_STANDALONE"):
        monkeypatch.delenv(name, raising=False)
    return process


def accelerator(config: Any, plugin: Any = None) -> Any:
    """As much of an Accelerator as `decide_by_models` looks at, with accelerate's real state."""
    state = AcceleratorState(
        parallelism_config=config, fsdp_plugin=plugin, dynamo_plugin=TorchDynamoPlugin(), _from_accelerator=True
    )
    fake = SimpleNamespace(
        state=state, parallelism_config=config, distributed_type=state.distributed_type, is_fsdp2=state.is_fsdp2,
        num_processes=2, multi_device=state.distributed_type.name.startswith("MULTI_"), _dataloaders=[], _models=[],
        device=state.device, torch_device_mesh=state.device_mesh,
    )  # fmt: skip
    config._validate_accelerator(fake)
    return fake


@pytest.mark.parametrize("backend", ["torch", "ring"])
def test_a_stock_ddp_config_stays_ddp(gpus: dict[str, Any], backend: Any) -> None:
    config = ParallelismConfig(cp_size=2, cp_backend=backend)
    made = accelerator(config)
    assert made.distributed_type is gpus["distributed_type"] is DistributedType.MULTI_GPU
    assert config.cp_backend == backend
    ours.decide_by_models(made, torch.nn.DataParallel(model()))
    assert ring_enabled(config)


def test_fsdp2_with_nothing_but_the_ring_to_shard_over(gpus: dict[str, Any]) -> None:
    for config in (ParallelismConfig(cp_size=2), ParallelismConfig(cp_size=2, cp_backend="ring")):
        AcceleratorState._reset_state()
        gpus["distributed_type"] = DistributedType.MULTI_GPU
        made = accelerator(config, FullyShardedDataParallelPlugin(fsdp_version=2))
        assert made.is_fsdp2
        ours.decide_by_models(made, model())
        assert ring_enabled(config)


def test_another_model_gets_the_refusal_that_waited(gpus: dict[str, Any]) -> None:
    made = accelerator(ParallelismConfig(cp_size=2))
    with pytest.raises(errors.TorchContextParallelRefused, match=r"fsdp_plugin \(FSDP2\).*MULTI_GPU") as refusal:
        ours.decide_by_models(made, model("eager"))
    assert 'or load the model with attn_implementation="ring_fp32"' in str(refusal.value)
    made.state.fsdp_plugin = SimpleNamespace(fsdp_version=2)
    made.distributed_type = DistributedType.FSDP
    ours.decide_by_models(made, model("eager"))  # torch's own context parallelism, as ever
    assert made.parallelism_config.cp_enabled


def test_options_of_a_model_with_another_attention_are_told_to_be_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program went on without a word, and its user believed that a ring, or less memory, was on."""
    said: list[str] = []
    monkeypatch.setattr(ours, "warn", said.append)
    alone = SimpleNamespace(parallelism_config=None, num_processes=1)
    for attention, configured in (("sdpa", False), ("ring_fp32", True), ("sdpa", True)):
        given = model(attention)
        if configured:
            hf_ring_attn.configure(given, hf_ring_attn.RingConfig(mlp_tokens=8))
        ours.decide_by_models(alone, given)
        assert bool(said) == (configured and attention == "sdpa"), said
    assert "configure() set options of LlamaForCausalLM, but they have no effect" in said[0] and "'sdpa'" in said[0]


def test_fsdp1_is_refused_for_either_kind_of_model(gpus: dict[str, Any]) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    made = accelerator(ParallelismConfig(cp_size=2), plugin)
    with pytest.raises(errors.TorchContextParallelRefused, match="needs FSDP2, but the fsdp_plugin is FSDP1"):
        ours.decide_by_models(made, model("sdpa"))
    with pytest.raises(errors.UntestedParallelism, match=r"FSDP1 is refused, .* never tested: set fsdp_version: 2"):
        ours.decide_by_models(made, model())
    AcceleratorState._reset_state()
    gpus["distributed_type"] = DistributedType.MULTI_GPU
    with pytest.raises(errors.UntestedParallelism, match="FSDP1"):
        accelerator(ParallelismConfig(cp_size=2, cp_backend="ring"), plugin)


def test_a_model_known_at_construction_gets_accelerates_own_words(gpus: dict[str, Any]) -> None:
    with deferring_cp_checks(model("sdpa")), pytest.raises(ValueError, match="no `fsdp_plugin` was provided"):
        accelerator(ParallelismConfig(cp_size=2))
    AcceleratorState._reset_state()
    with deferring_cp_checks(model("sdpa")):
        with pytest.raises(errors.TorchContextParallelRefused, match="needs dp_shard_size > 1 too"):
            accelerator(ParallelismConfig(cp_size=2, dp_replicate_size=2))
        with deferring_cp_checks(model()):
            made = accelerator(ParallelismConfig(cp_size=2))
    assert ring_enabled(made.parallelism_config)
    assert made.distributed_type is DistributedType.MULTI_GPU


@pytest.mark.parametrize(("kind", "name"), [("DEEPSPEED", "DeepSpeed"), ("MEGATRON_LM", "Megatron-LM"), ("XLA", "XLA")])
def test_other_engines_are_refused_by_name(gpus: dict[str, Any], kind: str, name: str) -> None:
    made = accelerator(ParallelismConfig(cp_size=2))
    made.distributed_type = DistributedType[kind]
    text = rf"ring_fp32 with {name} is refused.*use FSDP2 \(fsdp_version: 2\) or DDP"
    with pytest.raises(errors.UntestedParallelism, match=text):
        ours.decide_by_models(made, model())


def test_settling_without_a_config_or_a_model_changes_nothing(gpus: dict[str, Any]) -> None:
    ours.decide_by_models(SimpleNamespace(parallelism_config=None, num_processes=2), model())
    made = accelerator(ParallelismConfig(cp_size=2))
    ours.decide_by_models(made, None, object(), torch.optim.SGD(model().parameters()))
    assert made.parallelism_config.cp_backend == "torch"


def test_there_is_no_ring_group_without_a_mesh(gpus: dict[str, Any]) -> None:
    assert ring_group() is None
    assert AcceleratorState._shared_state == {}, "asking for the group must not make a state"
    accelerator(ParallelismConfig(cp_size=2))
    assert ring_group() is None


@pytest.mark.parametrize("several", [list, tuple])
def test_models_prepared_in_any_way_are_remembered(gpus: dict[str, Any], several: type) -> None:
    """`prepare` returns a list under FSDP2 and a tuple otherwise; only those models may run in a cp context."""
    made, net, head = accelerator(ParallelismConfig(cp_size=2)), model(), torch.nn.Linear(2, 2)
    ours._prepare(lambda self, *objects: several(objects))(made, net, head)
    assert net in prepared
    assert head not in prepared


@pytest.mark.parametrize("copied", ["embed_tokens", None])
def test_weights_that_accelerate_ties_are_refused(gpus: dict[str, Any], copied: str | None) -> None:
    """As its FSDP2 does by `tie_weights`: the head becomes the copy of the embeddings that PEFT trains."""
    made, tied = accelerator(ParallelismConfig(cp_size=2)), model()
    tied.config.tie_word_embeddings = True
    tied.tie_weights()
    net: Any = get_peft_model(
        tied, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=[copied] if copied else None)
    )

    def prepare(self: Any, model: Any) -> Any:
        model.tie_weights()
        return model

    if copied is None:
        assert ours._prepare(prepare)(made, net) is net
        return
    with pytest.raises(errors.TiedByFsdp, match=r"lm_head\.weight and .*embed_tokens\.modules_to_save"):
        ours._prepare(prepare)(made, net)


# ---- buffers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_buffers_are_sharded_in_place_and_restored(rank: int) -> None:
    layout = Layout(12, 3, rank)
    ids, angles = torch.arange(24).view(2, 12), torch.randn(12, 5)
    kept, before = torch.arange(12)[None].expand(4, -1), (ids.clone(), angles.clone())
    restore = shard_buffers_in_place([ids, angles, kept], [1, 0, -1], layout, no_restore={kept})
    places = layout.positions()
    assert torch.equal(ids, before[0][:, places])
    assert torch.equal(angles, before[1][places])
    assert torch.equal(kept, places.expand(4, -1))
    restore()
    assert torch.equal(ids, before[0])
    assert torch.equal(angles, before[1])
    assert torch.equal(kept, places.expand(4, -1))


def test_buffers_are_restored_if_one_cannot_be_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory ran out at the second, and the first one stayed as long as a rank's share."""
    ids, large, shard = torch.arange(8)[None], torch.ones(1, 8), Layout.shard

    def short_of_memory(layout: Layout, x: Tensor, dim: int) -> Tensor:
        if x is large:
            raise torch.OutOfMemoryError
        return shard(layout, x, dim)

    monkeypatch.setattr(Layout, "shard", short_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        shard_buffers_in_place([ids, large], [1, 1], Layout(8, 2, 0), no_restore={ids})
    assert torch.equal(ids, torch.arange(8)[None])


def test_uninstall_removes_the_hook_that_refuses_buffers_left_sharded() -> None:
    layer, ids = nn.Linear(2, 2), torch.ones(1, 2)
    for _ in range(2):
        _leave_sharded([ids], [layer])
    with pytest.raises(errors.BadBuffers, match="stayed sharded"):
        layer(ids)
    assert len(layer._forward_pre_hooks) == 1
    hf_ring_attn.uninstall()
    hf_ring_attn.install()
    layer(ids)
    assert not layer._forward_pre_hooks


def test_a_length_that_needs_padding_is_refused() -> None:
    text = (
        r"length that is a multiple of 2 \* cp_size = 8, got 12\. Tensors that are sharded in place cannot be padded: "
        r"pad the batch to 16 tokens with labels of -100, or use hf_ring_attn.shard, which pads\.$"
    )
    with pytest.raises(errors.UnevenLength, match=text):
        shard_buffers_in_place([torch.ones(1, 12)], [1], Layout(12, 4, 0))
