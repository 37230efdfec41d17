"""The numbers of a ring: its errors, those of rings that round, by depth; their table, their file and their plot."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from hf_ring_attn import cli
from hf_ring_attn.bench import contenders, errors, plot, results
from hf_ring_attn.bench.replay import replay
from hf_ring_attn.bench.rounding import WAYS, Way, merged_forward, rounded
from hf_ring_attn.bench.workload import Workload
from hf_ring_attn.comm.ring import Ring
from hf_ring_attn.errors import NoMatplotlib, NotAResult
from hf_ring_attn.kernels import KERNELS, Params
from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.sharding.mask import CAUSAL, Mask, tiles
from hf_ring_attn.testing import relative_error
from tests.helpers.live_ranks import LiveRanks

sys.path.append(str(Path(__file__).resolve().parents[2] / "recipes/benchmarks"))  # last: examples share names with it

import depth

SMALL = Workload(64, torch.device("cpu"), 4, 2, 16, 8)
COMMAND = ["bench", "--tokens", "64", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--device", "cpu"]
ERRORS = [*COMMAND, "--errors", "rings", "--rings", "1", "4"]


def saved(folder: Path, *more: str) -> results.Run:
    assert cli.main([*ERRORS, "--save", str(folder), *more]) == 0
    (run,) = results.read(folder / results.FILE)
    assert run.name == "errors"
    return run


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("merged", [True, False])
def test_what_others_do_is_exact_where_nothing_is_rounded(size: int, way: Way, merged: bool) -> None:
    """A hop left out, met twice or merged with a wrong weight is an error of its own, not of rounding."""
    work = replace(SMALL, dtype=torch.float64)
    data = errors.signed(work, biased=True)
    want = errors.exact(work, data)
    got = rounded(KERNELS["reference"], *data, size, work.params(), way, merged)
    for name in (*errors.NAMES, "lse"):
        assert relative_error(getattr(got, name), getattr(want, name)) < 1e-13, name


@pytest.mark.parametrize("size", [1, 2, 8])
def test_float64_has_no_error(size: int) -> None:
    work = replace(SMALL, dtype=torch.float64)
    data = errors.signed(work, biased=False)
    one, got = (errors.simulated(work, "reference", data, n) for n in (1, size))
    row = errors.compared(got, one, errors.exact(work, data))
    assert max(row["error"].values()) < 1e-13
    assert set(row["mismatch"].values()) == {0.0}
    assert row["forward_identical"] or size > 1


def test_a_biased_v_is_biased() -> None:
    plain, biased = (errors.signed(SMALL, given) for given in (False, True))
    assert torch.equal(plain[0], biased[0]) and torch.equal(plain[3], biased[3])
    assert biased[2].double().mean() - plain[2].double().mean() == pytest.approx(errors.BIAS, abs=0.05)


def test_two_rows_are_each_their_own() -> None:
    data = [torch.cat(pair) for pair in zip(*(errors.signed(SMALL, biased) for biased in (False, True)), strict=True)]
    q, k, v, _ = data
    out, lse = merged_forward(KERNELS["reference"], q, k, v, 4, SMALL.params(), "rounded parts")
    for row in range(2):
        one_q, one_k, one_v = (x[row : row + 1] for x in (q, k, v))
        want = merged_forward(KERNELS["reference"], one_q, one_k, one_v, 4, SMALL.params(), "rounded parts")
        assert relative_error(out[row : row + 1], want[0]) < 1e-3
        assert relative_error(lse[row : row + 1], want[1]) < 1e-6


def test_rows_tell_ours_from_rings_that_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, head, rows = saved(tmp_path)
    assert head["ranks"] == 1 and {"command", "date", "commit", "hardware", "versions"} <= set(head)
    assert len(rows) == 2 * 2 * (1 + 3)  # inputs, dtypes; one device; a ring of 4 in three ways
    assert {(row["inputs"], row["dtype"]) for row in rows} == {
        (name, dtype) for name in ("outliers", "biased V") for dtype in ("bfloat16", "float16")
    }
    for row in rows:
        assert row["kernel"] == "reference" and row["deterministic"] and not row["live"]
        assert set(row["mismatch"]) == set(row["error"]) == {"out", "dq", "dk", "dv", "lse"}
        unit = torch.finfo(getattr(torch, row["dtype"])).eps
        if row["way"] == "ring_fp32":
            assert row["error_over_one_device"] < 1.02
            assert all(0 < row["error"][name] < 2 * unit for name in errors.NAMES)  # a biased V costs a bit more
            assert row["ring_size"] > 1 or (row["forward_identical"] and not any(row["mismatch"].values()))
        else:
            assert row["error_over_one_device"] > 1.05
            assert min(row["mismatch"][name] for name in ("dq", "dk", "dv")) > 0.1
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 + len(rows)
    assert printed[1].split()[:5] == ["outliers", "bfloat16", "1", "ring_fp32", "same"]


def test_sums_in_16_bits_are_worse_than_rounded_parts() -> None:
    work = replace(SMALL, tokens=256)
    data = errors.signed(work, biased=False)
    want = errors.exact(work, data)
    parts, sums = (rounded(KERNELS["reference"], *data, 16, work.params(), way) for way in WAYS)
    for name in ("out", "dk", "dv"):
        assert relative_error(getattr(sums, name), getattr(want, name)) > 1.3 * relative_error(
            getattr(parts, name), getattr(want, name)
        )


def test_one_dtype_may_be_asked_for_and_wider_ones_are_not_rounded(tmp_path: Path) -> None:
    rows = saved(tmp_path, "--dtype", "float32").rows
    assert [(row["dtype"], row["way"]) for row in rows] == [("float32", "ring_fp32")] * 4


def test_what_cannot_be_measured_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*ERRORS, "--rings", "3"]) == 2
    assert capsys.readouterr().err == "64 tokens do not fill a zigzag ring of 3: give a multiple of 6\n"


def test_the_pull_requests_case_stands_beside_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter here: the rest is that of the pull request."""
    monkeypatch.setattr(errors, "Workload", lambda tokens, *rest: Workload(tokens // 32, *rest))
    rows = list(errors.measure([SMALL], Ring.of(None), ["pr821"], [1], "auto", []))
    assert [(row["way"], row["the_pr_reports"]) for row in rows] == [
        ("ring_fp32", None),
        ("rounded parts", {"out": 0.507, "gradients": 0.413}),
        ("16-bit sums", {"out": 0.620, "gradients": 0.590}),
    ]
    assert {(row["ring_size"], *row["heads"], *row["widths"], row["dtype"]) for row in rows} == {
        (8, 12, 12, 128, 128, "bfloat16")
    }
    assert errors.line(rows[1]).endswith("   the PR: out 50.7%, gradients 41.3%")


def live_rows() -> list[dict[str, Any]]:
    chosen = contenders.options(["ring", "gather"], ["auto"], [0])
    return list(errors.measure([SMALL], Ring.of(None), ["rings"], [2], "auto", chosen))


def test_a_launched_ring_is_measured_as_it_is(ranks: Callable[[int], LiveRanks]) -> None:
    first, second = ranks(2).run(live_rows)
    assert second == []
    live = [row for row in first if row["live"]]
    assert [(row["way"], row["inputs"]) for row in live] == [
        (f"ring_fp32 {contender}", name) for name in ("outliers", "biased V") for contender in ("ring", "gather")
    ]
    for row in live:
        assert row["ring_size"] == 2
        assert row["error_over_one_device"] < 1.02
        assert max(row["mismatch"][name] for name in ("dq", "dk", "dv")) < 0.02


def test_a_live_ring_and_the_replayed_one_agree(ranks: Callable[[int], LiveRanks]) -> None:
    rows = [row for row in ranks(2).run(live_rows)[0] if row["way"] in ("ring_fp32 ring", "ring_fp32")]
    for live, simulated in zip(rows[::2], rows[1::2], strict=True):
        assert live["live"] and not simulated["live"]
        assert live["error"] == pytest.approx(simulated["error"], rel=1e-3)


def test_the_replay_of_one_is_the_kernel() -> None:
    q, k, v, dout = errors.signed(SMALL, biased=False)
    mask = Mask.of(CAUSAL, 1, 64)
    whole = Layout(64, 1, 0).whole()
    out, lse = KERNELS["reference"].forward(q, k, v, tiles(mask, whole, whole), Params(0.25))
    got = replay(KERNELS["reference"], q, k, v, dout, mask, 1, Params(0.25))
    assert torch.equal(got.out, out) and torch.equal(got.lse, lse)


# ---- by depth -------------------------------------------------------------------------------------------------------


def test_depth_measures_every_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [
        "depth.py", "--depths", "1", "3", "--rings", "2", "4", "--length", "32", "--width", "16", "--seeds", "2",
        "--save", str(tmp_path),
    ])  # fmt: skip
    depth.main()
    (run,) = results.read(tmp_path / results.FILE)
    assert (run.name, run.head["length"]) == ("depth", 32)
    rows = {(row["depth"], row["ring_size"], row["way"]): row for row in run.rows}
    assert len(rows) == 2 * (1 + 3 * 2)
    for (layers, size, way), row in rows.items():
        assert len(row["runs"]) == 2
        assert 1e-3 < row["error"] < 0.05
        if size == 1:
            assert (row["over_one_device"], row["from_one_device"], row["mismatch"]) == (1.0, 0.0, 0.0)
        elif way != depth.OURS:
            assert row["from_one_device"] > 1e-3 and row["mismatch"] > 0.1
        elif layers == 1:
            assert row["over_one_device"] < 1.02 and row["mismatch"] < 0.02
    for layers, size in ((layers, size) for layers in (1, 3) for size in (2, 4)):
        assert rows[layers, size, depth.BOTH]["mismatch"] != rows[layers, size, depth.BACKWARD]["mismatch"]
    assert capsys.readouterr().out.count("\n") == 1 + len(rows)


def test_a_stack_has_the_gradient_of_plain_torch() -> None:
    how: list[depth.Ring] = []
    stack = depth.Stack(2, (4, 2), 8, torch.float64, torch.float64, torch.device("cpu"), how, 0)
    x, dout = torch.randn(2, 1, 24, 32, dtype=torch.float64)
    ways = [depth.Ring("reference", n, way) for n, way in ((1, depth.OURS), (2, depth.OURS), (2, depth.BOTH))]
    leaf = x.clone().requires_grad_()
    y = leaf
    for w_q, w_k, w_v, w_o in stack.layers:
        normed = torch.nn.functional.rms_norm(y, (32,), eps=1e-6)
        q, k, v = ((normed @ w).unflatten(-1, (-1, 8)).transpose(1, 2) for w in (w_q, w_k, w_v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = y + out.transpose(1, 2).flatten(2) @ w_o
    (want,) = torch.autograd.grad(y, leaf, dout)
    for ring, got in depth.gradients(stack, x, dout, ways):
        assert relative_error(got, want) < 1e-12, ring


# ---- plots ----------------------------------------------------------------------------------------------------------

SPEED = [
    {"contender": "one device", "tokens": 64, "both": {"share": 1.0}},
    {"contender": "one device", "tokens": 32, "both": {"share": 1.0}},
    {"contender": "ring_fp32 ring", "tokens": 64, "both": {"share": 0.9}},
    {"contender": "ring_fp32 ring", "tokens": 32, "failed": "no memory"},
]


def test_throughput_has_a_line_for_each_contender() -> None:
    *_, lines = plot.throughput(SPEED)
    assert lines == [("one device", [32, 64], [1.0, 1.0]), ("ring_fp32 ring", [64], [0.9])]


def test_errors_have_a_line_for_each_way(tmp_path: Path) -> None:
    rows = saved(tmp_path).rows
    title, _, _, lines = plot.by_ring_size(rows)
    assert title == "reference, bfloat16, 64 tokens, outliers"
    assert [(name, sizes) for name, sizes, _ in lines] == [
        ("ring_fp32", [1, 4]), ("rounded parts", [4]), ("16-bit sums", [4]),
    ]  # fmt: skip
    assert lines[0][2][0] == max(rows[0]["error"][name] for name in ("dq", "dk", "dv"))


def test_depth_has_a_line_for_each_ring() -> None:
    rows = [
        {"depth": n, "stream": stream, "kernel": "k", "way": way, "ring_size": size, "error": n * size}
        for stream in ("bfloat16", "float32") for n in (16, 2) for way, size in (("ring_fp32", 1), ("ring_fp32", 8))
    ]  # fmt: skip
    title, *_, lines = plot.by_depth(rows)
    assert title == "k, residuals in bfloat16"
    assert lines == [("one device", [2, 16], [2, 16]), ("ring_fp32, ring 8", [2, 16], [16, 128])]


HEAD = {"command": "python -m hf_ring_attn bench"}


def test_a_plot_stands_beside_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One for each run that has a plot; a second run of the same name has a plot of its own."""
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    results.save(tmp_path, "self_check", HEAD)
    for command in ("a", "b"):
        results.save(tmp_path, "speed", {"command": command}, SPEED)
    assert cli.main(["bench", "--plot", str(tmp_path / results.FILE)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'speed.svg'}\n{tmp_path / 'speed-2.svg'}\n"
    text = (tmp_path / "speed.svg").read_text()
    assert text.count(">ring_fp32 ring<") == 1 and text.count("\n") == 1 and "32/8 heads of 128" in text
    assert ElementTree.fromstring(text).tag.endswith("svg")


def test_a_plot_says_where_it_was_measured_and_shows_our_line() -> None:
    folder = Path(__file__).resolve().parents[2] / "recipes" / "results"
    for name, run, facts in (
        ("2026-11-22-four-gpus", "speed", "4 x NVIDIA H200; 32/8 heads of 128, bfloat16; 2026-11-22, d67db01"),
        ("2026-11-22-four-gpus", "four_gpt_oss", "4 x NVIDIA H200; 64/8 heads of 64, bfloat16; 2026-11-22, d67db01"),
        ("2026-11-21-ring-of-two", "depth", "1 x NVIDIA H200; 8/2 heads of 64, bfloat16; 2026-11-21, 8443f45"),
    ):
        shown = next(one for one in results.read(folder / name / results.FILE) if one.name == run)
        assert plot.about(shown.head, shown.rows) == facts
    looks = plot._looks(["Ulysses", "ring_fp32 pulls", "torch CP", "ring_fp32 messages"])
    assert [look["linewidth"] for look in looks] == [1.2, 3, 1.2, 3]
    assert len({(look["color"], look.get("linestyle")) for look in looks}) == 4


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "[]", "not JSON", '{"contender": "x"}', '{"rows": [{"contender": "x"}]}', '{"run": "speed"}',
        '{"run": "x"}\n{"else": 1}', '{"run": "speed"}\n{"contender": "x"}',
    ],
)  # fmt: skip
def test_what_holds_no_result_is_told(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(text)
    with pytest.raises(NotAResult, match="holds nothing to plot"):
        plot.save([file])
    assert cli.main(["bench", "--plot", str(file)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"{file} holds nothing to plot (")
    assert "Give a results.jsonl of hf-ring-attn bench --save or of recipes/benchmarks/depth.py --save." in told


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    results.save(tmp_path, "speed", HEAD, SPEED)
    with pytest.raises(NoMatplotlib, match=r"pip install matplotlib\.$"):
        plot.save([tmp_path / results.FILE])
