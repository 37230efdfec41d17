"""The self-check: before step one a short random row runs through the user's actual model, unsharded and sharded.

A list of refused names knows no remote code, and no model that is newer than the list. So every model is tried: once on
the whole row, on every rank, in a ring of one (the same masks and kernels), and once on its shares in the ring. If the
two disagree, every rank refuses, naming the first module that differs.

Then, where labels are given, a step is tried on such a row, too (`trial`): the loss as its host computes it, in the
mode it trains in, and gradients of a few weights.

It cannot see what begins beyond the row's length (`row.row_length`): a window of 4096 tokens that a layer applies by
itself, a frequency that changes after 8192.

>>> hf_ring_attn.configure(model, RingConfig(self_check=False))         # at your own risk
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ... import errors
from ...comm.ring import LOCAL, Ring
from ..context import batch_context, introspect
from ..context.batch_context import BatchContext
from ..context.cut import Share, share
from ..context.model_record import ModelRecord
from ..context.tensor_tree import tensors_of
from ..context.trial_step import TrialStep
from ..model.chunked import lazy_heads
from ..model.lazy_logits import ChunkedLoss
from ..model.replicas import SAME_WEIGHTS
from .compare import Places, Recorder, relative, spread
from .restore import preserved
from .row import Sample, SelfCheckState, row_length
from .tolerance import AMPLIFICATION, LOSS, outputs, rounded_anew
from .tolerance import tolerance as tolerance_of
from .trial import GRADIENT, StepResult, distances, random_state, run_step, set_modes, watched_weights

T = TypeVar("T")

TRIES = 3
"""Random rows that must all disagree. Where rounding sends a token to another expert, another row does without."""

_SAME_WEIGHTS = f"The self-check ran it on every rank alone, so their weights differ. {SAME_WEIGHTS}"


class _Verdicts(dict[tuple[object, ...], str]):
    """What came of a model's checks, by ring and kind of batch."""


# ---- the check -------------------------------------------------------------------------------------------------------


def check(model: nn.Module, context: BatchContext, record: ModelRecord) -> None:
    """Called with every outermost model that runs in a ring; once per model, ring and kind of batch it does something.

    Raises:
        SelfCheckFailed, SelfCheckRaised: on every rank, if the model's answer in the ring is not that to the whole row.
        LossNotSharded, PooledOutput: on every rank, if only its loss, or only what has no entry for each token, is not.
        RefusedElsewhere: on every rank, if the model failed on some ranks only. RanksDiffer: if their weights differ.
        SelfCheckNotRun: it failed on a whole row, and on as many as the batch has (not tried under FSDP2, which cannot
            go on after a forward that failed). NothingToCheck: it returned nothing that could be compared.
        Refused: what the ring refuses in any forward.
    """
    state, ring = context.state(SelfCheckState), context.ring
    sample = state.sample
    if not context.config.self_check:
        state.verdict = "off"
        return
    if sample is None or torch.compiler.is_compiling():
        return
    inner = introspect.inside(model)
    case: tuple[object, ...] = (ring.name, context.facts.has_labels, context.config.loss)
    if _sharding(inner) is None:  # else other rings, whose batches may be of another kind, take part in each forward
        case += (sample.first is None, sample.hides)
    verdicts = record.state(_Verdicts)
    step = context.state(TrialStep)
    trained = step.trains if step.loss else torch.is_grad_enabled() and any(x.training for x in inner.modules())
    tried = ("step", *case[:3], trained, *step.key)
    tries = context.facts.has_labels and (step.loss is not None or (trained and context.config.loss != "gathered"))
    if case not in verdicts or (tries and tried not in verdicts):
        if not introspect.uses_ring(inner):  # a loss, a head: what is called beside the model
            return
        job, modes = _Check(inner, context, sample, _device(model, sample)), [x.training for x in inner.modules()]
        if case not in verdicts:
            with preserved(inner, job.device):
                verdicts[case] = job.run()
        if tries and tried not in verdicts:
            with preserved(inner, job.device):
                verdicts[tried] = job.try_step(step, trained, modes)
    state.verdict = verdicts[case]


def _sharding(model: nn.Module) -> Ring | None:
    """The ranks that FSDP2 has shard this model's weights: they gather them in each forward, so all of them run it."""
    meshes = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
    mesh = next((mesh for mesh in meshes if mesh is not None), None)
    return None if mesh is None else Ring.of(mesh.get_group(mesh.ndim - 1))


