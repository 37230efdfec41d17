"""Who serves flash2, and why not: the two libraries, what is asked of them, and in which order."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hf_ring_attn.bench.replay import replay
from hf_ring_attn.kernels import KERNELS, Params, Request, choose
from hf_ring_attn.kernels.flash2 import Flash2, libraries
from hf_ring_attn.kernels.flash2.libraries import Lengths, Package, Torch
from hf_ring_attn.kernels.flash4.calls import Bounds
from hf_ring_attn.sharding.mask import UNBOUNDED, Tile
from hf_ring_attn.testing import CASES, inputs
from tests.kernels.fake_flash2 import Fake
from tests.kernels.package_flash2 import OPS, fake
from tests.kernels.test_flash2 import REQUEST
from tests.kernels.test_flash4 import mask_of


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (replace(REQUEST, device="cpu"), "needs an NVIDIA GPU, got tensors on cpu"),
        (replace(REQUEST, dtype=torch.float32), "computes in bfloat16 or float16, got torch.float32"),
        (replace(REQUEST, head_dim=192), "keys and values must be of one width, got 192 and 128"),
        (replace(REQUEST, head_dim=264, value_dim=264), "heads are a multiple of 8 wide, 256 at most, got 264"),
        (replace(REQUEST, head_dim=100, value_dim=100), "heads are a multiple of 8 wide, 256 at most, got 100"),
        (replace(REQUEST, holes=True), "a document's keys must be one run"),
        (replace(REQUEST, score_mod=True), "it has no score_mod"),
    ],
)
def test_what_is_refused_says_why(request_: Request, words: str) -> None:
    kernel = Flash2([Fake()])
    assert kernel.unsupported(REQUEST) == []
    (reason,) = kernel.unsupported(request_)
    assert words in reason


def test_the_first_library_that_can_serves_and_every_reason_is_given() -> None:
    unable, able, idle = Fake(["it is tired", "it is Saturday"]), Fake(), Fake()
    assert Flash2([unable]).unsupported(REQUEST) == ["fake: it is tired", "fake: it is Saturday"]
    kernel = Flash2([unable, able, idle])
    assert kernel.unsupported(REQUEST) == []
    q = torch.randn(1, 4, 2, 8)
    kernel.forward(q, q, q, torch.tensor([Tile(0, 0, 4, 0, 0, 4, 0, 0, UNBOUNDED)]), Params(1.0))
    assert able.calls and not unable.calls and not idle.calls


def test_a_library_that_computes_another_attention_does_not_serve() -> None:
    wrong, right = Fake(shift=1), Fake()
    reasons = Flash2([wrong]).unsupported(REQUEST)
    assert [reason.rpartition(",")[0] for reason in reasons] == [
        f"fake: a small attention {what} came out wrong here" for what in ("causal", "with a window", "of documents")
    ]
    assert Flash2([wrong, right]).unsupported(REQUEST) == []


def test_a_library_that_fails_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no kernel image is available")

    broken = Fake()
    monkeypatch.setattr(broken, "backward", fail)
    assert Flash2([broken]).unsupported(REQUEST) == ["fake: a small attention failed: no kernel image is available"]


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("here is one")
    assert Flash2().unsupported(REQUEST) == ["needs an NVIDIA GPU, and torch finds none"]


def test_auto_takes_it_after_those_that_do_not_round(monkeypatch: pytest.MonkeyPatch) -> None:
    rounding = [kernel.rounds_gradients(REQUEST) for name, kernel in KERNELS.items() if name != "reference"]
    assert rounding == sorted(rounding)
    assert list(KERNELS)[-3:] == ["flash2", "flex", "reference"]
    for name in ("flash4", "triton", "flash2"):
        monkeypatch.setattr(type(KERNELS[name]), "unsupported", lambda *_: [])
    assert choose("auto", REQUEST).name == "flash4"
    for name in ("flash4", "triton"):
        monkeypatch.setattr(type(KERNELS[name]), "unsupported", lambda *_: ["no"])
    assert choose("auto", REQUEST).name == "flash2"


# ---- the two libraries ---------------------------------------------------------------------------------------------


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of torch with flash attention, as far as it says."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(libraries, "_torch_differences", libraries._torch_differences.__wrapped__)


@pytest.mark.usefixtures("built")
def test_torchs_own_serves_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Torch()
    assert library.reasons(False, False) == []
    assert library.reasons(True, True) == [
        "it has no softcap", "it is deterministic only if the whole process is (torch.use_deterministic_algorithms)",
    ]  # fmt: skip
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4", raising=False)
    (reason,) = library.reasons(False, False)
    assert reason == "torch was told to use FA4 in its place (restore_flash_attention_impl() undoes it)"


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("constant", ["FORWARD", "BACKWARD"])
def test_an_op_of_torch_with_other_parameters_is_a_reason(constant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, constant, getattr(libraries, constant).replace("is_causal", "mask"))
    assert Torch().reasons(False, False) == [
        f"the parameters of torch's _flash_attention_{constant.lower()} have changed"
    ]


def test_an_op_that_needs_more_has_changed() -> None:
    first_nine = " ".join(libraries.FORWARD.split()[:9])
    (reason,) = libraries._changed("it", torch.ops.aten._flash_attention_forward, first_nine)
    assert reason == "the parameters of it have changed"


def test_a_build_of_torch_without_flash_attention_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert libraries._torch_differences.__wrapped__() == ("this build of torch has none",)


@pytest.mark.parametrize("bounds", [Bounds(None, None), Bounds(None, 0), Bounds(7, 3)])
@pytest.mark.parametrize("lengths", [False, True])
def test_torchs_ops_take_what_they_are_given(bounds: Bounds, lengths: bool) -> None:
    """Without data: torch's own shape functions see the calls."""
    shape, stats = ((20,), (4, 20)) if lengths else ((2, 10), (2, 4, 10))
    q, dout = (torch.empty(*shape, 4, 64, dtype=torch.bfloat16, device="meta") for _ in range(2))
    k = torch.empty(*shape, 2, 64, dtype=torch.bfloat16, device="meta")
    starts = torch.empty(3, dtype=torch.int32, device="meta")
    entries = Lengths(starts, starts, 12, 12) if lengths else None
    out, lse = Torch().forward(q, k, k, Params(0.1), bounds, entries)
    assert out.shape == q.shape and lse.shape == stats and lse.dtype == torch.float32
    gradients = Torch().backward(dout, q, k, k, out, lse, Params(0.1), bounds, entries)
    assert [x.shape for x in gradients] == [q.shape, k.shape, k.shape]


