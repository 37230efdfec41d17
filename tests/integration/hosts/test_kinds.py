"""Kinds of fine-tuning by Trainer in a ring against one process: quantized weights, optimizers, 16 bits, offload."""

from __future__ import annotations

import re
from functools import cache
from math import isnan
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from hf_ring_attn.integration.gradients import fsdp
from hf_ring_attn.layers.host_memory import host_memory
from tests.helpers.jobs import kinds_jobs
from tests.helpers.jobs.comparison import LOSS, Ranks
from tests.helpers.jobs.kinds_jobs import ADAM, INT8, KINDS, LORA, NF4, TORCHAO, Kind, Trained, distance
from tests.helpers.jobs.runs import Mesh
from tests.helpers.models.tiny_models import tiny

UPDATE = 1e-4
"""Relative bound of how far all steps moved the weights, together; 3e-6 to 7e-6 are found."""


def needed(kind: Kind) -> Any:
    uses_it = kind.quantized is not None or "bit" in kind.arguments.get("optim", "")
    return pytest.param(kind, marks=pytest.mark.qlora, id=kind.why) if uses_it else pytest.param(kind, id=kind.why)


@cache
def alone(ranks: Ranks, kind: Kind) -> Trained:
    found: Trained = ranks(1).run(kinds_jobs.trained, kind, Mesh())[0]
    return found


@pytest.mark.parametrize("kind", [needed(kind) for kind in KINDS])
@pytest.mark.turns
def test_a_kind_of_fine_tuning_is_that_of_one_process(ranks: Ranks, kind: Kind) -> None:
    want = alone(ranks, kind)
    moved = distance(want.after, want.before)
    assert moved > 0 and want.losses[0] != want.losses[2]
    assert not kind.scaled or (isnan(want.norms[0]) and want.scale == 2.0**11), "no overflow, or more than one"
    for got in ranks(2).run(kinds_jobs.trained, kind, Mesh(cp=2)):
        assert got.losses == pytest.approx(want.losses, rel=1e-3 if kind.half else LOSS)
        assert got.norms == pytest.approx(want.norms, rel=1e-2 if kind.half else 10 * LOSS, nan_ok=kind.scaled)
        assert got.scale == want.scale and got.after.keys() == want.after.keys()
        assert distance(got.after, want.after) < (2e-2 if kind.half else UPDATE) * moved


def trained_and_offloaded(kind: Kind) -> tuple[Trained, int]:
    """A run in a ring, and the number of tensors that went to host memory in it."""
    memory = host_memory(torch.device("cpu"))
    before = memory.stored
    return kinds_jobs.trained(kind, Mesh(cp=2)), memory.stored - before


STEPS, OF_THE_CHECK, LAYERS = 3, 2, 2
WRAPPER = "_checkpoint_wrapped_module."
CHECKPOINTED: dict[str, Any] = {"activation_checkpointing": True}
OFFLOADED = {**CHECKPOINTED, "activation_checkpointing_offload": True}
PLUGINS = [
    (Kind(why="checkpointing", fsdp=CHECKPOINTED, arguments=ADAM), 0),
    (Kind(why="checkpointing, LoRA", fsdp=CHECKPOINTED, arguments=ADAM, lora=LORA), 0),
    (Kind(why="offload, LoRA", fsdp=OFFLOADED, arguments=ADAM, lora=LORA), (STEPS + OF_THE_CHECK) * LAYERS),
]


@pytest.mark.parametrize(("kind", "offloaded"), PLUGINS, ids=lambda x: x.why if isinstance(x, Kind) else "")
@pytest.mark.turns
def test_fsdps_checkpointing_trains_as_one_process_does(ranks: Ranks, kind: Kind, offloaded: int) -> None:
    """The setting of a launch config, ``fsdp_activation_checkpointing``, which accelerate applies in `prepare`."""
    want = alone(ranks, kind)
    moved = distance(want.after, want.before)
    for got, count in ranks(2).run(trained_and_offloaded, kind):
        assert {name.partition(WRAPPER)[0] for name in got.after if WRAPPER in name} >= layers_in(want), "not wrapped"
        assert got.losses == pytest.approx(want.losses, rel=LOSS)
        assert got.norms == pytest.approx(want.norms, rel=10 * LOSS)
        after = without_wrapper(got.after)
        assert after.keys() == want.after.keys() and distance(after, want.after) < UPDATE * moved
        assert count == offloaded


