"""The options of a ring, and the only place that reads environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, get_args

from .arguments import check_choice, check_flag, whole_number
from .errors import BadOption

KERNEL_NAMES = ("flash4", "triton", "flash2", "flex", "reference")
"""Every kernel, the preferred one first. `hf_ring_attn.kernels` has them under these names."""

Backward = Literal["ring", "gather"]
Loss = Literal["sharded", "gathered"]
Traffic = Literal["auto", "messages", "pulls"]
Arrangement = Literal["auto", "zigzag", "balanced"]


@dataclass(frozen=True, kw_only=True)
class RingConfig:
    """What a ring may choose. No choice changes the answer beyond the order of float32 sums.

    Args:
        kernel: "auto", or one of `KERNEL_NAMES`: then that kernel runs or the call is refused with its reasons.
            "auto" never takes flash2, which rounds each contribution to a gradient.
        backward: "ring" passes keys and values on, and the float32 sums of their gradients behind them;
            "gather" gathers keys and values again and reduce-scatters float32 gradients (more memory, fewer hops).
        heads_per_gather: how many key/value heads are gathered at a time; memory of the gathered keys and values is
            proportional to it. None chooses by size, and lets layers that share keys and values (Gemma 3n, Gemma 4),
            compiled or not, gather them once in a forward: then all their heads stay from the first of these layers to
            the last, one set for each kind of mask. A number bounds that memory: nothing stays, whatever the number,
            and each of them gathers anew.
        traffic: "messages" sends by NCCL or gloo; "pulls" copies out of the other GPUs' memory, which is faster and
            needs NVIDIA GPUs of one machine, and memory for two copies of a rank's keys and values of one layer and for
            their float32 gradients; "auto" pulls where that is possible. No bit of any result depends on it.
        loss: "sharded" computes each rank's share of the loss on its own tokens; "gathered" re-gathers the logits in
            their original order and computes the loss on the whole row (S x V memory on every rank), which makes
            label smoothing and custom loss functions exact.
        layout: who holds which token of a batch. "zigzag": as `hf_ring_attn.positions` describes it, for every batch.
            "balanced": where a zigzag would leave a rank with more than 1.1 times the mean's work, ranks hold other
            chunks of packed rows, and ``sharded.positions`` alone shows which; batches of images or sound, and those
            of `maybe_context_parallel`, keep the zigzag. "auto": balanced in Trainer and SFTTrainer, which index
            nothing by a token's place; the zigzag in other training loops, which may.
        pad: pad rows to a multiple of 2 * ring size (of up to 16 * ring size, where ``layout`` deals more chunks) with
            tokens that nobody sees; False refuses other lengths.
        deterministic: demand the same bits from run to run.
        save_attention: under gradient checkpointing keep each layer's attention output and log-sum-exp, so that its
            recompute neither gathers nor attends again; needs use_reentrant=False.
        self_check: before step one, run a short random row through the model unsharded and sharded, and refuse if the
            two disagree (`integration.selfcheck`); False trains an unchecked model at your own risk.
    """

    kernel: str = "auto"
    backward: Backward = "ring"
    heads_per_gather: int | None = None
    traffic: Traffic = "auto"
    loss: Loss = "sharded"
    layout: Arrangement = "auto"
    pad: bool = True
    deterministic: bool = False
    save_attention: bool = False
    self_check: bool = True

    def __post_init__(self) -> None:
        _check_kernel("kernel", self.kernel)
        check_choice("backward", self.backward, get_args(Backward))
        check_choice("traffic", self.traffic, get_args(Traffic))
        check_choice("loss", self.loss, get_args(Loss))
        check_choice("layout", self.layout, get_args(Arrangement))
        if self.heads_per_gather is not None:
            whole_number("heads_per_gather", self.heads_per_gather, "a positive number of heads, or None", 1)
        for name in ("pad", "deterministic", "save_attention", "self_check"):
            check_flag(name, getattr(self, name))


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
    """Whether a launcher (torchrun, accelerate launch) started this process. RANK alone may be that of a machine."""
    return "LOCAL_RANK" in os.environ


def several_asked_for() -> tuple[str, str] | None:
    """The sign in the environment that this lone process was to be one of several, and its variable; None: no sign.

    For MULTI_CPU `accelerate launch` starts one process, and sets MASTER_PORT without WORLD_SIZE only if it was given
    several. MASTER_PORT alone may be a cluster's.
    """
    cp_size = os.environ.get("PARALLELISM_CONFIG_CP_SIZE", "1")
    if cp_size not in ("", "1"):
        return f"PARALLELISM_CONFIG_CP_SIZE is {cp_size}", "PARALLELISM_CONFIG_CP_SIZE"
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in os.environ and "WORLD_SIZE" not in os.environ
    if by_accelerate and "MASTER_PORT" in os.environ:
        return "accelerate launch was given several processes", "MASTER_PORT"
    return None


def triton_is_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on CPU tensors: its own TRITON_INTERPRET=1, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"
