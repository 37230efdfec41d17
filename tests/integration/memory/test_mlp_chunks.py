"""MLPs and norms in chunks of tokens give the loss and the gradients of all tokens at once, in less memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import hf_ring_attn
from hf_ring_attn import RingConfig, errors
from hf_ring_attn.integration import log
from hf_ring_attn.integration.memory import mlp_chunks
from hf_ring_attn.layers import chunked_loss, token_chunks
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs import activation_jobs as jobs
from tests.helpers.jobs.activation_jobs import IN_FLOAT32, LORA, Answer, Step
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import packed, tokens, told
from tests.helpers.models.tiny_models import tiny

NON_REENTRANT = {"use_reentrant": False}

STEPS = [
    Step(why="full"),
    Step(why="LoRA", lora=LORA),
    Step(why="DoRA", lora={**LORA, "use_dora": True}),
    Step(why="a chunk of one token", ring={"mlp_tokens": 1}),
    Step(why="packed", batch=packed(9, 3, 11)),
    Step(why="softcaps, norms after", model="gemma2"),
    Step(why="experts", model="mixtral", config={"output_router_logits": False}, dtype=torch.float32, exact=IN_FLOAT32),
    Step(why="experts and a tuple", model="gpt_oss", dtype=torch.float32, exact=IN_FLOAT32),
    Step(why="a shared expert", model="deepseek_v3", exact=IN_FLOAT32),
    Step(why="experts, flat", model="llama4", exact=IN_FLOAT32),
    Step(why="no gate", model="gpt2"),
    Step(why="recurrent layers", model="qwen3_5", exact=IN_FLOAT32),
    Step(why="checkpoints", checkpointing=NON_REENTRANT),
    Step(why="checkpoints, LoRA", checkpointing=NON_REENTRANT, lora=LORA),
    Step(why="checkpoints, reentrant", checkpointing={"use_reentrant": True}),
    Step(why="saved attention", checkpointing=NON_REENTRANT, ring={"mlp_tokens": 3, "save_attention": True}),
    Step(why="norms of queries and keys", model="gemma3"),
    Step(why="inputs by layer, sparsity", model="gemma3n", exact=IN_FLOAT32),
    Step(why="an attention that takes anything", model="learned biases"),
    Step(why="a trained copy of an MLP", lora={"target_modules": ["q_proj"], "modules_to_save": ["mlp"]}),
    Step(why="bfloat16", dtype=torch.bfloat16, exact=2e-2),
    Step(why="autocast", dtype=torch.float32, autocast=True, exact=2e-2),
    Step(why="DDP", wrap="DDP", checkpointing=NON_REENTRANT),
]
SHARDED = [
    Step(why="FSDP2", wrap="tail"),
    Step(why="FSDP2, checkpoints", wrap="tail", checkpointing=NON_REENTRANT),
    Step(why="FSDP2, checkpoints, LoRA", wrap="tail", checkpointing=NON_REENTRANT, lora=LORA),
]


def assert_equal(got: Answer, want: Answer, exact: float) -> None:
    assert relative_error(got.loss, want.loss) < exact
    assert got.gradients.keys() == want.gradients.keys()
    for name, gradient in want.gradients.items():
        found = got.gradients[name]
        assert relative_error(found, gradient) < exact if gradient.any() else not found.any(), name


@pytest.mark.parametrize("step", [step for step in STEPS if not step.wrap], ids=lambda step: step.why)
@pytest.mark.turns
def test_chunks_give_the_step_of_all_tokens(step: Step) -> None:
    assert_equal(*jobs.both(step), step.exact)


@pytest.mark.parametrize("step", [*STEPS, *SHARDED], ids=lambda step: step.why)
@pytest.mark.turns
def test_chunks_give_the_step_of_all_tokens_in_a_ring(ranks: Ranks, step: Step) -> None:
    for got, want in ranks(2).run(jobs.both, step):
        assert_equal(got, want, step.exact)


def test_what_an_mlp_computes_inside_exists_for_one_chunk() -> None:
    whole, chunks = jobs.peak_of_a_step(None), jobs.peak_of_a_step(8)
    inner = 64 * jobs.WIDE * 8  # [64 tokens, intermediate], in bytes
    assert whole > 4 * inner, "gate, up, their product and a gradient"
    assert chunks < whole - 3 * inner


def test_a_recompute_ends_before_it_runs_the_mlp() -> None:
    once, checkpointed = jobs.rows_of_gates(None), jobs.rows_of_gates(NON_REENTRANT)
    assert set(once) == {1, 2, 3, 16, 32}, "a trial of 32 and twice 16, a sample of 2, chunks of 3 and a rest of 1"
    chunks = 2 * 16  # two layers, 46 tokens in chunks of 3
    assert [once.count(3) + once.count(1), checkpointed.count(3) + checkpointed.count(1)] == [2 * chunks] * 2


class Shift(nn.Module):
    """Mixes each token with the one before it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: Tensor) -> Tensor:
        result: Tensor = self.inner(hidden_states + hidden_states.roll(1, 1))
        return result


