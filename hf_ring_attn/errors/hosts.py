"""Errors of hosts: patches, accelerate, command lines."""

from __future__ import annotations

from .base import Refused, RingAttentionError

# ---- hosts: the patches ---------------------------------------------------------------------------------------------


class ChangedHost(Refused):
    def __init__(self, target: str, found: str, needed: str, host: str, version: str, tested: str) -> None:
        super().__init__(
            f"{target} of {host} {version} is not what hf_ring_attn patches: found {found}, needed {needed}. "
            f"Use a tested version of {host} ({tested}), or a newer hf_ring_attn."
        )


class UntestedHost(UserWarning):
    def __init__(self, host: str, version: str, tested: str, requirement: str) -> None:
        super().__init__(
            f"hf_ring_attn was tested with {host} {tested}, not with {version}. The functions that it patches have the "
            "right parameters, and the self-check runs before the first step, so it continues. If that fails, or "
            f"results look wrong, install a tested version: pip install '{requirement}'."
        )


class PatchedByOthers(UserWarning):
    def __init__(self, target: str) -> None:
        super().__init__(f"{target} was patched again after hf_ring_attn; uninstall() removes both patches.")


# ---- hosts: accelerate ----------------------------------------------------------------------------------------------


class MeshMismatch(Refused):
    def __init__(self, sizes: dict[str, int], processes: int) -> None:
        needed = 1
        for size in sizes.values():
            needed *= size
        product = " x ".join(f"{name} {size}" for name, size in sizes.items())
        without_gpus = "; without GPUs set ACCELERATE_USE_CPU=true" if processes == 1 else ""
        super().__init__(
            f"the mesh {product} needs {needed} processes, got {processes}. Start {needed} processes "
            f"(accelerate launch --num_processes {needed}{without_gpus}), or choose sizes whose product is {processes} "
            "(--parallelism_config_cp_size; for several rings --parallelism_config_dp_replicate_size)."
        )


class OneProcess(Refused):
    def __init__(self, found: str, variable: str) -> None:
        super().__init__(
            f"a ring_fp32 model runs in a single process, but {found}: it would train without a ring. Use accelerate "
            "launch and a config with distributed_type: MULTI_GPU or FSDP, as in recipes/accelerate (for MULTI_CPU or "
            f"use_cpu: true accelerate starts one process). For a single process unset {variable}."
        )


class NoSmallerBatch(RingAttentionError):
    """``text``: of the error that accelerate's find_executable_batch_size (Trainer's auto_find_batch_size) caught."""

    def __init__(self, text: str) -> None:
        super().__init__(
            f"this rank failed ({text[:120]}). A smaller batch cannot be tried in a ring, since other ranks wait for "
            "this one in the middle of a step. Start again without auto_find_batch_size, with a smaller batch, a "
            "shorter row, or options that save memory; hf-ring-attn plan names them."
        )


class UntestedParallelism(Refused):
    def __init__(self, what: str, todo: str) -> None:
        super().__init__(f"ring_fp32 with {what} is refused, because it was never tested: {todo}.")


class TorchHandlerWithRing(Refused):
    def __init__(self, handler: object) -> None:
        super().__init__(
            f'ParallelismConfig got cp_backend="ring" and cp_handler={type(handler).__name__}(...), which configures '
            "torch's own context parallelism. Leave cp_handler out; hf_ring_attn.RingConfig has the options of a ring."
        )


class ModelIsNoRing(Refused):
    def __init__(self, model: str, implementations: list[str], cp_size: int) -> None:
        super().__init__(
            f'cp_backend is "ring" with cp_size={cp_size} (by the launch config, or an earlier ring_fp32 model), but '
            f"{model} has attn_implementation={' and '.join(implementations)}: each rank would attend to its own "
            'tokens only. Load it with attn_implementation="ring_fp32" (a program without that option: start it by '
            "python -m hf_ring_attn.run --attention ring_fp32 PROGRAM), or set cp_size=1."
        )


class TorchContextParallelRefused(Refused):
    """accelerate's own refusals, deferred until a model without ring_fp32 is known."""

    def __init__(self, model: str, implementations: list[str], reasons: list[str]) -> None:
        listing = "\n".join(f"  {reason}" for reason in reasons)
        have = " and ".join(implementations) or "no attention of transformers"
        super().__init__(
            f'{model} has attn_implementation={have}, so cp_size > 1 with cp_backend="torch" means accelerate\'s own '
            f"context parallelism, and accelerate refuses:\n{listing}\n"
            'Change that, or load the model with attn_implementation="ring_fp32", which has none of these limits.'
        )


