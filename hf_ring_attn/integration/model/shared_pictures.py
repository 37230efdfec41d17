"""Pictures of a row: each rank computes the features of some of them, and every rank gets all features.

transformers' models make features in a method, `get_image_features` or `get_video_features`. In a sharded batch that
trains it gets the pictures of this rank: as many on every rank, since FSDP2 gathers a tower's weights for each call.
Its `pooler_output` and `deepstack_features` are gathered. States of the tower's layers are left out, which models read
only inside of the method. The gradient of a tower's weights is then that of these pictures for the losses of all ranks.
Where every rank computes all pictures, it is that of all of them for this rank's loss. Added up, both are the same.

Each rank computes all pictures where one may depend on the others or on chance (batch norms, dropout), where pictures
cannot be told apart in what the method gets or returns, and outside of training.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.modules.batchnorm import _BatchNorm

from ...comm.ring import Ring
from ...layers.collectives import gather_parts
from ..context import batch_context
from ..context.batch_context import BatchContext
from ..context.model_record import latest_record
from ..context.ring_random import Draws
from ..context.tensor_tree import tensors_of
from ..context.whole_batch import LOSS_INPUTS
from ..patching.compiler import uncompiled
from ..patching.modules import replace

METHODS = {
    "get_image_features": ("pixel_values", "image_grid_thw"),
    "get_video_features": ("pixel_values_videos", "video_grid_thw"),
}
"""Methods that make features; their argument of pixels, and that of the patches of each picture [N, 3]."""
STATES = "last_hidden_state", "hidden_states", "attentions"
"""Fields with states of the tower's layers."""
GATHERED = "pooler_output", "deepstack_features"
_DOING = "gathered features of pictures"


def prepare(model: nn.Module, context: BatchContext) -> None:
    """Replaces the methods of ``model`` that make features of pictures."""
    if context.text is None or context.whole_head or context.ring.size == 1:
        return
    for path, name in latest_record(model).once(_makers, model):
        module = model.get_submodule(path)
        if name not in module.__dict__:  # else ours, or the program's
            replace(module, name, _Features(module, name))


def _makers(model: nn.Module) -> list[tuple[str, str]]:
    """The modules with such methods, by their paths; an outer one calls that of a module inside."""
    return [
        (path, name)
        for path, module in model.named_modules()
        for name in METHODS
        if hasattr(type(module), name)
        and not any(hasattr(type(inner), name) for inner in module.modules() if inner is not module)
    ]


class Pictures(NamedTuple):
    """The pictures in the arguments of a call.

    Attributes:
        sizes: of each picture, the entries of ``values`` along its first axis: 1, or its patches.
        values: the name of the pixels. beside: names of other arguments with an entry for each picture.
        apart: an output with as many entries as pictures has one of each. Not where a model leaves out empty pictures.
    """

    sizes: list[int]
    values: str
    beside: list[str]
    apart: bool

    def taken(self, named: Mapping[str, Any], which: list[int]) -> dict[str, Any]:
        """The arguments with some of the pictures, in that order."""
        pixels, starts = named[self.values], [0, *accumulate(self.sizes)]
        rows = [torch.arange(starts[at], starts[at + 1], device=pixels.device) for at in which]
        return {**named, self.values: pixels[torch.cat(rows)], **{name: named[name][which] for name in self.beside}}


def pictures_in(named: Mapping[str, Any], values: str, grid: str) -> Pictures | None:
    """The pictures in the arguments of a call by name; None: they cannot be told apart."""
    pixels, patches = named.get(values), named.get(grid)
    if not isinstance(pixels, Tensor) or pixels.ndim < 2:
        return None
    packed = isinstance(patches, Tensor)
    sizes = patches.prod(-1).tolist() if isinstance(patches, Tensor) else [1] * len(pixels)
    if sum(sizes) != len(pixels) or (pixels.ndim > 4 and bool((pixels == 0).flatten(1).all(1).any())):
        return None  # a row of empty pictures, which models leave out: a rank would have none
    beside = []
    for name, x in named.items():
        if name not in {values, *LOSS_INPUTS} and next(tensors_of(x), None) is not None:
            if not isinstance(x, Tensor) or (x.ndim and len(x) != len(sizes)):
                return None
            beside += [name] * (x.ndim > 0)
    return Pictures(sizes, values, beside, apart=not packed and pixels.ndim in (3, 4))


