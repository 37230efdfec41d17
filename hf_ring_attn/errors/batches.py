"""Of batches, masks, models and trainers: what cannot be computed exactly."""

from __future__ import annotations

from .base import Refused

# ---- batches --------------------------------------------------------------------------------------------------------


class BadBatch(Refused):
    """A batch that cannot be sharded exactly: what is wrong with it, and what to do."""


class MixedDocuments(BadBatch):
    def __init__(self, row: int, token: int) -> None:
        super().__init__(
            f"position_ids restart at token {token} of row {row}, so the row holds several documents, but a 2-D "
            "attention_mask is given too: eager and sdpa would then let documents see each other, flash attention "
            "would not. For packed documents leave attention_mask out; for one document let position_ids count on."
        )


class GradientsChanged(Refused):
    def __init__(self, what: str, todo: str) -> None:
        super().__init__(f"sharded.reduce_gradients(model) was called, but {what}. {todo}")


class NotEntered(Refused):
    """``what``: what was done with the batch, "sharded.reduce() was called"."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}, but the model did not run in the context of the sharded batch, so each rank attended to its own "
            "tokens alone. Call it there: `with sharded: out = model(**sharded.inputs)`."
        )


class GenerationFromShare(Refused):
    def __init__(self, model: str) -> None:
        super().__init__(
            f"{model}.generate() was called with one rank's share of a batch, so each rank would continue its own "
            "tokens alone. Call it with whole rows, outside of the context: model.generate(batch['input_ids'])."
        )


class LateLayout(Refused):
    def __init__(self) -> None:
        super().__init__(
            "the model asks for RingConfig(layout='balanced'), but its batch was sharded without naming the model, in "
            "the zigzag layout. Call hf_ring_attn.shard(batch, model=model)."
        )


class OtherInputs(Refused):
    """``missing``: inputs that the call lacked; ``other``: those that are not what `shard` made."""

    def __init__(self, model: str, missing: list[str], other: list[str]) -> None:
        lacking = [f"without {' and '.join(missing)}"] if missing else []
        got = " and ".join([*lacking, *(f"with another {name}" for name in other)])
        super().__init__(
            f"{model} was called in a ring {got}. What shard() made tells each rank's tokens their places in the row, "
            "the padding of the whole row, the label after each chunk, and how many labels the whole batch has; one "
            "rank's tokens do not. Call it with all of that, as it is: model(**sharded.inputs). What is to be "
            "otherwise (another mask, other labels, num_items_in_batch counted over the batches of a step) goes into "
            "the batch that shard() is given; without labels the model computes no loss."
        )


# ---- masks and models -----------------------------------------------------------------------------------------------


class UnknownMask(Refused):
    def __init__(self, name: str, known: list[str]) -> None:
        super().__init__(
            f"the mask function {name} is not one that ring_fp32 knows, so it cannot be computed exactly. Known are "
            f"the functions of transformers.masking_utils {known} and what they join. Use attn_implementation="
            "'sdpa' or 'eager' without a ring for this model."
        )


class ShardedMask(Refused):
    def __init__(self, kind: str) -> None:
        todo = {
            "blocks": "Put block_sequence_ids [B, S] of the whole row into the batch.",
            "documents": (
                "It was given position_ids without the attention_mask that shard() made, or does not hand that on: "
                "call it with all of that, model(**sharded.inputs), or train this model without a ring."
            ),
        }
        super().__init__(
            f"the model tells which tokens attend to each other by {kind} that it made of one rank's tokens, and a "
            f"ring needs those of the whole row. {todo.get(kind, 'Train this model without a ring.')}"
        )


class MaskOutsideRing(Refused):
    def __init__(self) -> None:
        super().__init__(
            "an attention mask is being made inside backward, outside the sharded batch's context: a whole model (not "
            "its layers) is checkpointed, and its recompute would take the shard for the whole row. Checkpoint layers "
            "(model.gradient_checkpointing_enable()), or call backward inside `with sharded:`."
        )


class UnshardedInput(Refused):
    def __init__(self, queries: int, keys: int, local: int, length: int) -> None:
        super().__init__(
            f"inside an active ring the model must get its rank's {local} of {length} tokens, got {queries} queries "
            f"and {keys} keys. Pass `**sharded.inputs` to the model, without past_key_values, and call generate() "
            "outside the ring's context."
        )


class UnsupportedModel(Refused):
    def __init__(self, model: str, reasons: list[str]) -> None:
        super().__init__(f"{model} cannot be trained in a ring exactly: " + "; ".join(reasons) + ".")


SELF_CHECK_TODO = (
    "Please report it with the model's name. hf_ring_attn.configure(model, RingConfig(self_check=False)) trains it all "
    "the same, at your own risk: every step would have this difference."
)


class SelfCheckFailed(Refused):
    """The answer in the ring is not the answer to the whole row. ``where``: the module, by its path; "": the model."""

    def __init__(
        self, model: str, ring_size: int, tokens: int, error: float, tolerance: float, where: str, kind: str
    ) -> None:
        at = f"its module {where!r} ({kind})" if where else f"the code of {kind} itself"
        super().__init__(
            f"the self-check ran a random row of {tokens} tokens through {model}, in one process and in a ring of "
            f"{ring_size}, and the answers differ: {error:.1e} relative, where rounding explains {tolerance:.1e}. The "
            f"first difference is made by {at}: it probably counts positions from the local length, attends past "
            f"transformers' attention interface, or carries something from token to token. {SELF_CHECK_TODO}"
        )


class SelfCheckRaised(Refused):
    def __init__(self, model: str, ring_size: int, error: str) -> None:
        super().__init__(
            f"the self-check ran a random row through {model}: it runs in one process, but in a ring of {ring_size} it "
            f"raised {error}. {SELF_CHECK_TODO}"
        )


class GradientDiffers(Refused):
    """The trial step's loss is right in the ring, and a gradient of it is not."""

    def __init__(self, model: str, weight: str, ring_size: int, error: float, tolerance: float) -> None:
        super().__init__(
            f"the self-check tried a step of {model} on a random row, in one process and in a ring of {ring_size}: the "
            f"losses agree, and the gradients of {weight} differ by {error:.1e} relative, where rounding explains "
            f"{tolerance:.1e}. {SELF_CHECK_TODO}"
        )


