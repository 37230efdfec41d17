"""Weights that bitsandbytes has quantized: reasons against some, and 4-bit ones that FSDP2 gathers by their bytes.

bitsandbytes keeps the codes of 4-bit weights in a tensor of a floating dtype (``bnb_4bit_quant_storage``). One 16-bit
word of a thousand is not a number if read as one. On a GPU FSDP2 copies its shards by `torch._foreach_copy_`, which
converts 16-bit words to float32 and back, and each of these words comes out as 0x7FFF: two of its four weights become
the largest of their block, in silence (bitsandbytes issue 1945). And a policy of another dtype than the storage's casts
the codes as if they were numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ... import errors
from ..context.batch_context import BatchContext
from ..context.introspect import is_a, is_dtensor, is_unit, modules_of, name_of
from ..gradients.fsdp_units import groups_of

_BYTES, _CODES = "Linear8bitLt", "Linear4bit"
"""bitsandbytes' layers of 8-bit and of 4-bit weights."""


def unsupported(model: nn.Module, context: BatchContext) -> Iterator[str]:
    """Yields the reasons why the quantized layers of ``model`` are not exact in a ring."""
    layer: Any
    for layer in modules_of(model) if context.ring.size > 1 else ():
        state = getattr(layer, "state", None)  # PEFT's layer of that name has none
        if is_a(layer, _BYTES) and getattr(state, "threshold", 0.0) > 0:
            yield (
                "its 8-bit layers (LLM.int8) compute columns with outliers in 16 bits, chosen by the tokens of each "
                "rank: set llm_int8_threshold=0.0, or load_in_4bit=True"
            )
        if is_a(layer, _BYTES) and is_dtensor(layer._parameters.get("weight")):
            yield "FSDP2 drops what bitsandbytes stores beside 8-bit weights: use DDP, or load_in_4bit=True"
        packs = is_a(layer, _CODES) and getattr(layer, "support_avx512bf16_for_cpu", False)
        if packs and layer.weight.device.type == "cpu":
            yield (
                "bitsandbytes packs its 4-bit weights at the first evaluation, here the self-check, for other "
                "arithmetic on this CPU: set support_avx512bf16_for_cpu=False on its Linear4bit layers"
            )


def prepare(model: nn.Module, context: BatchContext) -> None:
    """As `gather_bytes`, in a ring."""
    if context.ring.size > 1:
        gather_bytes(model)


def gather_bytes(model: nn.Module) -> None:
    """Has FSDP2 gather bytes for the packed weights of ``model``, and compares each with this rank's part once."""
    for weight in _packed(model):
        if not hasattr(weight, "gathers_bytes"):
            own: Any = type(weight)
            weight.__class__ = gathered_as_bytes(own)
            weight.param_dtype = None
            _check_once(weight, name_of(model))


def _packed(model: nn.Module) -> Iterator[Any]:
    """Yields what FSDP2 knows of each 4-bit weight."""
    for group in (group for unit in filter(is_unit, modules_of(model)) for group in groups_of(unit)):
        for weight in group.fsdp_params:
            info = weight._module_info
            if info.param_name == "weight" and is_a(info.module, _CODES) and weight.sharded_param.is_floating_point():
                yield weight


@functools.cache
def gathered_as_bytes(own: Any) -> Any:
    """Returns a subclass of FSDP2's ``own`` class of parameters, for weights whose numbers are codes."""

    class GatheredAsBytes(own):  # type: ignore[misc]
        """FSDP2 gathers a group of several dtypes as bytes, and copies bytes as they are."""

        gathers_bytes = True

        def init_dtype_attrs(self, *args: Any, **kwargs: Any) -> None:
            super().init_dtype_attrs(*args, **kwargs)
            self.param_dtype = None  # no cast

        @property
        def all_gather_inputs(self) -> list[Tensor]:
            inputs = super().all_gather_inputs
            return inputs if _shards(self) == 1 else [x.view(torch.uint8) for x in inputs]

        def init_all_gather_outputs(self, numels: list[int], dtypes: list[torch.dtype], *args: Any, **kw: Any) -> None:
            if dtypes == [torch.uint8]:
                numels, dtypes = [numels[0] // self.orig_dtype.itemsize], [self.orig_dtype]
            super().init_all_gather_outputs(numels, dtypes, *args, **kw)

    return GatheredAsBytes


def _shards(weight: Any) -> int:
    return int(getattr(weight.mesh_info, "shard_mesh_size", 1))


def _check_once(weight: Any, name: str) -> None:
    """Compares a gathered weight with this rank's part of it, before its layer's next forward.

    Raises there:
        UnsupportedModel: their bytes differ.
    """
    layer = weight._module_info.module

    def check(module: Any, _inputs: Any) -> None:
        whole = module.weight
        if is_dtensor(whole):  # a forward without the hooks of FSDP2
            return
        hook.remove()
        mine = weight._sharded_param_data.detach().view(torch.uint8)
        first = len(mine) * (weight.mesh_info.shard_mesh_rank if _shards(weight) > 1 else 0)
        found = whole.detach().reshape(-1).view(torch.uint8)[first : first + len(mine)]
        if not torch.equal(found, mine[: len(found)].to(found.device)):
            why = "FSDP2 gathers other 4-bit weights than its ranks have: use DDP"
            raise errors.UnsupportedModel(name, [why])

    hook = layer.register_forward_pre_hook(check)
