"""The self-check: remote code with a planted defect is refused before step one, and a right model is left as it was."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hf_ring_attn
import tests.helpers.jobs.self_check_jobs as jobs
from hf_ring_attn import RingConfig
from hf_ring_attn.integration import log
from hf_ring_attn.integration.selfcheck.compare import spread
from hf_ring_attn.integration.selfcheck.row import Sample, row_length
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs import plain_jobs, written_jobs
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import packed, padded, tokens
from tests.helpers.jobs.refusal_jobs import Training, refused_training
from tests.helpers.jobs.self_check_jobs import GOOD, OFF
from tests.helpers.models.remote_models import remote
from tests.helpers.models.tiny_models import BEFORE_IMAGE, IMAGE, VOCABULARY, tiny
from tests.integration.model.test_vision import with_images

IDS = torch.zeros(1, 23, dtype=torch.int64)
ITSELF = "the code of RemoteModel itself"
PLANTED = {
    "arange": ITSELF,
    "counted": "its module 'embed' (Embed)",
    "from two": ITSELF,
    "shift": "its module 'layers.1.mix' (Shift)",
    "convolution": "its module 'layers.1.mix' (Blur)",
    "sum": "its module 'layers.1.mix' (Sum)",
    "alibi": "its module 'layers.1.attend' (AttendAlibi)",
    "nearby": "its module 'layers.1.attend' (AttendNearby)",
    "past": "its module 'layers.1.attend' (AttendPast)",
    "mean": ITSELF,
}
"""What is planted, and what must be named."""


WAYS = {"2": (2, torch.float32), "4": (4, torch.float32), "2 in bfloat16": (2, torch.bfloat16)}


@pytest.mark.parametrize(
    ("planted", "size", "dtype"),
    [  # one of the two others by turns
        pytest.param(planted, *WAYS[way], id=f"{planted}-{way}", marks=pytest.mark.full if seldom else ())
        for turn, planted in enumerate(PLANTED)
        for way, seldom in zip(WAYS, (False, turn % 2 == 1, turn % 2 == 0), strict=True)
    ],
)
@pytest.mark.turns
def test_a_defect_is_refused_on_every_rank_before_a_step(
    ranks: Ranks, planted: str, size: int, dtype: torch.dtype
) -> None:
    found = ranks(size).run(jobs.refused, planted, dtype)
    for error, text, steps in found:
        assert (error, steps) == ("SelfCheckFailed", 0), text
        assert f"The first difference is made by {PLANTED[planted]}: " in text
    assert len({text for _, text, _ in found}) == 1, "ranks tell different stories"


@pytest.mark.turns
@pytest.mark.parametrize("planted", ["arange", "shift", "past"])
@pytest.mark.parametrize("at", [0, 2])
def test_the_first_layer_and_the_last_are_seen_too(ranks: Ranks, planted: str, at: int) -> None:
    """What happens in the last layer reaches no other token any more, so few tokens differ."""
    for error, text, _ in ranks(2).run(refused_at, planted, at):
        assert error == "SelfCheckFailed"
        assert f"'layers.{at}." in text or planted == "arange"


def refused_at(planted: str, at: int) -> tuple[str, str, int]:
    from unittest import mock

    with mock.patch.object(jobs, "remote", lambda kind: remote(kind, at=at)):
        return jobs.refused(planted)


@pytest.mark.parametrize("wrap", ["DDP", "FSDP2", "compiled"])
def test_wrapped_models_are_refused_too(ranks: Ranks, wrap: str) -> None:
    for error, text, steps in ranks(2).run(jobs.refused, "shift", wrap=wrap):
        assert (error, steps) == ("SelfCheckFailed", 0)
        assert "RemoteModel on 26 random tokens differs between one process and a ring of 2" in text
        assert PLANTED["shift"] in text


def test_the_words_of_the_refusal(ranks: Ranks) -> None:
    for _, text, _ in ranks(2).run(jobs.refused, "sum"):
        assert text.startswith(
            "self-check: RemoteModel on 26 random tokens differs between one process and a ring of 2 by 4.1e-01 "
            "(rounding: 1.0e-04). The first difference is made by its module 'layers.1.mix' (Sum): it probably uses "
            "the local length, bypasses transformers' attention interface, or passes state along. Please report it. To "
            "train with this error at your own risk, call hf_ring_attn.configure(model, RingConfig(self_check=False))."
        )


@pytest.mark.parametrize("planted", ["arange", "shift", "loss"])
def test_it_can_be_switched_off(ranks: Ranks, planted: str) -> None:
    """And only the check had refused these."""
    assert ranks(2).run(jobs.refused, planted, config=OFF) == [("", "", 2)] * 2


@pytest.mark.parametrize("size", [2, 4])
def test_a_loss_that_is_no_sum_over_tokens_is_refused(ranks: Ranks, size: int) -> None:
    for error, text, steps in ranks(size).run(jobs.refused, "loss"):
        assert (error, steps) == ("LossNotSharded", 0)
        assert text.startswith("the loss of RemoteModel (the self-check found ")
        assert "in one process) cannot be computed exactly from one rank's tokens. Compute it outside" in text
        assert "of the model, in compute_loss or compute_loss_func, with " in text


def test_options_for_a_trainer_leave_no_loss_of_a_plain_loop_untried(ranks: Ranks) -> None:
    """A plain loop gathers no logits, but with "gathered" among the model's options its loss was not tried."""
    for error, _, steps in ranks(2).run(jobs.refused, "loss", config=RingConfig(loss="gathered")):
        assert (error, steps) == ("LossNotSharded", 0)


