"""Tensors that a layer keeps in its attributes while it computes the documents of a packed row, one by one.

Each document has its own, and afterwards the attribute has the last one's. So nobody but the layer may use it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ... import errors
from ...layers.whole_documents import OfDocuments
from ..memory.attributes import Attributes
from ..patching.changes import at_uninstall

_KEEPS = (
    "in packed rows it is called for each document, and the model or its loss uses a tensor of the last one, in its "
    "attribute {}: return it for each token instead, or do not pack"
)
_KEEPING: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Layers in whose attributes nobody may look now."""


class DocumentAttributes:
    """The attributes of ``module`` and its parts in which it keeps tensors of documents."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.owners, self.written = module, dict[int, dict[str, Any]](), Counter[tuple[int, str]]()
        self.before: Attributes | None = None

    @contextmanager
    def of_document(self) -> Iterator[None]:
        """The call for a document. What has a gradient is refused there, since only its readers get that of a view."""
        before = self.before or Attributes(self.module)
        yield
        new = before.new_tensors()
        self.before = None if new else before  # there may be hundreds of documents
        for own, name in new:
            self.owners[id(own)] = own
            self.written[id(own), name] += 1
            if isinstance(x := own[name], Tensor) and x.grad_fn is not None:
                own[name] = x.view_as(x)
                own[name].register_hook(self._refuse(name))

    def _refuse(self, attribute: str) -> Any:
        layer = type(self.module).__name__

        def refuse(_gradient: Tensor) -> None:
            raise errors.UnsupportedModel(layer, [_KEEPS.format(attribute)])

        return refuse

    def end(self) -> None:
        """Hides what has no gradient, if several documents wrote it: others may read it before `give_back`."""
        for (owner, name), count in self.written.items():
            own = self.owners[owner]
            if count > 1 and isinstance(x := own.get(name), Tensor) and not x.requires_grad:
                own[name] = OfDocuments.of(type(self.module).__name__, _KEEPS.format(name), x)
                _KEEPING.add(self.module)


def give_back(module: nn.Module) -> None:
    """Gives a layer that begins what it, or another one that has the same parts, kept."""
    if _KEEPING:
        for own in map(vars, module.modules()):
            for name in [name for name, x in own.items() if type(x) is OfDocuments and x.last is not None]:
                own[name] = own[name].last
        _KEEPING.discard(module)


@at_uninstall
def give_back_all() -> None:
    """Gives every layer what it kept."""
    for module in list(_KEEPING):
        give_back(module)
