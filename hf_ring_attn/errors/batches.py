"""Errors of batches, masks, models and trainers that a ring cannot compute exactly."""

from __future__ import annotations

from collections.abc import Sequence

from .base import Refused
from .losses import OWN_TERM

# ---- batches --------------------------------------------------------------------------------------------------------


class BadBatch(Refused):
    """A batch that cannot be sharded exactly."""


class NumberedMask(BadBatch):
    def __init__(self, highest: int) -> None:
        super().__init__(
            f"the attention_mask holds {highest}, as if it numbered packed documents, but a 2-D mask is 0 or 1. Models "
            "take it for a mask of padding, and let documents see each other. Number documents by position_ids that "
            "restart at 0 for each, and leave the mask out; or make a mask of padding with mask.ne(0)."
        )


class MixedDocuments(BadBatch):
    def __init__(self, row: int, token: int) -> None:
        super().__init__(
            f"position_ids restart at token {token} of row {row}, as for packed documents, but the batch has a 2-D "
            "attention_mask, too. With both, eager and sdpa let documents see each other; flash attention does not. "
            "For packed documents leave attention_mask out; for one document let position_ids count on."
        )


class GradientsChanged(Refused):
    def __init__(self, what: str, todo: str) -> None:
        super().__init__(f"sharded.reduce_gradients(model) was called, but {what}. {todo}")


class NotEntered(Refused):
    """``what``: the use of the batch, such as "sharded.reduce() was called"."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}, but the model did not run in the context of the sharded batch, so each rank attended to its own "
            "tokens only. Call it there, in the same thread: `with sharded: out = model(**sharded.inputs)`."
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
            "the model has RingConfig(layout='balanced'), but its batch was sharded without the model, in the zigzag "
            "layout. Call hf_ring_attn.shard(batch, model=model)."
        )


class OtherInputs(Refused):
    """``missing``: inputs that the call lacked; ``other``: those that differ from `shard`'s."""

    def __init__(self, model: str, missing: list[str], other: list[str]) -> None:
        lacking = [f"without {' and '.join(missing)}"] if missing else []
        got = " and ".join([*lacking, *(f"with another {name}" for name in other)])
        super().__init__(
            f"{model} was called in a ring {got}. One rank's tokens do not determine positions, padding and labels of "
            "the whole row. Call model(**inputs) with the inputs of shard() or of the trainer. Change a mask or labels "
            "in the batch, before it is sharded. For other rows use hf_ring_attn.whole_rows(model), in a Trainer "
            "RingConfig(loss='gathered')."
        )


# ---- masks and models -----------------------------------------------------------------------------------------------


class UnknownMask(Refused):
    def __init__(self, name: str, known: list[str]) -> None:
        super().__init__(
            f"the mask function {name} is not one that ring_fp32 knows, so it cannot be computed exactly. Known are "
            f"these functions of transformers.masking_utils and their combinations: {', '.join(known)}. "
            "Use attn_implementation='sdpa' or 'eager' without a ring for this model."
        )


class ShardedMask(Refused):
    def __init__(self, kind: str) -> None:
        todo = {
            "blocks": "Put block_sequence_ids [B, S] of the whole row into the batch.",
            "documents": (
                "It was given position_ids without the attention_mask that shard() made, or does not pass it on. "
                "Call model(**sharded.inputs) unchanged, or train this model without a ring."
            ),
        }
        super().__init__(
            f"the model makes its mask from {kind} that it found in one rank's tokens, but a ring needs the row's. "
            f"{todo.get(kind, 'Train this model without a ring.')}"
        )


class MaskOutsideRing(Refused):
    def __init__(self) -> None:
        super().__init__(
            "an attention mask is being made inside backward, outside the sharded batch's context. A whole model (not "
            "its layers) is checkpointed, and its recompute would take the shard for the whole row. Checkpoint layers "
            "(model.gradient_checkpointing_enable()), or call backward inside `with sharded:` or `with whole_rows():`."
        )