def dealt(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Deals pictures to ranks: as many to each, and about as many patches. The smallest fills places that are left."""
    order = sorted(range(len(sizes)), key=lambda at: -sizes[at])
    order += order[-1:] * (-len(order) % ranks)
    rounds = [order[at : at + ranks] for at in range(0, len(order), ranks)]
    return [[one[-1 - rank if turn % 2 else rank] for turn, one in enumerate(rounds)] for rank in range(ranks)]


def gathered(mine: Any, hands: list[list[int]], apart: bool, ring: Ring) -> Any:
    """Gathers what a method returned for the pictures of each rank, as what it returns for all of them.

    Every rank decides the same: by types, by numbers of axes and by numbers of pictures, which are alike.

    Args:
        hands: the pictures of each rank. apart: see `Pictures`.

    Returns:
        The features of all pictures in order; of an output of transformers those fields that models read. None: they
        cannot be told apart in ``mine``.
    """
    known = isinstance(mine, Mapping)
    if known and not set(mine) <= {*GATHERED, *STATES}:
        return None
    features, deep = map(mine.get, GATHERED) if known else (mine, None)
    each, count = len(hands[0]), 1 + max(chain(*hands))
    places = {picture: at for at, picture in enumerate(chain(*hands))}
    order = [places[picture] for picture in range(count)]
    if isinstance(features, Tensor) and apart and features.ndim > 2 and len(features) == each and deep is None:
        whole: Any = gather_parts(features, ring).flatten(0, 1)[order]
        return type(mine)(pooler_output=whole) if known else whole
    if not known or not _is_of_each(features, each) or not (deep is None or isinstance(deep, list | tuple)):
        return None

    device = features[0].device
    lengths = list(chain(*ring.start_rows([len(x) for x in features], device, _DOING)()))
    longest = max(sum(lengths[at : at + each]) for at in range(0, len(lengths), each))
    starts = [at // each * longest + sum(lengths[at // each * each : at]) for at in range(len(lengths))]
    rows = torch.cat([torch.arange(starts[at], starts[at] + lengths[at], device=device) for at in order])

    def whole_of(x: Any) -> Any:
        if not isinstance(x, Tensor):  # of each picture
            return whole_of(torch.cat(list(x))).split([lengths[at] for at in order])
        x = pad(x, (0, 0) * (x.ndim - 1) + (0, longest - len(x)))
        return gather_parts(x, ring).flatten(0, 1)[rows]

    more = {} if deep is None else {"deepstack_features": [whole_of(x) for x in deep]}
    return type(mine)(pooler_output=whole_of(features), **more)


def _is_of_each(features: Any, count: int) -> bool:
    """Returns True for a tensor of each picture."""
    tensors = isinstance(features, list | tuple) and all(isinstance(x, Tensor) for x in features)
    return tensors and len(features) == count


class _Features:
    """A method of a model that makes features of pictures.

    Attributes:
        alone: each rank computes all pictures, since they cannot be shared.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name, self.alone = module, name, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = batch_context.current()
        if self.alone or context is None or not context.before_text or context.ring.size == 1:
            return self._own(*args, **kwargs)
        return self._shared(context.ring, args, kwargs)

    @property
    def _own(self) -> Any:
        """The class's method as of now, which a program may have changed since."""
        return getattr(type(self.module), self.name).__get__(self.module)

    @uncompiled("pictures are dealt to ranks between graphs")
    def _shared(self, ring: Ring, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = {**inspect.signature(self._own).bind_partial(*args).arguments, **kwargs}
        pictures = pictures_in(named, *METHODS[self.name])
        if pictures is None or len(pictures.sizes) < 2 or not self.module.training or self._has_batch_norm():
            return self._own(*args, **kwargs)
        hands = dealt(pictures.sizes, ring.size)
        draws = Draws()
        mine = self._own(**pictures.taken(named, hands[ring.rank]))
        found = None if draws.drew() else gathered(mine, hands, pictures.apart, ring)
        if found is None:
            self.alone = True
            draws.restore()
            return self._own(*args, **kwargs)
        return found

    def _has_batch_norm(self) -> bool:
        return any(isinstance(module, _BatchNorm) and module.training for module in self.module.modules())
