"""Trainer's best model, loaded at the end, where only the first rank has the checkpoint: nodes that share no disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from tests.helpers.jobs.comparison import LOSS, PARAMETER, Ranks
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.jobs.trainer_jobs import launched, trainer_of

ARGUMENTS = {
    "load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1,
    "save_steps": 1, "metric_for_best_model": "eval_loss", "greater_is_better": True,
}  # fmt: skip
"""The one of the greatest loss counts as best, so that it is not the last."""
ROWS = Rows(count=4, labelled="answers", seed=5)


def best(folder: str, mesh: Mesh, lora: bool) -> tuple[str, float, dict[str, Tensor]]:
    """The name of the best checkpoint, the loss of the model that is left, and its trained weights."""
    run = Run(why="", steps=4, evaluated=ROWS, lora=lora, arguments=ARGUMENTS)
    own = Path(folder, str(dist.get_rank()))  # of its node
    with launched(mesh):
        trainer = trainer_of(run, mesh, str(own))
        trainer.train()
        net: Any = trainer.model
        kept = {name: x.detach().clone() for name, x in net.named_parameters() if x.requires_grad}
        return Path(str(trainer.state.best_model_checkpoint)).name, trainer.evaluate()["eval_loss"], kept


@pytest.mark.parametrize("lora", [False, True])
def test_ranks_without_it_get_the_best_model(ranks: Ranks, tmp_path: Path, lora: bool) -> None:
    """They kept the last weights, with which a ring then evaluated their tokens."""
    ((name, loss, weights),) = ranks(1).run(best, str(tmp_path / "one"), Mesh(), lora)
    assert name != "checkpoint-4"
    for got in ranks(2).run(best, str(tmp_path / "ring"), Mesh(cp=2), lora):
        assert got[0] == name
        assert got[1] == pytest.approx(loss, rel=LOSS)
        for one, x in weights.items():
            torch.testing.assert_close(got[2][one], x, rtol=0, atol=10 * PARAMETER)
