"""Keys and values that layers share travel once in a forward, are gone before the backward, and change no bit."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_ring_attn import RingConfig
from hf_ring_attn.comm.ring import LOCAL
from hf_ring_attn.integration.context import shared_kv
from hf_ring_attn.integration.context.shared_kv import SharedKV
from hf_ring_attn.sharding.plan import Plan
from hf_ring_attn.testing import relative_error
from hf_ring_attn.traffic.gathered_kv import COMPARED, LAST, MAKES, TAKES
from tests.helpers.contexts import ring_of_two
from tests.helpers.jobs import plain_jobs
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.compile_jobs import Compiled
from tests.helpers.jobs.plain_jobs import Shards, Step, packed, padded
from tests.helpers.jobs.sharing_jobs import Beside, Found, autocast, by_bits, compiled, gathers, measured
from tests.helpers.models.tiny_models import tiny

MODELS = ("gemma3n", "gemma4")
PACKED, PADDED = packed(9, 15), padded(24, right=6)
STEPS = [
    *(Step(why=f"{model}, packed", model=model, batch=PACKED) for model in MODELS),
    *(Step(why=f"{model}, padded", model=model, batch=PADDED) for model in MODELS),
    *(Step(why=f"{model}, recomputed", model=model, batch=PACKED, checkpointing="recomputed") for model in MODELS),
    *(Step(why=f"{model}, reentrant", model=model, batch=PADDED, checkpointing="reentrant") for model in MODELS),
    Step(
        why="recomputed, with what attention computed",
        model="gemma4",
        batch=PACKED,
        checkpointing="recomputed",
        ring=RingConfig(save_attention=True),
    ),
    Step(why="backward by gather", model="gemma4", batch=PADDED, ring=RingConfig(backward="gather")),
]


def both(ranks: Ranks, size: int, step: Step, few: bool) -> list[tuple[Found, Found]]:
    """Of each rank, the step as it is, and with every layer gathering for itself, in the same groups of heads."""
    each = replace(step, ring=replace(step.ring, heads_per_gather=1))
    return list(zip(*(ranks(size).run(measured, one, few) for one in (step, each)), strict=True))


def assert_once(got: Found, each: Found) -> None:
    """Two of the six layers make keys and values, and no bit depends on how often these travel."""
    assert got.numbers.keys() == each.numbers.keys()
    assert all(torch.equal(got.numbers[name], x) for name, x in each.numbers.items())
    assert got.forward and got.forward == each.forward[: len(each.forward) // 3]
    assert got.backward == each.backward
    # One of each kind of mask is kept while layers need it, and none after the forward.
    assert (got.most, got.left) == (2, [0, 0])
    assert (each.most, each.left) == (0, [0, 0])


def marked(step: Step, size: int, few: bool) -> Any:
    """Sparse plans, on four ranks now and then and on two for all else; tests below gather instead."""
    often = few and size == (4 if step.why in ("gemma3n, padded", "gemma4, packed") else 2)
    name = f"{step.why}-{size}{', sparse plans' if few else ''}"
    return pytest.param(step, size, few, id=name, marks=() if often else pytest.mark.full)


@pytest.mark.parametrize(
    ("step", "size", "few"),
    [marked(step, size, few) for step in STEPS for size, few in ((2, False), (2, True), (4, True))],
)
@pytest.mark.turns
def test_they_travel_once_and_change_no_bit(ranks: Ranks, step: Step, size: int, few: bool) -> None:
    found = both(ranks, size, step, few)
    assert sum(received for got, _ in found for _, received in got.forward) > 0
    for got, each in found:
        assert_once(got, each)
        assert {what for what, _ in got.forward} == {f"{'exchanged' if few else 'gathered'} keys and values"}


@pytest.mark.turns
def test_they_travel_once_in_what_autocast_makes_of_them(ranks: Ranks) -> None:
    """In float32 they are shared, and each layer rounds them for itself."""
    step = Step(why="", model="gemma3n", batch=PACKED, dtype=torch.float32)
    runs = [ranks(2).run(autocast, replace(step, ring=ring)) for ring in (RingConfig(), RingConfig(heads_per_gather=1))]
    for got, each in zip(*runs, strict=True):
        assert_once(got, each)


@pytest.mark.turns
def test_they_travel_once_under_fsdp2(ranks: Ranks) -> None:
    (want,), _ = plain_jobs.without_fsdp([PACKED], 2, "gemma3n")
    ring = Shards({"cp_size": 2}, ("dp_shard_cp",), world=2)
    for count, (losses, _) in ranks(2).run(gathers, plain_jobs.fsdp2, ring, [PACKED], "", 2, "gemma3n"):
        # Keys and values of two groups of heads, of two layers: in the self-check, its trial step, and two steps.
        assert count == 2 * 2 * 2 * 4
        assert all(relative_error(a, b) < 1e-6 for a, b in zip(losses, want, strict=True))


def test_models_that_share_nothing_keep_nothing(ranks: Ranks) -> None:
    step = Step(why="", model="gemma3", batch=PACKED)
    for got, each in both(ranks, 2, step, few=False):
        assert got.most == 0 and got.forward == each.forward


alone = cache(plain_jobs.by_itself)


@pytest.mark.parametrize("model", MODELS)
def test_two_batches_alive(ranks: Ranks, model: str) -> None:
    """Checkpointed: the keys of both live until their backwards, and nothing is taken from the other one's."""
    batches = packed(24), packed(20, 4)
    for found in ranks(2).run(plain_jobs.two_batches_alive, *batches, model):
        for got, batch in zip(found, batches, strict=True):
            want = alone(Step(why="", model=model, batch=batch)).gradients
            assert all(relative_error(got[name], gradient) < 3e-5 for name, gradient in want.items())


