"""The dtypes that a ring takes, and the one in which it adds up."""

from __future__ import annotations

import torch

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tokens and ranks are added up: int64, float64 for float64, float32 for other floats."""
    if not dtype.is_floating_point:
        return torch.int64
    return torch.float64 if dtype == torch.float64 else torch.float32
