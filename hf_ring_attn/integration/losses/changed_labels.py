"""The labels that a model's forward gives to its loss function: shifted and counted on whole rows.

`shard` did so for the batch's. A forward of the program's own, or a hook, may mask some of them first, and those that
were shifted before would stand for others. Or it leaves out what `shard` made, as programs for one process do.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from ... import errors
from ..context import batch_context
from ..context.batch_context import BatchContext
from ..context.introspect import name_of
from ..context.local_batch import MadeInputs
from ..context.whole_batch import IGNORED, next_labels
from ..patching.compiler import uncompiled


@uncompiled("hf_ring_attn shifts the labels of whole rows")
def shifted_anew(model: nn.Module, function: Any, args: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a causal language model's loss, with what belongs to the labels that it gets.

    All ranks change labels at one place, or none, as they run one program.

    Raises:
        OtherInputs: beside logits of a rank's tokens the program passed labels of whole rows, which `shard` never got.
    """
    context = batch_context.current()
    logits = given.get("logits", args[0] if args else None)
    labels = given.get("labels", args[1] if len(args) > 1 else None)
    if context is None or function is not ForCausalLMLoss or len(args) > 3 or not isinstance(labels, Tensor):
        return given
    if context.gathers_logits:
        return given
    if labels.shape != context.local_shape:
        is_local = isinstance(logits, Tensor) and logits.shape[:2] == context.local_shape
        is_whole = labels.shape == (context.local_shape[0], context.layout.length)
        if is_local and is_whole and given.get("shift_labels") is None:
            raise errors.OtherInputs(name_of(model), [], ["labels"])
        return given
    made, count = context.state(MadeInputs), given.get("num_items_in_batch")
    shifted: Any = given.get("shift_labels")
    from_shard = shifted is None or made.shifted.is_(shifted) is True  # else the program shifted its own
    unchanged = from_shard and made.labels.is_(labels) is True
    if made.labels.value is None or (unchanged and shifted is not None and count is not None):
        return given
    counted = made.get("num_items_in_batch")
    if unchanged:
        shifted, count = made.shifted.value, counted if count is None else count
    elif from_shard:
        shifted = _shifted(labels, context)
    if count is None or (count is counted and not unchanged):  # else the program counted by itself
        count = context.ring.total((shifted != IGNORED).sum()).double() / context.ring.size
    return {**given, "shift_labels": shifted, "num_items_in_batch": count}


def _shifted(labels: Tensor, context: BatchContext) -> Tensor:
    """This rank's labels of next tokens, from all ranks' labels."""
    (everyone,) = context.ring.gather(labels.detach(), "gathered the labels that a forward changed").wait()
    layout = context.layout
    rows = layout.merge(everyone)[:, : layout.length]
    return layout.shard(layout.pad(next_labels(rows), 1, IGNORED), 1)
