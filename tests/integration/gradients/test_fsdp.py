"""FSDP2 on accelerate's mesh, by torch's `fully_shard` and by accelerate: dp_shard x cp for parameters, cp for rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import hf_ring_attn
from hf_ring_attn import RingConfig, errors
from hf_ring_attn.integration.gradients import fsdp_units
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs import fsdp_jobs, plain_jobs
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import Shards, tokens
from tests.helpers.models.tiny_models import tiny

SHARDS = [
    Shards({"cp_size": 2}, ("dp_shard_cp",), world=2),
    Shards({"cp_size": 4}, ("dp_shard_cp",), world=4),
    Shards({"dp_shard_size": 2, "cp_size": 2}, ("dp_shard_cp",), world=4),
    Shards({"dp_replicate_size": 2, "cp_size": 2}, ("dp_replicate", "dp_shard_cp"), world=4),
]
BOUND = 1e-6
"""Relative, for the loss and the updated parameters: transformers computes the loss in float32."""


OFTEN = [*((0, how) for how in ("", "recomputed", "reentrant")), (1, "recomputed"), (2, "reentrant"), (3, "")]
"""All kinds of checkpointing on one mesh, and one kind on each of the others."""


@pytest.mark.parametrize(
    ("shards", "checkpointing"),
    [
        pytest.param(shards, how, id=f"{shards}-{how}", marks=() if (at, how) in OFTEN else pytest.mark.full)
        for at, shards in enumerate(SHARDS) for how in ("", "recomputed", "reentrant")
    ],
)  # fmt: skip
@pytest.mark.turns
def test_sharded_parameters_train_as_in_one_process(ranks: Ranks, shards: Shards, checkpointing: str) -> None:
    compare(ranks, shards, BOUND, "llama", torch.float64, checkpointing)


@pytest.mark.parametrize("shards", [SHARDS[2], pytest.param(SHARDS[3], marks=pytest.mark.full)], ids=str)
def test_sinks_train_as_in_one_process(ranks: Ranks, shards: Shards) -> None:
    """Each rank has its share of their gradient, and a part of them."""
    parameters = compare(ranks, shards, 20 * BOUND, "gpt_oss", torch.float32)  # its experts do not take float64
    assert any("sinks" in name for name in parameters)


def test_a_model_with_an_indexer_trains_as_in_one_process(ranks: Ranks) -> None:
    """The indexer's parameters are gathered with its layer's, and have no gradients."""
    compare(ranks, SHARDS[0], BOUND, "glm_moe_dsa", torch.float64, "recomputed")


def test_learned_biases_train_as_in_one_process(ranks: Ranks) -> None:
    """A score_mod captures parameters that FSDP2 has gathered for the time of a layer."""
    parameters = compare(ranks, SHARDS[0], BOUND, "learned biases", torch.float64, "recomputed")
    assert {"slopes", "weight"} == {name.split(".")[-1] for name in parameters if ".self_attn.bias." in name}


def compare(
    ranks: Ranks, shards: Shards, bound: float, model: str, dtype: torch.dtype, checkpointing: str = ""
) -> dict[str, Tensor]:
    """The parameters of one process."""
    batches = [tokens(23, seed=seed) for seed in range(shards.world // shards.sizes["cp_size"])]
    want_losses, want = plain_jobs.without_fsdp(batches, name=model, dtype=dtype)
    for rank, (losses, parameters) in enumerate(
        ranks(shards.world).run(plain_jobs.fsdp2, shards, batches, checkpointing, name=model, dtype=dtype)
    ):
        for got, loss in zip(losses, want_losses[rank // shards.sizes["cp_size"]], strict=True):
            assert relative_error(got, loss) < bound
        assert parameters.keys() == want.keys()
        for name, parameter in want.items():
            assert relative_error(parameters[name], parameter) < bound, name
    return want


def is_rounded(x: Tensor) -> bool:
    return torch.equal(x.to(torch.bfloat16).to(x.dtype), x)


def test_accelerates_fsdp2_rounds_neither_the_loss_nor_the_sum_of_gradients(ranks: Ranks) -> None:
    for policy, loss, gradient in ranks(2).run(fsdp_jobs.step_in_half, tokens(23)):
        assert policy == MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        assert loss.dtype == gradient.dtype == torch.float32
        assert not is_rounded(loss) and not is_rounded(gradient)


def test_a_policy_that_somebody_chose_stays(ranks: Ranks) -> None:
    chosen = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for policy, _, gradient in ranks(2).run(fsdp_jobs.step_in_half, tokens(23), chosen):
        assert policy == chosen
        assert is_rounded(gradient)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize(
    ("kind", "layers"),
    [("qwen3_5", {"Qwen3_5DecoderLayer"}), ("gemma4", {"Gemma4TextDecoderLayer"})],
)
def test_a_text_model_of_a_family_with_vision_is_wrapped(
    ranks: Ranks, kind: str, layers: set[str], adapted: bool
) -> None:
    """It names its family's vision layers, too, and accelerate said that it could not find them."""
    for wrapped, named in ranks(2).run(fsdp_jobs.wrapped_layers, kind, adapted):
        assert layers < wrapped, wrapped  # and the model itself
        assert layers < set(named)  # as transformers has them