class Hidden(Shift):
    """Uses a trained tensor that is no parameter of it."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        result: Tensor = self.inner(hidden_states) * self.__dict__["scale"][0]
        return result


def refusal_of(model: Any, **options: Any) -> str:
    batch = hf_ring_attn.shard(tokens(23), config=RingConfig(mlp_tokens=3, self_check=False, **options))
    with pytest.raises(errors.Refused) as refused, batch:
        model(**batch.inputs).loss.backward()
    return str(refused.value)


def test_an_mlp_that_mixes_tokens_is_refused() -> None:
    model: Any = tiny("llama", "ring_fp32")
    model.model.layers[1].mlp = Shift(model.model.layers[1].mlp)
    assert "model.layers.1.mlp (Shift) over chunks of tokens, but it mixes tokens" in refusal_of(model)


def test_a_weight_that_is_no_parameter_is_refused() -> None:
    model: Any = tiny("llama", "ring_fp32")
    mlp = model.model.layers[0].mlp = Hidden(model.model.layers[0].mlp)
    mlp.__dict__["scale"] = [torch.ones(1, requires_grad=True)]
    assert "depends on a trained tensor of shape (1,) that is no parameter of it" in refusal_of(model)


class Counting(nn.Module):
    """Notes each call in a buffer."""

    calls: Tensor

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        result: Tensor = self.inner(hidden_states)
        return result


def test_an_mlp_that_changes_its_buffers_is_refused() -> None:
    model: Any = tiny("llama", "ring_fp32")
    model.model.layers[0].mlp = Counting(model.model.layers[0].mlp)
    jobs.run(model.eval(), mlp_tokens=3)  # then it was not looked at again
    for _ in range(2):  # a program that caught the refusal was not refused again, and trained
        assert "mlp (Counting) over chunks of tokens, but it changes its buffers in each" in refusal_of(model.train())


def step_with_a_penalty(mlp_tokens: int | None, by_forward: bool) -> dict[str, Tensor]:
    """The loss and gradients of a step whose loss has a penalty that hooks, or forwards, inside MLPs collect."""
    torch.manual_seed(3)
    model: Any = tiny("llama", "ring_fp32").double().train()
    collected: list[Tensor] = []

    def collect(_module: Any, _args: Any, out: Tensor) -> None:
        collected.append(out.abs().sum())

    def collecting(x: Tensor) -> Tensor:
        out = nn.functional.silu(x)
        collect(None, None, out)
        return out

    for layer in model.model.layers:
        if by_forward:
            layer.mlp.act_fn.forward = collecting
        else:
            layer.mlp.act_fn.register_forward_hook(collect)
    batch = hf_ring_attn.shard(tokens(23), config=RingConfig(mlp_tokens=mlp_tokens, self_check=False))
    with batch:
        loss = model(**batch.inputs).loss + sum(collected)
    loss.backward()
    return {"loss": loss.detach(), **{name: x.grad for name, x in model.named_parameters()}}


@pytest.mark.parametrize("by_forward", [False, True], ids=["a hook", "a forward"])
def test_an_mlp_with_hooks_inside_runs_whole(by_forward: bool, caplog: pytest.LogCaptureFixture) -> None:
    log._said.clear()
    with caplog.at_level("WARNING", "hf_ring_attn"):
        got, want = step_with_a_penalty(3, by_forward), step_with_a_penalty(None, by_forward)
    assert "a hook on model.layers.0.mlp.act_fn, or its own forward, would see chunks of tokens" in caplog.text
    for name, x in want.items():
        assert relative_error(got[name], x) < 1e-9, name


def step_that_changes_what_trains(mlp_tokens: int | None) -> dict[str, Tensor | None]:
    """Gradients where the gates of MLPs trained in the forward, and other matrices of their shape by the backward."""
    model: Any = tiny("llama", "ring_fp32").double()
    for name, weight in model.named_parameters():
        weight.requires_grad_("up_proj" not in name)
    batch = hf_ring_attn.shard(tokens(23), config=RingConfig(mlp_tokens=mlp_tokens, self_check=False))
    with batch:
        loss = model(**batch.inputs).loss
    for name, weight in model.named_parameters():
        weight.requires_grad_("gate_proj" not in name)
    loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def step_of_a_functional_call(mlp_tokens: int | None) -> dict[str, Tensor | None]:
    """Gradients where a call has weights of its own for one matrix of each MLP, and the model's are frozen."""
    model: Any = tiny("llama", "ring_fp32").double().requires_grad_(False)
    own = {name: 1.5 * x.detach() for name, x in model.named_parameters() if "up_proj" in name}
    own = {name: x.requires_grad_() for name, x in own.items()}
    batch = hf_ring_attn.shard(tokens(23), config=RingConfig(mlp_tokens=mlp_tokens, self_check=False))
    with batch:
        loss = torch.func.functional_call(model, own, (), dict(batch.inputs)).loss
    loss.backward()
    return {name: weight.grad for name, weight in own.items()}


