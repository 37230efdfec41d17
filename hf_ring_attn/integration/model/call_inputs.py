"""Checks of a model's call: its inputs are `shard`'s, its attention gets the score_mod, its loss is the whole row's.

One rank's tokens do not determine their places, nor the number of labels in the whole batch. Some models drop a
score_mod, and some compute a loss from other inputs than labels, which are not sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ... import errors
from ..context import batch_context
from ..context.batch_context import BatchContext
from ..context.introspect import by_name, compiled_call, modules_of, name_of, parameters_of
from ..context.local_batch import MadeInputs
from ..context.model_record import latest_record
from ..context.tracked_input import TrackedInput
from ..context.trial_step import TrialStep
from ..context.whole_batch import IGNORED, LOSS_INPUTS, restarts
from ..gradients import replicas
from ..losses.chunked import hand_out
from ..patching.compiler import uncompiled
from ..patching.modules import Replaced
from .changed_tokens import check_tokens, start_comparison

PLACES = ("position_ids", "attention_mask")
"""Inputs that a model must get unchanged from `shard`."""
SELECTING = ("logits_to_keep", "num_logits_to_keep")
"""Arguments that select tokens by their place in the model's input."""
CACHED = "a cache would hold this rank's tokens only; leave use_cache=False, as sharded.inputs has it"
_OF_SHARE = "_hf_ring_attn_share"
"""Marks caches that a model returned in a ring. An attribute, since a copy of the cache must have it, too."""
_CALLED = "was called in a ring with"
_SELECTS = "each rank would select from its own tokens. Leave it out, and select from sharded.gather(out.logits)"


def track(inputs: Mapping[str, Any], names: Sequence[str]) -> dict[str, TrackedInput]:
    """Tracks the inputs that a model must get unchanged."""
    return {name: TrackedInput.of(inputs[name]) for name in names if name in inputs}


class TrackedInputs(dict[str, TrackedInput]):
    """The inputs of one batch that a model must get unchanged, by name."""


class FilledIn(dict[nn.Module, set[str]]):
    """The inputs that the latest call of each model in a batch left out, and got (`ring_calls`)."""


def refuse_outside(given: Sequence[Any], refusal: errors.Refused | None = None) -> None:
    """Refuses a share of a batch outside its ring.

    Args:
        given: the inputs of a mask, or of a model.
        refusal: the error to raise; None: NotEntered.
    """
    # Batches with images are not sharded yet: their inputs are whole rows, perhaps the program's own tensors.
    batches = [context for context in batch_context.live_batches() if context.text is None]
    shares = [tracked for context in batches for tracked in context.state(TrackedInputs).values()]
    if any(tracked.same_memory(x) for tracked in shares for x in given):
        raise refusal or errors.NotEntered("a model was called with inputs from shard()")


def refuse_other_masks(mask: Any, places: Any, caller: str, context: BatchContext) -> None:
    """Refuses inputs of which a model is about to make its mask, unless they say what the batch's say.

    A ring makes masks from whole rows, whatever a forward or a hook has changed of this rank's.

    Args:
        mask: [B, T], of padding. places: the position ids, which matter if rows have several documents.
    """
    made = context.state(MadeInputs)
    given = {"attention_mask": (mask, made.mask)}
    if context.facts.positions is not None:
        given["position_ids"] = (places, made.places)
    unlike = {
        name: (x, own.value)
        for name, (x, own) in given.items()
        if isinstance(x, Tensor) and x.dim() == 2 and own.value is not None and own.is_(x) is not True
    }
    if not unlike:
        return
    real = context.layout.positions() < context.layout.length
    other = [name for name, pair in unlike.items() if not _says_the_same(name, *pair, real, context)]
    _refuse_on_all(caller, other, (x for x, _ in unlike.values()), context, "compared masks of a call")


def _refuse_on_all(caller: str, other: list[str], given: Iterable[Any], context: BatchContext, doing: str) -> None:
    """Raises OtherInputs on every rank if one got ``other`` inputs. ``given``: a call's, for the message's device."""
    refusal = errors.OtherInputs(caller, [], other) if other else None
    device = next((x.device for x in given if isinstance(x, Tensor)), torch.device("cpu"))
    context.ring.agree({}, context.ring.small_device(device), failure=refusal, doing=doing)


