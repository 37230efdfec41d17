"""flash-attn-4 on Blackwell, by the same road as on Hopper. UNTESTED: it compiles, and nobody has run it.

Without pairs of multiprocessors, so heads up to 128 wide; its blocks are 128 tokens of queries and of keys. Neither the
order of its accumulators nor the bits of its forward under sharding were looked at on a GPU.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal

from .blocks import BLACKWELL, Table
from .calls import Bounds
from .hopper import Hopper, Variant
from .library import PACKAGE

CLASS = (
    "head_dim head_dim_v is_causal is_local qhead_per_kvhead tile_m tile_n is_persistent deterministic spt "
    "cluster_size use_2cta_instrs score_mod score_mod_bwd mask_mod has_aux_tensors q_subtile_factor kv_subtile_factor"
)


class Blackwell(Hopper):
    """flash-attn-4 on compute capability 10."""

    sides: Table = BLACKWELL
    architecture = 100
    class_name, class_parameters = "FlashAttentionBackwardSm100", CLASS

    def _tiles_changed(self) -> list[str]:
        orders = self.interface.FlashAttentionBackwardSm100.accum_tile_orders
        if list(inspect.signature(orders).parameters) != ["use_2cta_instrs", "tile_n"]:
            return [f"the parameters of {PACKAGE}'s accum_tile_orders have changed"]
        return []

    def _forward_tiles(self, width: int, value_width: int, reach: Bounds) -> dict[str, Any]:
        return {}  # one size for all masks

    def _order(
        self, role: Literal["q", "k", "v"], widths: tuple[int, int]
    ) -> tuple[int, int, tuple[int, bool], dict[str, Any]]:
        side = self.sides[widths].of(role)
        of_q, of_k = self.interface.FlashAttentionBackwardSm100.accum_tile_orders(False, self.sides[widths].k)
        return side, 128, (1, False), {"accum_order": of_q if role == "q" else of_k}

    def _kernel(self, variant: Variant, dtype: Any) -> Any:
        local = variant.left or variant.right
        side = self.sides[variant.widths]
        return self.interface.FlashAttentionBackwardSm100(
            *variant.widths, is_causal=variant.causal, is_local=local, qhead_per_kvhead=1, tile_m=side.q, tile_n=side.k,
            deterministic=variant.deterministic, spt=(variant.causal or local) and variant.deterministic,
            **self._softcap(variant.softcap),
        )  # fmt: skip
