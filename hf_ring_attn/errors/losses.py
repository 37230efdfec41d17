"""Errors of losses that one rank's tokens do not determine."""

from __future__ import annotations

from .base import Refused

OWN_TERM = (
    "Each term of compute_loss must add up over ranks: (a sum over shift_labels) / num_items_in_batch * "
    "accelerator.num_processes; another model's loss: other(**inputs, num_items_in_batch=num_items_in_batch).loss * "
    "accelerator.num_processes."
)
_OWN_LOOP = "in your own loop call the model in hf_ring_attn.whole_rows(model)"
_GATHERED = "hf_ring_attn.configure(model, RingConfig(loss='gathered'))"


class LossNotSharded(Refused):
    """``gathers``: `loss="gathered"` can compute it, for a causal language model.

    ``again``: it could, if the loss were a separate function: the model's forward computes it. ``own``: a trainer's own
    compute_loss does, from one rank's tokens.
    """

    def __init__(self, what: str, gathers: bool = False, again: bool = False, own: bool = False) -> None:
        trainer = "If the model pools rows, set its loss_type='ForSequenceClassification'"
        if again:
            trainer = f"Compute it outside of the model, in compute_loss or compute_loss_func, with {_GATHERED}"
        if own:
            trainer = f"For any other loss {_GATHERED}: then compute_loss gets whole rows"
        if gathers:
            trainer = f"Use {_GATHERED} in a trainer"
        todo = f"{OWN_TERM} {trainer}." if own else f"{trainer}; {_OWN_LOOP}{', without labels' * again}."
        super().__init__(f"{what} cannot be computed exactly from one rank's tokens. {todo}")


class ShardedLoss(Refused):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"the loss of {name} is a DTensor: a term of it, as a penalty on weights, was computed from the parameters "
            "that FSDP2 shards. Use parameter.full_tensor() there, or the optimizer's weight_decay."
        )


class UnnamedModel(Refused):
    """A model whose head needs whole rows, for which its batch was not sharded."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"the loss of {model}, which is no causal language model's, cannot be computed exactly from one rank's "
            "tokens: its head needs whole rows. Name the model when you shard, hf_ring_attn.shard(batch, model=model), "
            "or use transformers.Trainer."
        )


class LossNotChunked(Refused):
    def __init__(self, model: str, why: str) -> None:
        super().__init__(
            f"loss='chunked' makes no logits, but {model} made them all: {why}. Use RingConfig(loss='auto'), which "
            "computes the loss in chunks where it can, or 'sharded', which never does."
        )


class LogitsNotMade(Refused):
    def __init__(self, why: str) -> None:
        super().__init__(
            "the loss was computed in chunks, so the logits of this batch were not made, and now they cannot be: "
            f"{why}. Read them earlier, or have them made in the forward: "
            "hf_ring_attn.configure(model, RingConfig(loss='sharded'))."
        )


_SUM_SHIFTED = (
    "Sum over sharded.inputs['shift_labels'], which were shifted on the whole row (reduction='sum'), and divide by "
    "sharded.inputs['num_items_in_batch']. For any other loss call the model in hf_ring_attn.whole_rows(model)."
)


class ShiftedByHand(Refused):
    def __init__(self) -> None:
        super().__init__(
            "logits, hidden states, labels or ids of one rank were shifted by hand, as by [:, :-1] or [:, 1:]. The "
            f"label of a chunk's last token is on another rank. {_SUM_SHIFTED}"
        )


class MeanOfOneRank(Refused):
    def __init__(self) -> None:
        super().__init__(
            "each rank divided its loss by another number: a mean over its tokens, or sum() / mask.sum(). So labels of "
            f"some ranks would count more than those of others. {_SUM_SHIFTED}"
        )


class PooledOnOneRank(Refused):
    def __init__(self) -> None:
        super().__init__(
            "the loss uses a rank's tokens as if they were a row: its last token, its largest number, or a function of "
            "a sum over its tokens, as of hidden states or log-probabilities. Take sharded.last_token(x), "
            "sharded.row_sum(x, mask) or sharded.row_mean(x, mask); or call the model in "
            "hf_ring_attn.whole_rows(model)."
        )


class PaddingInLoss(Refused):
    def __init__(self) -> None:
        super().__init__(
            "the loss counts tokens that only pad the row to a multiple of twice the ring size: it was summed over all "
            "of a rank's tokens. One process has no such tokens. Count those with shift_labels != -100, or with "
            "sharded.positions below the row's length; or call the model in hf_ring_attn.whole_rows(model)."
        )


class LossWithoutLabels(Refused):
    def __init__(self, model: str) -> None:
        super().__init__(
            f"{model} returned a loss, but the batch has no labels. It was computed from one rank's tokens and other "
            "inputs (such as start_positions), and the mean of such losses is not the whole row's. Give a causal "
            "language model the targets as labels [B, S]; else call it in hf_ring_attn.whole_rows(model)."
        )


class PooledLoss(Refused):
    """A trainer's own compute_loss, without labels, reads pooled rows from one rank's tokens. ``what``: its loss."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} cannot be computed exactly from one rank's tokens. If it compares tokens with targets, give the "
            "targets as labels. If it pools rows, hf_ring_attn.configure(model, RingConfig(loss='gathered')): then "
            "compute_loss gets whole rows; in your own loop call the model in hf_ring_attn.whole_rows(model)."
        )


class PastOutputs(Refused):
    """A loss of whole rows uses states of a rank's tokens, which a hook or an attribute took out of the model."""

    def __init__(self) -> None:
        super().__init__(
            "the loss uses states from inside a model that a hook, or an attribute of a module, took out: those of one "
            "rank's tokens, where the model returns whole rows. Let the model return them, as by "
            "output_hidden_states=True or as another output of its forward."
        )


class GradientOfState(Refused):
    """A program asks for the gradient of a loss by a state inside a model, which its later layers read."""

    def __init__(self, output: str) -> None:
        super().__init__(
            f"the program asks for the gradient of its loss by {output}, but later layers of the model read each "
            "rank's part of that, so what comes through them would be missing. Take it by the model's inputs_embeds, "
            "or by outputs from which the model computes no others, such as logits."
        )
