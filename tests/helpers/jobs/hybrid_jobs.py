"""What ranks run of hybrids: loops, wrappers, and what must be refused."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.models.qwen3_5 import modeling_qwen3_5

import hf_ring_attn
from hf_ring_attn.integration.context import model_record
from hf_ring_attn.integration.model import admission
from hf_ring_attn.integration.patching import changes, modules
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs import compile_jobs
from tests.helpers.jobs.balanced_jobs import BALANCED, chunks_forced
from tests.helpers.jobs.plain_jobs import Batch, Step, attempt, gradients_of, packed, ready, tokens

FUNCTIONS = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")
HYBRIDS = ("qwen3_5", "lfm2", "granite", "mamba", "mamba2", "minimax", "zaya", "recurrent gemma")
"""In the last three each rank computes the layers that are not attention on whole documents."""


def made(model: str, attention: str | None = "ring_fp32") -> Any:
    return ready(Step(why="", model=model), attention)


def first_layer(model: str, ids: Tensor) -> Tensor:
    """[B, S, width] after the first layer, which is no attention, in this process alone."""
    with torch.no_grad():
        hidden: Tensor = made(model, None)(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[1]
    return hidden


def packed_rows(lengths: tuple[int, ...], chunks: int = 0) -> dict[str, Tensor]:
    """Logits [B, S, V] of packed rows, by model; ``chunks`` as in `Step`."""
    found = {}
    for name in HYBRIDS:
        ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
        batch = {n: x for n, x in packed(*lengths).items() if n != "labels"}
        with chunks_forced(chunks):
            sharded = hf_ring_attn.shard({**batch, "seq_idx": ids}, config=BALANCED if chunks else None)
        assert sharded.ring.size == 1 or sharded.layout.chunks == (chunks or 2)
        with sharded, torch.no_grad():
            found[name] = sharded.gather(made(name)(**sharded.inputs).logits)
    return found


def documents_alone(name: str, lengths: tuple[int, ...]) -> Tensor:
    """The same by transformers' own code, each document by itself."""
    model, ids = made(name, None), packed(*lengths)["input_ids"]
    with torch.no_grad():
        return torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.split(lengths, 1)], 1)


