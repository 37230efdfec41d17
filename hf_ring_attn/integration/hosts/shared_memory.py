"""Memory that several weights of a model share, such as the tied adapters of PEFT (`ensure_weight_tying`).

A move to another device makes them weights of their own, in one process too. Several processes on CPUs have the device
"cpu:0" in accelerate, to which torch copies what is on "cpu", the same device: one process does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ... import errors
from ..context.introspect import name_of

Weights = dict[str, nn.Parameter]
"""Several weights by their names."""


@contextmanager
def keeping(models: Iterable[nn.Module], device: torch.device, splits: bool = False) -> Iterator[None]:
    """Inside, a host moves or wraps ``models``. Weights that shared memory share it afterwards, as in one process.

    Args:
        device: to which the host moves them. splits: it shards them, as FSDP2 does.

    Raises:
        SharedMemoryLost: it makes, or has made, weights of their own of them.
    """
    shared = [(model, [*sharing(model, device.type)]) for model in models]
    before = [(model, weights, _memory(weights)) for model, groups in shared for weights in groups]
    if splits:  # FSDP2 refuses a transposed one in its own words
        _refuse_any((model, weights) for model, weights, _ in before)
    yield
    _refuse_any((model, weights) for model, weights, _ in before if not _are_in(model, weights))
    for _, weights, memory in before:
        _share(weights, memory)


def _are_in(model: nn.Module, weights: Weights) -> bool:
    """Returns True if the model still has these weights, and not others in their place."""
    mine = set(map(id, model.parameters()))
    return all(id(x) in mine for x in weights.values())


def _refuse_any(lost: Iterable[tuple[nn.Module, Weights]]) -> None:
    for model, weights in lost:
        raise errors.SharedMemoryLost(name_of(model), sorted(weights))


def sharing(model: nn.Module, kind: str) -> Iterator[Weights]:
    """The weights of a model that share elements of memory on a kind of device, if one of them trains."""
    by_storage: dict[int, Weights] = {}
    for name, x in model.named_parameters():  # the same parameter only once: all hosts keep these
        if x.device.type == kind and x.numel() and (address := _storage_of(x)):
            by_storage.setdefault(address, {})[name] = x
    for weights in by_storage.values():
        if len(weights) > 1 and any(x.requires_grad for x in weights.values()):
            found = {name for pair in _overlapping(weights) for name in pair}
            if found:
                yield {name: x for name, x in weights.items() if name in found}


def _storage_of(x: Tensor) -> int:
    """The address of a tensor's storage; 0 if it holds other tensors in place of one, as a DTensor does."""
    try:
        return x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _overlapping(weights: Weights) -> Iterator[tuple[str, str]]:
    """Pairs of weights of one storage that have an element in common. Those of a file's storage are many."""
    starts = sorted(weights, key=lambda name: weights[name].storage_offset() * weights[name].itemsize)
    for at, name in enumerate(starts):
        a = weights[name]
        for other in starts[at + 1 :]:
            b = weights[other]
            if b.storage_offset() * b.itemsize >= _end(a) * a.itemsize:
                break
            if a.dtype == b.dtype and _have_common(a, b):
                yield name, other


def _end(x: Tensor) -> int:
    """The place in its storage after a tensor's last element."""
    return int(x.storage_offset()) + 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))


def _have_common(a: Tensor, b: Tensor) -> bool:
    """Returns True if two tensors, of which ``b`` starts in the range of ``a``, share an element: columns do not."""
    start = a.storage_offset()
    if a.is_contiguous():  # then it has no gaps; the mask below has a byte for each element
        return True
    seen = torch.zeros(max(_end(a), _end(b)) - start, dtype=torch.bool)
    seen.as_strided(a.shape, a.stride()).fill_(True)
    return bool(seen.as_strided(b.shape, b.stride(), b.storage_offset() - start).any())


def _memory(weights: Weights) -> dict[str, Tensor]:
    return {name: x.data for name, x in weights.items()}


@torch.no_grad()
def _share(weights: Weights, memory: dict[str, Tensor]) -> None:
    """Moves weights back into the memory that they shared, on the device where they are now."""
    if all(x.data_ptr() == memory[name].data_ptr() for name, x in weights.items()):
        return
    one, was = next(iter(weights.values())), next(iter(memory.values()))
    whole = was.as_strided((was.untyped_storage().nbytes() // was.itemsize,), (1,), 0).to(one.device, one.dtype)
    for name, x in weights.items():
        place = whole.as_strided(x.shape, memory[name].stride(), memory[name].storage_offset())
        place.copy_(x)  # DDP may have given it the values of the first rank
        x.data = place
