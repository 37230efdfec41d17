"""Outputs of a model for whole rows, of those that ranks have for their tokens: gathered, in order, differentiably."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ... import errors
from ...layers.collectives import gather_sequence
from ..context.attended_layers import AttendedLayers
from ..context.graph_notes import note_output
from ..context.introspect import CACHES
from ..context.model_record import SeenOutputs
from ..gradients import loss_gradients
from ..gradients.backward_end import BackwardEnd
from ..losses.lazy_logits import ordinary
from ..losses.local_logits import held
from ..model.call_inputs import is_number
from ..model.experts import AuxiliaryLoss
from .loss_graph import refuse_gradient_of_state
from .shard import Sharded

NOTHING_SEEN = SeenOutputs()
OF_TOWERS = {"image_outputs", "video_outputs", "audio_outputs"}
"""Outputs of models with images and sound since transformers 5.24."""
LOSSES = {"loss", "0"}
"""Outputs that are one number for whole rows, on every rank; "0" is the first one of a tuple."""


@dataclass
class Outputs:
    """The outputs of one call.

    Attributes:
        ends: the functions that made them. made: each output of a rank's tokens, and that of whole rows.
    """

    ends: list[Any] = field(default_factory=list)
    made: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class Wanted:
    """A state of a batch: its caller reads the model's loss alone."""

    loss_alone = False


def wanted(output: Any, sharded: Sharded) -> Any:
    """The part of a model's output that the caller reads: nothing else is gathered."""
    if not sharded.context.state(Wanted).loss_alone:
        return output
    if isinstance(output, Mapping) and output.get("loss") is not None:
        return _mapping_like(output, {"loss": output["loss"]})
    return output[:1] if isinstance(output, tuple) and output and is_number(output[0]) else output


def whole_output(
    output: Any, sharded: Sharded, seen: SeenOutputs = NOTHING_SEEN, path: str = "", others: Outputs | None = None
) -> Any:
    """A model's output with an entry for each token of the rows, in their order. It is differentiable.

    Left out is what has no entry for each of a rank's tokens.

    Args:
        seen: what the self-check saw of outputs. path: of this one, as "hidden_states.0". others: of the same call,
            to which this one is added.

    Raises:
        NotOfTokens: an output with a gradient would be left out. In a backward: GradientOfState.
    """
    others = Outputs() if others is None else others
    if isinstance(output, Mapping):
        if path in OF_TOWERS:  # whole rows run there, on every rank
            return output
        parts = {key: _part(x, sharded, seen, path, key, others) for key, x in output.items() if key not in CACHES}
        return _mapping_like(output, {key: x for key, x in parts.items() if x is not None})
    if isinstance(output, (tuple, list)):
        several = [_part(x, sharded, seen, path, at, others) for at, x in enumerate(output)]
        return type(output)(*several) if hasattr(output, "_fields") else type(output)(several)
    if not isinstance(output, Tensor):
        return None
    x, local, context = ordinary(held(output), "output of whole rows"), sharded.layout.local_length, sharded.context
    is_known = path in LOSSES or (path == "aux_loss" and context.state(AuxiliaryLoss).computed)
    if context.whole_head or path in seen.pooled or (x.dim() == 0 and is_known):
        others.ends.append(x.grad_fn)
        note_output(x, context)
        return _compared(x, sharded)
    if path.startswith("router_logits") and x.dim() == 2 and len(x) % local == 0:
        return _compared(gathered(x.unflatten(0, (-1, local)), sharded).flatten(0, 1), sharded)
    if x.dim() >= 2 and x.shape[1] == local and path not in seen.odd:
        if (known := next((whole for mine, whole in others.made if mine is output), None)) is not None:
            return known  # the last states may be there twice
        whole = _compared(gathered(x, sharded), sharded)
        others.made.append((output, whole))
        if x.grad_fn is not None and sharded.ring.size > 1:
            refuse_gradient_of_state(whole, x.grad_fn, others.ends, path or "the output")
            others.ends.append(x.grad_fn)
        return whole
    if x.requires_grad:
        raise errors.NotOfTokens(path or "a tensor", tuple(x.shape), local)
    return None


def _mapping_like(output: Any, parts: dict[str, Any]) -> Any:
    """The same kind of mapping; one of transformers may have entries beside its fields."""
    names = {one.name for one in dataclasses.fields(output)} if dataclasses.is_dataclass(output) else set(parts)
    made = type(output)(**{name: x for name, x in parts.items() if name in names})
    for name in parts.keys() - names:
        made[name] = parts[name]
    return made


def _part(x: Any, sharded: Sharded, seen: SeenOutputs, path: str, key: object, others: Outputs) -> Any:
    return whole_output(x, sharded, seen, f"{path}.{key}" if path else str(key), others)


def gathered(x: Tensor, sharded: Sharded) -> Tensor:
    """Whole rows [B, S, ...] of a rank's tokens [B, T, ...]. Ranks compare their gradients, which are the same."""
    whole = gather_sequence(x, sharded.ring, sharded.layout, alike=True)
    note_output(whole, sharded.context)
    return whole


def _compared(x: Tensor, sharded: Sharded) -> Tensor:
    """Lets ranks compare the gradient of what each of them has whole."""
    if x.requires_grad and sharded.ring.size > 1 and x.dim():
        # Not x, which its hook would keep.
        ring, device, end = sharded.ring, x.device, sharded.context.state(BackwardEnd)
        layers = sharded.context.state(AttendedLayers)

        def compare(gradient: Tensor | None) -> None:
            end.expect()
            loss_gradients.compare_whole(gradient, ring, device, layers)

        x.register_hook(compare)
    return x


def whole_of_fused(output: Any, sharded: Sharded) -> Any:
    """The output of TRL's fused head for whole rows: entries of a label, since no token follows the last one."""
    if not isinstance(output, Mapping) or output.get("log_probs") is None:
        raise errors.UnknownOutput("log_probs", None, sharded.layout.local_length)
    fields = {name: x for name, x in output.items() if name != "loss"}  # that of this rank's tokens
    for name, x in fields.items():
        if isinstance(x, Tensor) and x.dim() >= 2 and x.shape[1] == sharded.layout.local_length:
            whole = sharded.gather(x.byte()).bool() if x.dtype == torch.bool else sharded.gather(x)
            fields[name] = whole[:, :-1]
    return type(output)(**fields)


def kept_logits(output: Any, kept: int | Tensor) -> Any:
    """The output with logits of some tokens alone, as transformers' heads choose them."""
    places = slice(-kept or None, None) if isinstance(kept, int) else kept
    if isinstance(output, Mapping):
        fields = {name: x[:, places] if name == "logits" else x for name, x in output.items()}
        return type(output)(**fields)
    return tuple(x[:, places] if at == (output[0].dim() == 0) else x for at, x in enumerate(output))


def of_tokens(output: Any) -> Tensor | None:
    """An output's logits, or the first one of its tensors of tokens; None: there are none."""
    if isinstance(output, Mapping):
        output = [x for name, x in output.items() if name not in LOSSES]
    parts = output if isinstance(output, (tuple, list)) else [output]
    return next((x for x in parts if isinstance(x, Tensor) and x.dim() > 1), None)


def weighed(x: Tensor | None) -> Tensor | None:
    """The sum of x [B, S, ...], in which each token has its own weight, for the self-check."""
    if x is None:
        return None
    weights = 1 + torch.linspace(0, 9, x.shape[1], device=x.device).sin() / 2
    return (x * weights.reshape(-1, *[1] * (x.dim() - 2))).sum()
