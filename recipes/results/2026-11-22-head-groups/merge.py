"""How fast gathered tokens are put together: by an index, and as `Layout.merge` does."""

from __future__ import annotations

import torch
from hf_ring_attn.layout import Layout
from triton.testing import do_bench

for heads, width in ((12, 192), (4, 128)):
    for size in (2, 8):
        gathered = torch.randn(size, 1, 32768 // size, heads, width, device="cuda", dtype=torch.bfloat16)
        layout = Layout(32768, size, 0)
        places = torch.cat([layout.positions(rank) for rank in range(size)])[:: 32768 // (2 * size)]
        order = places.argsort().cuda()

        def by_index(x: torch.Tensor = gathered, at: torch.Tensor = order) -> torch.Tensor:
            return x.unflatten(2, (2, -1))[at // 2, :, at % 2].transpose(0, 1).flatten(1, 2)

        same = torch.equal(by_index(), layout.merge(gathered))
        before, now = do_bench(by_index), do_bench(lambda x=gathered, of=layout: of.merge(x))
        rate = 2 * gathered.nbytes / now / 1e6
        print(f"{tuple(gathered.shape)}: index {before:.3f} ms, now {now:.3f} ms, {rate:.0f} GB/s, equal {same}")