WAYS: list[fsdp_jobs.Way] = ["a loop", "a loop that names the model", "Trainer"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dtype", "count"), [(torch.bfloat16, 1250), (torch.float16, 131071)])
def test_the_count_of_tokens_is_not_rounded(ranks: Ranks, way: fsdp_jobs.Way, dtype: torch.dtype, count: int) -> None:
    """FSDP2 casts floating tensors on their way into a model: 1250 was 1248, and 131071 infinity, a loss of zero."""
    for tensor in (True, False):
        given = {**tokens(23), "num_items_in_batch": torch.tensor(2 * count) if tensor else 2 * count}
        assert ranks(2).run(fsdp_jobs.counts_that_arrive, given, dtype, way) == [[count]] * 2


@pytest.mark.parametrize("wrap", ["", "FSDP2", "compiled"])
def test_smoothed_labels_are_those_of_the_next_tokens(ranks: Ranks, wrap: str) -> None:
    """Trainer knows causal language models by their class's name, which FSDP2 and torch.compile change."""
    for got, want in ranks(2).run(fsdp_jobs.smoothed, tokens(23), wrap):
        assert relative_error(got, want) < BOUND


def checked(compiled: bool, penalty: bool) -> tuple[Tensor, str]:
    """The loss of a model that FSDP2 shards, after its self-check, or the name of its refusal."""
    model: Any = fsdp_jobs.sharded_weights(root=not compiled)
    if compiled:  # accelerate compiles first
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        wrapped: Any = torch.compile(model, backend="eager")
        model = fully_shard(wrapped, mesh=mesh)
    if penalty:
        model.register_forward_hook(penalize)
    try:
        with (sharded := hf_ring_attn.shard(tokens(23), config=RingConfig(loss="sharded"), model=model)):
            loss = model(**sharded.inputs).loss
            return sharded.reduce(loss.detach()), ""
    except errors.Refused as error:
        return torch.zeros(()), type(error).__name__


def penalize(model: Any, _: Any, output: Any) -> Any:
    output.loss = output.loss + 1e-2 * sum(p.square().sum() for p in model.model.layers.parameters())
    return output


@pytest.mark.turns
def test_a_model_that_is_compiled_before_it_is_sharded_is_checked(ranks: Ranks) -> None:
    plain, compiled = (ranks(2).run(checked, how, False)[0] for how in (False, True))
    assert plain[1] == compiled[1] == ""
    assert relative_error(compiled[0], plain[0]) < BOUND


def test_a_loss_of_sharded_weights_is_refused_by_name(ranks: Ranks) -> None:
    assert [name for _, name in ranks(2).run(checked, False, True)] == ["ShardedLoss"] * 2


def after_a_failed_forward() -> tuple[bool, list[Tensor]]:
    """Whether FSDP2 is as before a step, and the gradients of the next one. Sums have another dtype than weights."""
    model: Any = tiny("llama").double().train()
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**tokens(23))
    hook.remove()
    assert fsdp_units.end_forward(model)
    states = [part._get_fsdp_state() for part in (model, *model.model.layers)]
    is_new = states[0]._state_ctx.iter_forward_root is None
    is_new &= all(state._training_state.name == "IDLE" for state in states)
    is_new &= all(type(x).__name__ == "DTensor" for x in model.parameters())
    model(**tokens(23)).loss.backward()
    return is_new, [x.grad.full_tensor() for x in model.parameters()]


