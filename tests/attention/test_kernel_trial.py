"""The trial of a kernel before it serves: what it lets through and what it does not. On the CPU, by the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_ring_attn.attention import kernel_choice, kernel_trial
from hf_ring_attn.errors import UnsupportedAttention
from hf_ring_attn.kernels import KERNELS, Gradients, Request
from hf_ring_attn.kernels.reference import Reference

REQUEST = Request("cuda", torch.bfloat16, 8, 4, 16, 24, softcap=False, sinks=False, deterministic=False)
CPU = torch.device("cpu")


class Candidate(Reference):
    """The reference under another name, and with a defect."""

    name = "triton"

    def __init__(self, spoil: Callable[[Gradients], object] = lambda _: None) -> None:
        self.spoil = spoil

    def unsupported(self, request: Request) -> list[str]:
        return []

    def backward(self, *args: Any, **kwargs: Any) -> None:
        into: Gradients = args[8]
        super().backward(*args, **kwargs)
        self.spoil(into)


DEFECTS: dict[str, Callable[[Gradients], object]] = {
    "dq": lambda into: into.dq.copy_(into.dq.roll(1, 2)),  # heads mixed up, as by strides of another tensor
    "dk": lambda into: into.dk.mul_(1.05),
    "dv": lambda into: into.dv.zero_(),
}


@pytest.mark.parametrize(
    "request_",
    [
        REQUEST,
        replace(REQUEST, dtype=torch.float32, softcap=True),
        replace(REQUEST, dtype=torch.float16, sinks=True, heads=7, kv_heads=1),
        replace(REQUEST, holes=True, heads=4, deterministic=True),
    ],
    ids=["lanes", "softcap", "sinks, one key head", "holes"],
)
def test_a_kernel_that_keeps_the_contract_passes(request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS, "triton", Candidate())
    errors = kernel_trial.errors_of("triton", request_, CPU)
    assert set(errors) == {"out", "lse", "dq", "dk", "dv"}
    assert max(errors.values()) < kernel_trial.FAR[request_.dtype.itemsize] / 4, errors


@pytest.mark.parametrize("name", DEFECTS)
def test_a_gradient_that_is_wrong_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS, "triton", Candidate(DEFECTS[name]))
    errors = kernel_trial.errors_of("triton", REQUEST, CPU)
    assert [wrong for wrong, error in errors.items() if error > kernel_trial.FAR[2]] == [name]


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, candidate: Candidate) -> None:
    """As if there were a GPU, whose tensors lie on the CPU."""
    monkeypatch.setitem(KERNELS, "triton", candidate)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        kernel_trial, "errors_of", lambda kernel, request, _, tried=kernel_trial.errors_of: tried(kernel, request, CPU)
    )
    kernel_trial.failures_of.cache_clear()
    kernel_choice.kernel_for.cache_clear()
    kernel_choice.why_not_preferred.cache_clear()


def test_a_kernel_that_fails_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch, Candidate(DEFECTS["dv"]))
    with pytest.raises(UnsupportedAttention, match="a small attention came out wrong here: dv by 100%"):
        kernel_choice.kernel_for("", "triton", REQUEST)
    assert kernel_choice.kernel_for("", "auto", REQUEST) == "reference"
    said = kernel_choice.why_not_preferred("auto", "reference", REQUEST)
    assert said == "not triton: a small attention came out wrong here: dv by 100%"
    on_a_gpu(monkeypatch, Candidate())
    assert kernel_choice.kernel_for("", "auto", REQUEST) == "triton"
    assert kernel_choice.why_not_preferred("auto", "triton", REQUEST) == ""


def test_what_a_compiler_says_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_resources(_: Gradients) -> None:
        raise RuntimeError("out of resource: shared memory\nand more")

    on_a_gpu(monkeypatch, Candidate(out_of_resources))
    with pytest.raises(UnsupportedAttention, match=r"failed here: RuntimeError: out of resource: shared memory\n"):
        kernel_choice.kernel_for("", "triton", REQUEST)


def test_the_definition_and_the_cpu_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_trial, "errors_of", lambda *_: pytest.fail("tried"))
    kernel_trial.failures_of.cache_clear()
    assert kernel_trial.failures_of("reference", REQUEST) == ()
    assert kernel_trial.failures_of("triton", replace(REQUEST, device="cpu")) == ()
    assert kernel_trial.failures_of("triton", replace(REQUEST, score_mod=True)) == ()