def _says_the_same(name: str, x: Tensor, own: Tensor, real: Tensor, context: BatchContext) -> bool:
    """Returns True if a mask hides the same tokens as the batch's, or positions begin the same documents."""
    real = real.to(x.device)
    if x.shape[1:] != real.shape:
        return False
    if name == "attention_mask":
        hides_none = context.facts.hidden is None and bool(x[:, real].all())
        same = x.shape == own.shape and torch.equal(x[:, real].bool(), own.to(x.device)[:, real].bool())
        return hides_none or same
    if len(x) not in (1, len(own)):
        return False
    both = real[1:] & real[:-1]
    return torch.equal(restarts(x.expand_as(own))[:, both], restarts(own.to(x.device))[:, both])


def refuse_cache_of_share(cache: Any) -> None:
    """Refuses, outside of a ring, a cache that was made in one."""
    if hasattr(cache, _OF_SHARE):
        why = "it was made in a ring, so it holds one rank's tokens; make it outside, from whole rows"
        raise errors.UnsupportedArgument("a model", "a cache", why, "was called with")


def _mark_caches(output: Any) -> None:
    """Marks the caches in a model's output: a call without use_cache may make one that the program never uses."""
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    for x in values:
        if hasattr(x, "get_seq_length"):
            setattr(x, _OF_SHARE, True)


class _Accepted(dict[tuple[str, ...], list[str]]):
    """The names of arguments that a model takes, by the names of a batch's inputs."""


def _accepted(model: nn.Module, context: BatchContext) -> list[str]:
    """The names of the arguments that a model takes, in their order; the batch's, too, if it takes any."""
    asked, known = tuple(context.state(TrackedInputs)), latest_record(model).state(_Accepted)
    return known.get(asked) or known.setdefault(asked, parameters_of(model, asked))


def _refuse_others(model: nn.Module, given: Mapping[str, Any], context: BatchContext, has_loss: bool) -> None:
    """Refuses a call of ``model`` with missing or changed inputs, on every rank.

    Args:
        given: the arguments by name. has_loss: the model returned a loss.
    """
    _refuse_options(model, given, has_loss and context.facts.has_labels and not context.whole_head)
    names = _accepted(model, context)
    counts = {name for name in LOSS_INPUTS[:2] if given.get(name) is not None}
    counted = LOSS_INPUTS[1:] if "labels" in counts else LOSS_INPUTS[2:] if counts and has_loss else ()
    needed = {*PLACES, *counted}
    missing, other, copies = [], [], []
    for name, tracked in context.state(TrackedInputs).items():
        x = given.get(name)
        if x is None:
            if name in needed and name in names:
                missing.append(name)
        elif name in needed or name in counts:
            same = tracked.is_(x) if isinstance(x, (Tensor, float, int)) else True  # a mask made in this ring
            if same is False:
                other.append(name)
            elif same is None:
                copies.append(name)
    if missing:  # but for what every model inside that got inputs was given
        filled, inside = context.state(FilledIn), set(modules_of(model))
        got = [names for one, names in filled.items() if one in inside]
        missing = [name for name in missing if not got or not all(name in names for names in got)]
    if missing or other:
        raise errors.OtherInputs(name_of(model), missing, other)
    if copies:  # their values may differ on some ranks only
        other = [name for name in copies if not context.state(TrackedInputs)[name].equals(given[name])]
        _refuse_on_all(name_of(model), other, given.values(), context, "compared inputs of a call")


def _refuse_options(model: nn.Module, given: Mapping[str, Any], shares_loss: bool) -> None:
    """Refuses a call of ``model`` with options that a ring does not have. ``shares_loss``: ranks share its loss."""
    for name in SELECTING:
        if isinstance(x := given.get(name), Tensor) or x:
            raise errors.UnsupportedArgument(name_of(model), name, _SELECTS, _CALLED)
    if given.get("use_cache"):
        raise errors.UnsupportedArgument(name_of(model), "use_cache=True", CACHED, _CALLED)
    ignored = given.get("ignore_index")
    if shares_loss and ignored not in (None, IGNORED):
        raise errors.OtherIgnoreIndex(f"{name_of(model)} {_CALLED}", ignored)


def _has_loss(output: Any) -> bool:
    """Returns True if a model's output is a loss or holds one: first, by name, or as a differentiable number."""
    if isinstance(output, Mapping):
        others = (x for name, x in output.items() if name != "aux_loss" and is_number(x))  # that is of whole rows
        return output.get("loss") is not None or any(x.requires_grad for x in others)
    return is_number(output[0] if isinstance(output, (tuple, list)) and output else output)


