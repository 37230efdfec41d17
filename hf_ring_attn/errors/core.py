"""Errors of the core: lengths, shapes, options, kernels, and ranks that disagree or disappear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .base import Refused, RingAttentionError, shown

# ---- lengths, shapes, options ---------------------------------------------------------------------------------------


class UnevenLength(Refused):
    """``pads``: the interface that was called can pad rows itself."""

    def __init__(self, length: int, world_size: int, pads: bool = True) -> None:
        unit = 2 * world_size
        padded = -(-length // unit) * unit
        todo = f"pad the batch to {padded} tokens with labels of -100"
        if pads:
            todo = f"Let hf_ring_attn pad it (pad=True, the default), or {todo}"
        else:
            todo = f"Tensors that are sharded in place cannot be padded: {todo}, or use hf_ring_attn.shard, which pads"
        super().__init__(
            f"zigzag needs a sequence length that is a multiple of 2 * cp_size = {unit}, got {length}. {todo}."
        )


class BadShape(Refused):
    def __init__(self, name: str, got: object, need: str) -> None:
        super().__init__(f"{name} has shape {got}, but {need}.")


class UnknownToken(Refused):
    """``table``: the class of the embeddings; ``size``: how many they have."""

    def __init__(self, table: str, value: int, row: int, token: int, size: int) -> None:
        super().__init__(
            f"input_ids has {value} at token {token} of row {row}, but the model's {table} has {size} entries, for ids "
            f"from 0 to {size - 1}. Use this model's tokenizer; for tokens added to it call "
            "model.resize_token_embeddings(len(tokenizer)). -100 belongs in labels alone."
        )


class BadOption(Refused):
    def __init__(self, name: str, got: object, need: str) -> None:
        value = repr(got[:60]) if isinstance(got, str) else shown(got)
        super().__init__(f"{name}={value} is not possible: it must be {need}.")


class TwoLayouts(Refused):
    def __init__(self, world_size: int) -> None:
        super().__init__(
            f"positions() describes the zigzag layout, but this process holds a batch of a ring of {world_size} in the "
            "balanced layout, where ranks hold other tokens. Use sharded.positions of that batch, or "
            "RingConfig(layout='zigzag') in configure() or shard()."
        )


class BadScoreMod(Refused):
    def __init__(self, name: str, what: str) -> None:
        super().__init__(
            f"the score_mod {name} {what}. It must be made of torch functions of five scalars (score, b, h, q_idx, "
            "kv_idx), as in FlexAttention, without if, float() or .item() on them, and return one floating-point "
            "number."
        )


class ScoreModChanged(Refused):
    def __init__(self, name: str, what: str) -> None:
        super().__init__(
            f"the score_mod {name} changed between forward and backward: {what}. The backward runs it again, so what "
            "it uses must stay the same until then. Give each layer its own function, and each batch its own tensors."
        )


class UnsupportedAttention(Refused):
    """Raised with every reason at once when a kernel cannot honour a request.

    ``others``: kernels that support the request, if one was asked for by name.
    """

    def __init__(self, reasons: dict[str, list[str]], others: Sequence[str] = ()) -> None:
        lines = [f"  {kernel}: {'; '.join(why)}" for kernel, why in reasons.items()]
        if others:
            lines.append(f"use kernel='auto' (and no HF_RING_ATTN_KERNEL): {others[0]} supports this attention")
        super().__init__("no kernel can compute this attention exactly:\n" + "\n".join(lines))


class NoPulls(Refused):
    def __init__(self, reason: str) -> None:
        super().__init__(
            f"RingConfig(traffic='pulls') is not possible: {reason}. Use traffic='auto', which takes messages here; "
            "the results are the same bit for bit."
        )


class UnevenBuffers(Refused):
    """``made``: how many buffers each rank of the ring has made, in all rings that it is in."""

    def __init__(self, made: Sequence[int]) -> None:
        super().__init__(
            f"the ranks of this ring made {list(made)} buffers for P2P copies, since some are in another ring too. In "
            "this torch such ranks wait for each other without end (pytorch issue 196082). Use "
            "RingConfig(traffic='messages'): the results are the same bit for bit."
        )


class NoMemoryForBuffers(RingAttentionError, RuntimeError):
    """``size``, ``free``, ``total``: bytes."""

    def __init__(self, size: int, free: int, total: int) -> None:
        super().__init__(
            f"CUDA out of memory. The ring's buffer for P2P copies needs {size / 2**20:.0f} MiB, but "
            f"{free / 2**20:.0f} of {total / 2**20:.0f} MiB of the GPU are free. Use a shorter row, or options that "
            "save memory, such as RingConfig(offload_above=...); hf-ring-attn plan names them."
        )


class CapturedGraph(Refused):
    def __init__(self, ring_size: int) -> None:
        super().__init__(
            f"attention in a ring of {ring_size} was called while a CUDA graph was captured. A replayed graph does not "
            "exchange data with the other ranks in order, so it could read another attention's. Use torch.compile "
            "without CUDA graphs (no mode='reduce-overhead'), or leave attention out of the graph."
        )


class SecondGradient(Refused):
    def __init__(self, what: str) -> None:
        super().__init__(
            f"a gradient of {what} was differentiated again (create_graph=True: a gradient penalty, a Hessian). "
            "Kernels and messages compute it, so autograd does not know its derivative. Leave that term out, "
            "estimate it by finite differences, or train without a ring and with attn_implementation='eager'."
        )


class UnsupportedTransform(Refused):
    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} was called inside forward-mode autograd or a gradient transform of torch.func (jvp, grad, jacrev, "
            "hessian). Only its backward is known, so such a derivative would be wrong. Use loss.backward() or "
            "torch.autograd.grad."
        )


class UnsupportedVmap(Refused):
    """A call inside torch.func.vmap, which hides values that must be read. ``use``: "ring attention was called"."""

    def __init__(self, use: str) -> None:
        super().__init__(
            f"{use} inside a transform of torch.func such as vmap. It hides values that must be read before ranks "
            "exchange anything. Loop over the entries, or make them rows of one batch, with the gradients of "
            "loss.backward(). Over q, k and v alone, vmap of ring_attention is exact."
        )


class NotByToken(Refused):
    def __init__(self, module: str, what: str) -> None:
        super().__init__(
            f"mlp_tokens runs {module} over chunks of tokens, but it {what}. So chunks would not give its exact "
            "answer. Leave mlp_tokens out of RingConfig."
        )


class HiddenWeight(Refused):
    def __init__(self, module: str, shape: object) -> None:
        super().__init__(
            f"mlp_tokens runs {module} over chunks of tokens, but its output depends on a trained tensor of shape "
            f"{shape} that is no parameter of it. Its gradient would be lost. Register it as a parameter of that "
            "module, or leave mlp_tokens out of RingConfig."
        )


class SavedAttentionChanged(RingAttentionError, RuntimeError):
    def __init__(self, shape: object) -> None:
        super().__init__(
            f"a checkpointed layer changed the output {shape} of its attention in place. save_attention had saved it, "
            "so its recompute would use other numbers. Leave save_attention out of RingConfig for this model."
        )


class RopeOutsideRing(Refused):
    def __init__(self, module: str) -> None:
        super().__init__(
            f"{module} computes RoPE by the longest position of a batch. A checkpoint computes it again in backward, "
            "outside the batch's context and from position_ids that no forward gave it. Make position_ids outside of "
            "the checkpointed function, and pass them to it, or call backward inside `with sharded:`."
        )


class TokensKept(Refused):
    def __init__(self, model: str, states: str, size: int, error: float, tolerance: float) -> None:
        super().__init__(
            f"{model} stores values that depend on tokens ({states}), and each rank would store other ones: a "
            f"second forward of the self-check differs between one process and a ring of {size} by {error:.1e} "
            f"(rounding: {tolerance:.1e}). all_reduce them over the ring where they are written, or do not store them."
        )


class HostMemoryFull(RingAttentionError, MemoryError):
    """``wanted``, ``free``: bytes. ``said``: why there is no memory though it is free, in the words of who refused."""

    def __init__(self, wanted: int, free: int, said: str = "") -> None:
        said = f" {said}." if said else ""
        super().__init__(
            f"offload_above needs {wanted / 2**30:.1f} GiB more of page-locked host memory, but {free / 2**30:.1f} GiB "
            f"are free.{said} Raise offload_above, so that more checkpoints stay on the GPU, set save_attention=False, "
            "shard the sequence over more GPUs, or give the job more memory."
        )


class ChangedInPlace(RingAttentionError, RuntimeError):
    def __init__(self, shape: object) -> None:
        super().__init__(
            f"a checkpointed layer changed its input {shape} in place while offload_above copied it to the host, so "
            "its recompute would start from other numbers. Leave offload_above out of RingConfig for this model."
        )


class LeftHalfway(RingAttentionError):
    def __init__(self) -> None:
        super().__init__(
            "an exception that was caught (out of memory, for example) interrupted an earlier attention, forward or "
            "backward of this ring on this rank. Messages of the ranks no longer match, so the next answer could be "
            "wrong. Start the job again, or make the ring in a new process group."
        )


class GroupDestroyed(RingAttentionError):
    """``name``: of the ring's process group."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the process group {name!r} of this ring was destroyed, but a batch, a graph or a ring made with it is "
            "still in use. The ranks of another group hold other tokens. After init_process_group shard the batch "
            "again, and call backward before destroy_process_group()."
        )