@pytest.mark.parametrize("step", [step_that_changes_what_trains, step_of_a_functional_call])
def test_the_backward_computes_with_the_weights_of_the_forward(step: Callable[[int | None], Any]) -> None:
    got, want = step(3), step(None)
    assert sum(gradient is not None for gradient in want.values()) >= 2
    for name, gradient in want.items():
        assert (got[name] is None) == (gradient is None), name
        assert gradient is None or relative_error(got[name], gradient) < 1e-12, name


def test_router_logits_are_refused() -> None:
    assert "set output_router_logits=False" in refusal_of(tiny("mixtral", "ring_fp32"))
    model: Any = tiny("mixtral", "ring_fp32", output_router_logits=False)
    batch = hf_ring_attn.shard(tokens(23), config=RingConfig(mlp_tokens=3, self_check=False))
    with pytest.raises(errors.NotByToken, match="asked for its router's logits"), batch:
        model(**batch.inputs, output_router_logits=True)


def test_parts_that_fsdp2_shards_by_themselves_are_refused(ranks: Ranks) -> None:
    for refusal in ranks(2).run(jobs.refused_by_parts):
        assert "calls model.layers.0.mlp several times, and FSDP2 shards gate_proj of it by itself" in refusal


def test_a_model_without_mlps_is_refused() -> None:
    assert "no decoder layer has an MLP that takes hidden states alone" in refusal_of(tiny("mamba", "ring_fp32"))


def test_every_mlp_and_norm_is_found() -> None:
    def names(model: Any) -> list[str]:
        return [name.removeprefix("model.") for name, _ in mlp_chunks._parts(model)]

    layer = ["mlp", "input_layernorm", "post_attention_layernorm"]
    assert names(tiny("llama")) == [f"layers.{n}.{part}" for n in range(2) for part in layer] + ["norm"]
    found = names(tiny("gemma3"))
    assert len(found) == 2 * 7 + 1 and "layers.1.self_attn.k_norm" in found
    assert [name for name in names(tiny("mixtral")) if "mlp" in name] == ["layers.0.mlp", "layers.1.mlp"]
    assert not [name for name in names(tiny("gemma3 vision")) if "vision" in name]


def test_an_mlp_runs_in_chunks_again_once_its_hook_is_gone() -> None:
    """It ran whole for ever, though the warning says that to remove the hook saves the memory."""
    model: Any = tiny("llama", "ring_fp32")
    seen: list[int] = []
    jobs.note_tokens(model.model.layers[0].mlp.gate_proj, seen)
    for hooked in (True, False, True, False):
        hook = model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: None) if hooked else None
        seen.clear()
        jobs.run(model, mlp_tokens=3)
        assert (max(seen) == 23) is hooked, hooked
        if hook is not None:
            hook.remove()


def test_a_recompute_after_the_batch_is_as_the_forward_was() -> None:
    """Whole forwards of a model that had changed, in its first batch without the option, were run again in chunks."""
    model: Any = tiny("llama", "ring_fp32")
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    seen: list[int] = []
    jobs.note_tokens(model.model.layers[0].mlp.gate_proj, seen)
    jobs.run(model, mlp_tokens=3)
    model.model.layers[0].mlp.gate_proj.weight.requires_grad_(False)
    seen.clear()
    jobs.run(model)
    assert seen == [23, 23]


def test_without_the_option_forwards_are_as_before() -> None:
    model: Any = tiny("llama", "ring_fp32")
    jobs.run(model, mlp_tokens=3)
    mlp = model.model.layers[0].mlp
    assert isinstance(mlp.__dict__["forward"], mlp_chunks._ChunkedForward)
    seen: list[int] = []
    jobs.note_tokens(mlp.gate_proj, seen)
    jobs.run(model)
    assert seen == [23]
    hf_ring_attn.uninstall()
    try:
        assert "forward" not in mlp.__dict__
    finally:
        hf_ring_attn.install()


