"""The options of a ring, and what the environment says of its ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, get_args

from .arguments import check_choice, check_flag, number, whole_number
from .errors import BadOption

KERNEL_NAMES = ("flash4", "triton", "flash2", "flex", "reference")
"""Every kernel, the preferred one first. `hf_ring_attn.kernels` has them under these names."""

Backward = Literal["ring", "gather"]
Loss = Literal["auto", "chunked", "sharded", "gathered"]
Traffic = Literal["auto", "messages", "pulls"]
Arrangement = Literal["auto", "zigzag", "balanced"]


@dataclass(frozen=True, kw_only=True)
class RingConfig:
    """Options of a ring. Of these only a kernel may change the answer beyond the order of float32 sums.

    Args:
        kernel: "auto", "flash4", "triton", "flash2", "flex" or "reference". "auto" takes the first that can compute the
            attention, but never flash2. flash2 and flex round each contribution to a gradient; flex is for a score_mod.
            A named kernel runs, or refuses the call with its reasons.
        backward: "ring" sends keys, values and float32 sums of their gradients around the ring. "gather" all-gathers
            keys and values again and reduce-scatters float32 gradients: more memory, fewer steps.
        heads_per_gather: key/value heads gathered at a time. The memory of gathered keys and values is proportional to
            it. None chooses by size; then layers that share keys and values (Gemma 3n, Gemma 4) gather all their heads
            once per forward, and hold them from the first of these layers to the last, one set per kind of mask. With a
            number each of these layers gathers again, which takes less memory.
        traffic: the transport. "messages" sends by NCCL or gloo. "pulls" makes peer-to-peer copies from the other GPUs'
            memory. This is faster, but needs NVIDIA GPUs of one machine, and three buffers: two for a rank's keys and
            values of one layer, one for their float32 gradients. "auto" makes copies if possible. All give the same
            bits.
        loss: "chunked" computes the loss of a rank's tokens one chunk at a time, without logits. If the program reads
            ``out.logits``, they are computed then, again at each reading. "sharded" makes the logits of the rank's
            tokens. "gathered" is for trainers: compute_loss gets whole rows, and what a model returns for them is
            all-gathered in order. This makes any loss exact, and takes S x V memory for logits on every rank. "auto":
            "gathered" in a trainer whose loss needs whole rows, by its arguments (a compute_loss_func, a loss_function
            of the program's own, a model that takes no count, rows of other names, SFTTrainer's label smoothing) or by
            the self-check; else "chunked" if the head and the loss of the model allow it; else "sharded". The line at
            the start says which.
        layout: how tokens are sharded. "zigzag": as in `hf_ring_attn.positions`. "balanced": packed rows get other
            chunks if a zigzag would give a rank more than 1.1 times the mean work; ``sharded.positions`` has them.
            Batches with images or sound, and those of `maybe_context_parallel`, always use the zigzag. "auto": balanced
            in Trainer and SFTTrainer, and the zigzag in other loops, which may index by a token's position.
        pad: pad rows with masked tokens to a multiple of 2 * ring size (balanced: up to 16 * ring size). False refuses
            other lengths.
        deterministic: require the same bits from run to run.
        save_attention: with activation checkpointing, save each layer's attention output and log-sum-exp, so that the
            backward neither gathers nor attends again. Needs use_reentrant=False. "auto": in a ring on GPUs, once a
            step has shown that they fit and leave a tenth of the GPU's memory free, and with ``offload_above`` half of
            the free host memory; not for compiled layers, and not with images or sound.
        keep_layers: with activation checkpointing, the last so many layers keep their activations, so that the backward
            does not compute them again. "auto": once save_attention="auto" has measured a step, as many as fit and
            leave a tenth of the GPU's memory free. Not with ``offload_above``, and not for compiled layers.
        mlp_tokens: run each MLP (experts, too) and each norm of a decoder layer over chunks of so many tokens, forward
            and backward, so that its activations exist for one chunk at a time. The backward computes each chunk once
            more, and adds the weights' gradients in float32. 16384 keeps a GPU busy. None: all tokens at once. Each
            module is tested first; one that mixes tokens is refused.
        offload_above: with activation checkpointing, the GiB of checkpoints (layer inputs, and what save_attention
            saves) that may stay on each GPU: those of the last layers. The others wait in page-locked host memory; the
            copies overlap with the computation. 0: none stay. None: all stay, unless transformers' ``offload`` or
            accelerate's ``fsdp_activation_checkpointing_offload`` is on, which in a ring means 0.
        self_check: before the first step, run a short random row through the model unsharded and sharded, and refuse if
            the results differ (`integration.selfcheck`). False trains an unchecked model at your own risk.

    Raises:
        BadOption: a value is impossible, alone or beside another one.
    """

    kernel: str = "auto"
    backward: Backward = "ring"
    heads_per_gather: int | None = None
    traffic: Traffic = "auto"
    loss: Loss = "auto"
    layout: Arrangement = "auto"
    pad: bool = True
    deterministic: bool = False
    save_attention: bool | Literal["auto"] = "auto"
    keep_layers: int | Literal["auto"] = 0
    mlp_tokens: int | None = None
    offload_above: float | None = None
    self_check: bool = True

    def __post_init__(self) -> None:
        _check_kernel("kernel", self.kernel)
        check_choice("backward", self.backward, get_args(Backward))
        check_choice("traffic", self.traffic, get_args(Traffic))
        check_choice("loss", self.loss, get_args(Loss))
        check_choice("layout", self.layout, get_args(Arrangement))
        if self.heads_per_gather is not None:
            whole_number("heads_per_gather", self.heads_per_gather, "a positive number of heads, or None", 1)
        if self.mlp_tokens is not None:
            whole_number("mlp_tokens", self.mlp_tokens, "a positive number of tokens, or None", 1)
        if self.offload_above is not None:
            number("offload_above", self.offload_above, "a number of GiB, at least 0, or None", least=0)
        for name in ("pad", "deterministic", "self_check"):
            check_flag(name, getattr(self, name))
        if not isinstance(self.save_attention, str) or self.save_attention != "auto":
            check_flag("save_attention", self.save_attention, "True, False or 'auto'")
        self._check_kept()

    def _check_kept(self) -> None:
        kept = self.keep_layers
        if kept == "auto" and self.save_attention != "auto":
            raise BadOption("keep_layers", kept, "a number of layers: 'auto' needs save_attention='auto'")
        if kept != "auto":
            whole_number("keep_layers", kept, "a number of layers, or 'auto'", 0)
        if kept and self.offload_above is not None:
            raise BadOption("keep_layers", kept, "0 with offload_above: kept activations stay on the GPU")

    @property
    def saving_memory(self) -> list[str]:
        """The options that are set and save memory or time without a ring, too."""
        asked = {
            "save_attention": self.save_attention is True, "loss": self.loss == "chunked",
            "keep_layers": self.keep_layers != 0, "mlp_tokens": self.mlp_tokens is not None,
            "offload_above": self.offload_above is not None,
        }  # fmt: skip
        return [f"{name}={getattr(self, name)!r}" for name, is_set in asked.items() if is_set]


def kernel_from_environment() -> str | None:
    """The kernel named by HF_RING_ATTN_KERNEL, for command lines; a kernel named in a call goes first.

    Raises:
        BadOption: there is no such kernel.
    """
    name = os.environ.get("HF_RING_ATTN_KERNEL") or None
    if name is not None:
        _check_kernel("HF_RING_ATTN_KERNEL", name)
    return name


def _check_kernel(option: str, name: object) -> None:
    if name not in ("auto", *KERNEL_NAMES):
        raise BadOption(option, name, f"'auto' or one of {KERNEL_NAMES}")


def is_a_launched_rank() -> bool:
    """Returns True if torchrun or accelerate launch started this process. RANK alone may be a machine's."""
    return "LOCAL_RANK" in os.environ


