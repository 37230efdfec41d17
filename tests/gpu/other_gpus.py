"""Block sizes of GPUs that are not at hand, for test_triton_on_gpu.py: python -m tests.gpu.other_gpus ampere

A Hopper GPU runs every row of a family as that family would (recipes/like_gpu.py), those of "other" as itself.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import torch

from hf_ring_attn.kernels.triton.blocks import NARROWER_VALUES, TABLE, Row
from hf_ring_attn.testing import Case, inputs, relative_error
from recipes.like_gpu import compile_like
from tests.helpers.kernel_answers import computed_in_float64, on, table_of
from tests.helpers.rank_functions import poisoned_memory
from tests.helpers.triton_rows import computed_with

LIKE = {"ampere": 80, "ada": 89}
CASE = Case(why="grouped", length=300, heads=2, kv_heads=1, head_dim=128, value_dim=128, seed=50)


def error(row: Row, dtype: torch.dtype, width: int) -> float:
    """The largest relative error of what a row's launches give, against the reference in float64."""
    case = replace(CASE, head_dim=width, value_dim=NARROWER_VALUES.get(width, width))
    x, table = on("cuda", inputs(case, dtype)), table_of(case)
    got = computed_with(row, case, x, table)
    want = computed_in_float64(case, x, table, got["out"])
    return max(relative_error(got[name], want[name]) for name in want)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=[*LIKE, "other"])
    family = parser.parse_args().family
    if family in LIKE:
        compile_like(LIKE[family])
    rows = {key: row for key, row in TABLE.items() if key[0] == family}
    wrong = 0
    for (_, element_bytes, width), row in rows.items():
        dtype = torch.bfloat16 if element_bytes == 2 else torch.float32
        bound = 4e-6 if element_bytes == 4 else torch.finfo(dtype).eps / 2
        with poisoned_memory():
            found = error(row, dtype, width)
        wrong += not found < bound
        sys.stdout.write(f"{dtype}, heads {width} wide: {found:.1e}\n")
    sys.stdout.write(f"{len(rows)} rows of {family}, {wrong} wrong\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
