"""One attention call of a ring, as one value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from ..comm.ring import Ring
from ..config import RingConfig
from ..kernels import Params
from ..sharding.plan import Plan
from ..traffic import Traffic, traffic_of


@dataclass(frozen=True)
class RingOptions:
    """The way in which a ring computes a call; the same on every rank. None changes the answer beyond summation order.

    Args:
        kernel: the name of the kernel that was chosen for the inputs.
        backward, traffic: as in `RingConfig`.
        heads_per_gather: as in `RingConfig`; 0 chooses by size.
    """

    kernel: str
    backward: str = "ring"
    heads_per_gather: int = 0
    traffic: str = "auto"

    @classmethod
    def of(cls, config: RingConfig, kernel: str) -> RingOptions:
        return cls(kernel, config.backward, config.heads_per_gather or 0, config.traffic)


@dataclass(frozen=True, eq=False)
class Call:
    """Attention of this rank's tokens under a plan.

    Args:
        q: [B, T, H, D]; k: [B, T, G, D]; v: [B, T, G, Dv]; T is the same on every rank.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    plan: Plan
    params: Params
    options: RingOptions

    def transport(self) -> Traffic:
        """The transport of the ring; may be a collective, as `traffic_of`."""
        return traffic_of(Ring(self.plan.ring), self.q.device, self.options.traffic)

    def query_heads(self, heads: slice) -> slice:
        """The query heads that read these key heads."""
        per_key_head = self.q.shape[2] // self.k.shape[2]
        return slice(heads.start * per_key_head, heads.stop * per_key_head)

    def of_heads(self, heads: slice) -> Call:
        """The same call for some key heads and the query heads that read them."""
        mine = self.query_heads(heads)
        return replace(
            self, q=self.q[:, :, mine], k=self.k[:, :, heads], v=self.v[:, :, heads], params=self.params.of_heads(mine)
        )


def with_scale_above_zero(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Returns queries and a scale above 0 that give the same scores.

    Kernels need such a scale: they find the largest score by the largest product, and hide a score as a product of
    -inf.
    """
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale else (q * 0, 1.0)


class Results(NamedTuple):
    """The results of a call's forward, and the gradient of the first: out, dout [B, T, H, Dv]; lse [B, H, T]."""

    out: Tensor
    lse: Tensor
    dout: Tensor

    def of_heads(self, mine: slice) -> Results:
        """Those of some query heads."""
        return Results(self.out[:, :, mine], self.lse[:, mine], self.dout[:, :, mine])
