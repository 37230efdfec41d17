"""What all errors have in common."""

from __future__ import annotations


class RingAttentionError(Exception):
    """Base of all errors of this package."""


class Refused(RingAttentionError, ValueError):
    """Something this package cannot do exactly. Raised before the first training step, with what to do instead."""
