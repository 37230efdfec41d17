"""The verdict on a model in a ring: right ones are exact, planted defects are found and named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hf_ring_attn.verify import verdict
from hf_ring_attn.verify.verdict import Finding
from tests.helpers.jobs.verify_jobs import verified
from tests.helpers.live_ranks import LiveRanks
from tests.helpers.models.tiny_models import tiny

Ranks = Callable[[int], LiveRanks]
GOOD = (
    "gemma2", "gpt_oss", "mixtral", "llama4", "afmoe", "dynamic rope", "longrope", "deepseek_v3", "deepseek_v32",
    "qwen3_5", "granite", "qwen3 vision",
)  # fmt: skip
LEAKS = [
    "leak: a later token changes earlier logits", "leak: a document changes the one before it",
    "leak: a document changes the one after it", "leak: a token's loss has a gradient outside of its past",
]  # fmt: skip


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings}


def test_a_llama_is_exact_in_every_comparison(ranks: Ranks) -> None:
    (findings, refusal), other = ranks(2).run(verified, "llama")
    assert refusal == "" and findings == other[0], "all ranks come to one verdict"
    found = by_name(findings)
    cases = [
        f"{case}: {what}" for case in ("one document", "packed documents") for what in ("loss", "logits", "gradients")
    ]
    assert {"layers of kind full_attention", *cases, *LEAKS} <= set(found)
    assert "one document: gradients of model.layers.*.self_attn.q_proj" in found
    assert [finding.what for finding in findings if not finding.exact] == []
    assert all(found[leak].error == 0 for leak in LEAKS)


@pytest.mark.turns
@pytest.mark.parametrize("name", GOOD)
def test_other_kinds_of_layers_are_exact(ranks: Ranks, name: str) -> None:
    findings, refusal = ranks(2).run(verified, name)[0]
    assert refusal == "" and [x.what for x in findings if not x.exact] == []


def test_kinds_of_layers_get_a_verdict_each(ranks: Ranks) -> None:
    findings, _ = ranks(2).run(verified, "gpt_oss")[0]
    assert {"layers of kind sliding_attention", "layers of kind full_attention"} <= set(by_name(findings))


@pytest.mark.parametrize("defect", ["attention", "mlp"])
def test_a_planted_defect_is_found_and_its_layer_named(ranks: Ranks, defect: str) -> None:
    findings, refusal = ranks(2).run(verified, "llama", defect)[0]
    found = by_name(findings)
    layers = found["layers of kind full_attention"]
    assert not layers.exact and layers.where == "model.layers.1", "the first layer is right, given its input"
    assert not found["one document: logits"].exact
    leaking = [leak for leak in LEAKS if not found[leak].exact]
    assert leaking == (LEAKS if defect == "attention" else [])
    assert f"model.layers.1.{'self_attn' if defect == 'attention' else 'mlp'}" in refusal, "the self-check's words"


@pytest.mark.parametrize(("name", "passes"), [("mixtral", True), ("llama", False)])
def test_experts_may_round_anew_what_later_layers_magnify(
    monkeypatch: pytest.MonkeyPatch, name: str, passes: bool
) -> None:
    """On a GPU a row of another length rounds its experts anew; flash-linear-attention's TF32 made 1e-4 of it."""
    model = tiny(name, "eager")
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _module, _args, out: out.to(torch.bfloat16).float())
    monkeypatch.setattr(verdict, "leaks", lambda *_: {"a later token changes earlier logits": 2e-6})
    findings, _ = verdict.verdict(model, 48, torch.device("cpu"))
    (leak,) = [one for one in findings if one.what.startswith("leak: ")]
    assert leak.exact == passes and leak.limit < 1e-4, leak
