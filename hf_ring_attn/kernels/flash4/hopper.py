"""flash-attn-4 on Hopper, on our own buffers. No other file knows its names.

The package is a beta, so the parameters of its functions and the tiles of its backward are compared with those of the
tested version. Each difference becomes a reason in `Flash4.unsupported`.
"""

from __future__ import annotations

import hashlib
import inspect
import threading
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..base import Params
from .blocks import HOPPER, Sides, Table
from .calls import Bounds
from .library import PACKAGE, Lengths

CLASS = (
    "dtype head_dim head_dim_v qhead_per_kvhead is_causal is_local deterministic tile_m tile_n Q_stage dO_stage "
    "PdS_stage SdP_swapAB dKV_swapAB dQ_swapAB AtomLayoutMSdP AtomLayoutNdKV AtomLayoutMdQ num_threads V_in_regs "
    "score_mod score_mod_bwd mask_mod has_aux_tensors q_subtile_factor dQ_single_wg"
)
CALL = (
    "mQ mK mV mdO mLSE mdPsum mdQaccum mdK mdV softmax_scale mCuSeqlensQ mCuSeqlensK mSeqUsedQ mSeqUsedK "
    "window_size_left window_size_right mdQ_semaphore mdK_semaphore mdV_semaphore aux_data blocksparse_tensors "
    "mCuTotalMBlocks stream"
)
PREPARE = (
    "out dout dpsum lse lse_log2 dq_accum cu_seqlens_q seqused_q dlse dtype head_dim head_dim_v m_block_size row_max "
    "scale_p use_padded_offsets nheads_major pack_gqa qhead_per_kvhead nheads_kv softmax_scale cu_total_m_blocks "
    "hdim_multiple_of o_lo fake_mode"
)
FINISH = (
    "accum output scale cu_seqlens seqused arch dtype hdim block_size num_threads atom_layout swap_ab "
    "use_2cta_instrs cluster_size cu_total_m_blocks sink_tensors hdim_multiple_of accum_order fake_mode"
)
FORWARD = (
    "q k v cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k softmax_scale causal softcap "
    "window_size_left window_size_right learnable_sink tile_mn mma_pv_is_rs intra_wg_overlap return_lse out lse"
)
TILES = "head_dim head_dim_v causal local sparse_block_size_q"
"""Parameters of the tested version in order; of the forward, the names that are used."""

ARCHITECTURE = 90
ROWS = 128
"""Rows in a block of its first kernel."""

NAMES = {
    "interface": "AuxData torch2cute_dtype_map _tile_size_fwd_sm90",
    "utils": "create_softcap_scoremod create_softcap_scoremod_bwd",
}
"""Other names that are used, by module."""


class _OneThatAdds(int):
    """The number 1, but larger than 1 in comparisons: one query head per key head, on the path for several.

    On that path flash-attn-4 adds dk and dv in float32 instead of writing them in 16 bits. Division treats it as 1, so
    query head h still reads key head h.
    """

    def __new__(cls) -> _OneThatAdds:
        return super().__new__(cls, 1)

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True

    def __gt__(self, other: int) -> bool:
        return True

    def __hash__(self) -> int:
        return hash("one that adds")


class Variant(NamedTuple):
    """The constants of a compiled backward."""

    dtype: torch.dtype
    widths: tuple[int, int]
    group: int
    causal: bool
    left: bool
    right: bool
    deterministic: bool
    packed: bool
    softcap: float | None


