"""How a model is trained: GPUs, row, method and options, as `plan` varies them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from ..kernels.flash4.blocks import HOPPER
from .hardware import ATTENTION, GPUS, Gpu
from .shape import AttentionShape

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
METHODS = ("lora", "qlora", "full")
SHARDS = ("fsdp2", "ddp")
LOSSES = ("chunked", "sharded", "gathered")
KERNELS = ("auto", *ATTENTION)
OPTIMIZERS = {"adamw": 8.0, "adamw_8bit": 2.0 + 8 / 256, "paged_adamw_8bit": 2.0 + 8 / 256}
"""Bytes of two states per parameter; 8-bit states have a float32 scale per block of 256."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One training run: a row of ``tokens`` per ring.

    Args:
        gpus: of all nodes. ring: GPUs that share a row; gpus / ring rows are trained at a time.
        shard: "fsdp2" shards weights over all GPUs; "ddp" replicates them (on one GPU nothing wraps the model).
        save_attention, keep_layers, loss, mlp_tokens, offload_above: as in RingConfig; mlp_tokens=0: all tokens of a
            rank at once.
        kernel: of attention; "auto": flash4 where it serves, as if flash-attn-4 were installed, else triton.
        offload_params: FSDP2's weights and optimizer are in host memory. liger: fused norms, RoPE and gated MLPs.
        pictures: of a row. wrapped: FSDP2 wraps the model on one GPU, too, as by a launch config of FSDP2.
    """

    gpus: int
    tokens: int
    gpu: Gpu = field(default_factory=lambda: GPUS["h200"])
    gpus_per_node: int = 8
    ring: int = 0
    method: str = "lora"
    lora_rank: int = 16
    shard: str = "fsdp2"
    dtype: str = "bfloat16"
    optimizer: str = "adamw"
    checkpointing: bool = True
    save_attention: bool = False
    keep_layers: int = 0
    loss: str = "chunked"
    mlp_tokens: int = 0
    offload_above: float | None = None
    offload_params: bool = False
    liger: bool = False
    kernel: str = "auto"
    pictures: int = 0
    wrapped: bool = False

    def kernel_of(self, attention: AttentionShape) -> str:
        """The kernel of a layer's attention: the chosen one, if it serves heads of this width."""
        widths = attention.key_width, attention.value_width
        serves = self.gpu.has_flash4 and self.itemsize == 2 and widths in HOPPER
        return "flash4" if serves and self.kernel != "triton" else "triton"

    def keeps(self, layers: int) -> int:
        """How many of so many layers keep all their activations, the last ones."""
        return min(self.keep_layers, layers) if self.checkpointing else layers

    def of_kept(self) -> Setup:
        """The setup in which a kept layer runs: nothing checkpoints it."""
        return replace(self, checkpointing=False, save_attention=False, keep_layers=0)

    @property
    def ring_size(self) -> int:
        return self.ring or self.gpus

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of a rank, padded as the zigzag needs it."""
        return 2 * -(-self.tokens // (2 * self.ring_size))

    @property
    def chunk(self) -> int:
        """Tokens of an MLP's chunk; 0: all tokens of a rank at once, as where they would be one chunk."""
        return self.mlp_tokens if self.mlp_tokens < self.tokens_per_rank else 0

    @property
    def padded(self) -> int:
        return self.tokens_per_rank * self.ring_size

    @property
    def itemsize(self) -> int:
        return ITEMSIZES[self.dtype]

    @property
    def peak_flops(self) -> float:
        """FLOP/s of a GPU in the model's dtype, by its maker."""
        return 1e12 * (self.gpu.tflops if self.itemsize == 2 else self.gpu.float32_tflops)

    @property
    def is_sharded(self) -> bool:
        return self.shard == "fsdp2" and (self.gpus > 1 or self.wrapped)

    @property
    def shards(self) -> int:
        return self.gpus if self.is_sharded else 1

    @property
    def makes_logits(self) -> bool:
        """All logits of a rank's tokens are made: in float16 a chunk cannot be scaled by the GradScaler's factor."""
        return self.loss != "chunked" or self.dtype == "float16"

    @property
    def tokens_of_logits(self) -> int:
        """Tokens of which a rank makes a loss: all of the row if that is a program's own."""
        return self.padded if self.loss == "gathered" else self.tokens_per_rank

    @property
    def casts_for_adapters(self) -> bool:
        """PEFT's float32 matrices get float32 inputs; FSDP2, and beside 4-bit weights autocast, cast the matrices."""
        return self.method == "lora" and self.itemsize == 2 and not self.is_sharded

    @property
    def in_one_node(self) -> bool:
        return self.ranks_in_node == self.ring_size

    @property
    def ranks_in_node(self) -> int:
        """The fewest ranks of a ring that share a node: rings need not begin with a node."""
        return self.ring_size if self.gpus <= self.gpus_per_node else math.gcd(self.ring_size, self.gpus_per_node)

    @property
    def takes_options(self) -> bool:
        """RingConfig's options have an effect: in a ring, and in one process; several without a ring ignore them."""
        return self.ring_size > 1 or self.gpus == 1