class ForkedProcess(RingAttentionError):
    def __init__(self) -> None:
        super().__init__(
            "a process that was forked from a rank (a worker of multiprocessing or of a DataLoader, for example) used "
            "the rank's ring. It has no threads of the process group, so it would wait for ever, and its messages "
            "would mix with the rank's. Shard batches in the rank itself."
        )


class CrossedDocuments(Refused):
    def __init__(self) -> None:
        super().__init__(
            "a block of tokens that attend to each other both ways (an image, for example) crosses a border of "
            "documents, chunks or padding. Pack rows so that each block is inside one document."
        )


# ---- ranks that disagree or disappear -------------------------------------------------------------------------------


class RanksDiffer(Refused):
    """Ranks of one ring differ.

    Attributes:
        of_program: in their batches, or in their places in the program, not in what they compute.
    """

    of_program = False

    def __init__(self, what: str, per_rank: list[object], todo: str) -> None:
        values = {rank: shown(value)[:60] for rank, value in enumerate(per_rank)}
        listing = ", ".join(f"{who}: {value}" for value, who in _by_value(values).items())
        super().__init__(f"the ranks of one ring must hold the same {what}, but got {listing}. {todo}")


def _by_value(per_rank: Mapping[int, str]) -> dict[str, str]:
    """The ranks of each value, in words."""
    ranks: dict[str, list[int]] = {}
    for rank, value in per_rank.items():
        ranks.setdefault(value, []).append(rank)
    return {value: f"rank{'s' * (len(of) > 1)} {', '.join(map(str, of))}" for value, of in ranks.items()}


