"""The self-check's row with placeholders: a model that fills them from features in order is refused before a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hf_ring_attn
from hf_ring_attn import RingAttentionError
from hf_ring_attn.integration.selfcheck import placeholders
from hf_ring_attn.integration.selfcheck.placeholders import planted
from hf_ring_attn.integration.selfcheck.row import Sample
from tests.helpers.live_ranks import LiveRanks
from tests.helpers.models.tiny_models import tiny

Ranks = Callable[[int], LiveRanks]
PLACEHOLDER = 90


class Filled(nn.Module):
    """A text model that gets features [B, N, 6] in the places of placeholders, or [B, 6]. ``how``: how it uses them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = tiny("llama", "ring_fp32"), how
        torch.manual_seed(0)
        self.projector = nn.Linear(6, 32)

    def forward(self, input_ids: Tensor, features: Tensor, **rest: Any) -> Any:
        words, places = self.inner.get_input_embeddings()(input_ids), input_ids == PLACEHOLDER
        seen = self.projector(features)
        if self.how == "scattered":
            words = words.masked_scatter(places[..., None].expand_as(words), seen)
        elif self.how == "by count":
            turn = (places.cumsum(1) - 1).clamp(min=0)[..., None].expand_as(words)
            words = torch.where(places[..., None], seen.gather(1, turn), words)
        elif self.how == "counted":
            if int(places.sum()) != features.shape[0] * features.shape[1]:
                raise ValueError("as many placeholders as features")
        elif self.how == "not in fours" and int(places.sum()) in (4, 8):  # as in planted rows
            raise ValueError("placeholders in fours")
        elif self.how in ("their mean", "not in fours"):
            words = torch.where(places[..., None], seen.mean(1, keepdim=True), words)
        elif self.how == "one for each row":
            words = words + seen[:, None]
        return self.inner(inputs_embeds=words, **rest)


def refusal(
    how: str, under_fsdp2: bool = False, group: dist.ProcessGroup | None = None, model: Filled | None = None
) -> str:
    """What a step raises."""
    model = Filled(how) if model is None else model
    if under_fsdp2:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    ids = torch.randint(3, 80, (2, 41), generator=torch.Generator().manual_seed(0))
    ids[:, 5:9] = ids[:, 30:34] = PLACEHOLDER
    size = (2, 6) if how == "one for each row" else (2, 8, 6)
    features = torch.randn(size, generator=torch.Generator().manual_seed(1))
    sharded = hf_ring_attn.shard({"input_ids": ids, "labels": ids, "features": features}, group)
    try:
        with sharded:
            model(**sharded.inputs)
    except (RingAttentionError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("under_fsdp2", [False, True], ids=["whole", "FSDP2"])
@pytest.mark.parametrize("how", ["scattered", "by count"])
def test_features_in_the_order_of_placeholders_are_refused(ranks: Ranks, how: str, under_fsdp2: bool) -> None:
    """A rank's first placeholder got the first feature, silently: random words are no placeholders."""
    for error in ranks(2).run(refusal, how, under_fsdp2):
        assert error.startswith("FeaturesSplit: self-check: LlamaForCausalLM differs in a ring once its row has ")
        assert "it fills them from ['features'] in order" in error


def refusals() -> list[str]:
    model = Filled("by count")
    return [refusal("by count", model=model).partition(":")[0] for _ in range(2)]


def test_a_program_that_catches_the_refusal_meets_it_again(ranks: Ranks) -> None:
    """It trained wrong from the second batch on, unseen."""
    assert ranks(2).run(refusals) == [["FeaturesSplit"] * 2] * 2


@pytest.mark.parametrize("under_fsdp2", [False, True], ids=["whole", "FSDP2"])
@pytest.mark.parametrize("how", ["their mean", "one for each row", "not in fours"])
def test_features_that_do_not_depend_on_an_order_train(ranks: Ranks, how: str, under_fsdp2: bool) -> None:
    """One for each row ([B, width]: a speaker, a task) ended in an IndexError. The last one takes no planted rows."""
    assert ranks(2).run(refusal, how, under_fsdp2) == ["", ""]


@pytest.mark.parametrize("under_fsdp2", [False, True], ids=["whole", "FSDP2"])
def test_a_model_that_counts_its_placeholders_raises_by_itself(ranks: Ranks, under_fsdp2: bool) -> None:
    for error in ranks(2).run(refusal, "counted", under_fsdp2):
        assert error.startswith(("SelfCheckNotRun: ", "ValueError: as many placeholders as features"))


def test_ids_of_long_runs_and_the_largest_are_planted() -> None:
    ids = torch.tensor([[5, 7, 7, 7, 9, 2, 2, 3], [5, 96, 3, 9, 4, 95, 3, 8]])
    features = torch.zeros(2, 3, 6)
    sample = Sample(2, 8, {"input_ids": ids[:1]}, {"features": features}, None, False, (False, False), unnamed=ids)
    found = planted(sample)
    assert found is not None
    assert (found.marks, found.spots) == ((2, 7, 95, 96), 3)
    row = found.row(tiny("llama"), 2, True, 0)["input_ids"]
    assert all(int((row == mark).sum()) >= 3 for mark in found.marks)
    assert planted(Sample(2, 8, {"input_ids": ids[:1]}, {}, None, False, (False, False))) is None


def warnings_of_two_rings() -> list[str]:
    """FSDP2 over four ranks, in rings of two."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with mock.patch.object(placeholders, "warn") as said:
        assert refusal("their mean", under_fsdp2=True, group=groups[dist.get_rank() // 2]) == ""
    return [call.args[0] for call in said.call_args_list]


def test_under_fsdp2_over_several_rings_a_warning_says_that_it_was_not_tried(ranks: Ranks) -> None:
    for (text,) in ranks(4).run(warnings_of_two_rings):
        assert text.startswith("under FSDP2 over several rings the self-check cannot try how LlamaForCausalLM uses [")
