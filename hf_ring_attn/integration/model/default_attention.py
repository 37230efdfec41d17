"""A default attn_implementation, for programs without an option for it (``python -m hf_ring_attn.run --attention``)."""

from __future__ import annotations

from typing import Any

from ..log import warn
from ..patching import changes
from ..patching.changes import Original, Patch, around

TARGET = "transformers.modeling_utils:PreTrainedModel._check_and_adjust_attn_implementation"


def use_by_default(name: str) -> None:
    """Gives models ``name`` if neither their program nor their config names an attention. `uninstall` undoes it.

    Every model passes there when it is made: by from_pretrained, from_config or its class, its parts too. A model whose
    program names another attention keeps that, and a warning says so.

    Raises:
        ChangedHost: transformers' function has other parameters.
    """

    @around
    def adjust(
        original: Original, self: Any, attn_implementation: str | None, is_init_check: bool = False,
        allow_all_kernels: bool = False,
    ) -> Any:  # fmt: skip
        if is_init_check and attn_implementation not in (None, name):
            warn(
                f'--attention {name}: {type(self).__name__} keeps attn_implementation="{attn_implementation}", '
                "which its program or its config names",
                everywhere=False,
            )
        asked = name if is_init_check and attn_implementation is None else attn_implementation
        return original(self, asked, is_init_check, allow_all_kernels)

    changes.install([Patch(TARGET, "(self, attn_implementation, is_init_check=, allow_all_kernels=)", adjust)])
