"""Parts of docs that are generated from the package: errors, models, options of commands, launch configs."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_ring_attn import cli
from hf_ring_attn.bench import results
from hf_ring_attn.errors import batches, core, hosts, losses

from .numbers import FILED, status

REPOSITORY = Path(__file__).resolve().parents[1]
COMMANDS = ("doctor", "plan", "verify", "bench", "autoload")
TITLES: dict[ModuleType, str] = {
    batches: "Batches, masks, models and trainers",
    core: "Options, kernels and ranks",
    losses: "Losses and logits",
    hosts: "Launchers, accelerate and commands",
}


# ---- errors ----------------------------------------------------------------------------------------------------------


def errors() -> str:
    """Every class of hf_ring_attn.errors with its message, by the file that holds it."""
    lines: list[str] = []
    for module, title in TITLES.items():
        lines += [f"## {title}", ""]
        for name, kind in _classes(module):
            lines += [f"### {name}", "", *_message(kind), ""]
    return "\n".join(lines).strip()


def _classes(module: ModuleType) -> list[tuple[str, type[Exception]]]:
    """The classes that a file defines, in its order."""
    source = inspect.getsource(module)
    names = re.findall(r"^class (\w+)", source, re.MULTILINE)
    return [(name, getattr(module, name)) for name in names]


def _message(kind: type[Exception]) -> list[str]:
    """What the class is, and its message as a quotation."""
    about = inspect.getdoc(kind) if kind.__doc__ and "__doc__" in vars(kind) else None
    lines = [_plain(about), ""] if about and "``" not in about else []
    if "__init__" not in vars(kind):
        return lines or ["A base class."]
    return [*lines, f"> {_text(kind)}"]


def _plain(text: str | None) -> str:
    return " ".join((text or "").split())


def _text(kind: type[Exception]) -> str:
    """An error's text, made with the first of its examples."""
    from tests.errors import examples

    given = examples.given(kind, list(inspect.signature(kind).parameters))[0]
    return str(kind(**given)).replace("\n", "\n>\n> ")


# ---- models ----------------------------------------------------------------------------------------------------------


ALIKE = re.compile(r"^UnsupportedModel: \w+ cannot be trained in a ring exactly: ")
"""Words that every refused model's reason begins with."""


def models() -> str:
    """Every class of the sweep, by its outcome."""
    (run,) = results.read(FILED / "support" / results.FILE)
    lines = ["| model type | class | in a ring |", "|---|---|---|"]
    for line in run.rows:
        kind = " ".join(filter(None, (line["model_type"], line.get("variant"))))
        lines.append(f"| {kind} | {line['model_class']} | {_outcome(line)} |")
    return "\n".join(lines)


def _outcome(line: dict[str, Any]) -> str:
    if status(line) == "not run":
        return f"not run: {line.get('not_run', '')}"
    said = []
    for each in line["outcomes"]:
        reason = ALIKE.sub("", each.get("reason", ""))
        words = "exact" if each["status"] == "exact" else f"refused: {reason}"
        if each.get("positions"):
            words += ", with position_ids in the batch"
        kinds = f" ({', '.join(each['kinds'])})" if len(line["outcomes"]) > 1 else ""
        said.append(words + kinds)
    return "; ".join(said).replace("|", "\\|").replace("<", "&lt;")


# ---- commands and configs --------------------------------------------------------------------------------------------


def commands() -> str:
    """The help of every command."""
    parts = []
    for command in COMMANDS:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            cli.main([command, "--help"])
        parts.append(f"## {command}\n\n```text\n{said.getvalue().strip()}\n```")
    return "\n\n".join(parts)


def launch_configs() -> str:
    """The launch configs of recipes/accelerate, as they are."""
    files = sorted((REPOSITORY / "recipes" / "accelerate").glob("*.yaml"))
    return "\n\n".join(f"## {file.name}\n\n```yaml\n{file.read_text().strip()}\n```" for file in files)


def examples() -> str:
    """The programs of examples/ with the first line of their docstrings."""
    lines = ["| program | what it shows |", "|---|---|"]
    for file in sorted((REPOSITORY / "examples").glob("*.py")):
        about = re.match(r'(?:r)?"""(.*?)(?:\n\n|""")', file.read_text(), re.DOTALL)
        if about and "def main" in file.read_text():
            lines.append(f"| [examples/{file.name}]({{home}}/examples/{file.name}) | {_plain(about[1])} |")
    return "\n".join(lines)


def tested_versions() -> str:
    """What tests/constraints.txt pins of the packages that matter."""
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (REPOSITORY / "tests" / "constraints.txt").read_text(), re.MULTILINE))
    names = ("torch", "transformers", "accelerate", "trl", "peft", "bitsandbytes", "liger-kernel", "triton")
    lines = ["| package | pinned in CI |", "|---|---|", *(f"| {name} | {pins[name]} |" for name in names)]
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {
    "errors": errors,
    "models": models,
    "commands": commands,
    "launch_configs": launch_configs,
    "examples": examples,
    "tested_versions": tested_versions,
}