def _device(model: nn.Module, sample: Sample) -> torch.device:
    """Where the batch is, unless DDP would move it."""
    ids = getattr(model, "device_ids", None)
    if type(model).__name__ == "DistributedDataParallel" and ids:
        return torch.device(str(model.device_type), ids[0])
    return next(iter(sample.tokens.values())).device


@dataclass(frozen=True)
class _Found:
    """Of two runs of one row, on all ranks: the spread of its tokens' errors, both losses, the coarsest spacing."""

    tokens: float
    want: float
    got: float
    spacing: float

    def loss(self) -> float:
        """How far the second loss is from the first, relatively."""
        away = abs(self.got - self.want) / (abs(self.want) or 1.0)
        return math.inf if math.isnan(self.got) != math.isnan(self.want) else 0.0 if math.isnan(away) else away

    def within(self, tolerance: float) -> bool:
        return self.tokens <= tolerance and self.loss() <= LOSS * tolerance


@dataclass
class _Check:
    """One self-check on one rank. All ranks go the same way, since each turn is taken by numbers that all of them hold:
    those of the ring, and of the other rings whose ranks shard the same weights."""

    model: nn.Module
    context: BatchContext
    sample: Sample
    device: torch.device

    def __post_init__(self) -> None:
        self.ring = self.context.ring
        self.config = replace(self.context.config, pad=True)
        self.sharding = _sharding(self.model)
        self.labelled = self.context.facts.has_labels and self.config.loss != "gathered"

    def run(self) -> str:
        """The verdict in words."""
        return self._with_rows(self._compare)

    def try_step(self, step: TrialStep, trained: bool, modes: Sequence[bool]) -> str:
        """The verdict in words of a trial step. ``modes``: those of the model's modules."""
        self.labelled = True
        weights = watched_weights(self.model) if trained and self.sharding is None else {}
        if not trained:
            modes = [False] * len(modes)
        return self._with_rows(partial(self._compare_steps, step, weights, None if step.trains else modes))

    def _with_rows(self, compare: Callable[[int], str]) -> str:
        try:
            return compare(1)
        except errors.SelfCheckNotRun:
            if self.sharding is not None or self.sample.rows == 1:
                raise
        return compare(self.sample.rows)  # pairs of rows, say, of which one is preferred

    def _compare(self, rows: int) -> str:
        tolerance, found = 0.0, _Found(0.0, 0.0, 0.0, 0.0)
        for seed in range(TRIES):
            row = self._row(seed, rows)
            mine = self._shared(row, self.ring)
            mine.context.state(ChunkedLoss).keeps = True  # its logits are compared
            dtypes: set[torch.dtype] = set()
            with outputs(lambda x: dtypes.add(x.dtype)):  # noqa: B023  it is called in this turn only
                whole = self._whole(partial(self._call_whole, row), rows)
                share = self._sharded(partial(self._call, mine.inputs, mine.context))
            places = Places.of(mine.context.layout, mine.context.facts.hidden, self.device)
            found = self._table(places.errors(whole, share), whole, share, dtypes)
            if math.isnan(found.tokens):
                raise errors.NothingToCheck(introspect.name_of(self.model))
            least = tolerance_of(found.spacing, self.device)
            if found.within(least):
                return "passed"
            with rounded_anew(self.device):
                again = self._call_whole(row)
            tolerance = max(least, AMPLIFICATION * self._table(places.errors(whole, share, again), whole, again).tokens)
            if found.within(tolerance):
                return "passed"
        self._refuse_other_weights(whole, least)
        if found.tokens <= tolerance:
            raise errors.LossNotSharded(
                f"the loss of {introspect.name_of(self.model)} (the self-check found {found.got:.6g} in the ring, "
                f"{found.want:.6g} in one process)",
                again=True,
            )
        self._refuse_pooled(whole, share, places, tolerance)
        where = self._first_difference(row, mine, places, least)
        kind = introspect.class_of(self.model.get_submodule(where))
        tokens = mine.context.layout.length
        raise errors.SelfCheckFailed(
            introspect.name_of(self.model), self.ring.size, tokens, found.tokens, tolerance, where, kind
        )

    # ---- the trial step ----

    def _compare_steps(
        self, step: TrialStep, weights: dict[str, nn.Parameter], modes: Sequence[bool] | None, rows: int
    ) -> str:
        set_modes(self.model, modes)
        limits: list[float] = []
        names = ["", *weights]
        for seed in range(TRIES):
            row = self._row(seed, rows)
            mine, alone = self._shared(row, self.ring), self._shared(row, Ring(LOCAL))
            whole_step, ring_step = (
                partial(run_step, step, self.model, row, part, partial(self._call, *part), weights.values())
                for part in (alone, mine)
            )
            dtypes: set[torch.dtype] = set()
            with outputs(lambda x: dtypes.add(x.dtype)):  # noqa: B023  it is called in this turn only
                before = random_state(self.device)
                whole = self._whole(whole_step, rows)
                if not torch.equal(before, random_state(self.device)):  # not dropout: a router's noise, perhaps
                    for module in self.model.modules():
                        module.__dict__["training"] = False
                    whole = self._whole(whole_step, rows)
                if whole is None:
                    return "passed"
                share = self._sharded(ring_step)
            assert share is not None, "a loss in one process"
            spacing = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
            least = tolerance_of(max(self._everywhere([spacing]).flatten().tolist()), self.device)
            got = StepResult(*self._means(share))
            found = self._apart(got, whole)
            limits = [LOSS * least] + [GRADIENT * least] * (len(found) - 1)
            if all(error <= limit for error, limit in zip(found, limits, strict=True)):
                return "passed"
            with rounded_anew(self.device):
                again = whole_step()
            assert again is not None, "a loss in one process"
            own = self._apart(again, whole)
            limits = [max(limit, AMPLIFICATION * error) for limit, error in zip(limits, own, strict=True)]
            if all(error <= limit for error, limit in zip(found, limits, strict=True)):
                return "passed"
        assert whole is not None, "it was compared"
        name = introspect.name_of(self.model)
        if found[0] > limits[0]:
            numbers = f"{float(got.loss):.6g} in the ring, {float(whole.loss):.6g} in one process"
            what = f"the loss of {step.name or name} (the self-check found {numbers})"
            raise errors.LossNotSharded(what, again=self.config.loss != "gathered")
        worst = max(range(1, len(found)), key=lambda index: found[index] / limits[index])
        raise errors.GradientDiffers(step.name or name, names[worst], self.ring.size, found[worst], limits[worst])

    def _means(self, mine: StepResult) -> tuple[Tensor, list[Tensor]]:
        """The means over the ring, as DDP makes them."""
        device = self.ring.small_device(self.device)
        loss, *gradients = self.ring.means([x.to(device) for x in (mine.loss, *mine.gradients)])
        return loss, [x.to(self.device) for x in gradients]

    def _apart(self, got: StepResult, want: StepResult) -> list[float]:
        """The relative distance of the loss and of each gradient, the largest on any rank."""
        loss = _Found(0.0, float(want.loss), float(got.loss), 0.0).loss()
        table = self._everywhere([loss, *distances(got.gradients, want.gradients)])
        return [float(x) for x in table.amax(0)]

    # ---- runs ----

    def _row(self, seed: int, rows: int) -> dict[str, Any]:
        row = self.sample.row(self.model, self.ring.size, self.labelled, seed, rows)
        return {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in row.items()}

    def _call_whole(self, row: Mapping[str, Any]) -> Any:
        """The model's outputs for the whole row, in a ring of one: the same masks and kernels."""
        alone = self._shared(row, Ring(LOCAL))
        counted: dict[str, Any] = {
            name: alone.inputs[name] for name in ("shift_labels", "num_items_in_batch") if name in alone.inputs
        }
        return self._call(
            {**row, **counted} if alone.context.layout.padded == alone.context.layout.length else row, alone.context
        )

    def _shared(self, row: Mapping[str, Any], ring: Ring) -> Share:
        config = self.config
        if ring.size == 1 and config.loss != "gathered":  # the loss of the whole row is the full one
            config = replace(config, loss="sharded")
        mine = share(row, ring, config, self.context.text is not None)
        mine.context.log.seen |= self.context.log.seen  # the model was admitted
        if mine.context.text is not None and self.context.text is not None:
            mine.context.text.config = self.context.text.config
        return mine

    def _call(self, inputs: Mapping[str, Any], context: BatchContext) -> Any:
        taken = introspect.parameters_of(self.model, inputs)
        with batch_context.activate(context), lazy_heads(self.model):
            return self.model(**{name: x for name, x in inputs.items() if name in taken})

    def _whole(self, call: Callable[[], T], rows: int) -> T:
        """The answer to the whole row."""
        answer: Any = None
        failure: Exception | None = None
        try:
            answer = call()
        except Exception as error:  # noqa: BLE001  told below, on every rank: the row is ours, not the user's
            failure = error
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        state = 0.0 if failure is None else 2.0 if isinstance(failure, errors.Refused) else 1.0
        if set(self._everywhere([state])[:, 0].tolist()) != {state}:
            self.ring.agree({}, self.ring.small_device(self.device), "", text)  # raises on every rank
        if failure is None:
            found: T = answer
            return found
        if isinstance(failure, errors.Refused):
            raise failure
        raise errors.SelfCheckNotRun(
            introspect.name_of(self.model), rows, row_length(self.ring.size), str(text)
        ) from failure

    def _sharded(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (errors.RingAttentionError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise errors.SelfCheckRaised(introspect.name_of(self.model), self.ring.size, text) from error

    # ---- comparisons ----

    def _gathered(self, row: Tensor) -> Tensor:
        """[W, ...] what every rank holds, on the CPU in float64."""
        row = row.to(self.ring.small_device(self.device), torch.float64)
        return self.ring.gather(row, "compared its part of the self-check").wait()[0].cpu()

    def _everywhere(self, numbers: list[float]) -> Tensor:
        """[n, ...] what every rank holds, of this ring and of all that shard its weights; some of it more than once."""
        table = self._gathered(torch.tensor(numbers, dtype=torch.float64))
        if self.sharding is None:
            return table
        rings = table.to(self.sharding.small_device(self.device))
        return self.sharding.gather(rings, "compared its self-check").wait()[0].flatten(0, 1).cpu()

    def _table(self, mine: Tensor, whole: Any, other: Any, dtypes: Set[torch.dtype] = frozenset()) -> _Found:
        spacing = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
        table = self._gathered(torch.cat([mine, torch.tensor([_loss(whole), _loss(other), spacing]).double()]))
        want, got = (float(table[0, -3]), float(table[:, -2].mean())) if self.labelled else (0.0, 0.0)
        found = _Found(spread(table[:, :-3]), want, got, float(table[:, -1].max()))
        if self.sharding is None:
            return found
        rings = [_Found(*ring) for ring in self._everywhere([*astuple(found)]).tolist()]
        odd = max(rings, key=_Found.loss)
        tokens = torch.tensor([ring.tokens for ring in rings], dtype=torch.float64).max()  # nan if any is nan
        return _Found(float(tokens), odd.want, odd.got, max(ring.spacing for ring in rings))

    def _refuse_pooled(self, whole: Any, share: Any, places: Places, tolerance: float) -> None:
        """Where every token is right, it is an output without tokens that differs."""
        if self._table(places.errors(whole, share, pooled=False), whole, share).tokens > tolerance:
            return
        pooled = places.pooled_errors(whole, share)
        first = next((n for n, error in enumerate(pooled.values()) if not error <= tolerance), len(pooled))
        first = min(int(self._everywhere([float(first)]).min()), len(pooled))  # of another ring, perhaps
        raise errors.PooledOutput(introspect.name_of(self.model), [*pooled, "an output"][first], self.ring.size)

    def _refuse_other_weights(self, whole: Any, least: float) -> None:
        """Every rank has made the whole row alone, so their answers to it are the same, if their weights are."""
        answer = next(x for _, x in tensors_of(whole) if x.is_floating_point() and x.dim())
        answers = self._gathered(answer.flatten()[:256])
        away = relative(answers, answers[:1].expand_as(answers), 0)
        if float(away.max()) > least:
            norms: list[object] = [f"{float(x.norm()):.6g}" for x in answers]
            raise errors.RanksDiffer("answer to the same row (its norm)", norms, _SAME_WEIGHTS)

    def _first_difference(self, row: Mapping[str, Any], mine: Share, places: Places, least: float) -> str:
        """The path of the module that makes the first difference on any rank, with every module watched."""
        with Recorder(places, whole=True).watching(self.model) as want:
            self._call_whole(row)
        with Recorder(places, whole=False).watching(self.model) as got:
            self._call(mine.inputs, mine.context)
        with Recorder(places, whole=True).watching(self.model) as again, rounded_anew(self.device):
            self._call_whole(row)
        events = list(want.events)
        differs = (want.errors(event, got) > max(least, AMPLIFICATION * want.errors(event, again)) for event in events)
        first = next((index for index, it_does in enumerate(differs) if it_does), len(events))
        # The whole row's run is the same on every rank, and so are its events and their order.
        first = int(self._everywhere([float(first)]).min())
        if first == len(events):
            return ""
        # Given what it should be given, and returning something else, it is the module; else it is what called it.
        event = events[first]
        return event.module if event.returned else want.callers[event]


# ---- small things ----------------------------------------------------------------------------------------------------


def _loss(outputs: Any) -> float:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    return float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 else 0.0