def without_wrapper(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights by the names that they have before `prepare`."""
    return {name.replace(WRAPPER, ""): x for name, x in weights.items()}


def layers_in(found: Trained) -> set[str]:
    """The beginnings of the names of decoder layers' weights."""
    return {match[0] for name in found.after if (match := re.match(r".*[.]layers[.][0-9]+[.]", name))}


IN_SHARDS = {"state_dict_type": "SHARDED_STATE_DICT"}


def check_resumed(ranks: Ranks, kind: Kind, folder: Path, first: int, second: int) -> None:
    """A run in a ring of the first size, and one of the second that goes on from its checkpoint, must end alike."""
    want = ranks(first).run(kinds_jobs.trained, kind, Mesh(cp=first), str(folder / "first"))[0]
    checkpoint = str(folder / "first" / "checkpoint-2")
    for got in ranks(second).run(kinds_jobs.trained, kind, Mesh(cp=second), str(folder / "second"), checkpoint):
        assert got.losses == pytest.approx(want.losses, rel=LOSS)
        moved = distance(without_wrapper(want.after), want.before)
        assert distance(got.after, want.after) < UPDATE * moved
    if kind.lora is not None and kind.fsdp is not IN_SHARDS:  # which have no file of the adapter
        check_adapter(
            folder / "second" / "checkpoint-3" / "adapter_model.safetensors", without_wrapper(want.after), moved
        )


def check_adapter(file: Path, weights: dict[str, torch.Tensor], moved: float) -> None:
    """A file of an adapter must hold all of its weights."""
    saved = load_file(file)
    want = {name.replace(".default.", "."): x for name, x in weights.items() if ".lora_" in name}
    assert saved.keys() == want.keys() and distance(saved, want) < UPDATE * moved


SAVED = {**ADAM, "save_strategy": "steps", "save_steps": 2}
MOVES = {
    "all in one file, LoRA": ({"state_dict_type": "FULL_STATE_DICT"}, LORA),
    "in shards": ({"state_dict_type": "SHARDED_STATE_DICT"}, None),
    "all in one file, FSDP2's checkpointing, LoRA": ({"state_dict_type": "FULL_STATE_DICT", **CHECKPOINTED}, LORA),
    "all in one file, FSDP2's checkpointing": ({"state_dict_type": "FULL_STATE_DICT", **CHECKPOINTED}, None),
    "in shards, FSDP2's checkpointing": ({"state_dict_type": "SHARDED_STATE_DICT", **CHECKPOINTED}, None),
}


@pytest.mark.parametrize("form", MOVES)
@pytest.mark.turns
def test_fsdp2_resumes_at_another_ring_size(ranks: Ranks, tmp_path: Path, form: str) -> None:
    """Under FSDP2 again, since Trainer refuses its checkpoints elsewhere."""
    fsdp, lora = MOVES[form]
    check_resumed(ranks, Kind(why="FSDP2, saved", lora=lora, fsdp=fsdp, arguments=SAVED), tmp_path, 2, 4)


WITH_BITS = {
    "QLoRA, paged AdamW in 8 bits": (
        Kind(why="", lora=LORA, quantized=NF4, arguments={**SAVED, "optim": "paged_adamw_8bit"}), 1, 2,
    ),
    "torchao": (Kind(why="", arguments={**SAVED, "optim": TORCHAO}), 1, 2),
    "torchao, in shards": (Kind(why="", fsdp=IN_SHARDS, arguments={**SAVED, "optim": TORCHAO}), 2, 2),
    "torchao, LoRA in shards": (
        Kind(why="", fsdp=IN_SHARDS, lora=LORA, arguments={**SAVED, "optim": TORCHAO}), 2, 4,
    ),
}  # fmt: skip
"""Kinds, and the sizes of the ring that saves and of the one that goes on. Under FSDP2 torchao's states resume from
shards alone (a warning tells of it), and on other shards if these are whole blocks: those of all weights are not."""


@pytest.mark.qlora
@pytest.mark.parametrize("name", WITH_BITS)
@pytest.mark.turns
def test_few_bits_resume_at_another_ring_size(ranks: Ranks, tmp_path: Path, name: str) -> None:
    check_resumed(ranks, WITH_BITS[name][0], tmp_path, *WITH_BITS[name][1:])


@pytest.mark.parametrize(("form", "warns"), [("FULL_STATE_DICT", True), ("SHARDED_STATE_DICT", False)])
def test_checkpoints_that_torch_would_not_load_are_told_before_the_first_step(form: str, warns: bool) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.__class__ = type("DTensor", (torch.nn.Parameter,), {})
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=SimpleNamespace(state_dict_type=form)))
    optimizer = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "torchao.optim.adam"})([weight])
    with mock.patch.object(fsdp, "warn") as said:
        fsdp.check_optimizer(accelerator, SimpleNamespace(optimizer=optimizer))
        fsdp.check_optimizer(accelerator, torch.optim.AdamW([weight]))
    assert said.call_count == warns