@pytest.mark.parametrize("size", [2, 4])
def test_a_mean_over_each_rank_s_own_labels_is_refused(ranks: Ranks, size: int) -> None:
    """Where all ranks had labels in the check's row, it was the mean over all."""
    assert {error for error, *_ in ranks(size).run(jobs.refused, "mean of labels")} == {"LossNotSharded"}


@pytest.mark.parametrize("planted", ["pooled", "pooled beside"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_answer_for_the_whole_row_that_differs_is_named(ranks: Ranks, planted: str, dtype: torch.dtype) -> None:
    """Each rank's first tokens made BERT's pooler_output, silently, beside tokens that were right."""
    output = {"pooled": "logits", "pooled beside": "pooler_output"}[planted]
    for error, text, steps in ranks(2).run(jobs.refused, planted, dtype):
        assert (error, steps) == ("PooledOutput", 0)
        assert text.startswith(f"RemoteModel returns '{output}', which has no entry for each token, and in a ring of 2")


def test_positions_counted_by_the_padding_are_seen_once_there_is_padding(ranks: Ranks) -> None:
    batches = {"none": tokens(23), "left": padded(23, left=4), "right": padded(23, right=4)}
    refused = {why: ranks(2).run(jobs.refused, "by the padding", batch=batch) for why, batch in batches.items()}
    assert {why: found[0][0] for why, found in refused.items()} == {"none": "", "left": "SelfCheckFailed", "right": ""}


def test_positions_that_the_batch_gives_are_used(ranks: Ranks) -> None:
    """The same model is right with position_ids of its own in the batch."""
    batch = tokens(23)
    batch["position_ids"] = torch.arange(2, 25).expand(2, -1).contiguous()
    assert ranks(2).run(jobs.refused, "from two", batch=batch) == [("", "", 2)] * 2
    assert ranks(2).run(jobs.refused, "", batch=packed(9, 3, 11)) == [("", "", 2)] * 2


def test_a_trainer_refuses_before_its_first_step(ranks: Ranks) -> None:
    training = Training(why="", change=jobs.planted_trainer_model, error="SelfCheckFailed", text=PLANTED["shift"])
    for raised in ranks(2).run(refused_training, training):
        assert raised is not None and raised[0] == training.error
        assert training.text in raised[1]
        assert raised[2] == 0


def test_rings_whose_ranks_shard_the_same_weights_go_the_same_way(ranks: Ranks) -> None:
    """Each forward gathers weights from all four ranks, so that a check by one ring alone would never end."""
    assert ranks(4).run(jobs.two_rings, "") == [(["passed"] * 3, "")] * 4
    for verdicts, text in ranks(4).run(jobs.two_rings, "by the padding"):
        assert verdicts == []
        assert text.startswith("SelfCheckFailed: ") and ITSELF in text


def test_a_row_that_fails_in_one_ring_stops_all_that_shard_the_same_weights(ranks: Ranks) -> None:
    """The other ring went on to its sharded row, and waited there for weights."""
    here, _, there, _ = ranks(4).run(jobs.one_of_two_rings, "fails at last with paces")
    assert there[0] == "SelfCheckRowFailed" and here[0] == "RefusedElsewhere"
    assert here[1].endswith(f"  ranks 2, 3: SelfCheckRowFailed: {there[1]}")


def test_ranks_with_other_weights_are_told_so(ranks: Ranks) -> None:
    for error, text in ranks(2).run(jobs.with_other_weights):
        assert error == "RanksDiffer"
        assert text.startswith("the ranks of one ring must hold the same weights of embed.words.weight[0, 0], but got")
        assert text.endswith(
            "Build or load the same model on every rank (seed before random initialisation, LoRA's too), or wrap it in "
            "DDP or FSDP."
        )


# ---- models that fail of themselves ----------------------------------------------------------------------------------


def test_a_model_that_fails_in_the_ring_only_is_refused(ranks: Ranks) -> None:
    for error, text, _ in ranks(2).run(jobs.refused, "raises in a ring"):
        assert error == "SelfCheckRaised"
        assert text.startswith(
            "self-check: RemoteModel runs on a random row in one process, but in a ring of 2 it raised IndexError: too "
            "short. Please report it."
        )


def test_activations_that_hooks_collect_are_the_batch_s_alone(ranks: Ranks) -> None:
    """Those of the check's row were among them: a loss of them was 0.6 off, or ended in a second backward."""
    assert ranks(2).run(written_jobs.collected) == [[2, 2, 2, 1, 1]] * 2


def test_states_of_hooks_are_those_of_the_batch_alone(ranks: Ranks) -> None:
    """Counters, running means, class attributes and generators of a program's hooks were moved by the check's row."""
    assert ranks(2).run(written_jobs.states) == [[1, 1, 1, 1, 1, 0, 0]] * 2
    assert ranks(2).run(written_jobs.states_beside) == [[1, 1, 2]] * 2


def test_states_of_forwards_are_those_of_the_batch_alone(ranks: Ranks) -> None:
    """A loss that grows with each call, counted in an object, was that of the sixth call: 2.96 for 0.49."""
    assert ranks(2).run(written_jobs.states_of_forwards) == [[1, 1, 1, 1]] * 2


def test_a_state_that_moves_from_a_weight_to_its_layer_is_whole(ranks: Ranks) -> None:
    """The layer's was restored, and the weight's was not: bitsandbytes' 8-bit layers had neither."""
    assert ranks(2).run(written_jobs.states_that_move) == [[False, True]] * 2


def test_one_rank_that_fails_stops_all(ranks: Ranks) -> None:
    (here, text, _), (there, cause, _) = ranks(2).run(jobs.refused, "raises on one rank")
    assert (here, there) == ("RefusedElsewhere", "SelfCheckRowFailed")
    assert cause.startswith(
        "the self-check's random row failed on this rank, not on all: RemoteModel raised IndexError: not here. All "
    )
    assert text.endswith(f"  rank 1: SelfCheckRowFailed: {cause}")


@pytest.mark.parametrize("wrap", ["", "DDP", "FSDP2"])
def test_a_model_that_takes_no_such_row_is_refused(ranks: Ranks, wrap: str) -> None:
    for error, text, steps in ranks(2).run(jobs.refused, "wants 30", batch=tokens(70), wrap=wrap):
        assert (error, steps) == ("SelfCheckNotRun", 0)
        assert text == (
            "the self-check could not run RemoteModel on 2 rows of 26 random tokens: IndexError: wants 30. So its "
            "exactness in a ring is unknown. Try your batch in one process: if it fails there, too, correct it. Only "
            "if it does not: hf_ring_attn.configure(model, RingConfig(self_check=False)) trains it unchecked, at your "
            "own risk."
        )


@pytest.mark.parametrize("wrap", ["", "FSDP2"])
def test_a_model_of_pairs_of_rows_is_given_as_many_as_the_batch_has(ranks: Ranks, wrap: str) -> None:
    assert ranks(2).run(jobs.refused, "pairs", wrap=wrap) == [("", "", 2)] * 2
    for error, _, steps in ranks(2).run(jobs.refused, "pairs, shifted", wrap=wrap):
        assert (error, steps) == ("SelfCheckFailed", 0)


class Layer(LlamaDecoderLayer):  # type: ignore[no-untyped-call]  # transformers' __init_subclass__
    """A layer of a program's own, which may do anything."""


def layer_beside(own: bool = False) -> tuple[list[str], str]:
    """A decoder layer that a program calls beside its model, as in multi-token prediction: what was warned of."""
    model: Any = tiny("llama", "ring_fp32").train()
    layer = model.model.layers[0]
    if own:
        layer.__class__ = Layer
    with mock.patch.object(log.logger, "warning") as warning, (sharded := hf_ring_attn.shard(tokens(23))):
        hidden, places = model.get_input_embeddings()(sharded.inputs["input_ids"]), sharded.inputs["position_ids"]
        mask = create_causal_mask(model.config, hidden, sharded.inputs["attention_mask"], None, places)
        rotary = model.model.rotary_emb(hidden, places)
        out = layer(hidden, attention_mask=mask, position_ids=places, position_embeddings=rotary)
        out[:, sharded.positions < 23].sum().backward()
    return [str(call.args[0]) for call in warning.call_args_list], type(layer.mlp.up_proj.weight.grad).__name__


def test_a_layer_beside_the_model_runs_unchecked_with_a_warning(ranks: Ranks) -> None:
    for texts, gradient in ranks(2).run(layer_beside):
        assert gradient == "Tensor"
        assert any(text.startswith("LlamaDecoderLayer takes hidden states, so the self-check cannot") for text in texts)


def test_a_layer_of_a_programs_own_beside_the_model_is_refused(ranks: Ranks) -> None:
    for raised in ranks(2).run(plain_jobs.attempt, layer_beside, True):
        assert raised is not None and raised[0] == "SelfCheckNotRun"


def test_a_model_that_returns_nothing_to_compare_is_refused(ranks: Ranks) -> None:
    for error, text, steps in ranks(2).run(jobs.refused, "a loss alone"):
        assert (error, steps) == ("NothingToCheck", 0)
        assert text.startswith("RemoteModel returned nothing that the self-check can compare with one process")


# ---- right models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *((kind, 2) for kind in GOOD), ("gpt_oss", 4), ("FSDP2", 4),
        *(pytest.param(kind, 4, marks=pytest.mark.full) for kind in ("llama", "experts")),
    ],
)  # fmt: skip
@pytest.mark.turns
def test_a_right_model_passes_in_four_forwards_and_trains_with_the_same_bits(
    ranks: Ranks, kind: str, size: int
) -> None:
    """Loss, gradients, buffers, random numbers, flags and counters of two steps, with the check and without it.

    For the hook that counts calls, whole rows run twice, since it might change the second run: six forwards. Under
    FSDP2, where no rank may run one by itself, second runs are compared in any case: twelve.
    """
    checked, unchecked = ranks(size).run(jobs.trained, kind, True), ranks(size).run(jobs.trained, kind, False)
    for one, other in zip(checked, unchecked, strict=True):
        assert one.verdicts == ["passed", "passed"]
        assert other.verdicts == ["off", "off"]
        assert (one.calls, other.calls) == ([13 if "FSDP2" in kind else 7, 1], [1, 1])
        assert len(one.bits) == len(other.bits)
        assert all(torch.equal(a, b) for a, b in zip(one.bits, other.bits, strict=True))
        assert one.attributes == other.attributes