def test_the_package_is_asked_only_for_known_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "version", {"flash-attn": "3.0.1"}.__getitem__)
    (reason,) = libraries._package.__wrapped__().reasons
    assert reason == "version 3.0.1 is not known here (2.7., 2.8.x are)"
    monkeypatch.setattr(libraries, "version", {"flash-attn": "2.8.3"}.__getitem__)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    (reason,) = libraries._package.__wrapped__().reasons
    assert reason.startswith("it does not import: ")


def test_the_package_gets_its_arguments_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against ops with the parameters of flash-attn 2.8's, which compute with the fake."""
    monkeypatch.setattr(libraries, "version", {"flash-attn": "2.8.3"}.__getitem__)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", SimpleNamespace(**OPS))
    installed = libraries._package.__wrapped__()
    assert installed.reasons == ()
    monkeypatch.setattr(libraries, "_package", lambda: installed)
    kernel = Flash2([Package()])
    asked = replace(REQUEST, softcap=True, deterministic=True)
    assert kernel.unsupported(REQUEST) == kernel.unsupported(asked) == [], "it passes the trial"
    fake.calls.clear()
    case = next(case for case in CASES if case.why.startswith("window, documents, padding"))
    x = inputs(replace(case, head_dim=8, value_dim=8), torch.bfloat16)
    params = Params(0.5, 2.5, None, deterministic=True)
    tensors = x["q"], x["k"], x["v"], x["dout"]
    got = replay(kernel, *tensors, mask_of(case, x["documents"]), 1, params)
    want = replay(Flash2([Fake()], tried=False), *tensors, mask_of(case, x["documents"]), 1, params)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert {kind for kind, _, _ in fake.calls} == {"forward", "backward"}


def test_a_package_with_other_parameters_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "version", {"flash-attn": "2.8.3"}.__getitem__)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    changed = OPS | {"_wrapped_flash_attn_backward": OPS["_wrapped_flash_attn_forward"]}
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", SimpleNamespace(**changed))
    assert libraries._package.__wrapped__().reasons == ("the parameters of its _flash_attn_backward have changed",)


def test_nothing_is_imported_before_it_is_used() -> None:
    code = (
        "import sys, torch; from hf_ring_attn.kernels import KERNELS, Request\n"
        "request = Request('cpu', torch.bfloat16, 8, 2, 128, 128, softcap=True, sinks=False, deterministic=False)\n"
        "assert KERNELS['flash2'].unsupported(request)\n"
        "assert 'flash_attn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
