"""The gathered loss: all-gathers logits of the whole row for losses that a shard cannot compute.

The sharded loss needs no code here: shift_labels and num_items_in_batch make each rank's share exact (see `batch`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from ... import errors
from ..batch.shard import Sharded
from ..context import batch_context, introspect
from ..context.whole_batch import LOSS_INPUTS


@contextmanager
def with_gathered_logits(model: nn.Module, sharded: Sharded) -> Iterator[None]:
    """Makes ``model`` return logits of whole rows in this context, and their loss if it gets labels.

    These labels must be the whole row's. Memory: S x V logits on every rank.

    Raises:
        NoLogits: on the call, if it returns no logits.
    """
    head = introspect.loss_model_of(model)
    withheld: dict[str, Any] = {}

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if kwargs.get("fused_lm_head"):
            raise errors.NoLogits()
        withheld.clear()  # of these the model would compute a loss of its shard
        withheld.update({name: kwargs[name] for name in LOSS_INPUTS if kwargs.get(name) is not None})
        return args, {name: x for name, x in kwargs.items() if name not in LOSS_INPUTS}

    def after(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> Any:
        if batch_context.current() is not sharded.context:  # the self-check's row
            return output
        if not isinstance(output, Mapping) or output.get("logits") is None:
            raise errors.NoLogits()
        fields = dict(output)
        fields["logits"] = sharded.gather(output["logits"])
        if "labels" in withheld:
            fields["loss"] = head.loss_function(
                logits=fields["logits"], vocab_size=head.config.get_text_config().vocab_size, **withheld
            )
        return type(output)(**fields)

    with (
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True),
    ):
        yield
