import torch
from triton.testing import do_bench
from hf_ring_attn.layout import Layout
for shape in ((12,192),(4,128)):
    for W in (2,8):
        x = torch.randn(W, 1, 32768//W, *shape, device="cuda", dtype=torch.bfloat16)
        L = Layout(32768, W, 0)
        order = torch.argsort(torch.cat([L.positions(r) for r in range(W)])[:: 32768//(2*W)]).cuda()
        def index():
            p = x.unflatten(2,(2,-1)).transpose(1,2).flatten(0,1)
            return x.unflatten(2,(2,-1))[order//2, :, order%2].transpose(0,1).flatten(1,2)
        ok = torch.equal(index(), L.merge(x))
        a, b = do_bench(index), do_bench(lambda: L.merge(x))
        print(f"merge {tuple(x.shape)}: index {a:.3f} ms, now {b:.3f} ms, {2*x.nbytes/b/1e6:.0f} GB/s, equal {ok}", flush=True)
