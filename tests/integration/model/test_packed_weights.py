"""4-bit weights that FSDP2 gathers keep their bytes, with the copies of a GPU too."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.jobs import kinds_jobs, packed_jobs
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.kinds_jobs import LORA, NF4, Kind
from tests.helpers.jobs.runs import Mesh

HALF, FULL = torch.bfloat16, torch.float32
CASES = {
    "16-bit storage": (4096, HALF, HALF, True, False, True),
    "fp16": (4096, torch.float16, torch.float16, True, False, True),
    "alone in its group": (4096, HALF, HALF, False, False, True),
    "uneven shards": (4095, HALF, HALF, True, False, True),
    "shards on the host": (4096, HALF, HALF, True, True, True),
    "one shard": (4096, HALF, HALF, True, False, False),
    "float32 storage, computed in 16 bits": (4096, FULL, HALF, True, False, True),
    "float32": (4096, FULL, FULL, True, False, True),
}
"""Arguments of `packed_jobs.changed`."""
RIGHT_WITHOUT = {"one shard", "float32"}
"""Cases in which FSDP2 changes no byte by itself."""


@pytest.mark.parametrize("case", CASES)
def test_a_gathered_weight_has_the_bytes_of_its_shards(ranks: Ranks, case: str) -> None:
    assert ranks(2).run(packed_jobs.changed, *CASES[case], True) == [[0, 0]] * 2
    for changed in ranks(2).run(packed_jobs.changed, *CASES[case], False):
        assert changed[0] == changed[1] and (changed[0] == 0) == (case in RIGHT_WITHOUT)


def test_other_bytes_are_refused(ranks: Ranks) -> None:
    for said in ranks(2).run(packed_jobs.told_of_other_bytes):
        assert said.startswith("UnsupportedModel: Block ") and "FSDP2 gathers other 4-bit weights" in said, said


@pytest.mark.qlora
def test_qlora_in_16_bits_under_fsdp2_is_the_same_on_a_gpu(ranks: Ranks) -> None:
    """By itself FSDP2 trained other weights there: they moved by 20 % otherwise."""
    kind = Kind(
        why="", half=True, lora=LORA, fsdp={}, arguments={"bf16": True},
        quantized={**NF4, "bnb_4bit_compute_dtype": HALF, "bnb_4bit_quant_storage": HALF},
    )  # fmt: skip
    want = ranks(2).run(kinds_jobs.trained, kind, Mesh(cp=2))[0]
    alone = ranks(1).run(kinds_jobs.trained, kind, Mesh())[0]
    for got in ranks(2).run(packed_jobs.trained, kind, Mesh(cp=2)):
        assert got.losses == want.losses and all(torch.equal(got.after[name], x) for name, x in want.after.items())
        assert got.losses == pytest.approx(alone.losses, rel=4e-3)
    for got in ranks(2).run(packed_jobs.trained, kind, Mesh(cp=2), False):
        assert got.losses != want.losses
