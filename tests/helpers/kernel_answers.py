"""What a kernel alone answers to a case: for tests that compare kernels with the oracle on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hf_ring_attn.bench.replay import Answer as Replayed
from hf_ring_attn.kernels import KERNELS, Gradients, Kernel, Params
from hf_ring_attn.sharding.layout import Run
from hf_ring_attn.sharding.mask import UNBOUNDED, Band, Mask, tiles
from hf_ring_attn.testing import Case, Inputs, inputs, relative_error
from hf_ring_attn.traffic import head_halves
from tests.helpers.cases import CASES
from tests.helpers.oracle import gradient_oracle, oracle

Answer = dict[str, Tensor]


def mask_of(case: Case, documents: Tensor | None) -> Mask:
    lo, hi = case.band
    band = Band(-UNBOUNDED if lo is None else lo, UNBOUNDED if hi is None else hi)
    return Mask.of(band, case.batch, case.length, documents)


def table_of(case: Case, piece: int = 2**30) -> Tensor:
    """The case's tiles, with its row cut into pieces of so many tokens."""
    runs = pieces(case.length, piece)
    return tiles(mask_of(case, inputs(case)["documents"]), runs, runs)


def pieces(length: int, size: int) -> list[Run]:
    """The row as runs of ``size`` tokens."""
    return [Run(at, at, min(size, length - at)) for at in range(0, length, size)]


def params_of(case: Case, x: Inputs) -> Params:
    return Params(case.head_dim**-0.5 if case.scale is None else case.scale, case.softcap, x["sinks"])


def on(device: str, x: Inputs) -> Inputs:
    """The same inputs, with all but the documents on ``device``."""
    sinks = None if x["sinks"] is None else x["sinks"].to(device)
    q, k, v, dout = (x[name].to(device) for name in ("q", "k", "v", "dout"))
    return Inputs(q=q, k=k, v=v, dout=dout, sinks=sinks, documents=x["documents"])


def computed(kernel: Kernel, case: Case, x: Inputs, table: Tensor, out: Tensor | None = None) -> Answer:
    """out, lse, and dq, dk, dv before their rounding. ``out``: what the backward is given in place of its own."""
    q, k, v, dout, params = x["q"], x["k"], x["v"], x["dout"], params_of(case, x)
    mine, lse = kernel.forward(q, k, v, table, params)
    given = mine if out is None else out
    delta, dq = kernel.delta(dout, given), kernel.new_gradient(q)
    sums = []
    for lane in head_halves(k.shape[2], 2):  # as a ring does it: of dq a kernel gets some heads at a time, in place
        of_lane = slice(lane.start * (q.shape[2] // k.shape[2]), lane.stop * (q.shape[2] // k.shape[2]))
        keys, values = k[:, :, lane], v[:, :, lane]
        into = Gradients(kernel.of_heads(dq, of_lane), kernel.new_gradient(keys), kernel.new_gradient(values))
        kernel.backward(
            dout[:, :, of_lane], q[:, :, of_lane], keys, values, lse[:, of_lane], delta[:, of_lane], table,
            params.of_heads(of_lane), into, given[:, :, of_lane],
        )  # fmt: skip
        sums.append((into.dk, into.dv))
    dk, dv = (torch.cat(parts, 2) for parts in zip(*sums, strict=True))
    return {"out": mine, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def wanted(case: Case, x: Inputs, out: Tensor) -> Answer:
    """The oracle's answer; its gradients are those of a backward that is given this ``out``."""
    answer = oracle(case, x) | gradient_oracle(case, x, out)
    return {name: value for name, value in answer.items() if name != "dsinks"}


def vanishing(case: Case, names: Sequence[str] = ("dq", "dk")) -> tuple[str, ...]:
    """Gradients that are zero because every query sees one key: what is computed is the rounding of larger terms."""
    alone = case.length == 1 or case.band == (0, 0)
    return tuple(names) if alone and not case.sinks else ()


def unit(case: Case, x: Inputs) -> float:
    """The size of the terms whose difference makes a query's gradient: scale * |dout| |v| |k| of one query and key."""
    dout, v, q, k = (float(y.double().norm(dim=-1).max()) for y in (x["dout"], x["v"], x["q"], x["k"]))
    return params_of(case, x).scale * dout * v * max(q, k)


def without_padding(case: Case, size: int) -> Case:
    """The case without what a ring of ``size`` would pad: shorter, by whole tokens at its end."""
    length = case.length // (2 * size) * 2 * size if size > 1 else case.length
    documents = []
    for row in case.documents:
        left, cut = length, []
        for document, count in row:
            cut.append((document, min(count, left)))
            left -= cut[-1][1]
        documents.append(tuple(run for run in cut if run[1]))
    return replace(case, length=length, documents=tuple(documents))


NO_HOLES = [case for case in CASES if not mask_of(case, inputs(case)["documents"]).holes]
"""Those that kernels over whole ranges of keys can compute."""


def assert_same(got: Replayed, want: Replayed) -> None:
    for name in Replayed._fields:
        mine, theirs = getattr(got, name), getattr(want, name)
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        if name == "lse":
            assert torch.equal(mine.isinf(), theirs.isinf())
            mine, theirs = mine.nan_to_num(neginf=0.0), theirs.nan_to_num(neginf=0.0)
        # Where the exact gradient is zero, what is left is the rounding of float32.
        assert relative_error(mine, theirs) < 1e-5 or float((mine - theirs).abs().max()) < 2e-5, name


def computed_in_float64(case: Case, x: Inputs, table: Tensor, out: Tensor | None = None) -> Answer:
    """The reference's answer; with ``out``, its gradients are those of a backward that is given this one."""
    q, k, v, dout = (x[name].double() for name in ("q", "k", "v", "dout"))
    sinks = None if x["sinks"] is None else x["sinks"].double()
    params = replace(params_of(case, x), sinks=sinks)
    reference = KERNELS["reference"]
    exact, lse = reference.forward(q, k, v, table, params)
    delta = reference.delta(dout, exact if out is None else out.double())
    into = Gradients(*map(torch.zeros_like, (q, k, v)))  # type: ignore[arg-type]  # three tensors
    reference.backward(dout, q, k, v, lse, delta, table, params, into)
    return {"out": exact, "lse": lse, "dq": into.dq, "dk": into.dk, "dv": into.dv}