# ---- compiled --------------------------------------------------------------------------------------------------------

WHOLE = Compiled(
    why="", model="gemma4", what="whole", batches=[PACKED, packed(24), packed(3, 4, 17)], graphs=[1] * 3,
    ring=RingConfig(loss="sharded"),  # as compiled heads have it: bits are compared
)  # fmt: skip
LAYERS = replace(WHOLE, what="layers", graphs=[4] * 3)  # that make or take keys, with or without a window
COMPILED = [
    pytest.param(LAYERS, False, marks=pytest.mark.full, id="layers"),
    pytest.param(WHOLE, True, id="whole, sparse plans"),
    pytest.param(replace(LAYERS, model="gemma3n"), False, marks=pytest.mark.full, id="layers of gemma3n"),
    pytest.param(replace(WHOLE, model="gemma3n"), False, marks=pytest.mark.full, id="whole of gemma3n"),
    pytest.param(replace(LAYERS, backend="aot_eager", graphs=None), False, marks=pytest.mark.full, id="layers, aot"),
    pytest.param(replace(WHOLE, backend="aot_eager", graphs=None), False, marks=pytest.mark.full, id="whole, aot"),
]


def compared(messages: list[tuple[str, int]]) -> list[int]:
    return [received for what, received in messages if what == COMPARED]