class Hopper:
    """flash-attn-4 on compute capability 9.0."""

    sides: Table = HOPPER

    def __init__(self) -> None:
        self.interface = import_module("flash_attn.cute.interface")
        self.utils = import_module("flash_attn.cute.utils")
        self.cutlass = import_module("cutlass")
        self.cute = import_module("cutlass.cute")
        self.fake = import_module("quack.compile_utils").make_fake_tensor
        # It may be on disk, where flash-attn-4 marks the version of its own source, not of ours.
        source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
        self.compiled = self.interface.get_jit_cache(f"hf_ring_attn_backward_{ARCHITECTURE}_{source}")
        self.lock = threading.Lock()
        # Emitted at every compilation; harmless here.
        warnings.filterwarnings("ignore", message="Argument aux_data .* cannot be converted", category=UserWarning)

    def differences(self) -> list[str]:
        """Lists every difference from what was tested."""
        interface = self.interface
        of_class = interface.FlashAttentionBackwardSm90
        wanted: list[tuple[str, Callable[..., Any], str]] = [
            (of_class.__name__, of_class.__init__, "self " + CLASS),
            (f"{of_class.__name__}.__call__", of_class.__call__, "self " + CALL),
            ("_bwd_preprocess", interface._bwd_preprocess, PREPARE),
            ("_bwd_postprocess_convert", interface._bwd_postprocess_convert, FINISH),
        ]
        reasons = [
            f"the parameters of {PACKAGE}'s {name} have changed"
            for name, function, names in wanted
            if list(inspect.signature(function).parameters) != names.split()
        ]
        for module, names in NAMES.items():
            missing = [name for name in names.split() if not hasattr(getattr(self, module), name)]
            reasons += [f"{PACKAGE}'s {module} has no {name} any more" for name in missing]
        if not set(FORWARD.split()) <= set(inspect.signature(interface._flash_attn_fwd).parameters):
            reasons.append(f"the parameters of {PACKAGE}'s _flash_attn_fwd have changed")
        return reasons or self._tiles_changed()

    def _tiles_changed(self) -> list[str]:
        if list(inspect.signature(self.interface._tile_size_bwd_sm90).parameters) != TILES.split():
            return [f"the parameters of {PACKAGE}'s _tile_size_bwd_sm90 have changed"]
        found = {widths: self._tile(widths) for widths in self.sides}
        return [
            f"{PACKAGE}'s tiles of the backward for widths {widths} have changed"
            for widths, tile in found.items()
            if Sides(tile.m_block_size, tile.n_block_size) != self.sides[widths]
        ]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, params: Params, bounds: Bounds, reach: Bounds,
        lengths: Lengths | None,
    ) -> None:  # fmt: skip
        more = self._forward_tiles(q.shape[-1], v.shape[-1], reach)
        if lengths is not None:
            more |= {
                "cu_seqlens_q": lengths.q_starts, "seqused_q": lengths.q_lengths, "max_seqlen_q": lengths.most_queries,
                "cu_seqlens_k": lengths.k_starts, "seqused_k": lengths.k_lengths, "max_seqlen_k": lengths.most_keys,
            }  # fmt: skip
        self.interface._flash_attn_fwd(
            q, k, v, softmax_scale=params.scale, causal=bounds.causal, softcap=params.softcap,
            window_size_left=bounds.left, window_size_right=bounds.right, learnable_sink=params.sinks,
            return_lse=True, out=out, lse=lse, **more,
        )  # fmt: skip

    def _forward_tiles(self, width: int, value_width: int, reach: Bounds) -> dict[str, Any]:
        """Chooses tiles for the whole mask, so that bits do not depend on how a ring cuts it."""
        local = not (reach.causal or reach == (None, None))
        tile = self.interface._tile_size_fwd_sm90(width, value_width, reach.causal, local)
        return {
            "tile_mn": (tile.m_block_size, tile.n_block_size), "mma_pv_is_rs": tile.mma_pv_is_rs,
            "intra_wg_overlap": tile.intra_wg_overlap,
        }  # fmt: skip

    def delta(self, dout: Tensor, out: Tensor) -> Tensor:
        batch, tokens, heads, width = out.shape
        # It writes whole blocks. It also reads lse for a result that is not used, so lse may be uninitialized.
        sums = out.new_empty(batch, heads, -(-tokens // ROWS) * ROWS, dtype=torch.float32)
        self.interface._bwd_preprocess(
            out, dout, sums, sums[:, :, :tokens], None, None, None, None, None,
            self.interface.torch2cute_dtype_map[out.dtype], width, width, ROWS, fake_mode=False,
        )  # fmt: skip
        return sums[:, :, :tokens].contiguous()

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse_log2: Tensor, delta: Tensor, dq: Tensor, dk: Tensor,
        dv: Tensor, params: Params, bounds: Bounds, lengths: Lengths | None,
    ) -> None:  # fmt: skip
        widths, causal = (q.shape[-1], v.shape[-1]), bounds.causal
        variant = Variant(
            q.dtype, widths, q.shape[-2] // k.shape[-2], causal, bounds.left is not None,
            bounds.right is not None and not causal, params.deterministic, lengths is not None, params.softcap,
        )  # fmt: skip
        entries: tuple[Tensor | None, ...] = (None,) * 4
        if lengths is not None:
            entries = lengths.q_starts, lengths.k_starts, lengths.q_lengths, lengths.k_lengths
        semaphores: tuple[Tensor | None, ...] = (None,) * 3
        if params.deterministic:
            semaphores = self._semaphores(q, k, self.sides[widths], lengths)
        self._compiled(variant)(
            q, k, v, dout, lse_log2, delta, dq, dk, dv, params.scale, *entries, bounds.left,
            bounds.right if variant.right else None, *semaphores, self.interface.AuxData(None, None), None, None,
        )  # fmt: skip

    def finish(
        self, accumulator: Tensor, out: Tensor, scale: float, role: Literal["q", "k", "v"], widths: tuple[int, int],
        starts: Tensor | None, lengths: Tensor | None,
    ) -> None:  # fmt: skip
        side, threads, order, more = self._order(role, widths)
        self.interface._bwd_postprocess_convert(
            accumulator, out, scale, starts, lengths, ARCHITECTURE,
            self.interface.torch2cute_dtype_map[out.dtype], out.shape[-1], side, threads, *order, fake_mode=False,
            **more,
        )  # fmt: skip

    def _order(
        self, role: Literal["q", "k", "v"], widths: tuple[int, int]
    ) -> tuple[int, int, tuple[int, bool], dict[str, Any]]:
        """Returns the options that describe the order in a block: tokens, threads, layout, and others."""
        tile = self._tile(widths)
        more = {"hdim_multiple_of": 64 if tile.dKV_swapAB else 32}
        if role == "q":
            threads = 128 if tile.dQ_single_wg else tile.num_wg * 128
            return tile.m_block_size, threads, (tile.AtomLayoutMdQ, tile.dQ_swapAB), more
        return tile.n_block_size, tile.num_wg * 128, (tile.AtomLayoutNdKV, tile.dKV_swapAB), more

    def _tile(self, widths: tuple[int, int]) -> Any:
        return self.interface._tile_size_bwd_sm90(*widths, True, False)

    def _semaphores(self, q: Tensor, k: Tensor, sides: Sides, lengths: Lengths | None) -> tuple[Tensor, ...]:
        """Allocates zeroed counters that order the additions of blocks."""
        batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
        if lengths is not None:
            batch, queries, keys = len(lengths.q_lengths), lengths.most_queries, lengths.most_keys
        of_q, of_k = (q.shape[-2], -(-queries // sides.q), 1), (k.shape[-2], -(-keys // sides.k), 2)
        counters = tuple(torch.zeros(batch, *shape, dtype=torch.int32, device=q.device) for shape in (of_q, of_k, of_k))
        # The backward may start before the zeros are written; a launch in between waits for them.
        torch.zeros(1, device=q.device)
        return counters

    def _compiled(self, variant: Variant) -> Any:
        with self.lock:
            if variant not in self.compiled:
                self.compiled[variant] = self._compile(variant)
            return self.compiled[variant]

    def _compile(self, variant: Variant) -> Any:
        cute, float32, int32 = self.cute, self.cutlass.Float32, self.cutlass.Int32
        dtype, (width, value_width) = self.interface.torch2cute_dtype_map[variant.dtype], variant.widths
        kernel = self._kernel(variant, dtype)
        # Set after the constructor, which refuses several query heads per key head if keys and values differ in width.
        # The accumulators of dk and dv fit all the same: they reuse the shared memory of v, k and dout.
        kernel.qhead_per_kvhead = variant.group if variant.group > 1 else _OneThatAdds()

        def tensor(type_: Any, divisible: int, *last: int) -> Any:
            batch = () if variant.packed else (cute.sym_int(),)
            free = 2 if last else 1
            shape = (*batch, *(cute.sym_int() for _ in range(free)), *(last or (cute.sym_int(),)))
            return self.fake(type_, shape, divisibility=divisible)

        def numbers(*shape: int) -> Any:
            return self.fake(int32, tuple(size or cute.sym_int() for size in shape), divisibility=1)

        q, k, v, dout = (tensor(dtype, 8, size) for size in (width, width, value_width, value_width))
        sums = [tensor(float32, 4) for _ in ("lse_log2", "delta", "dq", "dk", "dv")]
        entries = [numbers(0) if variant.packed else None for _ in range(4)]
        counters = [numbers(0, 0, 0, size) if variant.deterministic else None for size in (1, 2, 2)]
        bounds = [1 if bound else None for bound in (variant.left, variant.right)]
        stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        return cute.compile(
            kernel, q, k, v, dout, *sums, 1.0, *entries, *bounds, *counters, self.interface.AuxData(None, None),
            None, None, stream, options="--enable-tvm-ffi",
        )  # fmt: skip

    def _kernel(self, variant: Variant, dtype: Any) -> Any:
        tile = self._tile(variant.widths)
        return self.interface.FlashAttentionBackwardSm90(
            dtype, *variant.widths, 1, variant.causal,
            is_local=variant.left or variant.right, deterministic=variant.deterministic,
            tile_m=tile.m_block_size, tile_n=tile.n_block_size, Q_stage=tile.num_stages_Q,
            dO_stage=tile.num_stages_dO, PdS_stage=tile.num_stages_PdS, SdP_swapAB=tile.SdP_swapAB,
            dKV_swapAB=tile.dKV_swapAB, dQ_swapAB=tile.dQ_swapAB, AtomLayoutMSdP=tile.AtomLayoutMSdP,
            AtomLayoutNdKV=tile.AtomLayoutNdKV, AtomLayoutMdQ=tile.AtomLayoutMdQ,
            num_threads=(tile.num_wg + 1) * 128, dQ_single_wg=tile.dQ_single_wg, **self._softcap(variant.softcap),
        )  # fmt: skip

    def _softcap(self, softcap: float | None) -> dict[str, Any]:
        if softcap is None:
            return {}
        return {
            "score_mod": self.utils.create_softcap_scoremod(softcap),
            "score_mod_bwd": self.utils.create_softcap_scoremod_bwd(softcap),
        }
