"""What a training run costs: seconds and losses by step, tokens/s, MFU, peak memory, and where a step's time goes."""

from __future__ import annotations

import gc
import logging
import platform
import re
import statistics
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from memory_peak import MemoryPeak
from shapes import weights_in
from transformers import TrainerCallback

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bf16 FLOP/s that the maker gives, by a part of the GPU's name."""
PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl", "flash-attn-4", "triton")
WARM_UP = 2
"""Steps that are not timed: kernels are compiled in the first, buffers are made in the second."""

KINDS = (
    ("traffic, NCCL", r"nccl"),
    ("traffic, copies", r"memcpy (ptop|dtod)|memcpy.*peer"),
    ("attention", r"flash|attention|fmha|attn"),
    ("loss", r"logprob|cross_entropy|_forward_kernel|_backward_kernel"),
    ("matrix products", r"gemm|nvjet|cutlass|xmma|cublas|splitk"),
)
"""Kinds of GPU work, by names of kernels; the first that fits counts."""


def flops_per_step(model: torch.nn.Module, config: Any, tokens: int, forward_only: bool = False) -> float:
    """Floating-point operations that one step over one causal sequence of ``tokens`` needs, recomputation left out.

    4 x tokens x frozen parameters in matrix products (forward, and the gradient of the input) + 6 x tokens x trained
    ones (the gradient of the weight as well) + 12 x pairs x heads x head width for attention of each layer (forward 4,
    backward 8); pairs of a query and a key that it sees are tokens^2 / 2, or fewer in a layer with a window. Of experts
    the part counts that a token takes.
    A gated delta rule (Qwen3.5) is 18 x tokens x heads x key width x value width instead: each token's key reads the
    state, its outer product with a value is added, its query reads the state (forward 6, backward 12). Embeddings that
    are only looked up cost nothing. ``forward_only``: 2 x tokens x parameters, and the forward's part of the others.
    Call it before parameters are sharded.
    """
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    looked_up = {id(p) for p in embeddings.parameters()}
    weights = [(name, p) for name, p in model.named_parameters() if id(p) not in looked_up]
    frozen = sum(in_products(name, p, config) for name, p in weights if not p.requires_grad)
    trained = sum(in_products(name, p, config) for name, p in weights if p.requires_grad)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    window = min(tokens, getattr(config, "sliding_window", None) or tokens)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    attending = [kind for kind in kinds if kind != "linear_attention"]
    keys = [window if kind == "sliding_attention" else tokens for kind in attending]  # that a late query sees
    pairs = sum(one * tokens - one**2 / 2 for one in keys)
    attention = 12 * pairs * config.num_attention_heads * width
    state = 0
    if linear := len(kinds) - len(attending):
        heads, width = config.linear_num_value_heads, config.linear_key_head_dim
        state = linear * heads * width * config.linear_value_head_dim
    mixing = attention + 18 * tokens * state  # of tokens with each other
    if forward_only:
        return float(2 * tokens * (frozen + trained) + mixing / 3)
    return float(4 * tokens * frozen + 6 * tokens * trained + mixing)


def in_products(name: str, parameter: torch.nn.Parameter, config: Any) -> float:
    """How many of a parameter's numbers one token meets in matrix products."""
    if ".experts." not in name:
        return weights_in(parameter) if parameter.dim() == 2 else 0
    count = getattr(config, "num_experts", None) or config.num_local_experts
    return weights_in(parameter) * config.num_experts_per_tok / count if "bias" not in name else 0


