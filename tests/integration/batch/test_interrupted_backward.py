"""A backward that an error ended: on one rank alone it is refused its next batch; where all ranks failed they go on."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hf_ring_attn
from hf_ring_attn.comm import meeting
from tests.helpers.checks import Ranks
from tests.helpers.jobs.plain_jobs import attempt, gradients_of, tokens
from tests.helpers.live_ranks import RanksFailed
from tests.helpers.models.tiny_models import tiny


def failed_in_backward(error: type[BaseException], who: set[int], whole: bool) -> dict[str, torch.Tensor]:
    """The gradients of a batch after one whose backward ``error`` ended on ranks ``who``."""
    model: Any = tiny("llama", "ring_fp32").train()
    armed = False

    def fail(*_: Any) -> None:
        if armed and dist.get_rank() in who:
            raise error

    model.model.layers[1].mlp.register_full_backward_hook(fail)
    for armed in (False, True, False):  # noqa: B007  the hook reads it
        model.zero_grad()
        with suppress(error):
            if whole:
                with hf_ring_attn.whole_rows(model):
                    loss = model(**tokens(23)).loss
            else:
                with hf_ring_attn.shard(tokens(23)) as sharded:
                    loss = model(**sharded.inputs).loss
            loss.backward()
    return gradients_of(model)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_where_all_ranks_failed_the_next_batch_is_right(ranks: Ranks, error: type[BaseException], whole: bool) -> None:
    expected = ranks(2).run(failed_in_backward, error, set[int](), whole)
    for got, want in zip(ranks(2).run(failed_in_backward, error, {0, 1}, whole), expected, strict=True):
        assert all(torch.equal(got[name], x) for name, x in want.items())


def failed_alone(folder: str, error: type[BaseException], whole: bool) -> None:
    """Rank 1 fails alone, and catches it; a rank that ends leaves its error in a file."""
    with mock.patch.object(meeting, "PATIENCE", timedelta(seconds=1)):
        raised = attempt(failed_in_backward, error, {1}, whole)
    Path(folder, f"{dist.get_rank()}").write_text(": ".join(raised or ()))
    os._exit(7)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_a_rank_that_failed_alone_ends_the_ring(
    ranks: Ranks, tmp_path: Path, error: type[BaseException], whole: bool
) -> None:
    """Both ranks waited until the time-out: one for the rest of that backward, the other with its next batch."""
    with pytest.raises(RanksFailed) as failed:
        ranks(2).run(failed_alone, str(tmp_path), error, whole)
    assert not failed.value.silent
    there, here = ((tmp_path / name).read_text() for name in "01")
    assert here.startswith("LeftHalfway: ") and there.startswith("PeerLost: ")
