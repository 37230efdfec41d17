"""`hf_ring_attn.shard`: what each rank's inputs hold, and which batches are refused, in which words."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import hf_ring_attn
from hf_ring_attn import RingConfig, errors
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import Batch, attempt, packed, padded, tokens

PADDING = {"labels": -100, "shift_labels": -100}


def share(batch: Batch, config: RingConfig = RingConfig()) -> dict[str, Any]:
    return hf_ring_attn.shard(batch, config=config).inputs


def zigzag(length: int, rank: int, world_size: int) -> list[int]:
    """The places of a padded row that a rank holds, by the definition: of 2W chunks, the rank's from either end."""
    if world_size == 1:
        return list(range(length))  # nothing to balance, nothing to pad
    chunk = -(-length // (2 * world_size))
    starts = (rank * chunk, (2 * world_size - 1 - rank) * chunk)
    return [place for start in starts for place in range(start, start + chunk)]


def expected(batch: Batch, rank: int, world_size: int) -> dict[str, Tensor]:
    rows, length = batch["input_ids"].shape
    whole: dict[str, Tensor] = {
        "attention_mask": torch.ones(rows, length, dtype=torch.int64),
        "position_ids": torch.arange(length).expand(rows, -1), **batch,
    }  # fmt: skip
    whole["shift_labels"] = torch.cat([batch["labels"][:, 1:], torch.full((rows, 1), -100)], 1)
    places = zigzag(length, rank, world_size)
    found = {}
    for name, x in whole.items():
        row = x[:, [min(place, length - 1) for place in places]]  # the last token again, but where that would count
        if name != "input_ids":
            row[:, torch.tensor(places) >= length] = PADDING.get(name, 0)
        found[name] = row
    return found


BATCHES = {
    "a multiple of 2W": tokens(24),
    "odd length": tokens(23),
    "fewer tokens than chunks": tokens(3),
    "one token": tokens(1),
    "padded": padded(23, left=4, right=6),
    "packed": packed(9, 3, 11),
    "an entry of one's own": {
        **tokens(23),
        "weights": torch.rand(2, 23, 5, generator=torch.Generator().manual_seed(0)),
    },
}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("why", BATCHES)
def test_each_rank_gets_its_tokens(ranks: Ranks, why: str, world_size: int) -> None:
    batch = BATCHES[why]
    labelled = int((batch["labels"][:, 1:] != -100).sum())
    for rank, inputs in enumerate(ranks(world_size).run(share, batch)):
        want = expected(batch, rank, world_size)
        assert inputs.pop("use_cache") is False
        assert inputs.pop("num_items_in_batch") == labelled / world_size
        assert inputs.keys() == want.keys()
        for name, x in want.items():
            assert torch.equal(inputs[name], x), name


def whole_again(batch: Batch) -> tuple[Tensor, Tensor]:
    """What each rank holds, gathered; and the gradient on this rank of a sum that weighs every place differently."""
    sharded = hf_ring_attn.shard(batch)
    mine = sharded.inputs["position_ids"].double()[..., None].requires_grad_()
    whole = sharded.gather(mine)
    weights = torch.arange(1.0, whole.numel() + 1, dtype=torch.float64).view_as(whole)
    (whole * weights).sum().backward()
    assert mine.grad is not None
    return whole.detach(), mine.grad / sharded.ring.size


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gather_is_the_opposite(ranks: Ranks, world_size: int) -> None:
    length = 23
    for rank, (whole, gradient) in enumerate(ranks(world_size).run(whole_again, tokens(length))):
        assert torch.equal(whole[..., 0], torch.arange(length).double().expand(2, -1))
        weights = torch.zeros(2, 24, dtype=torch.float64)  # padding gets none
        weights[:, :length] = torch.arange(1.0, 2 * length + 1, dtype=torch.float64).view(2, length)
        assert torch.equal(gradient[..., 0], weights[:, zigzag(length, rank, world_size)])


def test_a_given_number_of_items_is_shared_out(ranks: Ranks) -> None:
    """Over several batches of a step it is the caller who counts."""
    batch: Any = {**tokens(8), "num_items_in_batch": 30}
    assert [inputs["num_items_in_batch"] for inputs in ranks(2).run(share, batch)] == [15, 15]


def test_further_labels_are_padded_as_labels_are(ranks: Ranks) -> None:
    """A loss of the token after the next ignores padding; a mask of labels, and other columns, get zeros."""
    names = {"labels_2": -100, "next_targets": -100, "labels_mask": 0, "token_type_ids": 0, "float_labels": 0}
    batch: Any = {**tokens(7), **{name: torch.ones(2, 7, dtype=torch.int64) for name in names}}
    batch["float_labels"] = torch.ones(2, 7)
    names |= {"next_but_one": -100, "next_but_one_mask": 0, "region": 0}
    for name in ("next_but_one", "next_but_one_mask", "region"):
        batch[name] = torch.ones(2, 7, dtype=torch.int64)
    batch["next_but_one"][1, 5:] = batch["next_but_one_mask"][1, 5:] = -100
    first = ranks(2).run(share, batch)[0]  # its share ends with the padding
    assert {name: int(first[name][0, -1]) for name in names} == names


def test_shifted_labels_may_be_given(ranks: Ranks) -> None:
    """Then they are taken as they are, also without labels: models compute a loss only where those are."""
    batch = tokens(8)
    shifted = batch.pop("labels").roll(-1, 1)
    for rank, inputs in enumerate(ranks(2).run(share, {**batch, "shift_labels": shifted})):
        for name in ("labels", "shift_labels"):
            assert torch.equal(inputs[name], shifted[:, zigzag(8, rank, 2)])


# ---- refusals --------------------------------------------------------------------------------------------------------

IDS = torch.zeros(2, 8, dtype=torch.int64)
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing to shard": ({"labels": IDS}, "the batch holds neither input_ids nor inputs_embeds, only ['labels']."),
    "rows under other names": (
        {"chosen_input_ids": IDS, "rejected_input_ids": IDS},
        "only ['chosen_input_ids', 'rejected_input_ids']. If it has several kinds of rows, call the model",
    ),
    "one row without a batch": ({"input_ids": IDS[0]}, "input_ids has shape (8,), but it must be [B, S]"),
    "rows of several choices": (
        {"input_ids": IDS[:, None]},
        "input_ids has shape (2, 1, 8), but it must be [B, S] (inputs_embeds: [B, S, width]). Multiple choice is not",
    ),
    "a row without tokens": (
        {"input_ids": torch.tensor([[]])},  # as a collator makes it of an empty list
        "input_ids has shape (1, 0), but a row must have a token at least. Take empty rows out of the dataset",
    ),
    "embeddings without a width": ({"inputs_embeds": IDS}, "inputs_embeds has shape (2, 8), but it must be [B, S]"),
    "lists": ({"input_ids": [[1, 2, 3]]}, "input_ids is a list, not a tensor. Make it one, [B, S, ...]."),
    "sound alone": ({"input_features": torch.zeros(1)}, "the batch holds neither input_ids nor inputs_embeds, only ["),
    "a decoder's inputs": (
        {"input_ids": IDS, "decoder_input_ids": IDS},
        "the batch holds ['decoder_input_ids']: encoders and caches cannot be sharded along the sequence yet",
    ),
    "a cache": ({"input_ids": IDS, "past_key_values": object()}, "the batch holds ['past_key_values']"),
    "a 4-D mask": (
        {"input_ids": IDS, "attention_mask": torch.ones(2, 1, 8, 8)},
        "attention_mask has shape (2, 1, 8, 8), but a ring takes [2, 8], one entry a token: pass the 2-D mask",
    ),
    "masks by kind of layer": (
        {"input_ids": IDS, "attention_mask": {"full_attention": IDS}},
        "attention_mask is no tensor, but a ring takes [2, 8]",
    ),
    "labels of a classifier": (
        {"input_ids": IDS, "labels": torch.zeros(2)},
        "labels has shape (2,), but a ring needs one label a token, [2, 8]: a causal language model's.",
    ),
    "labels of the last tokens": (
        {**tokens(8), "labels": tokens(8)["labels"][:, -3:], "logits_to_keep": 3},
        "labels has shape (2, 3), but a ring needs one label a token, [2, 8]: let the program keep all logits and",
    ),
    "another value of ignored labels": (
        {"input_ids": IDS, "labels": IDS, "ignore_index": 0},
        "the batch holds ignore_index=0, but a ring marks padding, and the labels that it does not count, with -100. "
        "Give ignored labels that value, labels.masked_fill(labels == 0, -100), and leave ignore_index out.",
    ),
    "positions of other rows": (
        {"input_ids": IDS, "position_ids": torch.zeros(3, 2, 9)},
        "position_ids has shape (3, 2, 9), but it must be [2, 8].",
    ),
    "a mask that numbers documents": (
        {"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 1, 2, 2, 2, 3, 3]] * 2)},
        "the attention_mask holds 3, as if it numbered packed documents, but a 2-D mask is 0 or 1. ",
    ),
    "documents with a mask": (
        {"input_ids": IDS, "position_ids": PACKED, "attention_mask": torch.ones(2, 8)},
        "position_ids restart at token 3 of row 0, as for packed documents, but the batch has a 2-D attention_mask,",
    ),
    "documents that cu_seq_lens alone tells": (
        {"input_ids": IDS[:1], "cu_seq_lens_q": torch.tensor([0, 3, 8])},
        "cu_seq_lens_q and position_ids define different documents (first difference at token 3 of row 0).",
    ),
    "documents that cu_seq_lens alone tells, with a mask": (
        {"input_ids": IDS[:1], "cu_seq_lens_q": torch.tensor([0, 3, 8]), "attention_mask": torch.ones_like(IDS[:1])},
        "cu_seq_lens_q and position_ids define different documents (first difference at token 3 of row 0).",
    ),
    "documents that cu_seq_lens leaves out": (
        {
            "input_ids": IDS[:1], "cu_seq_lens_q": torch.tensor([0, 8]),
            "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]]),
        },
        "cu_seq_lens_q and position_ids define different documents (first difference at token 5 of row 0).",
    ),
    "documents that seq_idx alone tells": (
        {"input_ids": IDS, "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])},
        "seq_idx and position_ids define different documents (first difference at token 3 of row 0).",
    ),
    "documents that seq_idx alone tells, in one row": (
        {"input_ids": IDS, "seq_idx": torch.tensor([[0] * 8, [0] * 6 + [1] * 2]), "attention_mask": IDS + 1},
        "seq_idx and position_ids define different documents (first difference at token 6 of row 1).",
    ),
    "documents beside images that seq_idx alone tells": (
        {"input_ids": IDS, "pixel_values": torch.zeros(1), "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])},
        "seq_idx and position_ids define different documents (first difference at token 3 of row 0).",
    ),
    "a seq_idx of another length": (
        {"input_ids": IDS, "seq_idx": torch.zeros(2, 7)}, "seq_idx has shape (2, 7), but it must be [2, 8].",
    ),
    "documents beside images that cu_seq_lens alone tells": (
        {"input_ids": IDS[:1], "pixel_values": torch.zeros(1), "cu_seq_lens_q": torch.tensor([0, 3, 8])},
        "cu_seq_lens_q and position_ids define different documents (first difference at token 3 of row 0).",
    ),
    "documents beside images, told by their positions": (
        {
            "input_ids": IDS[:1], "pixel_values": torch.zeros(1), "cu_seq_lens_q": torch.tensor([0, 3, 8]),
            "position_ids": PACKED.expand(3, 1, -1),
        },
        "cu_seq_lens_q and position_ids define different documents (first difference at token 3 of row 0).",
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_refused_alone(why: str) -> None:
    """In a ring of one too, so that a program is told before it is started on many ranks."""
    batch, text = REFUSED[why]
    with pytest.raises(errors.Refused) as refusal:
        hf_ring_attn.shard(batch)
    assert text in str(refusal.value)


@pytest.mark.parametrize(
    "more",
    [
        {"position_ids": PACKED},
        {"position_ids": PACKED, "pixel_values": torch.zeros(1)},
        {"position_ids": PACKED.expand(4, 1, -1), "pixel_values": torch.zeros(1)},
    ],
)
def test_documents_told_twice_alike_are_no_conflict(more: dict[str, Any]) -> None:
    given = {"input_ids": IDS[:1], "cu_seq_lens_q": torch.tensor([0, 3, 8]), "max_length_q": 5, **more}
    inputs = hf_ring_attn.shard({**given, "seq_idx": torch.tensor([[4, 4, 4, 5, 5, 5, 5, 5]])}).inputs
    assert not {"cu_seq_lens_q", "max_length_q", "seq_idx"} & set(inputs)


def on_ranks(batches: list[Any], configs: list[RingConfig]) -> tuple[str, str] | None:
    rank = torch.distributed.get_rank()
    return attempt(share, batches[rank % len(batches)], configs[rank % len(configs)])


def altered(name: str) -> Batch:
    batch = padded(8, left=1, right=1) | {"position_ids": torch.arange(8).expand(2, -1).contiguous()}
    batch[name][1, 5] = 1 - batch[name][1, 5]
    return batch


def with_images(**more: Any) -> Any:
    grid = torch.tensor([[1, 4, 2]])
    return {"input_ids": IDS, "pixel_values": torch.zeros(8, 96), "image_grid_thw": grid, **more}


SAME = "Every rank of a ring must get the same whole batch. Leave out DistributedSampler and split_dataset_by_node"
DIFFERENT = {
    "tokens": (
        [altered("labels"), altered("input_ids")],
        "the ranks of one ring must hold the same input_ids[1, 5], but got rank 0: 91, rank 1: -90.",
    ),
    "labels": (
        [altered("input_ids") | {"labels": IDS}, altered("input_ids")],
        "the same labels[0, 0], but got rank 0: 0, rank 1: -100.",
    ),
    "positions": ([packed(3, 5), packed(4, 4)], "the same position_ids[0, 3], but got rank 0: 0, rank 1: 3."),
    "masks": (
        [{**padded(8, left=n), "labels": IDS} for n in (1, 2)],
        "the same attention_mask[0, 1], but got rank 0: 1, rank 1: 0.",
    ),
    "lengths": ([tokens(8), tokens(9)], "the same tokens, but got rank 0: 8, rank 1: 9."),
    "rows": ([tokens(8), tokens(8, rows=3)], "the same rows, but got rank 0: 2, rank 1: 3."),
    "grids of images": (
        [with_images(), with_images(image_grid_thw=torch.tensor([[1, 2, 4]]))],
        "the same image_grid_thw[0, 1], but got rank 0: 4, rank 1: 2.",
    ),
    "grids of videos": (
        [with_images(video_grid_thw=torch.tensor([[2, 4, n]])) for n in (2, 4)],
        "the same video_grid_thw[0, 2], but got rank 0: 2, rank 1: 4.",
    ),
    "pixels": (
        [with_images(pixel_values=torch.zeros(8, 96).index_fill(1, torch.tensor([n]), 1)) for n in (1, 2)],
        "the same pixel_values[0, 1], but got rank 0: 1.0, rank 1: 0.0.",
    ),
    "images in a list": (
        [with_images(pixel_values=[torch.zeros(2), torch.full((3,), n)]) for n in (1, 2)],
        "the same pixel_values[1][0], but got rank 0: 1, rank 1: 2.",
    ),
    "kinds of tokens": (
        [{"input_ids": IDS, "token_type_ids": IDS + n} for n in (0, 1)],
        "the same token_type_ids[0, 0], but got",
    ),
    "items of a step": (
        [tokens(8) | {"num_items_in_batch": n} for n in (9, 10)],
        "the same num_items_in_batch, but got rank 0: 9, rank 1: 10.",
    ),
    "items of a step, of numpy": (
        [tokens(8) | {"num_items_in_batch": numpy.int64(n)} for n in (9, 10)],
        "the same num_items_in_batch, but got rank 0: 9, rank 1: 10.",
    ),
    "arrays": (
        [{**tokens(8), "names": numpy.array(["a", str(n)]), "ages": numpy.full((2, 3), n)[:, ::-1]} for n in (0, 1)],
        "the same other inputs['ages'][0, 0], but got rank 0: 0, rank 1: 1.",
    ),
    "an entry of one's own": (
        [
            {**tokens(8), "note": "x", "weights": torch.ones(2), "shares": [torch.ones(1), (torch.zeros(2) + n,)]}
            for n in (0, 1)
        ],
        "the same other inputs['shares'][1][0][0], but got rank 0: 0.0, rank 1: 1.0.",
    ),
    "a number of one's own": (
        [{**tokens(8), "alpha": n} for n in (0.5, 1)],
        "the same other inputs, but got rank 0: {'alpha': 0.5}, rank 1: {'alpha': 1}.",
    ),
    "an entry too many": ([{**tokens(8), "weights": torch.ones(2)}, tokens(8)], "the same other inputs"),
    "embeddings beside tokens": (
        [{"input_ids": IDS, "inputs_embeds": torch.zeros(2, 8, 4) + n} for n in (0, 1)],
        "the same other inputs['inputs_embeds'][0, 0, 0], but got rank 0: 0.0",
    ),
    "shifted labels": (
        [{"input_ids": IDS, "shift_labels": IDS + n} for n in (0, 1)],
        "the same shift_labels[0, 0], but got",
    ),
}


@pytest.mark.parametrize("why", DIFFERENT)
def test_ranks_with_different_batches_all_raise(ranks: Ranks, why: str) -> None:
    batches, text = DIFFERENT[why]
    for raised in ranks(2).run(on_ranks, batches, [RingConfig()]):
        assert raised is not None and raised[0] == "RanksDiffer"
        assert text in raised[1] and SAME in raised[1]


def test_what_makes_no_difference_is_not_compared(ranks: Ranks) -> None:
    """Hints are not passed on, None is as nothing, and what is neither number nor tensor stays unchecked."""
    batches = [tokens(8) | more for more in ({"max_length_q": 8, "weights": None, "note": "a"}, {"note": "b"})]
    assert ranks(2).run(on_ranks, batches, [RingConfig()]) == [None, None]


def test_ranks_with_different_options_all_raise(ranks: Ranks) -> None:
    for raised in ranks(2).run(on_ranks, [tokens(8)], [RingConfig(), RingConfig(backward="gather")]):
        assert raised is not None and "the same RingConfig.backward, but got" in raised[1]


@pytest.mark.parametrize("why", ["a decoder's inputs", "a 4-D mask", "documents with a mask", "nothing to shard"])
def test_one_rank_refuses_and_all_raise_with_its_text(ranks: Ranks, why: str) -> None:
    batch, text = REFUSED[why]
    for rank, raised in enumerate(ranks(4).run(on_ranks, [tokens(8), tokens(8), batch, tokens(8)], [RingConfig()])):
        assert raised is not None and text in raised[1]
        assert (raised[0] == "RefusedElsewhere") == (rank != 2) == ("other ranks of its ring raised" in raised[1])


def test_no_padding_by_the_ring(ranks: Ranks) -> None:
    found = ranks(2).run(on_ranks, [tokens(10)], [RingConfig(pad=False)])
    for raised in found:
        assert raised is not None and raised[0] == "UnevenLength"
        assert "a multiple of 2 * cp_size = 4, got 10" in raised[1]
        assert "or pad the batch to 12 tokens" in raised[1]


def share_over_an_axis() -> tuple[list[int], bool]:
    """The ring's size and rank, and if a mesh's axis gives the inputs that its group gives."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    by_mesh, by_group = hf_ring_attn.shard(tokens(23), mesh["cp"]), hf_ring_attn.shard(tokens(23), mesh.get_group("cp"))
    same = torch.equal(by_mesh.inputs["input_ids"], by_group.inputs["input_ids"])
    return [by_mesh.ring.size, by_mesh.ring.rank], same


def test_an_axis_of_a_mesh_is_a_ring(ranks: Ranks) -> None:
    assert ranks(4).run(share_over_an_axis) == [([2, rank % 2], True) for rank in range(4)]


def test_a_loss_of_gathered_outputs_is_for_trainers() -> None:
    """It was ignored, and the line at start said that the loss was gathered."""
    with pytest.raises(errors.BadOption, match=r"loss='gathered' .* 'auto', 'chunked' or 'sharded' for shard"):
        share(tokens(23), RingConfig(loss="gathered"))
