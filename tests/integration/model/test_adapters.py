"""Adapters: a LoRA adapter from a ring serves anywhere; every type of PEFT is exact in a ring or refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft.utils.peft_types import PeftType

from hf_ring_attn.integration.model import adapters as ours
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.peft_jobs import (
    ADAPTERS,
    REFUSED,
    classifier_refusal,
    refusal,
    refusal_of_a_part,
    seeded_shares,
    shares,
    train_an_adapter,
)
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.sft_jobs import Case, model, one_step
from tests.helpers.patience import patient

SERVE = """
import json, sys, torch
from peft import AutoPeftModelForCausalLM
model = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="sdpa").eval()
ids = torch.arange(40)[None] * 5 + 3
with torch.no_grad(), model.disable_adapter():
    base = model(input_ids=ids).logits
with torch.no_grad():
    adapted = model(input_ids=ids).logits
    merged = model.merge_and_unload()(input_ids=ids).logits
    torch.save({"adapted": adapted, "base": base, "merged": merged}, sys.argv[2])
print(json.dumps(sorted(name for name in sys.modules if name.startswith("hf_ring_attn"))))
"""


@pytest.mark.slow
@pytest.mark.turns
def test_an_adapter_from_a_ring_serves_without_the_plugin(ranks: Ranks, tmp_path: Path) -> None:
    base, adapter, logits = tmp_path / "base", tmp_path / "adapter", tmp_path / "logits.pt"
    model("sdpa").save_pretrained(base)
    trained = ranks(2).run(train_an_adapter, str(base), str(adapter), Mesh(cp=2))
    assert {path.name for path in adapter.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert "ring_fp32" not in (adapter / "adapter_config.json").read_text()
    arguments = [sys.executable, "-c", SERVE, str(adapter), str(logits)]
    served = subprocess.run(arguments, capture_output=True, text=True, timeout=patient(220), cwd=tmp_path, check=False)
    assert served.returncode == 0, served.stderr
    assert json.loads(served.stdout.splitlines()[-1]) == []
    found = torch.load(logits)
    assert relative_error(found["adapted"], trained[0]) < 1e-5
    assert relative_error(found["merged"], trained[0]) < 1e-5
    assert relative_error(found["base"], trained[0]) > 1e-2, "the adapter changed nothing, so this shows nothing"


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.turns
def test_an_adapter_is_exact_in_a_ring(ranks: Ranks, name: str) -> None:
    if name == "ADAMSS":
        pytest.importorskip("sklearn", reason="AdaMSS clusters by scikit-learn")
    got, want = ranks(2).run(shares, name)[0]
    assert len(want) > 1, "no gradients"
    for key, value in want.items():
        # float32: most are at 1e-6, RANDLORA's sums over its bases at 1e-5. What is not exact is off by 0.1 or more.
        assert relative_error(got[key], value) < 1e-4, key


def test_every_type_is_measured_or_refused() -> None:
    """A type that PEFT adds is refused until it is measured here."""
    assert {name.partition(",")[0] for name in ADAPTERS} == ours.EXACT
    assert {kind.value for kind in PeftType} > ours.EXACT
    assert set(ours.INEXACT).isdisjoint(ours.EXACT)


@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_is_refused_by_name(ranks: Ranks, name: str) -> None:
    for said in ranks(2).run(refusal, name):
        assert "LlamaForCausalLM cannot be trained in a ring exactly: the PEFT adapter 'default'" in said
        assert f"({name}) {REFUSED[name][2]}" in said


@pytest.mark.parametrize("name", ["LILY", "MonteCLoRA"])
def test_an_adapter_of_a_part_is_refused_by_name(ranks: Ranks, name: str) -> None:
    """Only the outermost adapters were looked at. Noise of each rank's own passed, as no self-check compares it."""
    for said in ranks(2).run(refusal_of_a_part, name):
        assert f"({name}) {REFUSED[name][2]}" in said


DROPPED = [("LoHaConfig", "rank_dropout"), ("LoKrConfig", "module_dropout"), ("OFTConfig", "module_dropout")]


@pytest.mark.parametrize(("kind", "rate"), DROPPED)
def test_weights_dropped_at_random_are_refused_where_ranks_draw_their_own_numbers(
    ranks: Ranks, kind: str, rate: str
) -> None:
    """In a classifier other ranks had other weights, silently. In evaluation none are dropped."""
    for said in ranks(2).run(classifier_refusal, kind, rate, True):
        assert (
            f"the PEFT adapter 'default' drops weights at random, and each rank would drop others: set its {rate}"
            in said
        )
    assert ranks(2).run(classifier_refusal, kind, rate, False) == ["no refusal"] * 2


def test_weights_dropped_at_random_are_refused_where_ranks_have_other_seeds(ranks: Ranks) -> None:
    """Each rank dropped others, silently, in GRPO too. With one seed they are those that one process drops."""
    for said in ranks(2).run(seeded_shares, False):
        assert isinstance(said, str), "not refused"
        assert "the same random numbers by which a PEFT adapter drops weights" in said
    for answer in ranks(2).run(seeded_shares, True):
        assert isinstance(answer, tuple), answer
        got, want = answer
        assert len(want) > 1, "no gradients"
        for key, value in want.items():
            assert relative_error(got[key], value) < 1e-4, key


REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
UNUSED = {"ddp_find_unused_parameters": False}


def test_lora_with_ddp_and_reentrant_checkpointing_fails_as_it_does_without_the_plugin(ranks: Ranks) -> None:
    """Upstream: Trainer has DDP look for unused parameters of a PEFT model, and DDP then bears no second backward."""
    said = []
    for mesh in (Mesh(cp=2), Mesh(dp=2)):
        said += ranks(2).run(one_step, Case("LoRA", REENTRANT, lora=True), mesh)
        ranks(2).close()  # the backward of these ranks has ended halfway
    assert said == [said[0]] * 4
    assert said[0].startswith("RuntimeError: Expected to mark a variable ready only once.")
    assert ranks(2).run(one_step, Case("LoRA", REENTRANT | UNUSED, lora=True), Mesh(cp=2)) == ["trained"] * 2
