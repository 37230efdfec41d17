"""The self-check: before step one a short random row runs through the user's actual model, unsharded and sharded.

A list of refused names knows no remote code, and no model that is newer than the list. So every model is tried: once on
the whole row, on every rank, in a ring of one (the same masks and kernels), and once on its shares in the ring. If the
two disagree, every rank refuses, naming the first module that differs. With labels a step is tried, too (`trial`): the
loss as its host computes it, in the mode it trains in, and gradients of small weights.

It cannot see what begins beyond the row's length (`row.row_length`): a window of 4096 tokens that a layer applies by
itself, a frequency that changes after 8192.

>>> hf_ring_attn.configure(model, RingConfig(self_check=False))         # at your own risk
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ... import errors
from ...comm.ring import LOCAL, Ring
from ..context import batch_context, introspect, ring_random
from ..context.batch_context import BatchContext
from ..context.local_batch import CACHE, LocalBatch, local_batch
from ..context.model_record import ModelRecord, SeenOutputs, latest_record
from ..context.trial_step import TrialStep
from ..context.whole_batch import LOSS_INPUTS
from ..gradients import fsdp_units
from ..gradients.weight_parts import sharding_of
from ..log import warn
from ..losses.head import ChunkedLoss
from ..model.ring_calls import in_ring
from ..patching import changes
from .across_ranks import AcrossRanks, stays_in
from .compare import ComparedTokens, Recorder, outputs_inside
from .placeholders import try_placeholders
from .restore import preserved
from .row import Sample, SelfCheckState, row_length
from .states import States
from .tolerance import AMPLIFICATION, EXACT, LOSS, Attempt, always_passes, dtypes_seen, rounded_anew
from .trial import ALWAYS, GRADIENT, StepResult, repeatable_step, run_step, set_modes, stand_in, watched_weights
from .zeros import moved_from_zero

T = TypeVar("T")

TRIES = 3
"""Random rows. Where rounding sends a token to another expert, another row does without: one that agrees is enough.
In float32 that is rare, so after a row that disagrees two must: experts that drop tokens agree on some rows."""


class _Verdicts(dict[tuple[object, ...], str]):
    """The verdicts of a model's checks, by ring and kind of batch."""


class _WithOneValue(set[tuple[object, ...]]):
    """The trial steps whose loss was the same on every rank."""


def check(model: nn.Module, context: BatchContext, record: ModelRecord) -> None:
    """Checks an outermost model, once per model, ring and kind of batch.

    Raises (each on every rank):
        SelfCheckFailed, SelfCheckRaised, PooledOutput: the model's answer in the ring is not that to the whole row.
        LossNotSharded, GradientDiffers: its loss is not, or a gradient.
        RefusedElsewhere: the model failed on some ranks only. RanksDiffer: their weights differ.
        SelfCheckNotRun: it failed on whole rows, as many as a batch has. NothingToCheck: no output can be compared.
        Refused: anything that the ring refuses in a forward.
    """
    state, ring = context.state(SelfCheckState), context.ring
    sample = state.sample
    if not context.config.self_check:
        state.verdict = "off"
        return
    if sample is None or torch.compiler.is_compiling():
        return
    inner, has_labels, loss = introspect.callable_inside(model), context.facts.has_labels, context.config.loss
    as_one = introspect.compiled_part(model) is not None
    batch = ring.name, has_labels, loss, context.whole_head, context.gathers_logits, as_one
    sharding = sharding_of(inner)
    # Other rings, whose batches may be of another kind, take part in each forward if they hold shards of its weights.
    inputs, padding = (sample.inputs(), sample.masks()) if stays_in(ring, sharding) else ((), ())
    step, verdicts = context.state(TrialStep), record.state(_Verdicts)
    has_trained = inner.training or any(x.requires_grad for x in record.weights())
    trains = step.trains if step.loss else torch.is_grad_enabled() and has_trained
    # What is compiled with a model may make another function of its loss when an attribute changes.
    around = introspect.values_around(inner) if as_one else ()
    case, tried = (*batch, inputs, padding), ("step", *batch, inputs, trains, *step.key, around)
    by_model = has_labels and not context.gathers_logits
    needs_step = (step.loss is not None or by_model) and tried not in verdicts  # a host's own loss may need no labels
    if case not in verdicts or needs_step:
        if not _can_run(inner, record):
            return
        job = _Check(inner, context, sample, sample.device(model), as_one, stand_in(model, inner))
        modes = [x.training for x in inner.modules()]
        with preserved(inner), moved_from_zero(inner), introspect.forward_context(model):
            if case not in verdicts:
                with ring_random.preserved():
                    state.verdict = job.compare_tokens()
                    # Only now: a batch that is refused may ask for other outputs than the next one does.
                    latest_record(inner).state(SeenOutputs).add(job.seen)
                    try_placeholders(job)
                verdicts[case] = state.verdict  # last: what was refused is refused again
            if needs_step:
                verdicts[tried] = job.run(partial(job.try_step, step, trains, modes), job.rows_of_step())
        if job.has_one_value:
            record.state(_WithOneValue).add(tried)
    step.one_valued.append(tried in record.state(_WithOneValue))
    state.verdict = verdicts[case]


