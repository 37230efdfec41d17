"""Modules that are exact in a ring in evaluation only. They are checked for every batch, since modes change.

The trial step cannot find them all: it needs labels, and turns dropout off. A trainer may change the mode after a batch
was made, so modules in eval mode are checked again when they are called.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ... import errors
from ..context import batch_context
from ..context.batch_context import BatchContext
from ..context.introspect import class_of, place_of, text_modules
from ..context.model_record import latest_record
from ..log import say
from ..patching.compiler import uncompiled
from ..patching.modules import attach
from . import neftune

_DROPS_PATHS = re.compile(r"DropPath|StochasticDepth")


def _skips_layers(module: nn.Module) -> bool | None:
    """OPT, BioGPT, XGLM and others; stochastic depth of timm and transformers (drop_prob), and torchvision (p)."""
    rates = ("layerdrop", "drop_prob", "p") if _DROPS_PATHS.search(type(module).__name__) else ("layerdrop",)
    found = [module.__dict__[rate] for rate in rates if rate in module.__dict__]
    return any(found) if found else None


_DROP_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)
IN_TRAINING: list[tuple[Callable[[nn.Module], bool | None], str]] = [
    (
        _skips_layers,
        "skips layers at random, and each rank would skip others, so that keys of different layers would mix: set its "
        "rate to 0, here and in the model's config (config.layerdrop = 0)",
    ),
    (
        lambda module: isinstance(module, _NormBase) or None,  # of batches (also SyncBatchNorm) and instances
        "normalises by statistics of many tokens, and each rank has its own tokens only: freeze it, by eval() after "
        "each train(), or use a norm of single tokens (LayerNorm, RMSNorm)",
    ),
    (
        lambda module: module.p > 0 if isinstance(module, _DROP_CHANNELS) else None,
        "drops the same channels of many tokens at random, and each rank would drop others: set its p to 0, or use "
        "nn.Dropout",
    ),
    (
        neftune.adds_local_noise,
        "scales NEFTune's noise by the local length, by a hook of its own or one attached before hf_ring_attn was "
        "imported: import hf_ring_attn first, or set neftune_noise_alpha=None",
    ),
]
"""(test, reason) pairs. True: inexact in training now; False: exact at its present rate; None: never inexact."""


def _find_suspects(model: nn.Module) -> list[tuple[str, weakref.ref[nn.Module]]]:
    """The modules of a model that may be inexact in training, by name."""
    found = (at for at in text_modules(model) if any(does(at[1]) is not None for does, _ in IN_TRAINING))
    return [(name, weakref.ref(module)) for name, module in found]


def _suspects(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    suspects = latest_record(model).once(_find_suspects, model)  # so a batch need not visit all modules
    return ((name, module) for name, known in suspects if (module := known()) is not None)


def _why(module: nn.Module) -> str | None:
    return next((why for does, why in IN_TRAINING if does(module)), None)


def unsupported(model: nn.Module, context: BatchContext) -> Iterator[str]:
    """Yields why ``model`` is not exact in its present mode, each kind once. Hooks modules in eval mode."""
    found = set()
    for name, module in _suspects(model) if context.ring.size > 1 else ():
        why = _why(module)
        if why is None:
            continue
        if not module.training:
            attach(module, "mode", _called)
        elif why not in found:
            found.add(why)
            yield f"{place_of(name, module)} {why}"


# Not compiled: a graph would keep the first mode.
@uncompiled("hf_ring_attn checks a module's mode")
def _called(module: nn.Module, _args: object, _kwargs: object) -> None:
    context = batch_context.current()
    why = _why(module) if module.training else None
    if why is not None and context is not None and context.ring.size > 1 and not context.before_text:
        raise errors.UnsupportedModel(class_of(module), [f"in training it {why}"])


def say_dropout(model: nn.Module) -> None:
    """Logs once which modules draw random masks: ranks draw for their own tokens, as with another seed."""
    found = [name for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p > 0]
    if found:
        say(
            f"dropout in {len(found)} modules ({found[0]}, ...): each rank draws masks for its own tokens, so loss and "
            "gradient norms differ from those of one process as with another seed; to compare runs, set it to 0"
        )
