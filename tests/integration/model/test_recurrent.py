"""Hybrids: layers that carry state along the sequence, or mix neighbouring tokens, give one process's answer.

The sweep has every class of them, with rows of all kinds; here is what it does not see.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import hf_ring_attn
import tests.helpers.jobs.hybrid_jobs as jobs
from hf_ring_attn.errors import UnsupportedModel
from hf_ring_attn.integration.context.introspect import CACHES
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs import hybrid_bits, plain_jobs
from tests.helpers.jobs.comparison import Ranks, assert_equal_runs, on_two_or_four, without_ring
from tests.helpers.jobs.hybrid_jobs import HYBRIDS
from tests.helpers.jobs.plain_jobs import Shards, Step, packed, padded, tokens
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.jobs.trainer_jobs import train
from tests.helpers.models.tiny_models import tiny
from tests.integration.batch.test_plain_loop import assert_equal_answers

EXACT = 1e-5
"""transformers computes recurrences and the norms around them in float32, whatever the model's dtype."""

STEPS = [
    Step(why="gated delta, fewer tokens than chunks", model="qwen3_5", batch=tokens(3), exact=EXACT),
    Step(why="gated delta", model="qwen3_5", batch=padded(23, left=4, right=6), exact=EXACT),
    Step(why="gated delta, recomputed", model="qwen3_5", checkpointing="recomputed", exact=EXACT),
    Step(why="gated delta, reentrant", model="qwen3_5", checkpointing="reentrant", exact=EXACT),
    Step(why="convolutions, tiny chunks, recomputed", model="lfm2", batch=tokens(7), checkpointing="recomputed"),
    Step(why="convolutions", model="lfm2", batch=padded(23, left=4, right=6)),
    Step(why="mamba 2, fewer heads than ranks", model="granite", batch=padded(23, left=4, right=6), exact=EXACT),
    Step(why="mamba, without attention", model="mamba", batch=padded(23, left=4, right=6), exact=EXACT),
    Step(why="mamba, without attention, recomputed", model="mamba", checkpointing="recomputed", exact=EXACT),
    Step(why="mamba 2, without attention", model="mamba2", batch=padded(23, left=4, right=6), exact=EXACT),
    Step(why="mamba 2, without attention, reentrant", model="mamba2", checkpointing="reentrant", exact=EXACT),
    Step(why="mamba 2, reentrant", model="granite", checkpointing="reentrant", exact=EXACT),
    Step(why="lightning attention", model="minimax", batch=padded(23, left=4, right=6), exact=EXACT),
    Step(
        why="lightning attention, recomputed",
        model="minimax",
        dtype=torch.float32,
        checkpointing="recomputed",
        exact=EXACT,
    ),
    Step(why="gated recurrence", model="recurrent gemma", batch=padded(23, left=4, right=6), exact=EXACT),
    Step(why="gated recurrence, recomputed", model="recurrent gemma", checkpointing="recomputed", exact=EXACT),
    Step(why="gated recurrence, reentrant", model="recurrent gemma", checkpointing="reentrant", exact=EXACT),
    Step(why="convolved queries", model="zaya", batch=padded(23, left=4, right=6), exact=EXACT),
    Step(why="convolved queries, tiny chunks", model="zaya", batch=tokens(3), exact=EXACT),
    Step(why="convolved queries, recomputed", model="zaya", checkpointing="recomputed", exact=EXACT),
]

FULL = pytest.mark.full
LONGER = (61, 5, 5, 5, 5, 5, 9, 2)

alone = cache(plain_jobs.by_itself)


@pytest.mark.parametrize(("step", "world_size"), on_two_or_four(STEPS))
@pytest.mark.turns
def test_a_ring_gives_what_one_process_gives(ranks: Ranks, step: Step, world_size: int) -> None:
    for got in ranks(world_size).run(plain_jobs.in_a_ring, step):
        assert_equal_answers(got, alone(step), step)


ROWS = [
    (1, LONGER, 4), (2, LONGER, 8), (4, (9, 3, 11), 0),
    *(pytest.param(*row, marks=FULL) for row in [
        (1, (9, 3, 11), 0), (1, LONGER, 8), (2, (9, 3, 11), 0), (2, LONGER, 4), (4, LONGER, 4), (4, LONGER, 8),
    ]),
]  # fmt: skip
"""Ring size, documents, and chunks of a rank."""


