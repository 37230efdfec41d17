"""References for tests and benchmarks: inputs of a case, and distances. Imports only the package's errors."""

from .cases import BIDIRECTIONAL, CAUSAL, PADDING, Band, Case, Inputs, Row, inputs, packed, sliding
from .compare import mismatch, relative_error

__all__ = [
    "BIDIRECTIONAL", "CAUSAL", "PADDING", "Band", "Case", "Inputs", "Row", "inputs", "mismatch", "packed",
    "relative_error", "sliding",
]  # fmt: skip
