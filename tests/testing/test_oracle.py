"""The oracle against torch, autograd and finite differences: an oracle that is wrong makes every test worthless."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_ring_attn.testing import PADDING, Case, inputs, packed, relative_error
from tests.helpers.cases import CASES
from tests.helpers.oracle import gradient_oracle, oracle, visible

GRADIENTS = ("dq", "dk", "dv", "dsinks")
PLAIN = [case for case in CASES if not case.sinks and case.softcap is None]


def by_hand(case: Case) -> Tensor:
    """The mask in Python, pair by pair: [B, S, S]."""
    rows = case.documents or (packed(case.length),) * case.batch
    lo, hi = (
        far if bound is None else bound for bound, far in zip(case.band, (-case.length, case.length), strict=True)
    )
    table = []
    for row in rows:
        ids = [document for document, n in row for _ in range(n)]
        table.append([[a == b != PADDING and lo <= i - j <= hi for j, b in enumerate(ids)] for i, a in enumerate(ids)])
    return torch.tensor(table)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.why)
def test_the_mask_is_its_definition(case: Case) -> None:
    assert torch.equal(visible(case, inputs(case)["documents"]), by_hand(case))


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.why)
def test_the_oracle_equals_torch_where_torch_can_compute_it(case: Case) -> None:
    x = inputs(case)
    q, k, v = (x[name].transpose(1, 2).requires_grad_() for name in ("q", "k", "v"))
    # torch answers nan for a query without keys: let it see itself, and put zeros there.
    seen = by_hand(case)
    nothing = ~seen.any(2)
    mask = (seen | (nothing[:, :, None] & torch.eye(case.length, dtype=torch.bool)))[:, None]
    out = scaled_dot_product_attention(q, k, v, mask, scale=case.scale, enable_gqa=True)
    out = out.masked_fill(nothing[:, None, :, None], 0)
    gradients = torch.autograd.grad(out, (q, k, v), x["dout"].transpose(1, 2))
    answer = oracle(case, x)
    for name, theirs in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True):
        assert relative_error(theirs.transpose(1, 2), answer[name]) < 1e-13, name


@pytest.mark.parametrize(
    ("family", "case"),
    [("gemma2", case) for case in CASES if case.softcap is not None and not case.sinks]
    + [("gpt_oss", case) for case in CASES if case.sinks and case.softcap is None],
    ids=lambda x: x if isinstance(x, str) else x.why,
)
def test_the_oracle_equals_transformers_for_softcap_and_sinks(family: str, case: Case) -> None:
    eager = import_module(f"transformers.models.{family}.modeling_{family}").eager_attention_forward
    x = inputs(case)
    seen = by_hand(case)
    x["dout"] *= seen.any(2)[:, :, None, None]  # transformers lets a query without keys see them all
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)[:, None]
    leaves = {f"d{name}": x[name].requires_grad_() for name in ("q", "k", "v")}
    module = SimpleNamespace(num_key_value_groups=case.heads // case.kv_heads, training=False)
    if x["sinks"] is not None:
        module.sinks = leaves["dsinks"] = x["sinks"].requires_grad_()
    out, _ = eager(
        module,
        *(x[name].transpose(1, 2) for name in ("q", "k", "v")),
        mask,
        dropout=0.0,
        scaling=case.head_dim**-0.5 if case.scale is None else case.scale,
        softcap=case.softcap,
    )
    gradients = torch.autograd.grad(out, list(leaves.values()), x["dout"])
    answer = oracle(case, x)
    assert relative_error(out * seen.any(2)[:, :, None, None], answer["out"]) < 2e-7  # a softmax in float32
    for name, theirs in zip(leaves, gradients, strict=True):
        assert relative_error(theirs, answer[name]) < 2e-6, name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.why)
def test_the_formula_equals_autograd(case: Case) -> None:
    x = inputs(case)
    want = oracle(case, x)
    got = gradient_oracle(case, x, want["out"])
    assert [*got] == [name for name in GRADIENTS if name in want]
    for name in got:
        assert relative_error(got[name], want[name]) < 1e-12, name


@pytest.mark.parametrize("case", [case for case in CASES if case.sinks], ids=lambda case: case.why)
def test_the_gradient_of_sinks_equals_finite_differences(case: Case) -> None:
    x = inputs(case)
    sinks = x["sinks"]
    assert sinks is not None

    def loss(step: Tensor) -> Tensor:
        return (oracle(case, {**x, "sinks": sinks + step})["out"] * x["dout"]).sum()

    steps = 1e-5 * torch.eye(case.heads, dtype=torch.float64)
    differences = torch.stack([(loss(step) - loss(-step)) / 2e-5 for step in steps])
    assert relative_error(differences, oracle(case, x)["dsinks"]) < 1e-7


def test_the_lse_is_a_natural_logarithm_over_keys_and_sink() -> None:
    case = Case(why="", length=3, heads=1, kv_heads=1, sinks=True)
    x = inputs(case)
    x["q"], x["sinks"] = torch.zeros_like(x["q"]), torch.zeros(1, dtype=torch.float64)
    assert torch.allclose(oracle(case, x)["lse"], torch.tensor([[[2.0, 3.0, 4.0]]]).double().log())


@pytest.mark.parametrize("sinks", [False, True])
def test_a_query_that_sees_no_key_gives_and_takes_nothing(sinks: bool) -> None:
    case = Case(why="", length=9, heads=4, kv_heads=2, sinks=sinks, documents=(packed(-2, 5, -2),), seed=5)
    x = inputs(case)
    got = oracle(case, x)
    padding = torch.tensor([0, 1, 7, 8])
    alone = x["sinks"] if x["sinks"] is not None else torch.full((4,), -torch.inf, dtype=torch.float64)
    assert torch.equal(got["lse"][0, :, padding], alone[:, None].expand(4, 4))
    for name in ("out", "dq", "dk", "dv"):
        assert not got[name][0, padding].any(), name
        assert got[name].isfinite().all(), name
    # What is in the padding changes nothing at all.
    for name in ("q", "k", "v", "dout"):
        x[name][0, padding] = 1e3  # type: ignore[literal-required]
    for name, value in oracle(case, x).items():
        assert torch.equal(value, got[name]), name


def test_gradients_that_are_zero_are_zeros_to_the_bit() -> None:
    """`relative_error` is an absolute one for them."""
    for case in (case for case in CASES if case.length == 1 or case.band == (0, 0)):
        answer = oracle(case)
        assert not answer["dq"].any(), case.why
        assert not answer["dk"].any(), case.why


def test_the_oracle_takes_rounded_tensors_as_they_are_and_a_rounded_out() -> None:
    case = CASES[-2]
    x = inputs(case, torch.bfloat16)
    exact = oracle(case, x)
    assert all(value.dtype == torch.float64 for value in exact.values())
    rounded = oracle(case, x, out=exact["out"].bfloat16())
    assert [*rounded] == [*exact]
    assert torch.equal(rounded["dv"], gradient_oracle(case, x, exact["out"])["dv"])  # the only one without delta
    assert 1e-5 < relative_error(rounded["dq"], exact["dq"]) < 1e-2
    assert relative_error(oracle(case, x, out=exact["out"])["dq"], exact["dq"]) < 1e-12