@pytest.mark.parametrize(("world_size", "lengths", "chunks"), ROWS)
@pytest.mark.turns
def test_documents_of_a_packed_row_know_nothing_of_each_other(
    ranks: Ranks, world_size: int, lengths: tuple[int, ...], chunks: int
) -> None:
    """Also in a ring of one, where transformers itself would carry state on."""
    for answers in ranks(world_size).run(jobs.packed_rows, lengths, chunks):
        for model, got in answers.items():
            assert relative_error(got, jobs.documents_alone(model, lengths)) < EXACT, model


def test_state_matters() -> None:
    """What these tests compare depends on the tokens of other ranks through these layers."""
    for model in HYBRIDS:
        whole = jobs.first_layer(model, tokens(24)["input_ids"])
        late = jobs.first_layer(model, tokens(24)["input_ids"][:, 12:])
        assert relative_error(late, whole[:, 12:]) > 1e-3


def test_a_head_beside_a_model_without_attention_may_attend_to_nothing() -> None:
    sharded = hf_ring_attn.shard({"input_ids": tokens(24)["input_ids"]})
    with sharded, torch.no_grad():
        logits = tiny("mamba", "ring_fp32")(**sharded.inputs).logits
        assert torch.nn.Linear(logits.shape[-1], 2)(logits).shape == (2, 24, 2)


@pytest.mark.parametrize("model", ["qwen3_5", "mamba"])
def test_two_batches_alive(ranks: Ranks, model: str) -> None:
    """Their backwards mix after both contexts were left: what a recompute needs is not in a global."""
    batches = tokens(23), padded(30, left=7)
    for found in ranks(2).run(plain_jobs.two_batches_alive, *batches, name=model):
        for got, batch in zip(found, batches, strict=True):
            want = alone(Step(why="", model=model, batch=batch)).gradients
            errors = {name: relative_error(got[name], gradient) for name, gradient in want.items()}
            assert max(errors.values()) < EXACT, errors


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        *((model, Mesh(cp=2)) for model in ("qwen3_5", "granite", "mamba", "mamba2", "zaya", "minimax")),
        pytest.param("mamba2", Mesh(dp=2, cp=2), marks=FULL),
    ],
    ids=str,
)
@pytest.mark.turns
def test_trainer_gives_what_it_gives_in_one_process(ranks: Ranks, model: str, mesh: Mesh) -> None:
    """Text is generated in the middle: caches and decode steps are transformers' own, outside the ring."""
    # Few and small steps: weights that differ by 2e-7 soon give a tiny gated delta net gradients that differ by 3e-5.
    rows, mild = Rows(labelled="answers", length=23), {"learning_rate": 0.002}
    run = Run(why=model, model=model, rows=rows, generates=True, steps=3, arguments=mild)
    want = without_ring(ranks, run, mesh)
    for got in ranks(mesh.size).run(train, run, mesh):
        assert_equal_runs(got, want)
        assert got.generated == want.generated and got.generated


TWO_ROWS = [padded(23, left=4, right=6), padded(23, left=2, right=1)]
SHARDS = [
    Shards({"dp_shard_size": 2, "cp_size": 2}, ("dp_shard_cp",), world=4),
    Shards({"cp_size": 2}, ("dp_shard_cp",), world=2),
]