_UNCHECKED = "hf_ring_attn.configure(model, RingConfig(self_check=False)) trains it unchecked, at your own risk."


class SelfCheckNotRun(Refused):
    def __init__(self, model: str, rows: int, tokens: int, error: str) -> None:
        row = "a row" if rows == 1 else f"{rows} rows"
        super().__init__(
            f"the self-check could not run {model} on {row} of {tokens} random tokens: {error}. So it is not known "
            f"whether its answer in a ring is that of one process. {_UNCHECKED}"
        )


class NothingToCheck(Refused):
    def __init__(self, model: str) -> None:
        super().__init__(
            f"{model} returned nothing that the self-check can compare with one process: no output with an entry for "
            "each token. Return the logits or the last hidden state beside what is computed of them. " + _UNCHECKED
        )


class PooledOutput(Refused):
    """An output that has no entry for each token is not that of one process."""

    def __init__(self, model: str, output: str, ring_size: int) -> None:
        super().__init__(
            f"{model} returns {output!r}, which has no entry for each token, and in a ring of {ring_size} it is not "
            "what one process gives: it is made of the first tokens, the last ones or their mean, and each rank takes "
            "its own. Leave it out (add_pooling_layer=False, say), and compute it from whole sequences: "
            f"sharded.gather(out.last_hidden_state). {_UNCHECKED}"
        )


class LayerWithoutSpec(Refused):
    def __init__(self, module: str, got: str) -> None:
        super().__init__(
            f"{module} asked for ring attention with {got} as its mask, inside an active ring: only masks made by "
            "transformers.masking_utils from a 2-D mask reach the ring. A 4-D mask, or a model that makes its own, "
            "cannot be computed exactly: leave the mask out, or run without a ring."
        )


class ScoreModDropped(Refused):
    def __init__(self, model: str, scored: int, plain: int) -> None:
        got = f"{scored} of its {scored + plain} attentions" if plain else "none of its attentions"
        super().__init__(
            f"{model} was called with a score_mod, which reached {got}: its layers do not hand on what a call is "
            "given, or attend elsewhere. Give it to the attention layers themselves: override their forward and pass "
            "score_mod to the attention function, ALL_ATTENTION_FUNCTIONS['ring_fp32']."
        )