def is_number(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 0 and x.is_floating_point()


_BY_HOST = "hf_ring_attn checks the inputs of a model's call"


def watch(
    model: nn.Module, context: BatchContext, hooks: ExitStack, unwatched: Callable[[], AbstractContextManager[None]],
    inside: bool = False,
) -> None:  # fmt: skip
    """Hooks ``model`` to check its calls after they ran, so that a call in progress is checked, too.

    Refused: missing or changed inputs, a score_mod that some attention did not get, and a loss though the batch has no
    labels.

    Args:
        hooks: removes the hooks.
        unwatched: a context without the hook before every module.
        inside: the model is running already.
    """
    watched, compiled = _Watched(model, context), compiled_call(model)
    if compiled is not None and not inside:  # it would trace hooks, and compile anew for those of each batch

        def call(*args: Any, **given: Any) -> Any:
            watched.before(model, args, given)
            with unwatched():
                output = compiled(*args, **given)
            return watched.after(model, args, given, output)

        hooks.enter_context(Replaced(model, "_compiled_call_impl", call))
        return
    # First: in accelerate's loop a later hook leaves the context, which removes these hooks.
    hooks.enter_context(model.register_forward_hook(watched.after, with_kwargs=True, prepend=True))
    hooks.enter_context(model.register_forward_pre_hook(watched.before, with_kwargs=True))


class _Watched:
    """The checks of a model's calls in one batch."""

    def __init__(self, model: nn.Module, context: BatchContext) -> None:
        self.model, self.context = model, context
        self.attended = self._attentions()
        self.end_comparison: Callable[[], None] | None = None
        self.in_ring = context.ring.size > 1 and latest_record(model).uses_ring()

    @uncompiled(_BY_HOST)
    def before(self, _model: nn.Module, args: Any, given: dict[str, Any] | None = None) -> None:
        """Notes the attentions until a call, and begins to compare its tokens."""
        if given is None:  # removed while torch calls a model's hooks, by a garbage collection that ends the context
            return
        if torch.is_grad_enabled():
            replicas.note_trained(self.model, self.context)
        self.attended = self._attentions()
        self.end_comparison = self._start_comparison(self._named(args, given)) if self._looks_at_tokens() else None

    @uncompiled(_BY_HOST)
    def after(self, _model: nn.Module, args: Any, given: Any, *outputs: Any) -> Any:
        """Checks a call, and returns its output, perhaps another one."""
        if not outputs:  # as `before`
            return None
        (output,) = outputs
        context = self.context
        context.log.fused |= bool(given.get("fused_lm_head"))
        if self.in_ring and batch_context.current() is context:
            output = self._checked(output, args, given)
        by_share = context.ring.size > 1 and not context.whole_head
        if by_share and not context.facts.has_labels and _has_loss(output):
            raise errors.LossWithoutLabels(name_of(self.model))
        if given.get("score_mod") is not None:
            plain, scored = (now - then for now, then in zip(self._attentions(), self.attended, strict=True))
            if plain or not scored:
                raise errors.ScoreModDropped(name_of(self.model), scored, plain)
        return output

    def _checked(self, output: Any, args: Any, given: Any) -> Any:
        """Checks the inputs of a call of the batch itself, and returns its output."""
        model, context = self.model, self.context
        every = self._named(args, given)
        _refuse_others(model, every, context, _has_loss(output))
        if self._looks_at_tokens():
            end = self.end_comparison or self._start_comparison(every)  # a call in progress was not seen before
            self.end_comparison = None
            end()
            check_tokens(model, given, context.state(TrackedInputs))
        _mark_caches(output)
        tries_loss = context.state(TrialStep).loss is not None  # in the self-check
        return output if tries_loss or context.gathers_logits else hand_out(output, context)

    def _looks_at_tokens(self) -> bool:
        is_batch = self.in_ring and batch_context.current() is self.context  # else the self-check's row, or another's
        return is_batch and self.context.config.self_check and self.context.text is None

    def _start_comparison(self, given: dict[str, Any]) -> Callable[[], None]:
        return start_comparison(self.model, given, self.context.state(TrackedInputs), self.context)

    def _named(self, args: Any, given: dict[str, Any]) -> dict[str, Any]:
        return by_name(_accepted(self.model, self.context), args, given)

    def _attentions(self) -> tuple[int, int]:
        """The numbers of attentions of the batch until now, without and with a score_mod."""
        return self.context.log.plain, self.context.log.scored