@pytest.mark.parametrize("checkpointing", ["recomputed", *(pytest.param(n, marks=FULL) for n in ("", "reentrant"))])
@pytest.mark.parametrize(
    ("model", "shards"),
    [
        pytest.param(model, shards, id=f"{model}-{shards}", marks=() if (turn + at) % 2 == 0 else FULL)
        for turn, model in enumerate(["qwen3_5", "granite", "mamba", "mamba2", "zaya", "minimax"])
        for at, shards in enumerate(SHARDS)
    ],
)  # fmt: skip
@pytest.mark.turns
def test_fsdp2_trains_as_one_process_does(ranks: Ranks, model: str, shards: Shards, checkpointing: str) -> None:
    batches = TWO_ROWS[: shards.world // 2]
    before = dict(plain_jobs.ready(Step(why="", model=model), None).named_parameters())
    want_losses, want = plain_jobs.without_fsdp(batches, 3, model)
    for rank, (losses, parameters) in enumerate(
        ranks(shards.world).run(plain_jobs.fsdp2, shards, batches, checkpointing, 3, model)
    ):
        for got, loss in zip(losses, want_losses[rank // 2], strict=True):
            assert relative_error(got, loss) < EXACT
        for name, parameter in want.items():
            assert not torch.equal(parameter, before[name]), name
            assert relative_error(parameters[name] - before[name], parameter - before[name]) < EXACT, name


@pytest.mark.parametrize(
    ("model", "world_size", "rings"),
    [("granite", 4, 1), ("mamba", 4, 2), ("mamba2", 2, 1), pytest.param("mamba2", 4, 2, marks=FULL)],
)
def test_ddp_averages_every_gradient(ranks: Ranks, model: str, world_size: int, rings: int) -> None:
    """Also where a rank has no head: Granite's recurrence has two."""
    answers = [alone(Step(why="", model=model, batch=batch)) for batch in TWO_ROWS[:rings]]
    for rank, (loss, gradients) in enumerate(ranks(world_size).run(jobs.ddp, model, TWO_ROWS[:rings])):
        assert relative_error(loss, answers[rank * rings // world_size].loss) < EXACT
        for name, gradient in gradients.items():
            want = torch.stack([answer.gradients[name] for answer in answers]).mean(0)
            assert relative_error(gradient, want) < EXACT, name
        assert gradients.keys() == answers[0].gradients.keys()


def test_autocast_rounds_as_in_one_process(ranks: Ranks) -> None:
    for model, away in ranks(2).run(jobs.under_autocast, tokens(24))[0].items():
        assert away < 0.05, model


@pytest.mark.slow
@pytest.mark.turns
def test_a_compiled_hybrid_gives_the_same(ranks: Ranks) -> None:
    for away in ranks(2).run(jobs.compiled, [tokens(23), packed(10, 14)]):
        assert away < EXACT


@pytest.mark.parametrize(
    ("world_size", "dtype", "rounding"),
    [
        (2, torch.float32, 1e-6), (4, torch.bfloat16, 5e-3), pytest.param(4, torch.float32, 1e-6, marks=FULL),
        pytest.param(2, torch.bfloat16, 5e-3, marks=FULL),
    ],
    ids=str,
)  # fmt: skip
def test_a_head_s_recurrence_is_computed_as_in_one_process(
    ranks: Ranks, world_size: int, dtype: torch.dtype, rounding: float
) -> None:
    """Bit for bit, where a matrix product does not depend on how many there are: so it is on CPUs that were tried."""
    for found in ranks(world_size).run(hybrid_bits.other_bits, dtype):
        assert found["delta"] < 1e-3 and found["convolution"] < 0.05
        assert found["shared"] < rounding


# ---- what is refused, and what is left behind ------------------------------------------------------------------------


def test_what_cannot_be_exact_is_refused_by_name(ranks: Ranks) -> None:
    for raised in ranks(2).run(jobs.refusals):
        assert [error for error, _ in raised] == [
            "UnsupportedArgument", "LayerWithoutSpec", "RecurrentLayerWithoutMask", "UnsupportedModel", "BadBatch",
        ]  # fmt: skip
        assert "Qwen3_5GatedDeltaNet was called with a cache: its state would be one rank's" in raised[0][1]
        assert "Qwen3_5GatedDeltaNet, a recurrent layer in a ring, did not get the mask that" in raised[2][1]
        assert "a reentrant checkpoint got the mask as a tensor and copied it" in raised[2][1]
        assert "causal_conv1d_fn of its file was replaced after hf_ring_attn patched it" in raised[3][1]
        assert "seq_idx and position_ids define different documents (first difference at token 8 of" in raised[4][1]


def loss_of_a_call(model: str, *names: str) -> float:
    """The loss of a call with these inputs; all of them, if none are named."""
    hybrid = tiny(model, "ring_fp32").train()
    with (sharded := hf_ring_attn.shard(tokens(23), model=hybrid)):
        return float(hybrid(**{name: x for name, x in sharded.inputs.items() if not names or name in names}).loss)


@pytest.mark.parametrize("model", sorted(HYBRIDS))
def test_a_call_that_leaves_use_cache_out_makes_no_cache(ranks: Ranks, model: str) -> None:
    run = ranks(2).run
    assert run(loss_of_a_call, model, "input_ids", "labels") == run(loss_of_a_call, model)


class RecurrentLayer(nn.Module):
    """A layer that attends and may carry state, which no one can tell apart."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs)


def test_an_unknown_recurrence_is_refused_for_packed_rows_in_a_ring_of_one_too() -> None:
    model: Any = tiny("llama", "ring_fp32")
    model.model.layers[1] = RecurrentLayer(model.model.layers[1])
    with pytest.raises(UnsupportedModel) as raised, hf_ring_attn.shard(packed(9, 14)) as sharded:
        model(**sharded.inputs)
    assert "(RecurrentLayer) carries state from one document of a packed row to the next" in str(raised.value)
    with hf_ring_attn.shard(tokens(23)) as sharded:
        model(**sharded.inputs)


@pytest.mark.parametrize("kind", ["minimax", "qwen3_5"])
def test_generation_with_a_cache_whose_first_layer_has_no_keys(kind: str) -> None:
    """transformers took the length of that layer's: queries of MiniMax were refused, and saw padding with sdpa.

    In Qwen3.5 a layer without keys follows the one with keys.
    """
    layers = ["linear_attention", "full_attention", "linear_attention"]
    more: dict[str, Any] = {} if kind == "minimax" else {"num_hidden_layers": 3, "layer_types": layers}
    ids = tokens(12)["input_ids"].clone()
    ids[1, :5] = 0
    model: Any = tiny(kind, "ring_fp32", **more)
    given = {"input_ids": ids, "attention_mask": ids.ne(0).long(), "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(**given), model.generate(**given, use_cache=False))
    one = {"input_ids": ids[:1], "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(**one), tiny(kind, **more).generate(**one))  # type: ignore[operator]


@pytest.mark.parametrize("rows", [slice(0, 1), slice(0, 2)], ids=["one row", "padded"])
@torch.no_grad()
def test_several_queries_with_a_cache_whose_first_layer_has_no_keys(rows: slice) -> None:
    """They were refused: "inside an active ring the model must get its rank's 5 of 5 tokens"."""
    ids = tokens(12)["input_ids"][rows]
    mask = torch.ones_like(ids)
    mask[1:, :5] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model: Any = tiny("minimax", "ring_fp32")
    given = {} if len(ids) == 1 else {"attention_mask": mask}
    want = model(ids, position_ids=positions, use_cache=False, **given).logits
    first = model(ids[:, :7], position_ids=positions[:, :7], **{name: x[:, :7] for name, x in given.items()})
    name = next(name for name in CACHES if name in first)
    got = model(ids[:, 7:], position_ids=positions[:, 7:], **{name: first[name]}, **given).logits
    torch.testing.assert_close(got, want[:, 7:])


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_layer_that_ctrl_c_interrupts_leaves_its_rows_to_no_other_model() -> None:
    """torch calls no hook after it, so another model's functions took the documents of those rows (logits 4.3 off)."""
    other: Any = tiny("mamba2")
    batch = {"input_ids": tokens(23)["input_ids"], "use_cache": False}
    with torch.no_grad():
        want = other(**batch).logits
        model: Any = tiny("mamba2", "ring_fp32")
        model.backbone.layers[1].mixer.norm.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt), (sharded := hf_ring_attn.shard(packed(9, 14))):
            model(**sharded.inputs)
        assert torch.equal(other(**batch).logits, want)


def test_a_layer_that_ctrl_c_interrupts_in_a_backward_leaves_its_rows_to_no_other_model() -> None:
    """No context ends after it: logits were 4.3 off."""
    other: Any = tiny("mamba2")
    batch = {"input_ids": tokens(23)["input_ids"], "use_cache": False}
    with torch.no_grad():
        want = other(**batch).logits
    model: Any = tiny("mamba2", "ring_fp32").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with hf_ring_attn.shard(packed(9, 14)) as sharded:
        loss = model(**sharded.inputs).loss
    model.backbone.layers[1].mixer.norm.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    with torch.no_grad():
        assert torch.equal(other(**batch).logits, want)


def test_uninstall_leaves_the_functions_of_a_model_s_file_as_they_were(ranks: Ranks) -> None:
    assert ranks(2).run(jobs.left_behind) == [(True, True)] * 2


def test_functions_that_the_package_kernels_made_modules_of(ranks: Ranks) -> None:
    batch = {"input_ids": tokens(23)["input_ids"]}
    for found in ranks(2).run(jobs.functions_as_modules, batch):
        for got in found:
            assert relative_error(got, alone(Step(why="", model="qwen3_5")).logits) < EXACT


def test_a_copy_of_a_model_is_prepared_as_the_model_is(ranks: Ranks) -> None:
    assert max(ranks(2).run(jobs.a_copy)) < EXACT


@pytest.mark.slow
@pytest.mark.turns
def test_nothing_is_kept_of_models_that_are_gone(ranks: Ranks) -> None:
    """What `uninstall` was to do grew by an entry for each layer."""
    few, many = ranks(2).run(jobs.kept, 2), ranks(2).run(jobs.kept, 50)
    assert many == few
    assert [alive for alive, _ in many] == [0, 0]


def test_an_activation_that_a_layer_makes_anew_is_no_model(ranks: Ranks) -> None:
    """Each would be bound, and the model that trains forgotten when its replicas are looked at."""
    assert ranks(2).run(jobs.bound) == [["Qwen3_5ForCausalLM"]] * 2