class RecurrentLayerWithoutMask(Refused):
    def __init__(self, module: str) -> None:
        super().__init__(
            f"{module} looks along the sequence by other means than attention, in a ring, but was not given the mask "
            "that transformers.masking_utils.create_recurrent_attention_mask made, which tells it its place in the "
            "row: a model with a mask of its own, or a reentrant checkpoint that is given the mask as a tensor and "
            "copies it, cannot run in a ring. Use gradient_checkpointing_kwargs={'use_reentrant': False}."
        )


class MaskIsNoTensor(Refused, AttributeError):
    def __init__(self, use: str) -> None:
        super().__init__(
            f"the model uses its attention mask as a tensor ({use.strip()}), but a ring's mask is data that only its "
            "attention reads, and no tensor of S x S exists: a model that computes with its mask cannot run in a ring."
        )


class UnsupportedArgument(Refused):
    def __init__(self, module: str, name: str, why: str, call: str = "called attention with") -> None:
        super().__init__(f"{module} {call} {name}: {why}.")


class NoRingAttention(Refused):
    def __init__(self) -> None:
        super().__init__(
            "a forward ran inside an active ring, but no layer of it called ring attention, so each rank saw its own "
            "tokens alone. Load the model with attn_implementation='ring_fp32'; a model that does not use "
            "transformers' attention interface (bloom, mpt and kin) cannot run in a ring."
        )


_OWN_LOOP = "in your own loop leave labels out of the batch, and compute the loss on sharded.gather(out.logits)."


class LossNotSharded(Refused):
    """``gathers``: `loss="gathered"` computes it, which takes the loss of a causal language model.

    ``again``: it would, were the loss a function of its own: it is made in the model's forward.
    """

    def __init__(self, what: str, gathers: bool = False, again: bool = False) -> None:
        trainer = "No trainer can train it in a ring yet"
        if again:
            trainer = (
                "Give it to transformers.Trainer as compute_loss_func, a function of whole rows' logits, with "
                "hf_ring_attn.configure(model, RingConfig(loss='gathered'))"
            )
        if gathers:
            trainer = (
                "Use the gathered loss: hf_ring_attn.configure(model, RingConfig(loss='gathered')) with "
                "transformers.Trainer (SFTTrainer makes no logits)"
            )
        super().__init__(f"{what} cannot be computed exactly from one rank's tokens. {trainer}; {_OWN_LOOP}")


class LossWithoutLabels(Refused):
    def __init__(self, model: str) -> None:
        super().__init__(
            f"{model} returned a loss, but the batch has no labels: it was computed of one rank's tokens from other "
            "inputs (start_positions of question answering, say, or targets of your own), and the loss of the whole "
            "row is not the mean of such losses. Give the targets as labels [B, S] to a causal language model; else "
            "return no loss, and compute it from whole sequences: sharded.gather(out.logits)."
        )


# ---- trainers -------------------------------------------------------------------------------------------------------


class UnknownTrainer(Refused):
    def __init__(self, trainer: str, method: str) -> None:
        super().__init__(
            f"{trainer} counts or shards its batches in {method}, which is not known to be exact in a ring. Use "
            "transformers.Trainer's method; if yours only calls it and returns what it returns, set the class "
            f"attribute `ring_fp32_exact = True` on {trainer}."
        )


class UnsupportedTrainer(Refused):
    def __init__(self, trainer: str) -> None:
        super().__init__(
            f"{trainer} is not supported in a ring yet: its loss compares whole sequences, or models, and a rank holds "
            "a part of each sequence. Use it without a ring (cp_size=1); trl.SFTTrainer and transformers.Trainer run "
            "in one."
        )


class UnsupportedOption(Refused):
    def __init__(self, option: str, why: str) -> None:
        super().__init__(f"{option} is not possible with ring_fp32: {why}.")


class UnknownOutput(Refused):
    def __init__(self, name: str, got: object, local: int) -> None:
        super().__init__(
            f"the model's output {name!r} ({got}) does not hold one entry for each of this rank's {local} tokens, so "
            "whole sequences cannot be made of it. Name it in ignore_keys, or set "
            "TrainingArguments(prediction_loss_only=True)."
        )
