"""References for tests, doctor and benchmarks: one table of cases, a float64 oracle, and long-lived ranks.

Imports only the package's errors, so that the tested code and its reference share no mistake.
"""

from .cases import BIDIRECTIONAL, CASES, CAUSAL, PADDING, WORLD_SIZES, Band, Case, Inputs, Row, inputs, packed, sliding
from .compare import mismatch, relative_error
from .oracle import gradient_oracle, oracle, visible
from .ranks import LiveRanks

__all__ = [
    "BIDIRECTIONAL",
    "CASES",
    "CAUSAL",
    "PADDING",
    "WORLD_SIZES",
    "Band",
    "Case",
    "Inputs",
    "LiveRanks",
    "Row",
    "gradient_oracle",
    "inputs",
    "mismatch",
    "oracle",
    "packed",
    "relative_error",
    "sliding",
    "visible",
]
