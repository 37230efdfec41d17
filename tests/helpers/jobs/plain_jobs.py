"""What ranks run without a Trainer: loops that shard a batch, run a model in the ring and combine the gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hf_ring_attn
from hf_ring_attn import RingConfig, errors
from hf_ring_attn.integration import log
from tests.helpers.jobs.balanced_jobs import chunks_forced
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.trainer_jobs import launched
from tests.helpers.models.tiny_models import VOCABULARY, tiny

Batch = dict[str, Tensor]
CHECKPOINTING: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "recomputed": {"use_reentrant": False},
}


def tokens(length: int, rows: int = 2, seed: int = 1) -> Batch:
    """Random tokens; the first nine of the first row have no labels."""
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :9] = -100
    return {"input_ids": ids, "labels": labels}


def padded(length: int, left: int = 0, right: int = 0) -> Batch:
    """The first row is padded on the left, the second on the right; padding has no labels."""
    batch = tokens(length)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :left], mask[1, length - right :] = 0, 0
    return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def packed(*documents: int) -> Batch:
    """Rows of documents one after the other, told by position_ids."""
    positions = torch.cat([torch.arange(n) for n in documents])
    return {**tokens(sum(documents)), "position_ids": positions.expand(2, -1)}


@dataclass(frozen=True, eq=False, kw_only=True)
class Step:
    """One forward and backward of a model of `tiny_models`.

    ``exact``: relative bound of what is computed in ``dtype`` throughout. ``chunks``: how many a rank holds, where that
    is forced; 0 for the zigzag.
    """

    why: str
    model: str = "llama"
    config: dict[str, Any] = field(default_factory=dict)
    batch: Batch = field(default_factory=lambda: tokens(23))
    ring: RingConfig = RingConfig()
    checkpointing: str = ""
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    exact: float = 1e-11
    chunks: int = 0


@dataclass
class Answer:
    """The loss of the whole batch, logits [B, S, V] in order, and gradients by parameter.

    ``exact``: gradients of `own_loss`, which stays in float64, unlike transformers' loss.
    """

    loss: Tensor
    logits: Tensor
    gradients: dict[str, Tensor]
    exact: dict[str, Tensor]


def own_loss(logits: Tensor, batch: Batch) -> Tensor:
    """A loss of whole rows that weighs every place differently; padding does not count."""
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    weights = torch.linspace(-1, 1, logits[0].numel(), dtype=logits.dtype, device=logits.device).sin()
    return (logits.tanh() * weights.view(logits.shape[1:]) * mask[..., None]).sum()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def ready(step: Step, attention: str | None) -> Any:
    model: Any = tiny(step.model, attention, **step.config)
    model.to(step.device, step.dtype)
    if step.checkpointing:
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING[step.checkpointing])
    return model


def by_itself(step: Step) -> Answer:
    """By transformers' own attention, in this process alone."""
    model = ready(step, None)
    out = model(**step.batch, use_cache=False)
    out.loss.backward(retain_graph=True)
    gradients = gradients_of(model)
    own_loss(out.logits, step.batch).backward()
    return Answer(out.loss.detach(), out.logits.detach(), gradients, gradients_of(model))


def in_a_ring(step: Step) -> Answer:
    """The same with the batch shared by all ranks; backward comes after the context was left."""
    model = ready(step, "ring_fp32")
    before = {name: x.clone() for name, x in step.batch.items()}
    with chunks_forced(step.chunks):
        layout = "balanced" if step.chunks else step.ring.layout
        sharded = hf_ring_attn.shard(step.batch, config=replace(step.ring, layout=layout))
    assert sharded.ring.size == 1 or sharded.layout.chunks == (step.chunks or 2)
    assert bool(sharded.layout.owners) == bool(step.chunks and sharded.ring.size > 1)
    assert all(torch.equal(x, before[name]) for name, x in step.batch.items()), "shard() changed the batch"
    with sharded:
        out = model(**sharded.inputs)
    out.loss.backward()
    sharded.reduce_gradients(model)
    gradients = gradients_of(model)
    with sharded:  # once more, since a checkpointed graph is walked once
        logits = sharded.gather(model(**sharded.inputs).logits)
    own_loss(logits, step.batch).backward()
    sharded.reduce_gradients(model)
    return Answer(sharded.reduce(out.loss), logits.detach(), gradients, gradients_of(model))


# ---- several things at once ----------------------------------------------------------------------------------------


def two_batches_alive(first: Batch, second: Batch, name: str = "llama") -> list[dict[str, Tensor]]:
    """Two batches of different lengths are sharded and run before the first backward, checkpointed; backward mixes."""
    model = ready(Step(why="", model=name, checkpointing="recomputed"), "ring_fp32")
    alive = []
    for batch in (first, second):
        sharded = hf_ring_attn.shard(batch)
        with sharded:
            alive.append((sharded, model(**sharded.inputs).loss))
    found = []
    for sharded, loss in reversed(alive):
        loss.backward()
        sharded.reduce_gradients(model)
        found.append(gradients_of(model))
    return found[::-1]


def rings_of_two(batches: list[Batch]) -> Tensor:
    """Ranks (0, 1) share the first batch and (2, 3) the second: the ring is a group of the caller's own."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    model = ready(Step(why=""), "ring_fp32")
    sharded = hf_ring_attn.shard(batches[mine], groups[mine])
    with sharded:
        loss = model(**sharded.inputs).loss
    return sharded.reduce(loss)


class OneUnused(nn.Module):
    """A weight that only one rank's tokens reach, as an expert's may be."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))


