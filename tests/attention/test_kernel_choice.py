"""Which kernel serves a request, and that a kernel chosen by name is never replaced by another."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hf_ring_attn import kernels, ring_attention
from hf_ring_attn.attention import kernel_choice, kernel_trial
from hf_ring_attn.attention.kernel_choice import why_not_preferred
from hf_ring_attn.config import KERNEL_NAMES, RingConfig
from hf_ring_attn.errors import BadOption, RefusedElsewhere, UnsupportedAttention
from hf_ring_attn.kernels import KERNELS, Request, choose
from hf_ring_attn.kernels.reference import Reference
from tests.helpers.checks import Ranks

REQUEST = Request("cpu", torch.float32, 4, 2, 8, 8, softcap=False, sinks=False, deterministic=False)


class Picky(Reference):
    name = "picky"

    def unsupported(self, request: Request) -> list[str]:
        return ["it has no softcap", f"it knows no {request.dtype}"] if request.softcap else []


class Lacking(Reference):
    """It could serve all but a softcap, if an installation were whole."""

    name = "lacking"

    def lacks(self, request: Request) -> list[str]:
        return [] if request.softcap else ["its library is not installed", "nor is its compiler"]

    def unsupported(self, request: Request) -> list[str]:
        return self.lacks(request) or ["it has no softcap"]


class Refusing(Reference):
    name = "refusing"

    def unsupported(self, request: Request) -> list[str]:
        return ["it refuses"]


@pytest.fixture
def picky(monkeypatch: pytest.MonkeyPatch) -> Picky:
    """A kernel that goes before the others and refuses a softcap."""
    kernel = Picky()
    monkeypatch.setattr(kernels, "KERNELS", {"picky": kernel, **KERNELS})
    return kernel


def test_auto_takes_the_first_kernel_that_can(picky: Picky) -> None:
    assert choose("auto", REQUEST) is picky
    assert choose("auto", replace(REQUEST, softcap=True)).name == "reference"
    assert choose("reference", REQUEST).name == "reference"


def test_what_keeps_a_preferred_kernel_from_a_machine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "KERNELS", {"lacking": Lacking(), "picky": Picky(), **KERNELS})
    why_not_preferred.cache_clear()
    assert why_not_preferred("auto", "picky", REQUEST) == "not lacking: its library is not installed"
    assert why_not_preferred("auto", "reference", replace(REQUEST, softcap=True)) == "", "no machine would change that"
    assert why_not_preferred("picky", "picky", REQUEST) == "", "it was asked for"
    assert why_not_preferred("auto", "lacking", REQUEST) == "", "it serves"
    why_not_preferred.cache_clear()


@pytest.mark.usefixtures("picky")
def test_a_kernel_chosen_by_name_never_falls_back() -> None:
    with pytest.raises(UnsupportedAttention) as error:
        choose("picky", replace(REQUEST, softcap=True))
    assert str(error.value) == (
        "no kernel can compute this attention exactly:\n  picky: it has no softcap; it knows no torch.float32\n"
        "use kernel='auto' (and no HF_RING_ATTN_KERNEL): reference supports this attention"
    )


def test_every_reason_of_every_kernel_is_given(picky: Picky, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "KERNELS", {"picky": picky, "refusing": Refusing()})
    with pytest.raises(UnsupportedAttention) as error:
        choose("auto", replace(REQUEST, softcap=True))
    assert str(error.value).splitlines() == [
        "no kernel can compute this attention exactly:",
        "  picky: it has no softcap; it knows no torch.float32",
        "  refusing: it refuses",
    ]


def test_a_kernel_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BadOption) as error:
        choose("flash9", REQUEST)
    assert str(error.value) == f"kernel='flash9' is not possible: it must be 'auto' or one of {KERNEL_NAMES}."


def test_the_options_know_every_kernel() -> None:
    """RingConfig refuses other names, and config.py may not import kernels."""
    assert tuple(KERNELS) == KERNEL_NAMES
    assert [RingConfig(kernel=name).kernel for name in ("auto", *KERNELS)] == ["auto", *KERNELS]


def test_the_environment_names_the_kernel_for_auto_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_RING_ATTN_KERNEL", "flash9")
    with pytest.raises(BadOption, match="HF_RING_ATTN_KERNEL='flash9' is not possible: it must be 'auto' or one of"):
        choose("auto", REQUEST)
    assert choose("reference", REQUEST).name == "reference"


COMPILED_FIRST = """
import sys, torch
from hf_ring_attn import ring_attention
q, k, v = (torch.randn(1, 16, 4, 8, requires_grad=True) for _ in range(3))
out = torch.compile(ring_attention, backend=sys.argv[1])(q, k, v)
found = torch.autograd.grad(out.sum(), (q, k, v))
want = ring_attention(q, k, v)
assert torch.equal(out, want)
assert all(map(torch.equal, found, torch.autograd.grad(want.sum(), (q, k, v))))
"""


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.slow
@pytest.mark.turns
def test_a_compiled_call_may_be_the_first_of_a_process(backend: str) -> None:
    """The compiler traced the probe of versions and died of PackageNotFoundError, where flash-attn-4 is missing."""
    run = subprocess.run([sys.executable, "-c", COMPILED_FIRST, backend], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.bool, torch.complex64], ids=str
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_kernel_refuses_a_dtype_that_nobody_computes_in(device: str, dtype: torch.dtype, name: str) -> None:
    request = replace(REQUEST, device=device, dtype=dtype, score_mod=name == "flex")
    assert any(f"got {dtype}" in reason for reason in KERNELS[name].unsupported(request))


def dtype_refused() -> str:
    q, k, v = (torch.randn(1, 8, 2, 8).to(torch.float8_e4m3fn) for _ in range(3))
    with pytest.raises(BadOption) as error:
        ring_attention(q, k, v, length=8 * dist.get_world_size())
    return str(error.value)


def test_fp8_is_refused_on_every_rank_before_anything_travels(ranks: Ranks) -> None:
    """It was reported as a lost peer, and a ring of three hung."""
    for text in ranks(3).run(dtype_refused):
        assert text.startswith("q.dtype=torch.float8_e4m3fn is not possible: it must be")


def out_of_memory() -> str:
    """What a rank raises if the second one has no memory for a trial of kernels."""
    error = torch.OutOfMemoryError("no memory for the trial")
    failing = mock.patch.object(kernel_trial, "failures_of", side_effect=error if dist.get_rank() else None)
    q = torch.randn(1, 8, 2, 8)
    kernel_choice.kernel_for.cache_clear()
    with failing, pytest.raises((torch.OutOfMemoryError, RefusedElsewhere)) as raised:
        ring_attention(q, q, q, length=16)
    return f"{type(raised.value).__name__}: {raised.value}"


def test_a_rank_without_memory_for_a_trial_tells_the_others(ranks: Ranks) -> None:
    """They waited for it until the time-out."""
    first, second = ranks(2).run(out_of_memory)
    assert second == "OutOfMemoryError: no memory for the trial"
    assert first.startswith("RefusedElsewhere: ") and "rank 1: OutOfMemoryError: no memory for the trial" in first
