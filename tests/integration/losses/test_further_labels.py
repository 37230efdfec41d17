"""Labels of the token after the next one, as a column of the batch: a loss of these is exact in a loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from hf_ring_attn import Sharded
from hf_ring_attn.testing import relative_error
from tests.integration.losses.test_local_logits import BATCH, FLOAT64, Ranks, trained


def two_ahead(in_ring: bool) -> tuple[Tensor, dict[str, Tensor]]:
    def loss_of(model: Any, sharded: Sharded) -> Tensor:
        inputs = {name: x for name, x in sharded.inputs.items() if name != "second"}
        logits = model(**{**inputs, "labels": None}).logits
        return cross_entropy(logits.flatten(0, 1), sharded.inputs["second"].flatten(), reduction="sum")

    return trained({**BATCH, "second": pad(BATCH["labels"][:, 2:], (0, 2), value=-100)}, loss_of, in_ring)


def test_labels_further_ahead_are_a_column_of_the_batch(ranks: Ranks) -> None:
    want = two_ahead(in_ring=False)
    for _, gradients in ranks(2).run(two_ahead, True):
        assert all(relative_error(2 * gradients[name], gradient) < FLOAT64 for name, gradient in want[1].items())
        assert torch.cat([x.flatten() for x in gradients.values()]).isfinite().all()
