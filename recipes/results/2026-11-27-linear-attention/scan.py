import json, sys, torch, torch.nn.functional as F, fla, triton
from fla.ops.gated_delta_rule import chunk_gated_delta_rule as gdr
from fla.ops.kda import chunk_kda
out = open(sys.argv[1], "w")
def emit(**r): out.write(json.dumps(r) + "\n"); out.flush(); print(r, flush=True)
emit(hardware=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__, fla=fla.__version__)
def seconds(f, n=5):
    for _ in range(2): f()
    torch.cuda.synchronize()
    best = []
    for _ in range(n):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); f(); b.record(); torch.cuda.synchronize(); best.append(a.elapsed_time(b))
    return sorted(best)[n // 2]
D = 128
for kind, H in (("kda", 16), ("kda", 32), ("gdr", 16)):
    for T in (8192, 32768, 131072):
        if True:
            torch.manual_seed(0); torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()
            try:
                if kind == "conv":
                    x = torch.randn(1, H * 256, T, device="cuda", dtype=torch.bfloat16, requires_grad=True); w = torch.randn(H * 256, 1, 4, device="cuda", dtype=torch.bfloat16)
                    f = lambda: F.silu(F.conv1d(x, w, padding=3, groups=H * 256)[..., :T])
                    ins = [x]
                else:
                    q, k, v = (torch.randn(1, T, H, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
                    beta = torch.rand(1, T, H, device="cuda", dtype=torch.bfloat16).requires_grad_()
                    g = (-torch.rand(1, T, H, *((D,) if kind == "kda" else ()), device="cuda")).requires_grad_()
                    op = chunk_kda if kind == "kda" else gdr
                    f = lambda: op(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]
                    ins = [q, k, v, beta, g]
                def fwd():
                    with torch.no_grad(): f()
                def both():
                    y = f(); torch.autograd.grad(y, ins, torch.ones_like(y))
                base = torch.cuda.memory_allocated()
                a = seconds(fwd); torch.cuda.reset_peak_memory_stats(); b = seconds(both)
                emit(kind=kind, tokens=T, heads=H, width=D, forward_ms=a, both_ms=b, peak_MiB=(torch.cuda.max_memory_allocated() - base) / 2**20)
            except Exception as e: emit(kind=kind, tokens=T, heads=H, error=str(e)[:300])
