"""Compiled models in a ring: one graph, the numbers of the uncompiled model, and nothing kept of an earlier batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_ring_attn import RingConfig
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs import compile_jobs
from tests.helpers.jobs.comparison import Ranks, assert_equal_runs, without_ring
from tests.helpers.jobs.compile_jobs import Compiled
from tests.helpers.jobs.plain_jobs import packed, padded, tokens, without_fsdp
from tests.helpers.jobs.runs import Mesh, Rows, Run

pytestmark = pytest.mark.slow
SAME = 1e-6
"""Relative bound; transformers' loss is in float32. What another batch's documents would change is above 0.01."""

PACKED = [packed(10, 14), packed(3, 21), packed(5, 5, 5, 9), tokens(24)]
ONE = [1, 1, 1, 1]
LAYERS = Compiled(why="layers", what="layers", batches=PACKED, graphs=ONE)
WHOLE = Compiled(why="a model", batches=PACKED, graphs=ONE)
BREAKS = replace(WHOLE, batches=PACKED[:2], graphs=None)
SINKS = {"model": "gpt_oss", "dtype": torch.float32}

CASES = [
    replace(LAYERS, backend="aot_eager"),
    replace(LAYERS, why="layers of a model that nobody named", named=False),
    replace(LAYERS, why="layers with a window, recomputed", model="mistral", checkpointing="recomputed"),
    replace(LAYERS, why="layers with and without a window", model="gemma3"),
    replace(LAYERS, why="layers with sinks", **SINKS),  # type: ignore[arg-type]
    replace(WHOLE, backend="aot_eager"),
    replace(WHOLE, why="a model that compiles itself", what="in place"),
    replace(WHOLE, why="a model with a window, recomputed", model="mistral", checkpointing="recomputed"),
    replace(WHOLE, why="two kinds of masks", model="gemma3"),
    replace(WHOLE, why="sinks", ring=RingConfig(loss="sharded"), **SINKS),  # type: ignore[arg-type]
    replace(
        WHOLE, why="padding, backward by gather", ring=RingConfig(backward="gather"),
        batches=[padded(24, left=4, right=6), padded(24, left=2), padded(24, right=7), tokens(24)],
    ),
    replace(  # a second length is a variable one to a compiler, also without a ring
        WHOLE, why="other lengths", batches=[packed(10, 14), packed(5, 13), tokens(32), packed(7, 20)],
        graphs=[1, 2, 2, 2],
    ),
    replace(BREAKS, why="chunks, whose masks break the graph", model="llama4"),
    replace(BREAKS, why="learned biases, which break the graph", model="learned biases"),
    replace(BREAKS, why="an indexer, which breaks the graph", model="deepseek_v32"),
    replace(BREAKS, why="layers with an indexer, which breaks their graph", model="glm_moe_dsa", what="layers"),
]  # fmt: skip


SELDOM = ("a model that compiles itself", "recomputed", "layers with sinks")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.full) if case.why.endswith(SELDOM) else case for case in CASES],
    ids=lambda case: case.why,
)
@pytest.mark.turns
def test_compiled_it_is_one_graph_for_all_batches(ranks: Ranks, case: Compiled) -> None:
    for found in ranks(2).run(compile_jobs.compiled, case):
        assert max(found.away) < SAME, found.away
        assert case.graphs is None or found.graphs == case.graphs


@pytest.mark.parametrize("model", [*(pytest.param(n, marks=pytest.mark.full) for n in ("llama", "mistral")), "gemma3"])
@pytest.mark.parametrize("case", [LAYERS, WHOLE], ids=lambda case: case.why)
@pytest.mark.turns
def test_so_it_is_in_a_ring_of_one(case: Compiled, model: str) -> None:
    found = compile_jobs.compiled(replace(case, model=model))
    assert max(found.away) < SAME, found.away
    assert found.graphs == case.graphs


@pytest.mark.turns
def test_a_window_is_not_that_of_another_model(ranks: Ranks) -> None:
    """Their code is the same, and the compiler keeps what it made of it."""
    short = replace(WHOLE, model="mistral", batches=PACKED[:1])
    cases = [replace(short, config={"sliding_window": n, "num_hidden_layers": 1}) for n in (7, 5, 7)]
    for found in ranks(2).run(compile_jobs.compiled, *cases):
        assert max(found.away) < SAME, found.away


UNCHECKED = replace(LAYERS, ring=RingConfig(self_check=False))  # which runs uncompiled, and is refused first
REFUSED = [
    (replace(UNCHECKED, ring=RingConfig(self_check=False, kernel="triton")), "UnsupportedAttention: no kernel can"),
    (
        replace(UNCHECKED, config={"attention_dropout": 0.1}),
        "UnsupportedArgument: LlamaAttention called attention with dropout=0.1",
    ),
]


@pytest.mark.parametrize(("case", "text"), REFUSED, ids=["kernel", "dropout"])
@pytest.mark.turns
def test_a_refusal_comes_by_name(ranks: Ranks, case: Compiled, text: str) -> None:
    for raised in ranks(2).run(compile_jobs.refused, replace(case, graphs=None)):
        assert raised.startswith(text)
    for raised in ranks(2).run(compile_jobs.refused, case):  # who demands one graph is told by the compiler
        assert raised.startswith("Unsupported: ")
        assert "hf_ring_attn refuses this attention: uncompiled, it says why" in raised


@pytest.mark.turns
def test_rows_that_were_not_cut_are_refused(ranks: Ranks) -> None:
    case = replace(WHOLE, graphs=None, config={"num_hidden_layers": 1})
    for raised in ranks(2).run(compile_jobs.rows_that_were_not_cut, case):
        assert raised.startswith("UnshardedInput: inside an active ring the model must get its rank's 12 of 24 tokens")


@pytest.mark.turns
def test_layers_under_fsdp2(ranks: Ranks) -> None:
    batches = [tokens(23)]
    (want_losses,), want = without_fsdp(batches)
    case = replace(LAYERS, batches=batches, backend="aot_eager")
    for losses, parameters, graphs in ranks(2).run(compile_jobs.layers_under_fsdp2, case, len(want_losses)):
        assert all(relative_error(a, b) < SAME for a, b in zip(losses, want_losses, strict=True))
        assert all(relative_error(parameters[name], p) < SAME for name, p in want.items())
        assert graphs == 1


# Of a model inside DDP: what DDP itself does not let a compiler see. Of regions: embedding, RoPE, layers, norm, head.
TRAININGS = {"a model in DDP": ({}, 1), "regions": ({"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "1"}, 5)}


@pytest.mark.parametrize("way", TRAININGS)
@pytest.mark.turns
def test_a_trainer_that_compiles(ranks: Ranks, way: str) -> None:
    environment, most = TRAININGS[way]
    run = Run(why="compiled", steps=3, rows=Rows(packed=True))
    compiling = replace(run, arguments={"torch_compile": True, "torch_compile_backend": "aot_eager"})
    want = without_ring(ranks, run, Mesh(cp=2))
    for got, graphs, breaks in ranks(2).run(compile_jobs.trained, compiling, Mesh(cp=2), **environment):
        assert_equal_runs(got, want)
        assert graphs == most
        assert not [why for why in breaks if "hf_ring_attn" in why or "ring_mask" in why]
