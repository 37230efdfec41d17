"""NEFTune's noise in a ring: as large as in one process, other numbers on each rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hf_ring_attn.integration.model import neftune
from tests.helpers.jobs import kinds_jobs
from tests.helpers.jobs.comparison import LOSS, Ranks
from tests.helpers.jobs.kinds_jobs import ADAM, LORA, Kind, Trained, distance
from tests.helpers.jobs.runs import Mesh

ALPHA = 5.0
NEFTUNE = {**ADAM, "neftune_noise_alpha": ALPHA}


def pushed(x: Tensor, bound: float, _rank: int = 0) -> Tensor:
    """In place of noise: the same for a token wherever it is."""
    return bound * x.detach().sign()


def whole_row(module: Any, _inputs: Any, output: Tensor) -> Tensor:
    """transformers' hook with `pushed`."""
    return output + pushed(output, ALPHA / (output.shape[1] * output.shape[2]) ** 0.5) if module.training else output


def activated(model: Any, alpha: float, _accelerator: Any) -> Any:
    embeddings = model.get_input_embeddings()
    embeddings.neftune_noise_alpha = alpha
    return embeddings.register_forward_hook(whole_row)


def trained(kind: Kind, mesh: Mesh) -> Trained:
    in_one_process = mock.patch("transformers.trainer.activate_neftune", activated)
    with mock.patch.object(neftune, "draw_noise", pushed) if mesh.cp > 1 else in_one_process:
        return kinds_jobs.trained(kind, mesh)


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("cp", [2, 4])
def test_its_size_is_that_of_the_whole_row(ranks: Ranks, cp: int, lora: dict[str, Any] | None) -> None:
    kind, plain = Kind(why="", arguments=NEFTUNE, lora=lora), Kind(why="", arguments=ADAM, lora=lora)
    want, without = (ranks(1).run(trained, one, Mesh())[0] for one in (kind, plain))
    assert want.losses != pytest.approx(without.losses, rel=1e-3), "the noise changes nothing, so this shows nothing"
    for got in ranks(cp).run(trained, kind, Mesh(cp=cp)):
        assert got.losses == pytest.approx(want.losses, rel=LOSS)
        assert distance(got.after, want.after) < 1e-4 * distance(want.after, want.before)


def test_ranks_draw_other_numbers_within_its_bound() -> None:
    x, found = torch.ones(2, 500, 8, dtype=torch.bfloat16), []
    for rank in (0, 1):
        torch.manual_seed(3)
        found.append(neftune.draw_noise(x, 0.25, rank))
    assert found[0].dtype is x.dtype and not torch.equal(*found)
    for each in found:
        assert 0.24 < float(each.abs().max()) <= 0.25 and abs(float(each.float().mean())) < 0.01
    both = torch.stack(found).float().flatten(1)
    assert abs(float(torch.corrcoef(both)[0, 1])) < 0.05
    assert not torch.equal(neftune.draw_noise(x, 0.25, 1), found[1]), "each step draws others"


def test_trainer_trains_with_it(ranks: Ranks) -> None:
    """With its own noise, whose losses are not those of one process, but as near as with another seed."""
    noisy, plain = Kind(why="", arguments=NEFTUNE), Kind(why="", arguments=ADAM)
    want, without = (ranks(1).run(kinds_jobs.trained, kind, Mesh())[0].losses for kind in (noisy, plain))
    one, other = (got.losses for got in ranks(2).run(kinds_jobs.trained, noisy, Mesh(cp=2)))
    assert one == other and one[0] != pytest.approx(want[0], rel=1e-6)
    assert one == pytest.approx(want, rel=0.1) and one[0] != pytest.approx(without[0], rel=1e-4)