def _can_run(inner: nn.Module, record: ModelRecord) -> bool:
    """Returns False for a loss or a head beside the model, and, with a warning, for a layer of a model."""
    if not record.uses_ring():
        return False
    is_layer = introspect.is_stock_layer(inner)
    if is_layer:
        name = introspect.class_of(inner)
        warn(f"{name} takes hidden states, so the self-check cannot run it: it runs in the ring unchecked.")
    return not is_layer


@dataclass
class _Check(AcrossRanks):
    """One self-check on one rank. Its turns depend on numbers that all ranks hold, so all ranks take the same."""

    model: nn.Module
    context: BatchContext
    sample: Sample
    device: torch.device
    as_one: bool
    given: nn.Module
    """The model for a program's loss: see `stand_in`."""
    has_one_value: bool = False
    """The latest trial step had the same loss on every rank."""
    seen: SeenOutputs = field(default_factory=SeenOutputs)

    def __post_init__(self) -> None:
        self.ring = self.context.ring
        self.config = replace(self.context.config, pad=True, mlp_tokens=None, self_check=False)
        self.sharding = sharding_of(self.model)
        self.name = introspect.name_of(self.model)
        self.states = States(self.model, bool(self.sharding))

    def rows_of_step(self) -> int:
        """The number of rows of a trial step. A loss may compare rows, and one alone is no test."""
        all_rows = self.context.whole_head or not self.context.facts.has_labels
        return self.sample.rows if all_rows else min(2, self.sample.rows)

    def compare_tokens(self) -> str:
        """`run` of `try_tokens`, without the labels of a head that fails with them: its program may pass it none."""
        rows = self.sample.rows if self.context.whole_head else 1
        try:
            return self.run(self.try_tokens, rows)
        except errors.SelfCheckNotRun:
            if not (self.context.whole_head and fsdp_units.end_forward(self.model)):
                raise
            with suppress(errors.SelfCheckNotRun):
                return self.run(partial(self.try_tokens, labelled=False), rows)
            raise

    def run(self, attempt: Callable[[int, int], Attempt | None], rows: int) -> str:
        """Returns the verdict in words. ``attempt``: called with a seed and a number of rows; None: nothing to try."""
        try:
            found = self._run(attempt, rows)
            if not self.states.second and self._everywhere([float(self.states.matter)]).any():
                self.states.second = True
                self._run(attempt, rows)
                self.states.second = False
            return found
        except errors.SelfCheckNotRun as error:
            others = [self.sample.leaves_out_more(self.model, error), self.sample.rows != rows]
            again, more = self._everywhere([float(other) for other in others]).any(0).tolist()
            if not (fsdp_units.end_forward(self.model) and (again or more)):
                raise
        # The row lacks inputs now that the model may not take. A model of pairs needs all rows of the batch.
        return self.run(attempt, rows) if again else self._run(attempt, self.sample.rows)

    def _run(self, attempt: Callable[[int, int], Attempt | None], rows: int) -> str:
        needed, refused = 1, None
        for seed in range(TRIES):
            tried = attempt(seed, rows)
            if tried is None or tried.agrees(self.device):
                needed -= 1
            else:
                needed, refused = 2 if seed == 0 and tried.precise else needed, tried
            if tried is None or not needed:
                return "passed"
        assert refused is not None, "an attempt disagreed"
        raise refused.refusal(refused.limits)

    def try_tokens(self, seed: int, rows: int, repeats: bool = False, labelled: bool = True) -> Attempt:
        """Compares what the model returns for each token. ``labelled``: give it labels, if the batch has any."""
        has_labels = labelled and (self.context.facts.has_labels or self.context.whole_head)  # a forward may need them
        row = self._row(seed, rows, has_labels and not self.context.gathers_logits, repeats)
        mine = self._local(row, self.ring)
        mine.context.state(ChunkedLoss).keeps = True  # its logits are compared
        call, call_share = partial(self._call_whole, row), partial(self._call_share, mine)
        compared = ComparedTokens.of(mine.context.layout, mine.context.facts.hidden, self.device)
        found = math.nan
        for inner in (False, True):  # a program's own module may return its loss alone
            if inner:
                call, call_share = (partial(outputs_inside, self.model, one) for one in (call, call_share))
            with dtypes_seen() as dtypes:
                whole, share = self._whole(call, rows), self._sharded(call_share)
            found = self._spread(compared.errors(whole, share, pooled=not inner))
            if not math.isnan(found):
                break
        else:
            raise errors.NothingToCheck(self.name)
        least = self._tolerance(dtypes)
        self.seen.pooled.update(compared.pooled_errors(whole, share))
        self.seen.odd.update(compared.odd_outputs(whole, share))

        def again() -> list[float]:
            return [self._spread(compared.errors(whole, share, call(), pooled=not inner))]

        def refusal(limits: list[float]) -> errors.Refused:
            self._refuse_other_weights(whole, least)
            if self.states.second:
                return self._tokens_kept(self.name, [found], limits)
            if not self.context.whole_head:
                self._refuse_pooled(whole, share, compared, limits[0])
            where, tokens = self._first_difference(row, mine, compared, least), mine.context.layout.length
            kind = introspect.class_of(self.model.get_submodule(where))
            return errors.SelfCheckFailed(self.name, self.ring.size, tokens, found, limits[0], where, kind)

        return Attempt([found], [least], least <= EXACT, again, refusal, [least])

    def try_step(self, step: TrialStep, trains: bool, modes: Sequence[bool], seed: int, rows: int) -> Attempt | None:
        """Compares the loss of a trial step, and gradients if it ``trains``. ``modes``: those of the modules."""
        name, weights = step.name or self.name, watched_weights(self.model) if trains else {}
        set_modes(self.model, None if step.trains else modes if trains else [False] * len(modes))
        labelled = self.context.facts.has_labels or self.context.whole_head
        row = self._row(seed, rows, labelled, repeats=True, of_batch=bool(step.name))
        whole_step, ring_step = (self._step(step, row, ring, [*weights.values()]) for ring in (Ring(LOCAL), self.ring))
        with dtypes_seen() as dtypes:
            whole = repeatable_step(partial(self._whole, whole_step, rows), self.model, name, self.device)
            if whole is None:
                return None
            share = self._sharded(ring_step)
        assert share is not None, "a loss in one process"
        if introspect.is_dtensor(share.loss):
            raise errors.ShardedLoss(name)
        losses, least = self._gathered(share.loss), self._tolerance(dtypes)
        kept = len(weights) if least <= EXACT else ALWAYS
        got, want = self._mean(share.of_first(kept)), whole.of_first(kept)
        self.has_one_value = bool((losses == losses[0]).all() and losses[0].any())  # parts may all be zero
        found = self._apart(got, want)

        def again() -> list[float]:
            other = whole_step()
            assert other is not None, "a loss in one process"
            return self._apart(other.of_first(kept), want)

        def refusal(limits: list[float]) -> errors.Refused:
            if self.states.second:
                return self._tokens_kept(name, found, limits)
            own = bool(step.name) and not (self.context.gathers_logits or self.context.whole_head)  # else on whole rows
            if found[0] > limits[0]:
                with suppress(errors.NothingToCheck, errors.SelfCheckNotRun):
                    tokens = self.try_tokens(seed, rows, repeats=True)
                    if not tokens.agrees(self.device):  # in this mode, or this row: a module makes the difference
                        return tokens.refusal(tokens.limits)
                return self._refused_loss(step, float(got.loss), float(want.loss), own)
            worst = max(range(1, len(found)), key=lambda index: found[index] / limits[index])
            weight = [*weights][worst - 1]
            return errors.GradientDiffers(name, weight, self.ring.size, found[worst], limits[worst], own)

        limits = [LOSS * least] + [GRADIENT * least] * (len(found) - 1)
        fine = always_passes(len(found) - 1) if least <= EXACT else limits
        return Attempt(found, limits, least <= EXACT, again, refusal, fine)

    def _refused_loss(self, step: TrialStep, got: float, want: float, own: bool) -> errors.Refused:
        """The refusal of a loss whose value differs. ``own``: the program's, of a rank's tokens."""
        by_model = not step.name
        within = by_model and self.as_one and self.model not in introspect.loss_models_of(self.model)
        compiled = ", compiled as a whole (compile the language model inside it)," if within else ""
        numbers = f"{got:.6g} in the ring, {want:.6g} in one process"
        what = f"the loss of {step.name or self.name}{compiled} (the self-check found {numbers})"
        if not self.context.facts.has_labels and not self.context.whole_head:
            return errors.LossWithoutLabels(self.name) if by_model else errors.PooledLoss(what)
        again = own or (by_model and not self.context.whole_head)
        return errors.LossNotSharded(what, again=again, own=own)

    def _tokens_kept(self, name: str, found: list[float], limits: list[float]) -> errors.Refused:
        """The refusal of a second run that differs, since something kept tokens of the first."""
        error, limit = max(zip(found, limits, strict=True), key=lambda pair: pair[0] / pair[1])
        return errors.TokensKept(name, self.states.in_words(), self.ring.size, error, limit)

    # ---- runs ----

    def _row(
        self, seed: int, rows: int, labelled: bool, repeats: bool = False, of_batch: bool = False
    ) -> dict[str, Any]:
        row = self.sample.row(self.model, self.ring.size, labelled, seed, rows, repeats, of_batch)
        return {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in row.items()}

    def _local(self, row: Mapping[str, Any], ring: Ring) -> LocalBatch:
        config = self.config if ring.size > 1 else replace(self.config, loss="sharded")  # in one process the full one
        mine = local_batch(row, ring, config, self.context.text)
        mine.context.gathers_logits = self.context.gathers_logits
        mine.context.log.configs += self.context.log.configs  # the model was admitted
        if mine.context.text is not None and self.context.text is not None:
            mine.context.text.configs += self.context.text.configs
        return mine

    def _step(
        self, step: TrialStep, row: Mapping[str, Any], ring: Ring, weights: list[nn.Parameter]
    ) -> Callable[[], StepResult | None]:
        """A trial step of this rank's share of a row; of the whole row in a ring of one."""
        mine = self._local(row, ring)
        call, agree = partial(self._call, *mine), partial(self.agree, ring)
        run = partial(run_step, step, self.model, self.given, row, mine, call, agree, weights, self.as_one)
        return partial(self.states.run, run, ring.size == 1)

    def _call_whole(self, row: Mapping[str, Any]) -> Any:
        """The model's outputs for the whole row, in a ring of one: the same masks and kernels."""
        alone = self._local(row, Ring(LOCAL))
        needed = (*LOSS_INPUTS[1:], CACHE)  # some losses read those
        made = {name: x for name, x in alone.inputs.items() if name in needed}
        return self.states.run(partial(self._call, {**row, **made}, alone.context), whole=True)

    def _call_share(self, mine: LocalBatch) -> Any:
        return self.states.run(partial(self._call, *mine))

    def _call(self, inputs: Mapping[str, Any], context: BatchContext) -> Any:
        with batch_context.activate(context), in_ring(self.model, as_one=self.as_one):
            return self.model(**self.sample.taken(self.model, inputs))

    def _whole(self, call: Callable[[], T], rows: int) -> T:
        """The answer to the whole row, if every rank has one."""
        failure: Exception | None = None
        try:
            answer = call()
        except Exception as error:  # noqa: BLE001  raised below, on every rank: the row is ours, not the user's
            failure = error
        is_refusal = isinstance(failure, errors.Refused)
        state, text = 0.0 if failure is None else 2.0 if is_refusal else 1.0, errors.told(failure)
        mine = errors.SelfCheckRowFailed(self.name, text) if state == 1 else failure
        if not self._all_are_back(failure is not None):
            assert mine is not None
            raise mine
        if set(self._everywhere([state])[:, 0].tolist()) != {state}:
            self.agree(self.ring, {}, failure=mine)
            raise AssertionError("a rank failed")
        if failure is None:
            return answer
        if isinstance(failure, errors.Refused):
            failure.everywhere = True
            raise failure
        untested = [changes.requirement(host) for host in changes.untested()]
        raise errors.SelfCheckNotRun(self.name, rows, row_length(self.ring.size), text, untested) from failure

    def _sharded(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (errors.RingAttentionError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise errors.SelfCheckRaised(self.name, self.ring.size, errors.told(error)) from error

    # ---- comparisons ----

    def _refuse_pooled(self, whole: Any, share: Any, compared: ComparedTokens, limit: float) -> None:
        """Refuses an output without tokens, if every token is right."""
        if self._spread(compared.errors(whole, share, pooled=False)) > limit:
            return
        pooled = compared.pooled_errors(whole, share)
        first = next((n for n, error in enumerate(pooled.values()) if not error <= limit), len(pooled))
        first = min(int(self._everywhere([float(first)]).min()), len(pooled))  # of another ring, perhaps
        name = [*pooled, "an output"][first] or "a tensor"
        raise errors.PooledOutput(self.name, name, self.ring.size, self.context.gathers_logits)

    def _first_difference(
        self, row: Mapping[str, Any], mine: LocalBatch, compared: ComparedTokens, least: float
    ) -> str:
        """The path of the module that makes the first difference on any rank, with every module watched."""
        with Recorder(compared, whole=True).watching(self.model) as want:
            self._call_whole(row)
        with Recorder(compared, whole=False).watching(self.model) as got:
            self._call_share(mine)
        with Recorder(compared, whole=True).watching(self.model) as again, rounded_anew(self.device):
            self._call_whole(row)
        events = list(want.events)
        differs = (want.errors(event, got) > max(least, AMPLIFICATION * want.errors(event, again)) for event in events)
        first = next((index for index, it_does in enumerate(differs) if it_does), len(events))
        # The whole row's run is the same on every rank, and so are its events and their order.
        first = int(self._everywhere([float(first)]).min())
        if first == len(events):
            return ""
        # A module with the right inputs and another output makes the difference; else its caller does.
        event = events[first]
        return event.module if event.returned else want.callers[event]
