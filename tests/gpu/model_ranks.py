"""What every rank of tests/gpu/test_models_on_gpu.py does: torchrun --nproc_per_node 2 -m tests.gpu.model_ranks

Tiny models of every kind in a ring, over NCCL where there are GPUs, in float32, against transformers' own attention on
one device: hybrids, experts with their auxiliary loss, windows, sinks, latent attention; whole rows, padded and packed
ones; and towers that draw random numbers. Windows and short documents make sparse plans. Losses of whole rows:
tests/integration/losses/test_whole_heads.py.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
import torch.distributed as dist
import transformers
from packaging.version import Version

import hf_ring_attn
import tests.integration.context.test_ring_random as towers
from hf_ring_attn.command_ranks import world
from hf_ring_attn.testing import relative_error
from tests.gpu.verdict import told
from tests.helpers.jobs.hybrid_jobs import HYBRIDS
from tests.helpers.jobs.plain_jobs import Answer, Batch, Step, by_itself, in_a_ring, packed, padded, ready, tokens
from tests.helpers.models.tiny_models import MODELS, OF_WHOLE_ROWS, ON_WHOLE_DOCUMENTS

DOCUMENTS = (5, 20, 3, 30, 9)
BATCHES: dict[str, Batch] = {"whole": tokens(67), "padded": padded(67, right=20), "packed": packed(*DOCUMENTS)}
BY_DOCUMENT = (*HYBRIDS, *ON_WHOLE_DOCUMENTS, "gpt_oss", "afmoe", "bert")
"""Their packed rows are compared with each document alone, since transformers' own code mixes the documents."""
NEEDS_A_MASK = {"longrope in each layer"} if Version(transformers.__version__) < Version("5.24") else set[str]()
"""Moshi's layers get no mask without one then, and are refused."""
BOUND, FLOOR = 5e-5, 0.05
"""Relative; a parameter's gradient counts for at least this share of the gradient of all, as in the sweep."""


def steps(device: torch.device) -> list[Step]:
    return [
        Step(
            why=why, model=name, batch={n: x.to(device) for n, x in batch.items()}, dtype=torch.float32,
            device=str(device),
        )
        for name in MODELS if name not in OF_WHOLE_ROWS
        for why, batch in BATCHES.items()
        if (why != "packed" or name not in BY_DOCUMENT) and (why == "padded" or name not in NEEDS_A_MASK)
    ]  # fmt: skip


def errors(got: Answer, want: Answer, real: torch.Tensor) -> dict[str, float]:
    """Relative errors of the loss, of the logits of real tokens, and the largest of a parameter's gradient."""
    found = {"loss": relative_error(got.loss, want.loss), "logits": relative_error(got.logits[real], want.logits[real])}
    for kind in ("gradients", "exact"):
        mine, theirs = getattr(got, kind), getattr(want, kind)
        # Towers may have weights without a gradient, which a ring gives zeros.
        assert all(name in theirs or not gradient.any() for name, gradient in mine.items())
        floor = FLOOR * float(torch.stack([x.norm() for x in theirs.values()]).norm())
        found[kind] = max(float((mine[n] - x).norm()) / max(float(x.norm()), floor) for n, x in theirs.items())
    return found


def by_document(name: str, device: torch.device) -> float:
    """The relative error of the logits of a packed row."""
    step = Step(why="", model=name, dtype=torch.float32, device=str(device))
    batch = {n: x.to(device) for n, x in packed(*DOCUMENTS).items() if n != "labels"}
    with torch.no_grad():
        sharded = hf_ring_attn.shard(batch)
        with sharded:
            got = sharded.gather(ready(step, "ring_fp32")(**sharded.inputs).logits)
        parts = batch["input_ids"].split(DOCUMENTS, 1)
        model = ready(step, None)
        want = torch.cat([model(input_ids=part, use_cache=False).logits for part in parts], 1)
    return relative_error(got, want)


def by_a_tower(step: Step, device: torch.device) -> dict[str, float]:
    """`errors` of a model whose tower draws on the GPU, against one process seeded as the ring was."""
    batch = {n: x.to(device, torch.float32 if x.is_floating_point() else None) for n, x in step.batch.items()}
    step = replace(step, batch=batch, dtype=torch.float32, device=str(device))
    got, seeds = towers.in_a_ring(step)
    first = torch.tensor(seeds, device=device)
    dist.broadcast(first, 0)
    want = towers.by_itself(step, int(first[0]), int(first[3]))
    mask = step.batch.get("attention_mask", torch.ones_like(step.batch["input_ids"]))
    return errors(got, want, mask.bool())


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    wrong: list[str] = []
    with world(None, may_share=True) as (ring, device):
        cases = steps(device)
        for step in cases:
            if ring.rank == 0:
                sys.stderr.write(f"{step.model}, {step.why}\n")
            try:
                mask = step.batch.get("attention_mask", torch.ones_like(step.batch["input_ids"]))
                found = errors(in_a_ring(step), by_itself(step), mask.bool())
                far = {name: x for name, x in found.items() if not x <= BOUND}
            except hf_ring_attn.errors.RingAttentionError as error:
                far = {str(error): torch.inf}
            if far:
                wrong.append(f"{step.model}, {step.why}: {far}")
                sys.stderr.write(f"rank {ring.rank}: {wrong[-1]}\n")  # at once: a job may be stopped before its end
        for name in BY_DOCUMENT:
            apart = by_document(name, device)
            wrong += [f"{name}, packed: {apart:.1e}"] if not apart <= BOUND else []
        for step in towers.STEPS:
            far = {name: x for name, x in by_a_tower(step, device).items() if not x <= BOUND}
            wrong += [f"{step.model}, {step.why}: {far}"] if far else []
        failed = told(ring, wrong, f"{len(cases) + len(BY_DOCUMENT) + len(towers.STEPS)} cases")
    sys.exit(failed)


if __name__ == "__main__":
    main()