class UnshardedInput(Refused):
    def __init__(self, queries: int, keys: int, local: int, length: int) -> None:
        super().__init__(
            f"inside an active ring the model must get its rank's {local} of {length} tokens, got {queries} queries "
            f"and {keys} keys. Pass `**sharded.inputs` to the model, without a cache. Trim padding of whole rows: in a "
            "collator or a trainer's _prepare_inputs, not in compute_loss. Call generate() outside the ring's context."
        )


class UnsupportedModel(Refused):
    def __init__(self, model: str, reasons: list[str]) -> None:
        super().__init__(f"{model} cannot be trained in a ring exactly: " + "; ".join(reasons) + ".")


SELF_CHECK_TODO = (
    "Please report it. To train with this error at your own risk, call "
    "hf_ring_attn.configure(model, RingConfig(self_check=False))."
)


class SelfCheckFailed(Refused):
    """The ring's answer differs from one process's. ``where``: the module, by its path; "": the model."""

    def __init__(
        self, model: str, ring_size: int, tokens: int, error: float, tolerance: float, where: str, kind: str
    ) -> None:
        at = f"its module {where!r} ({kind})" if where else f"the code of {kind} itself"
        super().__init__(
            f"self-check: {model} on {tokens} random tokens differs between one process and a ring of {ring_size} by "
            f"{error:.1e} (rounding: {tolerance:.1e}). The first difference is made by {at}: it probably uses the "
            f"local length, bypasses transformers' attention interface, or passes state along. {SELF_CHECK_TODO}"
        )


class SelfCheckRaised(Refused):
    def __init__(self, model: str, ring_size: int, error: str) -> None:
        super().__init__(
            f"self-check: {model} runs on a random row in one process, but in a ring of {ring_size} it raised {error}. "
            f"{SELF_CHECK_TODO}"
        )


_UNCHECKED = "hf_ring_attn.configure(model, RingConfig(self_check=False)) trains it unchecked, at your own risk."
_OWN_FORWARD = f"Remove hooks that clip gradients, and means over a rank's tokens; else please report it. {_UNCHECKED}"


class GradientDiffers(Refused):
    """A gradient of the trial step differs from one process's, though its loss does not."""

    def __init__(  # own: as in LossNotSharded
        self, model: str, weight: str, ring_size: int, error: float, tolerance: float, own: bool = False
    ) -> None:
        super().__init__(
            f"the self-check tried a step of {model} on a random row, in one process and in a ring of {ring_size}: the "
            f"losses agree, but the gradients of {weight} differ by {error:.1e} (rounding: {tolerance:.1e}). "
            f"{OWN_TERM if own else _OWN_FORWARD}"
        )


class SelfCheckNotRun(Refused):
    """``untested``: pip requirements that replace hosts of untested versions."""

    def __init__(self, model: str, rows: int, tokens: int, error: str, untested: Sequence[str]) -> None:
        row = "a row" if rows == 1 else f"{rows} rows"
        tested, error = " ".join(f"'{requirement}'" for requirement in untested), error.rstrip(".")
        advice = f"Install tested versions first: pip install {tested}. " if tested else ""
        super().__init__(
            f"the self-check could not run {model} on {row} of {tokens} random tokens: {error}. So its exactness in a "
            f"ring is unknown. {advice}Try your batch in one process: if it fails there, too, correct it. Only if it "
            f"does not: {_UNCHECKED}"
        )


class SelfCheckRowFailed(Refused):
    """The self-check's row failed on this rank, and not on others."""

    def __init__(self, model: str, error: str) -> None:
        super().__init__(
            f"the self-check's random row failed on this rank, not on all: {model} raised {error}. All ranks of a ring "
            "gave the same row to their model, so compare its code and options, packages and free memory there, and "
            "the inputs of other rings."
        )


class NothingToCheck(Refused):
    def __init__(self, model: str) -> None:
        super().__init__(
            f"{model} returned nothing that the self-check can compare with one process: no output with an entry for "
            "each token. Return the logits or the last hidden state, too. " + _UNCHECKED
        )


