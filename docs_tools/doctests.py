"""An extension of griffe: docstrings in the form that Markdown reads."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

SESSION = re.compile(r"(?:^(?:>>>|\.\.\.).*\n?)+", re.MULTILINE)


class Doctests(Extension):
    """Lines that begin with >>> become a block of Python; a literal block's two colons become one."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            text = SESSION.sub(_block, obj.docstring.value)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)


def _block(match: re.Match[str]) -> str:
    lines = "\n".join(re.sub(r"^(?:>>>|\.\.\.) ?", "", line) for line in match[0].splitlines())
    return f"```python\n{lines}\n```\n"