class Meter(TrainerCallback):
    """Watches a trainer that logs every step.

    Args:
        tokens: of one step, over all ranks. flops: of one step, over all ranks (`flops_per_step`).
        profile: record the last step's GPU work; that step is not timed. memory: record its allocations; likewise.
    """

    def __init__(self, tokens: int, flops: float, profile: bool, memory: bool = False) -> None:
        self.tokens, self.flops, self.profile, self.memory = tokens, flops, profile, memory
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.seconds: list[float] = []
        self.collecting: list[float] = []
        """Seconds of each step in which Python collected garbage, and the GPU may have waited."""
        self.retries: list[int] = []
        """How often torch's allocator had run out of this rank's GPU and emptied its cache, by the end of each step."""
        self.recorder: Any = None
        self.allocations: MemoryPeak | None = None
        self.fullest: dict[str, Any] | None = None
        self.started = 0.0
        self.said: list[str] = []
        """What hf_ring_attn logged: its line at the start names the ring and the kernel."""
        logging.getLogger("hf_ring_attn").addFilter(self._heard)  # a handler of ours would silence the package's own

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # building and sharding the model took memory of their own
        gc.callbacks.append(self._collected)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        gc.callbacks.remove(self._collected)

    def _heard(self, record: logging.LogRecord) -> bool:
        self.said.append(record.getMessage())
        return True

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if self.collecting:
            self.collecting[-1] += time.perf_counter() * (1 if phase == "stop" else -1)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        is_last = torch.cuda.is_available() and state.global_step == args.max_steps - 1
        if self.memory and is_last:
            self.allocations = MemoryPeak()
            self.allocations.start()
        if self.profile and is_last:
            self.recorder = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.recorder.__enter__()
        self.collecting.append(0.0)
        self.started = _now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds.append(_now() - self.started)
        if torch.cuda.is_available():
            self.retries.append(torch.cuda.memory_stats()["num_alloc_retries"])
        if self.recorder is not None:
            self.recorder.__exit__(None, None, None)
        if self.allocations is not None:
            self.fullest = self.allocations.stop()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))
            self.norms.append(float(logs["grad_norm"]))
            if state.is_world_process_zero:
                gpu = torch.cuda.is_available()
                memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most" if gpu else ""
                step = f"step {state.global_step}: loss {logs['loss']:.6f}, {self.seconds[-1]:.3f} s"
                print(step + memory, flush=True)

    def results(self) -> dict[str, Any]:
        """The numbers in JSON's types; every rank calls it."""
        gpu = torch.cuda.is_available()
        world = dist.get_world_size() if dist.is_initialized() else 1
        recorded = self.recorder is not None or self.allocations is not None
        timed = self.seconds[: -1 if recorded else None]
        timed = timed[WARM_UP:] or timed[-1:]
        seconds = statistics.median(timed)
        name = torch.cuda.get_device_name() if gpu else platform.machine()
        peak = next((x for gpu_name, x in PEAK_FLOPS.items() if gpu_name in name), None)
        memory: list[Any] = [torch.cuda.max_memory_allocated() / 2**30 if gpu else None] * world
        if dist.is_initialized():
            dist.all_gather_object(memory, memory[0])
        return {
            "ranks": world,
            "device": name,
            "said": self.said,
            "losses": self.losses,
            "grad_norms": self.norms,
            "seconds": self.seconds,
            "seconds_per_step": seconds,
            "seconds_of_garbage_collection": self.collecting,
            "tokens_per_second": self.tokens / seconds,
            "flops_per_step": self.flops,
            "mfu": self.flops / seconds / (world * peak) if peak else None,
            "mfu_formula": "flops_per_step / seconds_per_step / (ranks x dense bf16 peak); see measure.flops_per_step",
            "peak_memory_GiB": memory,
            "allocation_retries": self.retries,
            # of this rank: what torch's allocator had from the GPU, and what of it was lost between tensors
            "peak_reserved_GiB": torch.cuda.max_memory_reserved() / 2**30 if gpu else None,
            "peak_split_GiB": torch.cuda.memory_stats()["inactive_split_bytes.all.peak"] / 2**30 if gpu else None,
            "profile": self._profile(),
            "fullest_moment": self.fullest,
            "versions": {package: _version(package) for package in PACKAGES} | {"python": platform.python_version()},
        }

    def _profile(self) -> dict[str, Any] | None:
        """Milliseconds of this rank's GPU by kind of work, and its longest kernels; several streams overlap."""
        if self.recorder is None:
            return None
        marks = ("FSDP::", "nccl:", "ProfilerStep", "##")  # spans around kernels, which would count twice
        averages = self.recorder.key_averages()
        events = [x for x in averages if x.self_device_time_total > 0 and not x.key.startswith(marks)]
        kinds: dict[str, float] = {}
        for event in events:
            kind = next((kind for kind, names in KINDS if re.search(names, event.key, re.IGNORECASE)), "other")
            kinds[kind] = kinds.get(kind, 0.0) + event.self_device_time_total / 1000
        longest = sorted(events, key=lambda event: -event.self_device_time_total)[:40]
        return {
            "step_milliseconds": self.seconds[-1] * 1000,
            "milliseconds_by_kind": kinds,
            "longest": [(event.key[:160], event.count, event.self_device_time_total / 1000) for event in longest],
        }


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
