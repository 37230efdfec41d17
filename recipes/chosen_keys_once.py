"""One GPU: attention to chosen keys, against float32, and its time beside dense attention."""

import json, sys, time, os
import torch
from hf_ring_attn.attention.call import Call, RingOptions
from hf_ring_attn.kernels.score_mods.chosen_keys import ChosenKeys, is_chosen
from hf_ring_attn.attention.op import attend
from hf_ring_attn.attention.score_mod_op import attend_scored
from hf_ring_attn.comm.ring import LOCAL, Ring
from hf_ring_attn.kernels import KERNELS, Params, ScoreMod, Request, asking
from hf_ring_attn.attention.kernel_choice import kernel_for_scores, part_of
from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.sharding.mask import CAUSAL, Mask
from hf_ring_attn.sharding.plan import Plan

dev = "cuda"


def choose(T, n, gen):
    out = []
    for a in range(0, T, 1024):
        q = torch.arange(a, min(a + 1024, T), device=dev)
        s = torch.rand(len(q), T, device=dev, generator=gen).masked_fill(
            torch.arange(T, device=dev)[None] > q[:, None], -1
        )
        out.append(s.topk(min(n, T)).indices.int())
    return torch.cat(out)[None]


def timed(f, n=3):
    f()
    torch.cuda.synchronize()
    t = time.perf_counter()
    for _ in range(n):
        r = f()
    torch.cuda.synchronize()
    return (time.perf_counter() - t) / n