class FeaturesSplit(Refused):
    """Features take the places of tokens by an order that a rank's tokens do not have. ``names``: of inputs."""

    def __init__(self, model: str, names: list[str]) -> None:
        super().__init__(
            f"self-check: {model} differs in a ring once its row has the batch's own placeholders: it fills them from "
            f"{names} in order, and a rank holds a part of them. Name such inputs pixel_values or input_features, and "
            "let get_decoder() return an inner text model with its own config: then rows are sharded at its input."
        )


class PooledOutput(Refused):
    """An output without an entry for each token differs from one process's. ``gathers``: those of tokens are whole."""

    def __init__(self, model: str, output: str, ring_size: int, gathers: bool) -> None:
        todo = "Leave it out, and pool the hidden states that the model returns: outside of it they are of whole rows"
        if not gathers:
            todo = (
                "Call the model without labels in hf_ring_attn.whole_rows(model); or leave the output out "
                "(add_pooling_layer=False), and pool by sharded.row_mean"
            )
        super().__init__(
            f"{model} returns {output!r}, which has no entry for each token, and in a ring of {ring_size} it differs "
            f"from one process: each rank pools its own tokens. {todo}. {_UNCHECKED}"
        )


class LayerWithoutSpec(Refused):
    """``got``: the type of its mask; "nothing": a program calls the layer by itself."""

    def __init__(self, module: str, got: str) -> None:
        todo = "Leave the mask out, or run without a ring."
        if got == "nothing":
            todo = (
                "Call a layer by itself with whole rows: in a Trainer by RingConfig(loss='gathered'), in a loop inside "
                "hf_ring_attn.whole_rows(model)."
            )
        super().__init__(
            f"{module} asked for ring attention with {got} as its mask, inside an active ring. Only masks made by "
            f"transformers.masking_utils from a 2-D mask are exact there, not a 4-D mask or a model's own. {todo}"
        )


class ScoreModDropped(Refused):
    def __init__(self, model: str, scored: int, plain: int) -> None:
        got = f"{scored} of its {scored + plain} attentions" if plain else "none of its attentions"
        super().__init__(
            f"{model} was called with a score_mod, which reached {got}: its layers do not pass on extra arguments, "
            "or use another attention. Override the forward of the attention layers and pass score_mod to the "
            "attention function, ALL_ATTENTION_FUNCTIONS['ring_fp32']."
        )


class RecurrentLayerWithoutMask(Refused):
    def __init__(self, module: str) -> None:
        super().__init__(
            f"{module}, a recurrent layer in a ring, did not get the mask that "
            "transformers.masking_utils.create_recurrent_attention_mask made, which holds its position in the row. The "
            "model gives it none, or a reentrant checkpoint got the mask as a tensor and copied it. "
            "With checkpointing use gradient_checkpointing_kwargs={'use_reentrant': False}; else train without a ring."
        )


class MaskIsNoTensor(Refused, AttributeError):
    def __init__(self, use: str) -> None:
        super().__init__(
            f"the model uses its attention mask as a tensor ({use.strip()}), but a ring's mask is no tensor: no S x S "
            "tensor exists. So a model that computes with its mask cannot run in a ring. Train it without one."
        )


class StatesLeftOut(Refused, AttributeError):
    """States of a vision tower were used, of which each rank has those of its own images."""

    def __init__(self, use: str) -> None:
        super().__init__(
            f"states of the vision tower were used ({use.strip()}), but each rank computed its own images, and only "
            "pooler_output and deepstack_features were gathered. Take pooler_output. Or read the states in a forward "
            "hook on the tower (register_forward_hook): beside a hook of your own every rank computes all images."
        )


class UnsupportedArgument(Refused):
    def __init__(self, module: str, name: str, why: str, call: str = "called attention with") -> None:
        super().__init__(f"{module} {call} {name}: {why}.")


