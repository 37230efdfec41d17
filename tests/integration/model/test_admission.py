"""What a ring refuses: models and trainers that it cannot compute exactly, on every rank, before a step, in words."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import hf_ring_attn
import tests.helpers.jobs.refusal_jobs as jobs
from hf_ring_attn import RingConfig, errors
from hf_ring_attn.integration.context import model_record
from hf_ring_attn.integration.hosts.prediction import whole_sequences
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import padded, tokens
from tests.helpers.jobs.refusal_jobs import Forward, Training
from tests.helpers.jobs.runs import Mesh, Run
from tests.helpers.models.tiny_models import tiny

RWKV = {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 97}
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32, "attention_dropout": 0.0}
BERT = {"attention_probs_dropout_prob": 0.0}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 97}
NO_INTERFACE = "its code does not use transformers' attention interface, so its attention would stay on each rank"
GATHERED_INSTEAD = "cannot be computed exactly from one rank's tokens. Use hf_ring_attn.configure("

FORWARDS = [
    Forward(
        why="attention dropout", config={"attention_dropout": 0.1}, error="UnsupportedArgument",
        text="LlamaAttention called attention with dropout=0.1: it is not exact in a ring; set it to 0.0",
    ),
    Forward(
        why="attention dropout of GPT-2, on by default", kind="GPT2LMHeadModel", error="UnsupportedArgument",
        text="dropout=0.1: it is not exact in a ring; set it to 0.0 in the model's config (attention_dropout,",
    ),
    Forward(
        why="layers that are named as hybrids' are", change=jobs.named_as_hybrids,
        text="its layers of type ['linear_attention'] do not go through ring attention exactly",
    ),
    Forward(
        why="a recurrence alone", kind="RwkvForCausalLM", sizes=False, config=RWKV, text=NO_INTERFACE,
    ),
    Forward(
        why="ALiBi off the interface", kind="BloomForCausalLM", sizes=False,
        config={"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97}, text=NO_INTERFACE,
    ),
    Forward(
        why="off the interface", kind="MptForCausalLM", sizes=False,
        config={"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 97}, text=NO_INTERFACE,
    ),
    Forward(
        why="an encoder and a decoder", kind="T5ForConditionalGeneration", sizes=False,
        config=T5, text="encoder-decoder models are not supported",
    ),
    *(
        Forward(why=f"{kind} beside attention", change=partial(jobs.with_a_mixer, kind=kind), text=text)
        for kind, text in {
            "GRU": "model.layers.0.mixer (GRU) reads other tokens than its own, which are on other ranks",
            "MultiheadAttention": "model.layers.0.mixer (MultiheadAttention) reads other tokens than its own",
        }.items()
    ),
    Forward(
        why="a temperature that is not Llama 4's", change=jobs.tuned_otherwise,
        text="model.layers.0.self_attn (LlamaAttention) has a temperature tuning that is not Llama 4's",
    ),
    Forward(
        why="an auxiliary loss of experts that is not Mixtral's", kind="MixtralForCausalLM",
        config={"output_router_logits": True, "num_local_experts": 4}, change=jobs.balanced_otherwise,
        text="its MoE auxiliary loss is not a known one, so it is not exact on one rank's tokens; set output_router",
    ),
    Forward(
        why="a causal mask that sdpa drops for none", kind="Gemma2ForCausalLM",
        config={"use_bidirectional_attention": True, "sliding_window": 7}, error="UnsupportedArgument",
        text="Gemma2Attention called attention with is_causal=False: its mask is causal, but transformers' sdpa drops",
    ),
    Forward(
        why="labels of a masked language model", kind="BertForMaskedLM", error="UnnamedModel",
        config=BERT,
        text="the loss of BertForMaskedLM, which is no causal language model's, cannot be computed exactly from one",
    ),
    Forward(
        why="labels of tokens", kind="LlamaForTokenClassification", error="UnnamedModel",
        text="its head needs whole rows. Name the model when you shard, hf_ring_attn.shard(batch, model=model), or use",
    ),
    Forward(
        why="a class of the sequence", kind="LlamaForSequenceClassification", labelled=False,
        text="it classifies a sequence by one token, which each rank would choose among its own",
    ),
    Forward(
        why="positions counted from the padding token", kind="RobertaForCausalLM",
        config={**BERT, "is_decoder": True},
        text="roberta.embeddings (RobertaEmbeddings) numbers positions by input_ids; put its position_ids into",
    ),
    Forward(
        why="positions counted by the padding mask", kind="OPTForCausalLM", batch=padded(24, left=4),
        config=OPT,
        text="(OPTDecoder) numbers positions by the padding mask; put its position_ids into the batch",
    ),
    Forward(
        why="a prompt of PEFT", change=jobs.prompt_tuning,
        text="the PEFT adapter 'default' (PROMPT_TUNING) prepends its prompt to every rank's tokens",
    ),
    Forward(why="aLoRA", change=jobs.activated_lora, text="(aLoRA) looks for its invocation tokens in each rank's"),
    Forward(why="NEFTune", change=jobs.neftune, text="scales NEFTune's noise by the local length"),
    Forward(
        why="another attention", attention="sdpa", text="its attn_implementation is 'sdpa'; load it with \"ring_fp32\"",
    ),
    Forward(
        why="no model of transformers", change=jobs.Linear, error="NoRingAttention",
        text="a forward ran inside an active ring, but no layer of it called ring attention",
    ),
    Forward(
        why="a 4-D mask past shard()", change=jobs.with_a_4d_mask, error="LayerWithoutSpec",
        text="LlamaAttention asked for ring attention with Tensor as its mask, inside an active ring",
    ),
    Forward(
        why="rows that were not sharded", change=jobs.with_whole_rows, error="UnshardedInput",
        text="the model must get its rank's 12 of 24 tokens, got 24 queries and 24 keys. Pass `**sharded.inputs`",
    ),
    Forward(
        why="generate in the context", change=jobs.that_generates, error="UnshardedInput",
        text="Call generate() outside the ring's context.",
    ),
    Forward(
        why="a checkpoint around the whole model", change=jobs.checkpointed_whole, error="MaskOutsideRing",
        text="an attention mask is being made inside backward, outside the sharded batch's context",
    ),
    Forward(why="DeepSpeed", change=jobs.DeepSpeedEngine, text="DeepSpeed is not tested: use FSDP2 or DDP"),
    Forward(
        why="FSDP1", change=jobs.FullyShardedDataParallel,
        text="FSDP1 is not tested: use FSDP2 (fsdp_version: 2; Lightning: ModelParallelStrategy) or DDP",
    ),
    Forward(
        why="tensor parallelism by torch", change=jobs.split_by_torch,
        text="torch's distribute_module, or parallelize_module, split its Linear over ranks of one ring",
    ),
    Forward(
        why="a weight on disk", change=jobs.with_a_layer_on_disk,
        text="its weight model.layers.0.self_attn.q_proj.weight trains, but its device_map put it on disk",
    ),
    Forward(
        why="tensor parallelism by transformers", change=jobs.split_by_transformers,
        text="tensor parallelism needs the same tokens on its ranks",
    ),
]  # fmt: skip


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.why)
def test_a_model_is_refused_on_every_rank(ranks: Ranks, forward: Forward) -> None:
    for raised in ranks(2).run(jobs.refused, forward):
        assert raised is not None, "not refused"
        assert raised[0] == forward.error, raised
        assert forward.text in raised[1]


EXACT = [
    Forward(
        why="positions of its own", kind="RobertaForCausalLM", error="", text="",
        config={**BERT, "is_decoder": True, "hidden_dropout_prob": 0.0},
        batch={**tokens(24), "position_ids": torch.arange(1, 25).expand(2, -1).contiguous()},
    ),
    Forward(why="OPT without padding", kind="OPTForCausalLM", config=OPT, error="", text=""),
]  # fmt: skip


@pytest.mark.parametrize("forward", EXACT, ids=lambda forward: forward.why)
def test_what_is_exact_is_not_refused(ranks: Ranks, forward: Forward) -> None:
    assert ranks(2).run(jobs.refused, forward) == [None, None]


@pytest.mark.parametrize("forward", [forward for forward in FORWARDS if "numbers positions by" in forward.text])
def test_other_positions_are_refused_in_a_ring_of_one_too(forward: Forward) -> None:
    """`shard` numbers the rows of a batch without position_ids at any ring size."""
    raised = jobs.refused(forward)
    assert raised is not None and raised[0] == forward.error and forward.text in raised[1]


def test_alone_nothing_needs_refusing() -> None:
    """In a ring of one attention has its whole row, so the loss of a masked language model is its own."""
    assert jobs.refused(Forward(why="", kind="BertForMaskedLM", config=BERT, error="", text="")) is None


# ---- Trainers --------------------------------------------------------------------------------------------------------

TRAININGS = [
    Training(
        why="a compute_loss of its own", kind=jobs.OwnLoss, error="LossNotSharded",
        text="the loss of OwnLoss.compute_loss (the self-check found ",
    ),
    Training(
        why="label smoothing", error="LossNotSharded",
        run=Run(why="", arguments={"label_smoothing_factor": 0.1}, ring=RingConfig(loss="sharded")),
        text=f"label smoothing (label_smoothing_factor) {GATHERED_INSTEAD}model, RingConfig(loss=",
    ),
    Training(
        why="label smoothing of means of batches", change=jobs.with_means_of_batches, error="UnsupportedOption",
        run=Run(why="", arguments={"label_smoothing_factor": 0.1}),
        text="label_smoothing_factor is not possible with ring_fp32: LlamaForCausalLM has accepts_loss_kwargs=False",
    ),
    Training(
        why="an optimizer that steps inside the backward", kind=jobs.WithLomo, error="UnsupportedOption",
        text="LOMO is not possible with ring_fp32: it updates weights inside the backward, by the gradient of one rank",
    ),
    Training(
        why="compute_loss_func", run=Run(why="", loss_function=True, ring=RingConfig(loss="sharded")),
        error="LossNotSharded",
        text=f"compute_loss_func {GATHERED_INSTEAD}",
    ),
    Training(
        why="an encoder and a decoder, whose labels are others than its tokens", model="T5ForConditionalGeneration",
        config=T5, error="UnsupportedModel", more={"data_collator": jobs.with_other_labels},
        text="T5ForConditionalGeneration cannot be trained in a ring exactly: encoder-decoder models are not supp",
    ),
    Training(
        why="a compute_loss of its own, and model_init", kind=jobs.OwnLossOfALaterModel, error="LossNotSharded",
        text="the loss of OwnLossOfALaterModel.compute_loss (the self-check found ",
    ),
    Training(
        why="a loss_function of its own", run=Run(why="", ring=RingConfig(loss="sharded")),
        change=jobs.with_a_loss_function, error="LossNotSharded",
        text=f"the loss of LlamaForCausalLM, whose loss_function is its_own_loss, {GATHERED_INSTEAD}",
    ),
    Training(
        why="a forward that takes no count", change=jobs.without_keywords, error="LossNotSharded",
        run=Run(why="", steps=2, ring=RingConfig(loss="chunked")),
        text="the loss of WithoutKeywords, which takes no num_items_in_batch,",
    ),
    Training(
        why="attention dropout", config={"attention_dropout": 0.2}, error="UnsupportedArgument",
        text="LlamaAttention called attention with dropout=0.2",
    ),
    Training(
        why="one rank has a cache", more={"data_collator": jobs.one_rank_has_a_cache}, only=1, error="BadBatch",
        text="the batch holds ['past_key_values']",
    ),
    Training(
        why="ranks with batches of their own", kind=jobs.OtherOrder, error="RanksDiffer",
        text="the ranks of one ring must hold the same input_ids[0, 0], but got rank 0: ",
    ),
    Training(
        why="dispatched batches", error="DispatchedBatches",
        run=Run(why="", streamed=True, arguments={"accelerator_config": {"dispatch_batches": True}}),
        text="dispatch_batches=True: accelerate would give every rank of a ring another batch, but a ring shares one.",
    ),
    Training(
        why="sizes that do not multiply out", environment={"PARALLELISM_CONFIG_CP_SIZE": "3"}, error="MeshMismatch",
        text="the mesh dp_replicate 1 x dp_shard 1 x cp 3 x sp 1 x tp 1 needs 3 processes, got 2. Start 3 processes",
    ),
    Training(
        why="tensor parallelism", mesh=Mesh(cp=2, dp=2), error="UntestedParallelism",
        environment={"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1", "PARALLELISM_CONFIG_TP_SIZE": "2"},
        text="ring_fp32 with tensor parallelism (tp_size=2) is refused, because it was never tested: set tp_size=1.",
    ),
    Training(
        why="predictions without names", run=Run(why="", steps=0, ring=RingConfig(loss="chunked")), predicts=True,
        error="UnknownOutput", change=jobs.that_returns_a_tuple, text="the model's output 'outputs' (tuple) does not",
    ),
]  # fmt: skip


@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: training.why)
@pytest.mark.turns
def test_a_trainer_is_refused_before_its_first_step(ranks: Ranks, training: Training) -> None:
    for rank, raised in enumerate(ranks(training.mesh.size).run(jobs.refused_training, training)):
        assert raised is not None, "not refused"
        error, text, steps = raised
        assert error == (training.error if training.only in (None, rank) else "RefusedElsewhere"), raised
        assert training.text in text
        assert steps == 0


def test_the_gathered_loss_takes_a_loss_function_of_its_own(ranks: Ranks) -> None:
    run = Run(why="", steps=2, ring=RingConfig(loss="gathered"))
    training = Training(why="", run=run, change=jobs.with_a_loss_function, error="", text="")
    assert ranks(2).run(jobs.refused_training, training) == [None, None]


# ---- small things ----------------------------------------------------------------------------------------------------


def test_an_output_that_is_not_of_tokens_is_refused() -> None:
    sharded = hf_ring_attn.shard(tokens(12))
    assert whole_sequences(sharded, "logits", torch.ones(2, 12, 3)).shape == (2, 12, 3)
    for odd in (torch.ones(2, 5), torch.ones(2), "text"):
        with pytest.raises(errors.UnknownOutput, match=r"'pooled' .* in ignore_keys, or set TrainingArguments\(pred"):
            whole_sequences(sharded, "pooled", odd)


def test_gather_takes_a_rank_s_share_only() -> None:
    with pytest.raises(errors.BadShape, match=r"x has shape \(2, 11\), but it must be \[B, 12, \.\.\.\]"):
        hf_ring_attn.shard(tokens(12)).gather(torch.ones(2, 11))


def test_options_follow_the_model() -> None:
    """Through wrappers, and not to another model with an equal config."""
    model, other = tiny("llama", "ring_fp32"), tiny("llama", "ring_fp32")
    options = RingConfig(loss="gathered")
    hf_ring_attn.configure(model, options)
    assert model_record.options_of(torch.nn.Sequential(model)) is options
    assert model_record.options_of(other) == RingConfig()
    assert hf_ring_attn.shard(tokens(8), model=model).context.config is options
    assert "ring" not in model.config.to_json_string()