def ddp(name: str, batches: list[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of this rank's batch, and the gradients that DDP averages over all ranks; each batch has a ring of them.

    The second time, when DDP would wait for the gradients that it had the first time.
    """
    size = dist.get_world_size() // len(batches)
    rings = [dist.new_group(list(range(first, first + size))) for first in range(0, dist.get_world_size(), size)]
    mine = dist.get_rank() // size
    model = DistributedDataParallel(made(name))
    for _ in range(2):
        model.zero_grad()
        sharded = hf_ring_attn.shard(batches[mine], rings[mine])
        with sharded:
            loss = model(**sharded.inputs).loss
        loss.backward()
    return sharded.reduce(loss), gradients_of(model.module)


def under_autocast(batch: Batch) -> dict[str, float]:
    """How far logits and gradients in bfloat16 are from those of float32, over what one process has of it."""
    found = {}
    for name in HYBRIDS:
        with torch.autocast("cpu", torch.bfloat16):
            sharded = hf_ring_attn.shard(batch)
            model = made(name).float()
            with sharded:
                out = model(**sharded.inputs)
        out.loss.backward()
        sharded.reduce_gradients(model)
        alone = made(name, None).float()
        with torch.autocast("cpu", torch.bfloat16):
            want = alone(**batch, use_cache=False)
        want.loss.backward()
        got, expected = ({n: x.flatten() for n, x in gradients_of(one).items()} for one in (model, alone))
        found[name] = max(
            relative_error(sharded.gather(out.logits), want.logits),
            relative_error(torch.cat([got[n] for n in expected]), torch.cat(list(expected.values()))),
        )
    return found


def compiled(batches: list[Batch]) -> float:
    """How far a compiled model's losses and gradients are from those of the same model uncompiled."""
    case = compile_jobs.Compiled(why="", batches=batches, graphs=None, model="qwen3_5")
    return max(compile_jobs.compiled(case).away)


# ---- refusals --------------------------------------------------------------------------------------------------------


def with_a_cache(model: Any, inputs: dict[str, Any]) -> Any:
    return model(**{**inputs, "use_cache": True, "past_key_values": DynamicCache(config=model.config)})


def without_masks(model: Any, inputs: dict[str, Any]) -> Any:
    masks = {"full_attention": None, "linear_attention": None}
    return model(**{**inputs, "attention_mask": masks})


class Positional(nn.Module):
    """A reentrant checkpoint around a layer, which is given the mask as a tensor and detaches it for its recompute."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        def run(x: Tensor, mask: Tensor) -> Any:
            return self.layer(x, attention_mask=mask)

        return checkpoint(run, hidden_states, attention_mask, use_reentrant=True)


def checkpointed_by_position(model: Any, inputs: dict[str, Any]) -> None:
    model.model.layers[0].linear_attn = Positional(model.model.layers[0].linear_attn)
    model(**inputs).loss.backward()


def replaced_later(model: Any, inputs: dict[str, Any]) -> None:
    """Somebody's faster function takes the place of the one that was changed for the ring."""
    model(**inputs)
    original = modeling_qwen3_5.causal_conv1d_fn.__wrapped__
    with mock.patch.object(modeling_qwen3_5, "causal_conv1d_fn", original):
        model(**inputs)


def run(change: Any, batch: Batch) -> None:
    model = made("qwen3_5")
    sharded = hf_ring_attn.shard(batch, config=hf_ring_attn.RingConfig(self_check=False))
    with sharded:
        change(model, sharded.inputs)


def refusals() -> list[tuple[str, str]]:
    ids = torch.arange(24)[None].expand(2, -1) // 8
    return [
        attempt(run, with_a_cache, tokens(24)) or ("nothing", ""),
        attempt(run, without_masks, tokens(24)) or ("nothing", ""),
        attempt(run, checkpointed_by_position, tokens(24)) or ("nothing", ""),
        attempt(run, replaced_later, tokens(24)) or ("nothing", ""),
        attempt(run, None, {**tokens(24), "seq_idx": ids}) or ("nothing", ""),
    ]


def left_behind() -> tuple[bool, bool]:
    """Whether a use in a ring changes the functions of the model's file, and `uninstall` brings back the same ones."""
    hf_ring_attn.uninstall()
    hf_ring_attn.install()
    names = (*FUNCTIONS, "create_recurrent_attention_mask")
    before = [getattr(modeling_qwen3_5, name) for name in names]
    run(lambda model, inputs: model(**inputs), tokens(24))
    during = [getattr(modeling_qwen3_5, name) for name in names]
    hf_ring_attn.uninstall()
    after = [getattr(modeling_qwen3_5, name) for name in names]
    hf_ring_attn.install()
    dist.barrier()
    changed = all(a is not b for a, b in zip(before, during, strict=True))
    return changed, all(a is b for a, b in zip(before, after, strict=True))


def as_module(function: Any) -> nn.Module:
    """What the package kernels makes of a function that it may replace."""

    class Func(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [own, *inspect.signature(function).parameters.values()]
    Func.forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return Func()


def functions_as_modules(batch: Batch) -> list[Tensor]:
    """Logits of two models, one after the other, whose file's functions are modules."""
    hf_ring_attn.uninstall()
    hf_ring_attn.install()
    modules: dict[str, Any] = {name: as_module(getattr(modeling_qwen3_5, name)) for name in FUNCTIONS}
    found = []
    with mock.patch.multiple(modeling_qwen3_5, **modules):
        for _ in range(2):
            model = made("qwen3_5")
            sharded = hf_ring_attn.shard(batch)
            with sharded, torch.no_grad():
                found.append(sharded.gather(model(**sharded.inputs).logits))
        hf_ring_attn.uninstall()
    hf_ring_attn.install()
    return found


def a_copy() -> float:
    """How far logits of a copied model are from those of the model, after everything was uninstalled and installed."""
    model, batch = made("qwen3_5"), {"input_ids": tokens(24)["input_ids"]}
    answers = []
    for called in (model, copy.deepcopy(model), None):
        if called is None:
            called = copy.deepcopy(model)
            hf_ring_attn.uninstall()
            hf_ring_attn.install()
        sharded = hf_ring_attn.shard(batch, config=hf_ring_attn.RingConfig(self_check=False))
        with sharded, torch.no_grad():
            answers.append(sharded.gather(called(**sharded.inputs).logits))
    return max(relative_error(x, answers[0]) for x in answers)


def kept(count: int) -> tuple[int, list[int]]:
    """Of models that are made, used in a ring and dropped: how many live on, and the sizes of what is kept of them."""
    alive, batch = weakref.WeakSet[Any](), tokens(24)
    for _ in range(count):
        model = made("qwen3_5")
        alive.add(model)
        hf_ring_attn.configure(model, hf_ring_attn.RingConfig(self_check=False))
        sharded = hf_ring_attn.shard(batch, model=model)
        with sharded, torch.no_grad():
            model(**sharded.inputs)
    del model, sharded
    gc.collect()
    registries: tuple[Any, ...] = (
        changes._undos, modules._HOLDING, model_record._OPTIONS, model_record._RECORDS,
    )  # fmt: skip
    return len(alive), [len(registry) for registry in registries]


def bound() -> list[str]:
    """What was taken for an outermost model."""
    seen: list[str] = []
    bind = admission.bind

    def noted(model: nn.Module, context: Any) -> None:
        seen.append(type(model).__name__)
        bind(model, context)

    with mock.patch.object(admission, "bind", noted):
        run(lambda model, inputs: model(**inputs), tokens(24))
    return seen
