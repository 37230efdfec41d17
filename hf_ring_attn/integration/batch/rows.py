"""Public methods of a sharded batch that reduce along its rows."""

from __future__ import annotations

from torch import Tensor

from ...layers.rows import cumsum_row, last_of_row, mean_row, sum_row
from ..context.batch_context import BatchContext
from ..losses.local_logits import held


class RowReductions:
    """Sums, means, last values and cumulative sums of whole rows, from each rank's tokens.

    Losses of whole sequences are made of these: preferences, rewards, pooled embeddings. All ranks of the ring call the
    same methods in the same order. ``x`` [B, T, ...] has this rank's tokens, such as log-probabilities. A token counts
    where ``mask`` [B, T], of any dtype, is not 0. The ring's own padding never counts. Shift a mask of next tokens
    on the whole row, before it is sharded: a token's next one may be on another rank.

    The results are differentiable once. If every rank computes the same loss from them, DDP, FSDP and
    `Sharded.reduce_gradients` give the gradient of one process.

    Raises:
        BadShape: x is not [B, T, ...], or mask is not [B, T].
        BadOption: their dtype is complex.
    """

    context: BatchContext

    def row_sum(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, ...]: ``x.sum(1)`` of whole rows, the same on every rank; of tokens that ``mask`` counts, if given.

        Floats are summed in float32 (float64 for float64) and rounded once to x's dtype; integers and bools in int64.
        A row without counted tokens gives 0. B numbers travel, not B x S.
        """
        return sum_row(held(x), self.context.ring, self.context.layout, held(mask))

    def row_mean(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, ...]: the mean over whole rows, the same on every rank; of tokens that ``mask`` counts, if given.

        In x's dtype, which is floating point, summed as in `row_sum`. A row without counted tokens gives 0.
        """
        return mean_row(held(x), self.context.ring, self.context.layout, held(mask))

    def last_token(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, ...]: the value at each row's last token, the same on every rank; at the last that ``mask`` counts.

        ``sharded.inputs["attention_mask"]`` is a mask of real tokens. The bits are those of x. A row without counted
        tokens gives its first token's value, as transformers' classification heads do.
        """
        return last_of_row(held(x), self.context.ring, self.context.layout, held(mask))

    def row_cumsum(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, T, ...]: this rank's tokens of ``x.cumsum(1)`` of whole rows, in the order of the row.

        In the dtypes of `row_sum`. Tokens that ``mask`` does not count add 0.
        """
        return cumsum_row(held(x), self.context.ring, self.context.layout, held(mask))
