"""The op under torch.compile: one graph, the same bits, and no new graph for every new batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import Tensor

from hf_ring_attn.attention.call import Call, RingOptions
from hf_ring_attn.attention.op import attend, flatten
from hf_ring_attn.comm.ring import Ring
from hf_ring_attn.kernels import Params
from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.sharding.mask import CAUSAL, Mask
from hf_ring_attn.sharding.plan import Plan
from hf_ring_attn.traffic import ComparedKV
from hf_ring_attn.traffic.gathered_kv import MAKES, number_tensor
from tests.helpers.checks import Ranks
from tests.helpers.rank_functions import held

LENGTH = 24
PARAMS, REFERENCE = Params(0.3, softcap=4.0), RingOptions("reference")

Function = Callable[[Tensor, Tensor, Tensor, Plan], tuple[Tensor, Tensor]]


def layer(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Something before the op and something after it, as in a model."""
    out, lse = attend(Call(q * 2, k + 1, v, plan, PARAMS, REFERENCE))
    return torch.nn.functional.silu(out), lse


def layer_by_gather(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    return attend(Call(q, k, v, plan, PARAMS, RingOptions("reference", "gather", heads_per_gather=1)))


def plan_of(documents: list[int]) -> Plan:
    """For a row of documents of these many tokens, on this rank of the world, or alone."""
    ring = Ring.of(None)
    ids = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
    return Plan.of(ring, Layout(LENGTH, ring.size, ring.rank), Mask.of(CAUSAL, 2, LENGTH, ids.expand(2, -1)))


def share(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    shapes = ((4, 8), (2, 8), (2, 6))
    row = [torch.randn(2, LENGTH, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x[:, held(LENGTH, rank, size)].requires_grad_() for x in row]


def answer(function: Function, plan: Plan, seed: int = 0) -> list[Tensor]:
    leaves = share(seed)
    q, k, v = leaves
    out, lse = function(q, k, v, plan)
    return [out, lse, *torch.autograd.grad(out.square().sum(), leaves)]


def compiled(function: Function, packings: list[list[int]]) -> tuple[list[bool], int]:
    """Whether the compiled function gives eager's bits for every packing, and how many graphs it took."""
    torch._dynamo.reset()
    backend = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    quick = torch.compile(function, fullgraph=True, backend=backend)
    same = []
    for seed, documents in enumerate(packings):
        plan = plan_of(documents)
        pairs = zip(answer(function, plan, seed), answer(quick, plan, seed), strict=True)
        same.append(all(torch.equal(a, b) for a, b in pairs))
    return same, backend.frame_count


@pytest.mark.parametrize("function", [layer, layer_by_gather])
@pytest.mark.parametrize("size", [1, 2])
def test_compiled_it_is_one_graph_with_the_bits_of_eager(ranks: Ranks, size: int, function: Function) -> None:
    assert ranks(size).run(compiled, function, [[LENGTH]]) == [([True], 1)] * size


@pytest.mark.turns
@pytest.mark.parametrize("size", [1, 4])
def test_batches_of_other_documents_take_no_new_graphs(ranks: Ranks, size: int) -> None:
    """One for the first number of tiles and one for all others; with a table a rank it was eight at ring size 4, and
    at eight torch gives up."""
    packings = [[24], [10, 14], [3, 4, 5, 12], [24], [8, 8, 8], [1, 1, 20, 1, 1], [13, 11], [1] * 24, [23, 1]]
    for same, graphs in ranks(size).run(compiled, layer, packings):
        assert all(same)
        assert graphs <= 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.turns
def test_the_ops_keep_what_they_promise_to_a_compiler(kv_heads: int, sinks: bool, dtype: torch.dtype) -> None:
    """Schema, fakes (shapes, strides, dtypes), autograd: torch's own check of a custom op."""
    plan = plan_of([10, 14])
    q, k, v = torch.randn(2, LENGTH, 4, 8), torch.randn(2, LENGTH, kv_heads, 8), torch.randn(2, LENGTH, kv_heads, 6)
    q, k, v, dout = (x.to(dtype) for x in (q, k, v, torch.randn(2, LENGTH, 4, 6)))
    sink = torch.randn(4, dtype=dtype) if sinks else None
    flat = flatten(Call(q, k, v, plan, Params(0.3, sinks=sink), REFERENCE))
    leaves = [x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in flat]
    ops = torch.ops.hf_ring_attn
    shares = (ComparedKV().number, number_tensor(MAKES)) if sinks else (None, None)
    forward = torch.library.opcheck(ops.ring_flash_attn_fwd, (*leaves, *shares))
    out, lse = ops.ring_flash_attn_fwd(*flat, None, None)
    backward = torch.library.opcheck(ops.ring_flash_attn_bwd, (out, lse, dout, *flat))
    assert set(forward.values()) | set(backward.values()) == {"SUCCESS"}


def gradients_of_a_sparse_plan() -> list[bool]:
    """Whether out and each gradient lie in memory as the fakes have it, where all key heads travel in one group."""
    ring = Ring.of(None)
    layout = Layout(LENGTH, ring.size, ring.rank)
    ids = layout.pad(torch.arange(LENGTH).expand(2, -1) // 3, 1, -1)
    plan = Plan.of(ring, layout, Mask.of(CAUSAL, 2, layout.padded, ids), sparse_share=1)
    assert plan.stops[-1], "ranks exchange what they see"
    shapes = ((4, 8), (1, 8), (1, 6))
    leaves = [torch.randn(2, layout.local_length, *shape).requires_grad_() for shape in shapes]
    q, k, v = leaves
    out, _ = attend(Call(q, k, v, plan, Params(1.0), REFERENCE))
    return [x.is_contiguous() for x in (out, *torch.autograd.grad(out.square().sum(), leaves))]


def test_gradients_lie_as_the_fakes_have_it_also_where_ranks_exchange_what_they_see(ranks: Ranks) -> None:
    """A compiler reads them by the strides of the fakes."""
    assert ranks(2).run(gradients_of_a_sparse_plan) == [[True] * 4] * 2


def test_fakes_tell_shapes_without_a_process_group() -> None:
    """Tracing on one machine for a ring that only exists on others."""
    q, k, v = (torch.empty(2, 8, *shape, device="meta", dtype=torch.bfloat16) for shape in ((4, 8), (2, 8), (2, 6)))
    plan = Plan("a ring that is not here", torch.empty(3, 9, dtype=torch.int64), torch.tensor([1, 2, 3]))
    out, lse = attend(Call(q, k, v, plan, Params(1.0), REFERENCE))
    assert (out.shape, out.dtype) == ((2, 8, 4, 6), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 4, 8), torch.float32)


def test_second_derivatives_are_refused_by_torch() -> None:
    torch._dynamo.reset()
    q, k, v = share()
    out, _ = torch.compile(layer, fullgraph=True, backend="aot_eager")(q, k, v, plan_of([LENGTH]))
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        first.sum().backward()