class OtherIgnoreIndex(Refused):
    """Labels that are ignored have another value than -100."""

    def __init__(self, what: str, value: object) -> None:
        super().__init__(
            f"{what} ignore_index={value!r}, but a ring marks padding, and the labels that it does not count, with "
            f"-100. Give ignored labels that value, labels.masked_fill(labels == {value!r}, -100), and leave "
            "ignore_index out."
        )


class NoRingAttention(Refused):
    """``ran``: a model was called."""

    def __init__(self, ran: bool = True) -> None:
        without_call = (
            "a rank left its batch without a call of the model, for which other ranks of its ring may wait. Call it on "
            "every rank and for every batch. To skip a batch, return the model's loss times 0."
        )
        without_attention = (
            "a forward ran inside an active ring, but no layer of it called ring attention, so each rank saw its own "
            "tokens only. Load the model with attn_implementation='ring_fp32'. Remove code that replaces the forward "
            "of attention layers. A model without transformers' attention interface (such as bloom or mpt) cannot run "
            "in a ring."
        )
        super().__init__(without_attention if ran else without_call)


# ---- trainers -------------------------------------------------------------------------------------------------------


class UnknownTrainer(Refused):
    def __init__(self, trainer: str, method: str) -> None:
        super().__init__(
            f"{trainer} counts or shards its batches in {method}, which is not known to be exact in a ring. Use "
            "transformers.Trainer's method; if yours only calls it and returns what it returns, set the class "
            f"attribute `ring_fp32_exact = True` on {trainer}."
        )


class InputsNotHandedOn(Refused):
    def __init__(self, trainer: str, method: str) -> None:
        super().__init__(
            f"{method} of {trainer} changed the batch, or did not return super()'s result unchanged. The loss would be "
            "computed on other inputs than the ring sharded. Change batches in `_prepare_inputs` or a collator, losses "
            "in `compute_loss`."
        )


class UnsupportedTrainer(Refused):
    def __init__(self, trainer: str) -> None:
        super().__init__(
            f"{trainer} is not supported in a ring yet: its loss compares whole sequences, or models, and a rank holds "
            "a part of each sequence. Use it without a ring (cp_size=1). In a ring use transformers.Trainer or TRL's "
            "trainers for SFT, DPO, KTO, ORPO, CPO, TPO, online DPO, A*-PO, rewards, GRPO, GMPO, RLOO, distillation, "
            "GKD."
        )


class UnsupportedOption(Refused):
    def __init__(self, option: str, why: str) -> None:
        super().__init__(f"{option} is not possible with ring_fp32: {why}.")


class PartialGroups(Refused):
    def __init__(self, completions: int, counted: str, generations: int) -> None:
        super().__init__(
            f"{completions} completions ({counted}) are no whole groups of {generations} generations. The ranks of a "
            "ring share their rows, so their number counts rings, not processes. Set per_device_train_batch_size, "
            "per_device_eval_batch_size or steps_per_generation to a multiple, or num_generations to a divisor."
        )


class CacheNotKept(Refused, AttributeError):
    """The use of a cache that a call with whole rows did not make."""

    def __init__(self) -> None:
        super().__init__(
            "a call of whole rows in a ring keeps no cache, since a rank has the keys of its tokens alone. Call the "
            "model with use_cache=True: then each rank computes whole rows, and the cache is that of one process."
        )


class NotOfTokens(Refused):
    """An output of a model that gets whole rows, with a gradient, that cannot be made whole."""

    def __init__(self, output: str, got: object, local: int) -> None:
        super().__init__(
            f"the model returns {output!r} ({got}), which has no entry for each of this rank's {local} tokens in its "
            "second dim, so it is not that of whole rows. Compute it outside of the model, from what it returns for "
            "tokens; or set the model's loss_type='ForSequenceClassification' (the guide of classification)."
        )


class UnknownOutput(Refused):
    def __init__(self, name: str, got: object, local: int) -> None:
        super().__init__(
            f"the model's output {name!r} ({got}) does not have one entry for each of this rank's {local} tokens, so "
            "it cannot be gathered to whole sequences. Name it in ignore_keys, or set "
            "TrainingArguments(prediction_loss_only=True)."
        )