class DispatchedBatches(Refused):
    """``why``: what would be wrong."""

    def __init__(
        self, how: str, why: str = "accelerate would give every rank of a ring another batch, but a ring shares one"
    ) -> None:
        super().__init__(
            f"{how}: {why}. Leave dispatch_batches out and prepare the model first, as Trainer does: rings then get "
            "the rows that processes without rings would get. DataLoaderConfiguration(dispatch_batches=False) "
            '(TrainingArguments: accelerator_config={"dispatch_batches": False}) fills the last batch of a stream '
            "otherwise."
        )


class ShardedByFsdp(Refused):
    def __init__(self, optimizer: str) -> None:
        super().__init__(
            f"the optimizer {optimizer} of bitsandbytes got weights that FSDP2 shards: its first step would fail, "
            'after a whole forward and backward. Use torchao\'s (optim="adamw_torch_8bit", pip install torchao), an '
            "optimizer of torch, or DDP."
        )


class ModelNotPrepared(Refused):
    def __init__(self) -> None:
        super().__init__(
            "maybe_context_parallel was entered before accelerate got a model, so it may mean torch's context "
            "parallelism or a ring. Call accelerator.prepare(model, ...) first, or set "
            'ParallelismConfig(cp_backend="ring").'
        )


class BadBuffers(Refused):
    def __init__(self, got: str, needed: str) -> None:
        super().__init__(f"maybe_context_parallel got {got}, but {needed}.")


class UnclearCount(Refused):
    def __init__(self, got: object, labels: int, size: int, why: str) -> None:
        super().__init__(
            f"maybe_context_parallel got num_items_in_batch={got} for a batch of {labels} labels. It reads the number "
            f"as {labels} (the whole batch) or {labels} / {size} (per rank), but {why}. Leave num_items_in_batch out, "
            "or use hf_ring_attn.shard(batch): there it counts all batches of a step."
        )


class UnclearScheduler(Refused):
    def __init__(self, why: str) -> None:
        super().__init__(
            "a prepared scheduler steps once for each process if its numbers of steps are multiples of "
            f"accelerator.num_processes, else once for each ring. Here {why}. Multiply all its numbers of steps by "
            "accelerator.num_processes, or none, in whole numbers; or step it yourself, without prepare()."
        )


class SameRowsGathered(Refused):
    """A program gathers rows of all ranks, for its loss, where ranks of a ring have the same."""

    def __init__(self, ring_size: int) -> None:
        super().__init__(
            f"the same rows were gathered from all processes: the {ring_size} ranks of a ring have one batch, so each "
            f"row would count {ring_size} times. Leave it out. Or gather over rings: by the accelerator "
            "of a Trainer, or in a process group with one rank of each ring."
        )


class HeadReadPastFsdp(Refused):
    def __init__(self, model: str) -> None:
        super().__init__(
            f"the output embedding of {model} is trained (modules_to_save), and FSDP2 sums its gradient over ranks "
            "only if the head is called. TRL's fused head reads its weight instead, so each rank would train its part "
            "by its own tokens alone. Use DDP, or transformers.Trainer with full logits, or leave the head out."
        )


class TiedByFsdp(Refused):
    def __init__(self, model: str, names: list[str]) -> None:
        super().__init__(
            f"accelerate's FSDP2 tied these weights of {model}, which one process trains separately: "
            f"{' and '.join(names)}. Use DDP, or train neither embeddings nor head (modules_to_save), or untie them "
            "before (tie_word_embeddings=False)."
        )


class UnevenBatches(Refused):
    def __init__(self, fewest: int, most: int) -> None:
        super().__init__(
            f"with even_batches=False some rings get more batches ({most}) than others ({fewest}). Rings average "
            "gradients and gather metrics together, so they would wait for those without a batch. Use even_batches="
            "True, which is accelerate's default, or dataloader_drop_last=True, or a max_steps that ends before."
        )


class SharedMemoryLost(Refused):
    def __init__(self, model: str, names: list[str]) -> None:
        super().__init__(
            f"these weights of {model} share memory, so that one process changes them together: {' and '.join(names)}. "
            "FSDP2 would separate them. Use DDP, or do not ask for it (PEFT's ensure_weight_tying=False), or make "
            "them one parameter."
        )


class OtherCheckpoint(Refused):
    """``by_fsdp``: FSDP saved the checkpoint, and the run has none; else it is the other way round."""

    def __init__(self, checkpoint: str, by_fsdp: bool) -> None:
        saved, run, needed = ("by", "without", "with") if by_fsdp else ("without", "with", "without")
        super().__init__(
            f"{checkpoint} was saved {saved} FSDP, and a run {run} FSDP cannot read its optimizer. Resume with a "
            f"launch config {needed} FSDP, or start a new run from its weights: from_pretrained(checkpoint)."
        )