def gradients_that_ranks_lack(batch: Batch) -> dict[str, Tensor | None]:
    """Only rank 1 has a gradient of `used`; the others take part in the average all the same."""
    module = OneUnused()
    if dist.get_rank() == 1:
        module.used.grad = torch.full((3,), 6.0, dtype=torch.float64)
    with hf_ring_attn.shard(batch) as sharded:
        sharded.reduce_gradients(module)
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def functional(batch: Batch) -> dict[str, Tensor]:
    """Gradients of a `functional_call` with weights that were computed, averaged by hand."""
    model = ready(Step(why=""), "ring_fp32").train()
    given = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    sharded = hf_ring_attn.shard(batch)
    with sharded:
        computed = {name: 1 * x for name, x in given.items()}
        loss = torch.func.functional_call(model, computed, (), dict(sharded.inputs)).loss
    found = torch.autograd.grad(loss, list(given.values()))
    return dict(zip(given, sharded.ring.means(found), strict=True))


def evaluated(batch: Batch, guard: Callable[[], Any]) -> tuple[Tensor, Tensor]:
    """The loss and the logits of an evaluation before any training, under ``guard``."""
    model = ready(Step(why=""), "ring_fp32").eval()
    with guard():
        sharded = hf_ring_attn.shard(batch)
        with sharded:
            out = model(**sharded.inputs)
        loss, logits = sharded.reduce(out.loss), sharded.gather(out.logits)
    return loss.clone(), logits.clone()


def compiled(batches: list[Batch], ring: RingConfig | None = None) -> list[Answer]:
    """torch.compile of the whole model: what it keeps of one batch must not reach the next, of other documents."""
    model = ready(Step(why=""), "ring_fp32")
    torch._dynamo.reset()
    fast: Any = torch.compile(model, backend="eager")
    answers = []
    for batch in batches:
        sharded = hf_ring_attn.shard(batch, model=fast, config=ring)
        with sharded:
            out = fast(**sharded.inputs)
        out.loss.backward()
        sharded.reduce_gradients(model)
        logits = sharded.gather(out.logits).detach()
        answers.append(Answer(sharded.reduce(out.loss), logits, gradients_of(model), {}))
    return answers


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shards:
    """A mesh for `fully_shard`: accelerate's sizes, and the axes over which parameters are sharded."""

    sizes: dict[str, int]
    axes: tuple[str, ...]
    world: int

    def __str__(self) -> str:
        return " x ".join(f"{name.removesuffix('_size')}{n}" for name, n in self.sizes.items())


def fsdp2(
    shards: Shards, batches: list[Batch], checkpointing: str, steps: int = 2, name: str = "llama",
    dtype: torch.dtype = torch.float64,
) -> tuple[list[Tensor], Any]:  # fmt: skip
    """Loss of each step, and the parameters after them, whole. Replica i of a ring trains on ``batches[i]``."""
    step = Step(why="", model=name, checkpointing=checkpointing, dtype=dtype)
    with launched(Mesh(cp=2)):  # the launch config of a ring; the sizes here go before it
        accelerator = Accelerator(parallelism_config=ParallelismConfig(**shards.sizes))
        model = ready(step, "ring_fp32")
        hf_ring_attn.integration.hosts.accelerate.decide_by_models(accelerator, model)
        mesh = accelerator.torch_device_mesh[shards.axes]
        for part in reversed(list(model.modules())):  # as accelerate wraps: mixers of Mamba by themselves, too
            if type(part).__name__ in model._no_split_modules:
                fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(steps):
            sharded = hf_ring_attn.shard(batches[dist.get_rank() // shards.sizes["cp_size"]])
            with sharded:
                loss = model(**sharded.inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(sharded.reduce(loss))
        whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
        return losses, whole


def without_fsdp(
    batches: list[Batch], steps: int = 2, name: str = "llama", dtype: torch.dtype = torch.float64
) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """The same in one process: the mean of the batches' losses. Returns each batch's losses, and the parameters."""
    model = ready(Step(why="", model=name, dtype=dtype), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[list[Tensor]] = [[] for _ in batches]
    for _ in range(steps):
        for seen, batch in zip(losses, batches, strict=True):
            loss = model(**batch, use_cache=False).loss
            (loss / len(batches)).backward()
            seen.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.named_parameters())


# ---- what a plain loop is told ---------------------------------------------------------------------------------------


def attempt(function: Callable[..., Any], *args: Any) -> tuple[str, str] | None:
    """What ``function`` raised on this rank, as its class's name and its text; None if it raised nothing."""
    try:
        function(*args)
    except errors.RingAttentionError as error:
        return type(error).__name__, str(error)
    return None


def told(function: Callable[..., Any], *args: Any, **named: Any) -> list[str]:
    """What the package warned of on this rank meanwhile."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    log.logger.addHandler(handler)
    log.logger.setLevel(logging.NOTSET)  # an earlier test's program may have silenced the logs of this process
    logging.disable(logging.NOTSET)
    log._said.clear()
    try:
        function(*args, **named)
    finally:
        log.logger.removeHandler(handler)
    return texts


def bare_loop(reduce: str) -> None:
    """Two optimizer steps of two micro-batches; gradients are reduced "each" time, once a "step", or "never"."""
    model = ready(Step(why=""), "ring_fp32").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn in range(5):
        sharded = hf_ring_attn.shard(tokens(23, seed=turn))
        with sharded:
            loss = model(**sharded.inputs).loss
        loss.backward()
        step = turn % 2 == 1
        if reduce == "each" or (reduce == "step" and step):
            sharded.reduce_gradients(model)
        if step:
            optimizer.step()
            optimizer.zero_grad()