def launched_processes() -> int:
    """The number of processes that torchrun or accelerate launch started; 1 without them."""
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if is_a_launched_rank() and text.isdigit() else 1


def ranks_of_machine() -> int:
    """The number of processes that torchrun or accelerate launch started on this machine; 1 without them."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdigit() else 1


def launched_ring() -> int:
    """The ring size in the config of `accelerate launch`; 1 without one."""
    used = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() in ("1", "true", "yes", "on", "y", "t")
    text = os.environ.get("PARALLELISM_CONFIG_CP_SIZE", "")
    return max(1, int(text)) if used and text.isdigit() else 1


def several_asked_for() -> tuple[str, str] | None:
    """Returns a sign in the environment that several processes were requested, and its variable; None: no sign.

    For MULTI_CPU `accelerate launch` starts one process, and sets MASTER_PORT without WORLD_SIZE only if several were
    requested. MASTER_PORT alone may be a cluster's.
    """
    cp_size = os.environ.get("PARALLELISM_CONFIG_CP_SIZE", "1")
    if cp_size not in ("", "1"):
        return f"PARALLELISM_CONFIG_CP_SIZE is {cp_size}", "PARALLELISM_CONFIG_CP_SIZE"
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in os.environ and "WORLD_SIZE" not in os.environ
    if by_accelerate and "MASTER_PORT" in os.environ:
        return "accelerate launch was given several processes", "MASTER_PORT"
    return None


def torch_autoloads() -> bool:
    """Returns True unless TORCH_DEVICE_BACKEND_AUTOLOAD stops torch from calling other packages at its import."""
    return os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"


def triton_is_interpreted() -> bool:
    """Returns True if Triton's kernels run in its interpreter, on CPU tensors (TRITON_INTERPRET=1, for tests)."""
    return os.environ.get("TRITON_INTERPRET") == "1"