# ---- command lines --------------------------------------------------------------------------------------------------


class BadCommand(Refused):
    """Base of the errors of `python -m hf_ring_attn.run`, which prints them without a traceback."""


class NothingToRun(BadCommand):
    def __init__(self) -> None:
        super().__init__(
            "no program is named. Give a script, a module or a console command, and its arguments: "
            "python -m hf_ring_attn.run train.py ..., -m my_package.train ..., or trl sft ..."
        )


class OtherAttention(BadCommand):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"--attention got {name!r}, and only ring_fp32 is possible. Name it before the program: "
            "python -m hf_ring_attn.run --attention ring_fp32 train.py ..."
        )


class NoSuchProgram(BadCommand):
    def __init__(self, program: str, why: str) -> None:
        super().__init__(
            f"cannot run {program!r}: {why}. It must be a script (train.py), a module (-m my_package.train) or a "
            "console command of an installed package (trl sft)."
        )


class LaunchedTwice(BadCommand):
    def __init__(self, program: str, options: list[str]) -> None:
        super().__init__(
            f"this process is a rank of a launcher already, so {program} runs in it, but the command has options for "
            f"another launcher: {', '.join(options)}. Give them to the outer launcher, or start the command once, "
            "without it: python -m hf_ring_attn.run COMMAND ..."
        )


class NoPython(BadCommand):
    def __init__(self, program: str) -> None:
        super().__init__(
            f"a launcher got --no_python, so it would start {program} without python, where hf_ring_attn is not "
            "imported. Leave --no_python out: scripts, modules (-m) and console commands work without it."
        )


class IncompleteCheckpoint(Refused):
    """``complete``: the last complete checkpoint beside it, if there is one."""

    def __init__(self, checkpoint: str, complete: str | None) -> None:
        todo = f"Resume from {complete}" if complete else "No complete one is beside it: train from the start"
        super().__init__(
            f"{checkpoint} is incomplete: its trainer_state.json, which is written last, is missing or cut off, so "
            f"saving was interrupted (killed, or a full disk). {todo}."
        )


class CheckpointNotSaved(RingAttentionError, OSError):
    """``failures``: rank of the job -> the error with which it saved its part. ``complete``: as above."""

    def __init__(self, checkpoint: str, failures: dict[int, str], complete: str | None) -> None:
        listing = "; ".join(f"rank {rank}: {text[:160]}" for rank, text in failures.items())
        then = f"a resume takes {complete}" if complete else "no complete one is beside it"
        super().__init__(
            f"{checkpoint} was not saved ({listing}). It is incomplete, so all ranks stop; {then}. Free disk space, or "
            "set save_total_limit, then train with resume_from_checkpoint=True."
        )


# ---- autoload -------------------------------------------------------------------------------------------------------


class NotInstalled(Refused):
    def __init__(self) -> None:
        super().__init__(
            "autoload changes the metadata of the installed package, but hf_ring_attn runs from a folder here. Install "
            "it first (pip install . in the checkout), or start programs with python -m hf_ring_attn.run."
        )


class NotWritable(Refused):
    def __init__(self, where: str, why: str) -> None:
        super().__init__(
            f"autoload cannot write to {where} ({why}). Run the command as the user who installed the package, or "
            "start programs with python -m hf_ring_attn.run."
        )


# ---- models that commands load --------------------------------------------------------------------------------------


class UnknownModel(Refused):
    def __init__(self, name: str, why: str) -> None:
        super().__init__(
            f"the model {name!r} cannot be read ({why}). Name a causal language model of the Hub that this machine can "
            "reach (a gated one needs hf auth login), a folder with its config.json, or a config file with model_type."
        )


class EncoderDecoder(Refused):
    def __init__(self, name: str, kind: str) -> None:
        super().__init__(
            f"{name} is an encoder-decoder model ({kind}). A ring trains decoder models only: it shards one row, and "
            "an encoder-decoder has two of unequal length. Give a decoder model, or train this one without a ring."
        )


class CannotPlan(Refused):
    def __init__(self, name: str, why: str) -> None:
        super().__init__(
            f"{name} cannot be planned: {why}. A forecast would be a guess. Measure a few steps of a short row instead."
        )


class FilesDiffer(Refused):
    def __init__(self, folder: str, names: list[str]) -> None:
        super().__init__(
            f"{folder} has {' and '.join(names)} with other content, so nothing was written: they may be yours. Give "
            "--write another folder, or --overwrite to replace them."
        )


class PlanNotWritten(RingAttentionError, OSError):
    def __init__(self, folder: str, why: str) -> None:
        super().__init__(
            f"plan cannot write to {folder} ({why}). Give --write a folder, existing or new, in which you may write."
        )