gen = torch.Generator(dev).manual_seed(0)
rows = []
for T, H, G, D, Dv, n in (
    (1024, 8, 8, 192, 128, 128),
    (8192, 32, 8, 128, 128, 2048),
    (8192, 128, 128, 192, 128, 2048),
    (32768, 128, 128, 192, 128, 2048),
):
    layout = Layout(T, 1, 0)
    mask = Mask.of(CAUSAL, 1, T)
    plan = Plan.of(Ring(LOCAL), layout, mask)
    q = torch.randn(1, T, H, D, device=dev, dtype=torch.bfloat16, generator=gen).requires_grad_()
    k = torch.randn(1, T, G, D, device=dev, dtype=torch.bfloat16, generator=gen).requires_grad_()
    v = torch.randn(1, T, G, Dv, device=dev, dtype=torch.bfloat16, generator=gen).requires_grad_()
    do = torch.randn(1, T, H, Dv, device=dev, dtype=torch.bfloat16, generator=gen)
    idx = choose(T, n, gen)
    places = torch.arange(T, device=dev)
    t_pack = timed(lambda: ChosenKeys(idx, places, T))
    f = ChosenKeys(idx, places, T)
    t_mod = timed(lambda: ScoreMod.of(f, torch.device(dev)))
    mod = ScoreMod.of(f, torch.device(dev))
    params = Params(D**-0.5, score_mod=mod)
    req = Request("cuda", torch.bfloat16, H, G, D, Dv, False, False, False, False, score_mod=True)
    t0 = time.perf_counter()
    kernel = kernel_for_scores(LOCAL, "auto", req, params, mask, 1, T)
    t_first = time.perf_counter() - t0
    t_choice = timed(
        lambda: kernel_for_scores(
            LOCAL, "auto", req, Params(D**-0.5, score_mod=ScoreMod.of(f, torch.device(dev))), mask, 1, T
        )
    )
    call = Call(q, k, v, plan, params, RingOptions(kernel))
    row = dict(
        T=T,
        H=H,
        D=D,
        Dv=Dv,
        chosen=n,
        kernel=kernel,
        pack_ms=t_pack * 1e3,
        mod_ms=t_mod * 1e3,
        choice_ms=t_choice * 1e3,
        first_s=t_first,
    )
    torch.cuda.reset_peak_memory_stats()
    try:
        out, _ = attend_scored(call)
        g = torch.autograd.grad(out, (q, k, v), do)

        def fwd():
            return attend_scored(call)[0]

        def both():
            return torch.autograd.grad(attend_scored(call)[0], (q, k, v), do)

        row["fwd_ms"] = timed(fwd) * 1e3
        row["both_ms"] = timed(both) * 1e3
        row["peak_GiB"] = torch.cuda.max_memory_allocated() / 2**30
    except Exception as e:
        row["error"] = repr(e)[:300]
        rows.append(row)
        print(json.dumps(row), flush=True)
        continue
    if T <= 2048:
        w = [x.detach().double().requires_grad_() for x in (q, k, v)]
        kk = w[1].repeat_interleave(H // G, 2)
        vv = w[2].repeat_interleave(H // G, 2)
        s = torch.einsum("bqhd,bkhd->bhqk", w[0], kk) * D**-0.5
        m = is_chosen(idx, T)[:, None] & torch.ones(T, T, dtype=torch.bool, device=dev).tril()
        o = torch.einsum("bhqk,bkhd->bqhd", s.masked_fill(~m, -torch.inf).softmax(-1), vv)
        wg = torch.autograd.grad(o, w, do.double())
        row["errors"] = [float((a.double() - b).norm() / b.norm()) for a, b in zip((out, *g), (o, *wg))]
    for name in ("triton",):
        r2 = Request("cuda", torch.bfloat16, H, G, D, Dv, False, False, False, False)
        why = KERNELS[name].unsupported(r2)
        if why:
            row[name] = why[0][:120]
            continue
        c2 = Call(q, k, v, plan, Params(D**-0.5), RingOptions(name))
        row[name + "_fwd_ms"] = timed(lambda: attend(c2)[0]) * 1e3
        row[name + "_both_ms"] = timed(lambda: torch.autograd.grad(attend(c2)[0], (q, k, v), do)) * 1e3
    from hf_ring_attn.kernels.triton import launch as TL
    from hf_ring_attn.kernels.triton.blocks import Blocks, Row
    from hf_ring_attn.kernels import Gradients

    if T == 8192 and D == 192:
        tl_ = plan.tables.forward
        p1 = params
        p1 = __import__("dataclasses").replace(params, score_mod=mod.with_values((), ()))
        with torch.no_grad():
            for b in (Blocks(128, 64, 8, 2), Blocks(64, 64, 4, 2), Blocks(128, 64, 8, 1), Blocks(128, 128, 8, 1)):
                r = Row(b, b, b)
                try:
                    print(
                        json.dumps(
                            dict(T=T, D=D, fwd=list(b), ms=timed(lambda: TL.forward(q, k, v, tl_, p1, r)) * 1e3)
                        ),
                        flush=True,
                    )
                except Exception as e:
                    print("fwd", b, repr(e)[:80], flush=True)
            o, lse = TL.forward(q, k, v, tl_, p1)
            delta = TL.delta(do, o)
            nl = (lse * -1.4426950408889634).contiguous()
            P = TL.Problem.of(q, k, v, tl_, p1, {})
            into = Gradients(
                torch.zeros(q.shape, device=dev), torch.zeros(k.shape, device=dev), torch.zeros(v.shape, device=dev)
            )
            for b in (Blocks(64, 64, 8, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 1), Blocks(128, 64, 8, 1)):
                for what, f in (
                    ("keys", lambda: TL.add_dk_dv(P, do, nl, delta, into, b)),
                    ("queries", lambda: TL.add_dq(P, do, nl, delta, into, b)),
                ):
                    try:
                        print(json.dumps(dict(T=T, D=D, kernel=what, blocks=list(b), ms=timed(f) * 1e3)), flush=True)
                    except Exception as e:
                        print(what, b, repr(e)[:80], flush=True)
    rows.append(row)
    print(json.dumps(row), flush=True)
    del out, g, q, k, v, do
    P = into = o = lse = nl = delta = None
    torch.cuda.empty_cache()

T, H, D, Dv = 8192, 128, 192, 128
q = torch.randn(1, H, T, D, device=dev, dtype=torch.bfloat16, requires_grad=True)
k = torch.randn(1, H, T, D, device=dev, dtype=torch.bfloat16, requires_grad=True)
v = torch.randn(1, H, T, Dv, device=dev, dtype=torch.bfloat16, requires_grad=True)
do = torch.randn(1, H, T, Dv, device=dev, dtype=torch.bfloat16)
m = is_chosen(choose(T, 2048, gen), T)[:, None] & torch.ones(T, T, dtype=torch.bool, device=dev).tril()
F = torch.nn.functional.scaled_dot_product_attention
print(
    json.dumps(
        dict(
            sdpa_with_a_mask=T,
            fwd_ms=timed(lambda: F(q, k, v, attn_mask=m)) * 1e3,
            both_ms=timed(lambda: torch.autograd.grad(F(q, k, v, attn_mask=m), (q, k, v), do)) * 1e3,
        )
    ),
    flush=True,
)