def assert_once_compiled(found: list[Beside], graphs: list[int] | None, comparisons: Sequence[int] = (4,)) -> None:
    for number, beside in enumerate(found):
        assert beside.same
        assert (beside.most, beside.left) == (2, 0)
        assert graphs is None or beside.graphs == graphs[number]
        got, each = ([message for message in of[0] if message[0] != COMPARED] for of in (beside.got, beside.each))
        assert got and got == each[: len(each) // 3]
        assert beside.got[1] == beside.each[1]
        assert compared(beside.got[0]) in [[8] * count for count in comparisons]


@pytest.mark.parametrize(("case", "few"), COMPILED)
@pytest.mark.slow
@pytest.mark.turns
def test_compiled_they_travel_once(ranks: Ranks, case: Compiled, few: bool) -> None:
    """Other batches take no new graphs; each layer that takes is told so by all ranks."""
    for found in ranks(2).run(compiled, case, few):
        assert_once_compiled(found, case.graphs)


@pytest.mark.slow
@pytest.mark.turns
def test_compiled_and_recomputed_they_travel_once_forward(ranks: Ranks) -> None:
    """transformers' own code breaks the graph of a layer that stores its keys in a checkpoint, and so none is left."""
    for found in ranks(2).run(compiled, replace(LAYERS, graphs=None, checkpointing="recomputed")):
        assert_once_compiled(found, None, comparisons=(0, 4))  # 4 once anything was compiled before a batch


@pytest.mark.slow
@pytest.mark.turns
def test_a_rank_where_the_compiler_gave_up_sends_the_same(ranks: Ranks) -> None:
    """It has a limit of graphs, which ranks of unlike masks may reach at unlike times."""
    quick, slow = ranks(2).run(compiled, replace(LAYERS, model="gemma3n", graphs=None), False, True)
    for found in (quick, slow):
        assert_once_compiled(found, None)
    assert slow[0].graphs == quick[0].graphs > 0


@pytest.mark.parametrize("what", ["", "layers"])
@pytest.mark.turns
def test_heads_per_gather_bounds_what_is_kept(ranks: Ranks, what: Any) -> None:
    """Who gives it wants no more memory than that of so many heads, so nothing stays, compiled or not."""
    ring = RingConfig(heads_per_gather=1)
    if what:
        for found in ranks(2).run(compiled, replace(LAYERS, ring=ring)):
            assert all(beside.most == 0 and beside.got == beside.each for beside in found)
    else:
        for each in ranks(2).run(measured, Step(why="", model="gemma4", batch=PACKED, ring=ring)):
            assert each.most == 0 and len(each.forward) == 6 * 2 * 2  # keys and values of two heads in six layers


# ---- what is the same, and how long ----------------------------------------------------------------------------------


class Layers(nn.Module):
    """Three layers marked as transformers marks them: the first makes, the others take."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(3))
        for number, layer in enumerate(self.layers):
            vars(layer).update({shared_kv._MAKES: number == 0, shared_kv._TAKES: number > 0})


def plan() -> Plan:
    return Plan(LOCAL, torch.zeros(1, 9), torch.ones(1))


PLAN = plan()


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, as at its start: a test before may have compiled something, and shared a batch then."""
    monkeypatch.setattr(shared_kv, "_traced", False)


def asked() -> tuple[list[Any], SharedKV, Tensor, Tensor]:
    """Layers, of which the first has gathered, what is kept of it, and its key and value."""
    model = Layers()
    shared_kv.mark_layers(model, ring_of_two())
    shared, key, value = SharedKV(), torch.randn(2, 3), torch.randn(2, 3)
    layers = [*model.layers]
    assert shared.store_of(layers[0], key, value, PLAN, torch.float32) is not None
    return layers, shared, key, value


def test_it_goes_with_the_last_layer() -> None:
    layers, shared, key, value = asked()
    first = shared.store_of(layers[1], key, value, PLAN, torch.float32)
    last = shared.store_of(layers[2], key, value, PLAN, torch.float32)
    assert first is last is not None
    gone = weakref.ref(first)
    del first, last
    assert gone() is None and shared.store_of(layers[1], key, value, PLAN, torch.float32) is None


def test_it_goes_with_the_last_layer_whatever_that_attends_to() -> None:
    layers, shared, key, value = asked()
    assert shared.store_of(layers[2], torch.randn(2, 3), value, PLAN, torch.float32) is None
    assert shared.store_of(layers[1], key, value, PLAN, torch.float32) is None


def test_it_goes_with_its_key() -> None:
    layers, shared, key, value = asked()
    gone = weakref.ref(shared.store_of(layers[1], key, value, PLAN, torch.float32))
    del key
    assert gone() is None


def test_only_the_very_same_is_the_same() -> None:
    layers, shared, key, value = asked()
    others = [
        (key.clone(), value, PLAN, torch.float32), (key.view(2, 3), value, PLAN, torch.float32),
        (key, value.clone(), PLAN, torch.float32), (key, value, plan(), torch.float32),
        (key, value, PLAN, torch.bfloat16),
    ]  # fmt: skip
    assert [shared.store_of(layers[1], *other) for other in others] == [None] * 5
    assert shared.store_of(layers[1], key, value, PLAN, torch.float32) is not None


@pytest.mark.parametrize("changed", ["key", "value"])
def test_what_was_changed_in_place_is_not_the_same(changed: str) -> None:
    layers, shared, key, value = asked()
    {"key": key, "value": value}[changed].view(-1).mul_(2)
    assert shared.store_of(layers[1], key, value, PLAN, torch.float32) is None


def test_what_cannot_tell_its_changes_is_not_kept() -> None:
    layers, shared, *_ = asked()
    with torch.inference_mode():
        key, value = torch.randn(2, 3), torch.randn(2, 3)
        assert shared.store_of(layers[0], key, value, PLAN, torch.float32) is None


def test_nothing_is_kept_through_a_backward() -> None:
    """As for a checkpoint's recompute, which has the keys of the forward still."""
    layers, shared, key, value = asked()
    found = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: found.append(shared.store_of(layers[1], key, value, PLAN, torch.float32)))
    x.sum().backward()
    assert found == [None]
    assert shared.store_of(layers[1], key, value, PLAN, torch.float32) is None


def test_layers_are_known_by_their_marks() -> None:
    six = [MAKES, MAKES, TAKES, TAKES, TAKES, LAST]
    for name, wanted in (("gemma3n", six), ("gemma4", six), ("llama", [0, 0])):
        model: Any = tiny(name)
        shared_kv.mark_layers(model, ring_of_two())
        layers = [layer.self_attn for layer in model.model.layers]
        roles = [int(vars(layer).get(shared_kv.ROLE, 0)) for layer in layers]
        assert roles == wanted


def test_where_one_rank_compiled_before_all_go_by_bits(ranks: Ranks) -> None:
    """It may have given a layer up that others compile, as a rank that generates a sample alone does."""
    for who in range(2):
        assert ranks(2).run(by_bits, who) == [(False, True)] * 2