class RefusedElsewhere(Refused):
    """``messages``: rank -> the name and the words of its error; ranks with the same error share a line.

    Attributes:
        kinds: the names of these errors.
    """

    def __init__(self, messages: dict[int, str]) -> None:
        self.kinds = {text.partition(":")[0] for text in messages.values()}
        listing = "\n".join(f"  {who}: {text}" for text, who in _by_value(messages).items())
        super().__init__(f"this rank stops because other ranks of its ring raised an error:\n{listing}")


class PeerLost(RingAttentionError, RuntimeError):
    """``waited``: seconds until the backend's time-out; None: it lost the connection."""

    def __init__(self, doing: str, rank: int, size: int, waited: float | None = None) -> None:
        if waited is None:
            what = "lost another rank while it"
            why = (
                "That rank failed (its traceback is the cause to look at), or its program ended: it skipped a batch, "
                "or left its loop early."
            )
        else:
            what = f"waited {waited:.0f} s for another rank, until the time-out, while it"
            why = "That rank is late, skipped a batch, or caught an error and went on: see its log."
        super().__init__(
            f"rank {rank} of a ring of {size} {what} {doing}. {why} A ring cannot skip a batch on one rank: end the "
            "job, or skip it on all ranks."
        )


class NotSendable(Refused):
    def __init__(self, doing: str, text: str) -> None:
        super().__init__(
            f"the process group's backend could not send this rank's tensors when it {doing}: "
            f"{text.splitlines()[0][:200]}. Use a dtype and a device that it knows: gloo sends no "
            "float8, NCCL nothing from the CPU."
        )


# ---- results of benchmarks ------------------------------------------------------------------------------------------


class NoMatplotlib(RingAttentionError):
    def __init__(self) -> None:
        super().__init__("a plot needs matplotlib, which is not installed. Install it: pip install matplotlib.")


class ResultsNotSaved(RingAttentionError):
    def __init__(self, folder: str, why: str) -> None:
        super().__init__(
            f"no results can be saved in {folder} ({why}). Give --save a folder, existing or new, in which you may "
            "write and no results.jsonl is of another program."
        )


class NotAResult(RingAttentionError):
    def __init__(self, file: str, why: str) -> None:
        super().__init__(
            f"{file} holds nothing to plot ({why}). Give a results.jsonl of hf-ring-attn bench --save "
            "or of recipes/benchmarks/depth.py --save."
        )
