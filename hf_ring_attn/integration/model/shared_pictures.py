"""Pictures of a row: each rank computes the features of some of them, and every rank gets all features.

transformers' models make features in a method, `get_image_features` or `get_video_features`. Where the model's forward
calls it in a sharded batch that trains, it gets the pictures of this rank: as many on every rank, since FSDP2 gathers a
tower's weights for each call. A single picture takes the same way: all rings must call a tower equally often.
Its `pooler_output` and `deepstack_features` are gathered. States of the tower's layers are left out (`LeftOut`).

The gradient of a tower's weights is then that of these pictures for the losses of all ranks. Where every rank computes
all pictures, it is that of all of them for this rank's loss. Added up, both are the same.

Each rank computes all pictures where one may depend on the others or on chance (batch norms, dropout), where the
program has hooks or classes of its own before the text model, which may look at all pictures, where pictures cannot be
told apart in what the method gets or returns, and outside of training.
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

from ... import errors
from ...comm.ring import Ring
from ...layers.collectives import gather_parts
from ..context import batch_context
from ..context.batch_context import BatchContext, Opaque
from ..context.introspect import bound_by_name, function_of, inner_text_model
from ..context.model_record import latest_record
from ..context.program_states import is_of_program
from ..context.ring_random import Draws
from ..context.whole_batch import LOSS_INPUTS
from ..patching.compiler import uncompiled
from ..patching.modules import HOOKS, attach, attached, hooks_of, is_ours, replace

METHODS = {
    "get_image_features": ("pixel_values", "image_grid_thw"),
    "get_video_features": ("pixel_values_videos", "video_grid_thw"),
}
"""Methods that make features; their argument of pixels, and that of the patches of each picture [N, 3]."""
OF_EACH = {
    *(grid for _, grid in METHODS.values()), "image_sizes", "image_position_ids", "image_merge_sizes",
    "video_merge_sizes", "high_res_pixel_values", "pixel_mask", "pixel_attention_mask", "spatial_shapes",
    "qformer_input_ids", "qformer_attention_mask",
}  # fmt: skip
"""Their other arguments with an entry for each picture."""
OF_ALL = {"vision_feature_layer"}
"""Those that may be a list, and are the same for all pictures."""
STATES = "last_hidden_state", "hidden_states", "attentions"
"""Fields with states of the tower's layers."""
GATHERED = "pooler_output", "deepstack_features"
_DOING = "gathered features of pictures"


class LeftOut(Opaque):
    """Stands for states of the tower's layers, which this rank has of its own pictures only. Refuses every use."""

    refusal = errors.StatesLeftOut


class _Callers(list[nn.Module | None]):
    """The models whose forwards run in this batch, innermost last; None while one of their methods makes features."""


def prepare(model: nn.Module, context: BatchContext) -> None:
    """Replaces the methods of ``model`` that make features of pictures."""
    if context.text is None or context.whole_head or context.ring.size == 1:
        return
    makers, is_plain = latest_record(model).once(_makers, model)
    for path, name in makers:
        module = model.get_submodule(path)
        if not is_plain:
            for handle in attached(module, name):
                handle.remove()
        elif name not in module.__dict__:  # else ours, or the program's
            replace(module, name, _Features(module, name))
            attach(module, "features", _enter, _leave)


def _makers(model: nn.Module) -> tuple[list[tuple[str, str]], bool]:
    """The modules with such methods, by their paths, and if all before the text model is of installed packages.

    An outer one calls that of a module inside. A class of the program, a hook or a forward that it set may look at all
    pictures of a call: at statistics, or for a loss of its own.
    """
    makers = [
        (path, name)
        for path, module in model.named_modules()
        for name in METHODS
        if hasattr(type(module), name)
        and not any(hasattr(type(inner), name) for inner in module.modules() if inner is not module)
    ]
    text = inner_text_model(model)
    of_text = set() if text is None else set(text.modules())
    roots = dict.fromkeys(model.get_submodule(path) for path, _ in makers)
    parts = dict.fromkeys(part for root in roots for part in root.modules() if part not in of_text)
    owners: list[Any] = [hook for part in parts if part not in roots for hook in hooks_of(part)]
    kinds: list[Any] = list(dict.fromkeys(map(type, parts)))
    owners += [owner for kind in kinds for owner in (*kind.__mro__, kind.forward)]
    return makers, not any(map(_is_of_program, owners))


def _is_of_program(owner: Any) -> bool:
    """Returns True for a class or a function of the program."""
    return is_of_program(getattr(function_of(owner), "__module__", None))


def _watches_all_modules() -> bool:
    """Returns True if the program has a hook on all modules, as by `register_module_forward_hook`."""
    tables = (getattr(torch.nn.modules.module, f"_global{name}") for name in HOOKS)
    return any(not is_ours(hook) and _is_of_program(hook) for table in tables for hook in table.values())


