"""Kinds of fine-tuning by Trainer in a ring against one process: quantized weights, optimizers, 16 bits, offload."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.jobs import kinds_jobs
from tests.helpers.jobs.comparison import LOSS, Ranks
from tests.helpers.jobs.kinds_jobs import LORA, NF4, Kind, Trained
from tests.helpers.jobs.runs import Mesh
from tests.helpers.models.tiny_models import tiny

UPDATE = 1e-4
"""Relative bound of how far all steps moved the weights, together; 3e-6 to 7e-6 are found."""
ADAM = {"optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-4, "weight_decay": 0.1}
INT8 = {"load_in_8bit": True, "llm_int8_threshold": 0.0}
BITSANDBYTES = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


def quantized(kind: Kind) -> object:
    return pytest.param(kind, marks=BITSANDBYTES)


KINDS = [
    Kind(why="AdamW", arguments=ADAM),
    Kind(why="rsLoRA and DoRA, with AdamW", arguments=ADAM, lora={**LORA, "use_rslora": True, "use_dora": True}),
    Kind(why="Adafactor", arguments={"optim": "adafactor", "learning_rate": 1e-3}),
    quantized(Kind(why="AdamW in 8 bits", arguments={**ADAM, "optim": "adamw_bnb_8bit"})),
    quantized(Kind(why="paged AdamW", arguments={**ADAM, "optim": "paged_adamw_32bit"})),
    quantized(Kind(why="paged AdamW in 8 bits, LoRA", lora=LORA, arguments={**ADAM, "optim": "paged_adamw_8bit"})),
    quantized(Kind(why="QLoRA in NF4", lora=LORA, quantized=NF4, arguments=ADAM)),
    quantized(Kind(why="LoRA on 8 bits", lora=LORA, quantized=INT8, arguments=ADAM)),
    Kind(why="FSDP2", fsdp={}, arguments=ADAM),
    Kind(why="FSDP2, LoRA", fsdp={}, lora=LORA, arguments=ADAM),
    Kind(why="FSDP2, parameters and optimizer on the host", fsdp={"cpu_offload": True}, arguments=ADAM),
    quantized(
        Kind(
            why="QLoRA under FSDP2", fsdp={}, lora=LORA, arguments=ADAM,
            quantized={**NF4, "bnb_4bit_quant_storage": torch.float32},
        )
    ),
    Kind(why="bf16", half=True, arguments={"bf16": True}),
]  # fmt: skip


@cache
def alone(ranks: Ranks, kind: Kind) -> Trained:
    found: Trained = ranks(1).run(kinds_jobs.trained, kind, Mesh())[0]
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.why)
@pytest.mark.turns
def test_a_kind_of_fine_tuning_is_that_of_one_process(ranks: Ranks, kind: Kind) -> None:
    want = alone(ranks, kind)
    moved = distance(want.after, want.before)
    assert moved > 0 and want.losses[0] != want.losses[2]
    for got in ranks(2).run(kinds_jobs.trained, kind, Mesh(cp=2)):
        assert got.losses == pytest.approx(want.losses, rel=1e-3 if kind.half else LOSS)
        assert got.norms == pytest.approx(want.norms, rel=1e-2 if kind.half else 10 * LOSS)
        assert got.after.keys() == want.after.keys()
        assert distance(got.after, want.after) < (2e-2 if kind.half else UPDATE) * moved


MOVES = {"FULL_STATE_DICT": LORA, "SHARDED_STATE_DICT": None}


@pytest.mark.parametrize("form", MOVES)
@pytest.mark.turns
def test_fsdp2_resumes_at_another_ring_size(ranks: Ranks, tmp_path: Path, form: str) -> None:
    """Under FSDP2 again, since Trainer refuses its checkpoints elsewhere."""
    kind = Kind(
        why="FSDP2, saved", lora=MOVES[form], fsdp={"state_dict_type": form},
        arguments={**ADAM, "save_strategy": "steps", "save_steps": 2},
    )  # fmt: skip
    want = ranks(2).run(kinds_jobs.trained, kind, Mesh(cp=2), str(tmp_path / "first"))[0]
    checkpoint = str(tmp_path / "first" / "checkpoint-2")
    for got in ranks(4).run(kinds_jobs.trained, kind, Mesh(cp=4), str(tmp_path / "second"), checkpoint):
        assert got.losses == pytest.approx(want.losses, rel=LOSS)
        assert distance(got.after, want.after) < UPDATE * distance(want.after, want.before)


REFUSED = [
    ({"load_in_8bit": True}, r"its 8-bit layers \(LLM.int8\) .*llm_int8_threshold=0.0"),
    (NF4, "packs its 4-bit weights .*support_avx512bf16_for_cpu=False"),
]


@BITSANDBYTES
@pytest.mark.parametrize(("how", "text"), REFUSED, ids=["LLM.int8", "4 bits on a CPU that packs them"])
def test_weights_that_depend_on_other_tokens_are_refused(ranks: Ranks, how: dict[str, Any], text: str) -> None:
    for said in ranks(2).run(kinds_jobs.refused, how):
        assert re.match(f"UnsupportedModel: LlamaForCausalLM cannot be trained in a ring exactly: .*{text}", said), said


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


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The norm of the difference of all weights together."""
    return float(torch.stack([(one[name] - x).norm() for name, x in other.items()]).norm())