REFUSED = {
    "its 8-bit layers (LLM.int8) compute columns": Kind(why="", lora=LORA, quantized={"load_in_8bit": True}),
    "FSDP2 drops what bitsandbytes stores beside 8-bit weights": Kind(why="", fsdp={}, lora=LORA, quantized=INT8),
}
EXACTLY = "UnsupportedModel: LlamaForCausalLM cannot be trained in a ring exactly: "


@pytest.mark.qlora
@pytest.mark.parametrize("text", REFUSED)
def test_quantized_weights_are_refused_by_name(ranks: Ranks, text: str) -> None:
    for said in ranks(2).run(kinds_jobs.refused, REFUSED[text]):
        assert said.startswith(EXACTLY + text), said


@pytest.mark.qlora
@pytest.mark.parametrize("optimizer", ["adamw_bnb_8bit", "paged_adamw_32bit"])
def test_an_optimizer_of_bitsandbytes_is_refused_under_fsdp2(ranks: Ranks, optimizer: str) -> None:
    """Its first step fails, in a ring and without one. If no host failed any more, nothing should be refused."""
    kind = Kind(why="", fsdp={}, arguments={**ADAM, "optim": optimizer})
    for said in ranks(2).run(kinds_jobs.refused, kind):
        assert said.startswith("ShardedByFsdp: the optimizer AdamW of bitsandbytes"), said
    for said in ranks(2).run(kinds_jobs.failed_in_bitsandbytes, kind):
        assert said.startswith("Operator bitsandbytes.optimizer_update_"), said


@pytest.mark.qlora
def test_4_bits_are_refused_on_a_cpu_that_packs_them(ranks: Ranks) -> None:
    """The self-check is such an evaluation: the loss was 5.771 after it, not 5.781."""
    for said in ranks(2).run(kinds_jobs.refused_where_weights_are_packed):
        assert said.startswith(EXACTLY + "bitsandbytes packs its 4-bit weights"), said


@pytest.mark.parametrize("wrap", ["", "DDP", "FSDP2"])
def test_a_scaled_loss_in_float16(ranks: Ranks, wrap: str) -> None:
    """An overflow on one rank, in one row of one weight, is an overflow on all: they skip the step, and scale alike."""
    want = kinds_jobs.with_scaled_loss(False, "", 1)
    assert want.moved == [True, False, True, True] and want.scales == [256.0, 128.0, 128.0, 256.0]
    for got in ranks(2).run(kinds_jobs.with_scaled_loss, True, wrap, 1):
        assert (got.scales, got.moved) == (want.scales, want.moved)
        assert got.losses == pytest.approx(want.losses, rel=2e-3)
        weights = tiny("llama").state_dict()
        first = {name: weights[name] for name in want.after}
        assert distance(got.after, want.after) < 2e-2 * distance(want.after, first)