def _enter(module: nn.Module, _args: Any, _kwargs: Any) -> None:
    if (context := batch_context.current()) is not None:
        context.state(_Callers).append(module)


def _leave(module: nn.Module, _args: Any, _output: Any) -> None:
    context = batch_context.current()
    if context is not None and context.state(_Callers)[-1:] == [module]:
        context.state(_Callers).pop()


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
        if name not in {values, *LOSS_INPUTS, *OF_ALL} and not isinstance(x, bool | int | float | str | None):
            if name not in OF_EACH or not isinstance(x, Tensor) or len(x) != len(sizes):
                return None
            beside.append(name)
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
        The features of all pictures in order; in an output of transformers `LeftOut` for states. None: they cannot be
        told apart in ``mine``.
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
        return _output_like(mine, pooler_output=whole) if known else whole
    if not known or not _is_of_each(features, each) or not _are_alike(deep, features):
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
    return _output_like(mine, pooler_output=whole_of(features), **more)


def _output_like(mine: Any, **features: Any) -> Any:
    """An output of transformers with these features, whose states are left out."""
    return type(mine)(**{name: LeftOut() for name in STATES if mine.get(name) is not None}, **features)


def _is_of_each(features: Any, count: int) -> bool:
    """Returns True for the tokens [M, width] of each picture."""
    of_tokens = isinstance(features, list | tuple) and all(isinstance(x, Tensor) and x.ndim == 2 for x in features)
    return of_tokens and len(features) == count


def _are_alike(deep: Any, features: Sequence[Tensor]) -> bool:
    """Returns True for nothing, or for a list of features of as many tokens, each of all pictures or by pictures."""
    lengths = [len(x) for x in features]
    return deep is None or (
        isinstance(deep, list | tuple)
        and all(
            (isinstance(x, Tensor) and x.ndim == 2 and len(x) == sum(lengths))
            or (_is_of_each(x, len(lengths)) and [len(part) for part in x] == lengths)
            for x in deep
        )
    )


class _Share(NamedTuple):
    """A rank's share of a call.

    Attributes:
        named: its arguments. hands: the pictures of each rank. apart: see `Pictures`. draws: random numbers before it.
    """

    named: dict[str, Any]
    hands: list[list[int]]
    apart: bool
    draws: Draws


class _Features:
    """A method of a model that makes features of pictures.

    Attributes:
        alone: each rank computes all pictures, since they cannot be shared.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name, self.alone = module, name, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = batch_context.current()
        if context is None or self.alone or not self.module.training or not self._shares(context):
            return self._own(*args, **kwargs)
        share = self._share(context.ring, args, kwargs)
        if share is None:
            return self._own(*args, **kwargs)
        callers = context.state(_Callers)
        callers.append(None)  # one method may call the other
        try:
            found = self._gathered(self._own(**share.named), share, context)
            return self._own(*args, **kwargs) if found is None else found
        finally:
            callers.pop()

    def _shares(self, context: BatchContext) -> bool:
        """Returns True if the model's own forward calls, and not the program, which may do so on one rank."""
        return context.ring.size > 1 and context.before_text and context.state(_Callers)[-1:] == [self.module]

    @property
    def _of_class(self) -> Any:
        """The class's function as of now, which a program may have changed since."""
        return getattr(type(self.module), self.name)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the method: `generate` hands it the arguments that it names."""
        return inspect.signature(self._of_class.__get__(self.module))

    def _own(self, *args: Any, **kwargs: Any) -> Any:
        # Not by a bound method: after a graph break torch.compile looks it up on the module, and finds this object.
        return self._of_class(self.module, *args, **kwargs)

    @uncompiled("pictures are dealt to ranks between graphs")
    def _share(self, ring: Ring, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Share | None:
        """This rank's share of a call; None: all ranks compute all pictures."""
        named = bound_by_name(self, args, kwargs)
        pictures = pictures_in(named, *METHODS[self.name])
        if pictures is None or not pictures.sizes or self._has_batch_norm():
            return None
        if _is_of_program(self._of_class) or _watches_all_modules():
            return None
        hands = dealt(pictures.sizes, ring.size)
        return _Share(pictures.taken(named, hands[ring.rank]), hands, pictures.apart, Draws())

    @uncompiled("features are gathered between graphs")
    def _gathered(self, mine: Any, share: _Share, context: BatchContext) -> Any:
        """The features of all pictures; None if they cannot be shared, and random numbers are as before."""
        found = None if share.draws.drew() else gathered(mine, share.hands, share.apart, context.ring)
        if found is None:
            self.alone = True
            share.draws.restore()
        else:
            context.log.features.add("images shared")
        return found

    def _has_batch_norm(self) -> bool:
        return any(isinstance(module, _BatchNorm) and module.training for module in self.module.modules())