DEFECTS: dict[str, tuple[Any, str, Any]] = {
    "gradients of one chunk alone": (chunked_loss, "add_wide", lambda _total, gradient: gradient),
    "a token left out": (token_chunks._Run, "parts", lambda run, x: [slice(0, len(x) - 1)]),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_planted_defects_are_seen(defect: str) -> None:
    where, name, wrong = DEFECTS[defect]
    with mock.patch.object(where, name, wrong), pytest.raises(AssertionError):
        assert_equal(*jobs.both(STEPS[0]), STEPS[0].exact)


def test_sums_of_chunks_are_rounded_once() -> None:
    """In bfloat16 the gradients of weights are as near to those of float32 as without chunks."""
    truth = jobs.step_of(Step(why="", dtype=torch.float32))
    half = Step(why="", dtype=torch.bfloat16)
    name = "model.layers.1.mlp.down_proj.weight"
    plain, chunks = (
        float(relative_error(jobs.step_of(half, **options).gradients[name].float(), truth.gradients[name]))
        for options in ({}, {"mlp_tokens": 1})
    )
    assert chunks < 1.1 * plain


@pytest.mark.turns
@pytest.mark.parametrize("whole", [True, False], ids=["the model", "its layers"])
@pytest.mark.slow
def test_compiled_models_are_exact(whole: bool) -> None:
    """MLPs are left out of the graphs."""
    torch._dynamo.reset()
    found, want = jobs.compiled_gradients(whole), jobs.step_of(Step(why=""))
    assert len(found) == len(want.gradients)
    for name, gradient in want.gradients.items():
        assert relative_error(found[name], gradient) < 1e-6, name


def test_a_class_forward_that_changes_between_two_batches_is_the_one_that_runs() -> None:
    """As Liger changes it. The loss was that of the first batch's forward."""

    def loss(model: Any, mlp_tokens: int | None) -> float:
        config = RingConfig(self_check=False, mlp_tokens=mlp_tokens)
        with (sharded := hf_ring_attn.shard(tokens(23), config=config, model=model)):
            return float(model(**sharded.inputs).loss)

    model, whole = tiny("llama", "ring_fp32").train(), tiny("llama", "ring_fp32").train()
    before, kind = loss(model, 4), type(model.model.layers[0].mlp)
    forward = kind.forward
    with mock.patch.object(kind, "forward", lambda self, x: 3 * forward(self, x)):
        changed = loss(model, 4)
        assert changed == pytest.approx(loss(whole, None), rel=1e-6) and abs(changed - before) > 1e-2


def test_a_copy_of_a_model_recomputes_as_it_ran() -> None:
    """A copied config has no options, so the copy's forward is whole; its recompute comes after the batch."""
    model: Any = tiny("llama", "ring_fp32").train()
    model.gradient_checkpointing_enable()
    hf_ring_attn.configure(model, RingConfig(mlp_tokens=3))
    losses = []
    for copies in range(2):
        net = copy.deepcopy(model) if copies else model
        sharded = hf_ring_attn.shard(tokens(23))
        with sharded:
            losses.append(net(**sharded.inputs).loss)
        losses[-1].backward()
    assert relative_error(losses[1], losses[0]) < 1e-6


class Convolves(nn.Module):
    """An MLP with a causal convolution over three tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.conv = nn.Conv1d(2 * width, 2 * width, 3, padding=2, groups=2 * width)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.conv(self.up(x).mT)[..., : x.shape[1]].mT
        return self.down(mixed)  # type: ignore[no-any-return]


def with_a_convolution() -> None:
    model: Any = tiny("llama", "ring_fp32").train()
    for layer in model.model.layers:
        torch.manual_seed(0)
        layer.mlp = Convolves(model.config.hidden_size)
    for _ in range(2):
        with hf_ring_attn.shard(tokens(23), config=RingConfig(mlp_tokens=4)) as sharded:
            model(**sharded.inputs).loss.backward()


def test_an_mlp_that_looks_along_the_row_runs_whole_with_a_warning(ranks: Ranks) -> None:
    """It had no effect there, and nothing said so."""
    for texts in ranks(2).run(told, with_a_convolution):
        found = [text for text in texts if text.startswith("mlp_tokens has no effect on model.layers.")]
        assert len(found) == len(tiny("llama", None).model.layers)
        assert "0.mlp (Convolves), which has a layer that looks along the row" in found[0]