def test_another_forward_may_follow_one_that_failed(ranks: Ranks) -> None:
    model: Any = tiny("llama").train()
    model(**tokens(23)).loss.backward()
    for is_new, gradients in ranks(2).run(after_a_failed_forward):
        assert is_new
        assert all(relative_error(x, y.grad) < 1e-6 for x, y in zip(gradients, model.parameters(), strict=True))


class WithATower(torch.nn.Module):
    """A text model with a tower of its own, which no row of text calls."""

    def __init__(self, attention: str | None) -> None:
        super().__init__()
        self.model, self.tower = tiny("llama", attention), torch.nn.Linear(8, 8)

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)


def trained_without_its_tower(in_ring: bool) -> list[Tensor]:
    model: Any = WithATower("ring_fp32" if in_ring else None).train()
    if not in_ring:
        model(**tokens(23)).loss.backward()
        return [x.grad for x in model.model.parameters()]
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    for part in (*model.model.model.layers, model.tower, model):
        fully_shard(part, mp_policy=policy)
    with hf_ring_attn.shard(tokens(23)) as sharded:
        model(**sharded.inputs).loss.backward()
    return [x.grad.full_tensor() for x in model.model.parameters()]


def test_a_part_that_no_row_calls_is_left_out(ranks: Ranks) -> None:
    want = trained_without_its_tower(False)
    for got in ranks(2).run(trained_without_its_tower, True):
        assert all(relative_error(x, y) < 1e-5 for x, y in zip(got, want, strict=True))


# ---- weights that wrappers leave out ---------------------------------------------------------------------------------


def wrapped_in_part(how: str) -> dict[str, Tensor]:
    """The weights after three steps of a model of which a wrapper holds a part. ``how``: "" is one process."""
    model: Any = tiny("llama", "ring_fp32" if how else None).train()
    if "DDP" in how:
        model.model = DistributedDataParallel(model.model)
    for layer in model.model.layers if "layers" in how or "ignores" in how else ():
        fully_shard(layer)
    if "replicates" in how:
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicates", "shards")))
    if "ignores" in how:
        fully_shard(model, ignored_params={model.lm_head.weight})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in (1, 2, 3):
        batch: Any = tokens(23, seed=seed)
        if how:
            with (sharded := hf_ring_attn.shard(batch)):
                loss = model(**sharded.inputs).loss
        else:
            loss = model(**batch).loss
        loss.backward()
        if "reduces" in how:
            sharded.reduce_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    found: dict[str, Any] = {name.replace("model.module.", "model."): x for name, x in model.named_parameters()}
    return {name: getattr(x, "full_tensor", lambda x=x: x)().detach() for name, x in found.items()}


@pytest.mark.parametrize(
    "how",
    [
        "FSDP2 layers", "FSDP2 layers, reduces", "FSDP2 ignores the head", "FSDP2 replicates", "body under DDP",
        "body under DDP, reduces",
    ],
)  # fmt: skip
def test_weights_that_a_wrapper_leaves_out_train_as_in_one_process(ranks: Ranks, how: str) -> None:
    """Each rank stepped by the gradients of its own tokens: 0.036 off after three steps.

    Where FSDP2 replicates all weights, the self-check said that a process group was destroyed.
    """
    want = wrapped_in_part("")
    for got in ranks(2).run(wrapped_in_part, how):
        assert max(relative_error(got[name], x) for name, x in want.items()) < 1e-5


# ---- gradients that FSDP2 was told not to reduce ---------------------------------------------------------------------


def refusals_of_steps(dtype: torch.dtype) -> list[str]:
    """What each of three steps is refused with, of which the second comes after a backward without a reduction."""
    model: Any = tiny("llama", "ring_fp32").train()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for part in (*model.model.layers, model):
        fully_shard(part, mp_policy=policy)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), list[str]()
    for syncs in (True, False, True):
        model.set_requires_gradient_sync(syncs)
        with (sharded := hf_ring_attn.shard(tokens(23), config=RingConfig(self_check=False))):
            model(**sharded.inputs).loss.backward()
        found.append((plain_jobs.attempt(optimizer.step) or ("", ""))[0])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_without_a_reduction_is_refused(ranks: Ranks, dtype: torch.dtype) -> None:
    """It changed no weight."""
    assert ranks(2).run(refusals_of_steps, dtype) == [["", "UnsupportedModel", ""]] * 2
