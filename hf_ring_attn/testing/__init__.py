"""References for tests and benchmarks: inputs of a case, a float64 oracle, and distances.

Imports only the package's errors, so that the tested code and its reference share no mistake.
"""

from .cases import BIDIRECTIONAL, CAUSAL, PADDING, Band, Case, Inputs, Row, inputs, packed, sliding
from .compare import mismatch, relative_error
from .oracle import gradient_oracle, oracle, visible

__all__ = [
    "BIDIRECTIONAL",
    "CAUSAL",
    "PADDING",
    "Band",
    "Case",
    "Inputs",
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
