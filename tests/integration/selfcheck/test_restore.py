"""A run on the side leaves nothing behind."""

from __future__ import annotations

import gc
import random

import numpy
import pytest
import torch
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import cached

from hf_ring_attn.integration.selfcheck.restore import preserved
from tests.helpers.jobs import written_jobs


def test_nothing_is_left_of_a_run_on_the_side() -> None:
    module = written_jobs.Restless().train()
    written, replaced, tensor, items = module.written, module.replaced, module.tensor, module.items
    before = {name: x.clone() for name, x in module.state_dict().items()}
    generators = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())
    with preserved(module):
        torch.rand(1), random.random(), numpy.random.random()
        assert not any(part.training for part in module.modules())
        assert not module(torch.ones(5, 4)).requires_grad
    assert all(part.training for part in module.modules())
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert (random.getstate(), str(numpy.random.get_state())) == generators[1:]
    assert torch.is_grad_enabled()
    assert module.written is written and module.replaced is replaced and module.tensor is tensor
    assert not tensor.any() and module.number == 0
    assert module.items is items == [1] and module.table == {"a": 1}
    assert "added" not in module._buffers and "cache" not in vars(module)
    assert module.state_dict().keys() == before.keys()
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())


def test_autocast_keeps_no_weight_without_a_graph() -> None:
    """Weights that autocast casts in a run without gradients would be found again in the step, and get none."""
    layer = torch.nn.Linear(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        with preserved(layer):
            layer(torch.ones(1, 4))
        layer(torch.ones(1, 4)).sum().backward()
    assert layer.weight.grad is not None


def test_a_parametrized_weight_is_cached_from_no_run_on_the_side() -> None:
    """It got no gradient in the first step of a loop inside `parametrize.cached()`."""
    layer = weight_norm(torch.nn.Linear(4, 4))
    with cached():
        layer(torch.ones(1, 4)).sum().backward(retain_graph=True)
        once = layer.weight
        with preserved(layer):
            assert layer.weight is not once
        assert layer.weight is once
    with cached():
        with preserved(layer):
            assert not layer.weight.requires_grad
        assert layer.weight.requires_grad


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_in_a_run_on_the_side(collects: bool) -> None:
    """Kernels are imported in it, so that searches for garbage would take more than a second."""
    was_on = gc.isenabled()
    _set(collects)
    try:
        with preserved(torch.nn.Linear(1, 1)):
            assert not gc.isenabled()
        assert gc.isenabled() == collects
    finally:
        _set(was_on)


def _set(collects: bool) -> None:
    if collects:
        gc.enable()
    else:
        gc.disable()