@pytest.mark.parametrize("model", ["gemma3 vision", "qwen2.5 vision", "qwen3 vision"])
def test_models_that_take_images_are_checked_with_text(ranks: Ranks, model: str) -> None:
    assert ranks(2).run(jobs.of_a_batch, model, with_images(model, left=5)) == ["passed"] * 2


def test_the_row_has_no_special_tokens() -> None:
    """A placeholder of an image would ask for one."""
    vision, sample = (
        tiny("gemma3 vision", "ring_fp32"),
        Sample(1, 23, {"input_ids": IDS}, {}, None, False, (False, False)),
    )
    drawn = torch.cat([sample.row(vision, 64, False, seed)["input_ids"] for seed in range(3)])
    assert set(range(VOCABULARY)) - set(drawn.flatten().tolist()) >= {IMAGE, BEFORE_IMAGE}
    assert len(drawn.unique()) > VOCABULARY - 8


def test_a_gathered_loss_gathers_nothing_of_the_check(ranks: Ranks) -> None:
    want = plain_jobs.by_itself(plain_jobs.Step(why="", dtype=torch.float32)).loss
    for verdict, loss in ranks(2).run(jobs.gathered_loss):
        assert verdict == "passed"
        assert relative_error(loss, want) < 1e-5


def test_the_line_at_start_tells(ranks: Ranks) -> None:
    line = "ring of 2: 12 of 23 tokens a rank, kernel reference, backward ring by messages, loss sharded; self-check "
    assert ranks(2).run(jobs.said, RingConfig()) == [[line + "passed"], []]
    assert ranks(2).run(jobs.said, OFF) == [[line + "off"], []]
    assert ranks(2).run(jobs.said, RingConfig(loss="gathered")) == [[line + "passed"], []]  # which is for a trainer


# ---- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4, 8, 64])
def test_the_row_fills_every_chunk_and_needs_padding(size: int) -> None:
    length = row_length(size)
    chunk = -(-length // (2 * size))
    assert length >= 26 and chunk >= 4
    assert 2 * size * chunk - length == 2


def test_a_few_odd_tokens_do_not_move_the_spread_and_groups_of_them_do() -> None:
    """Experts that are chosen otherwise in the one case; a chunk, the chunks' first tokens, a share's in the others."""
    size, chunk = 4, 5
    odd = torch.full((size, 2 * chunk), 1e-7)
    odd[0, 3] = odd[2, 1] = odd[3, 9] = 0.5
    odd[3, 5:7] = torch.nan
    assert spread(odd) == pytest.approx(1e-7)
    whole_chunk, first_of_chunks, first_of_shares = odd.clone(), odd.clone(), odd.clone()
    whole_chunk[1, chunk:] = 0.3
    first_of_chunks[:, [0, chunk]] = 0.3
    first_of_shares[1:, 0] = 0.3
    for groups in (whole_chunk, first_of_chunks, first_of_shares):
        assert spread(groups) == pytest.approx(0.3)
    assert torch.tensor(spread(torch.full((2, 8), torch.nan))).isnan()
