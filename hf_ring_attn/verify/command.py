"""The command ``verify``: its arguments, its ranks, its table and its JSON."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

from .. import errors
from ..command_line import DTYPES, count, device
from ..command_ranks import start_ranks, world
from ..config import is_a_launched_rank
from ..integration.model import loading
from ..integration.model.decoder import layer_kinds
from .verdict import Finding, verdict

LEAST_TOKENS = 32
FEW = 4
"""Layers of a model so small that a list of as many numbers need not be of its layers: it may be a range."""
ATTENDING = ("full_attention", "attention", "sliding_attention", "chunked_attention", "hybrid", "indexed_attention")
"""Kinds of layers that attend."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="name on the Hub, folder, or config file (random weights)")
    parser.add_argument(
        "--tokens", type=count(LEAST_TOKENS), default=256, help="length of the row: 4096, 4K (default: 256)"
    )
    parser.add_argument(
        "--ranks", type=count(), default=2, help="number of ranks to start (default: 2); not used under a launcher"
    )
    parser.add_argument("--layers", type=count(), help="use only so many of the model's first layers")
    parser.add_argument("--device", type=device, help='"cuda" or "cpu"; default: a GPU if there is one')
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the model (default: float32)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Returns 0 if the ring is exact, 1 if it is not.

    Raises:
        Refused: the model is unknown, or cannot run in a ring.
    """
    config = loading.load_config(given.model)
    if not is_a_launched_rank() and given.ranks > 1:
        return start_ranks(given.ranks, given.argv)
    kinds = layer_kinds(config)
    with world(given.device, may_share=True) as (ring, where):
        model, loaded = _model(given, config, where)
        try:
            findings, refusal = verdict(model, given.tokens, where)
        except errors.NoRingAttention:
            first = next((at for at, kind in enumerate(kinds) if kind in ATTENDING), None)
            if given.layers is None or first is None or first < given.layers:
                raise
            need = f"{first + 1} or more: no layer before that attends, so there is nothing for a ring to do"
            raise errors.BadOption("--layers", given.layers, need) from None
        if ring.size == 1:
            refusal = refusal or "one rank is no ring, so only leaks were looked for: give --ranks 2 or more"
        layers = config.get_text_config().num_hidden_layers
        facts = {
            "model": type(model).__name__, "weights": "loaded" if loaded else "random", "ranks": ring.size,
            "device": where.type, "dtype": given.dtype, "tokens": given.tokens,
            "layers": layers,
        }  # fmt: skip
        if ring.rank == 0:
            if given.layers is not None and given.layers > layers:
                sys.stderr.write(f"--layers {given.layers} is more than the model has: all {layers} layers ran\n")
            show = _as_json if given.json else _table
            not_seen = [*_windows_not_seen(config, given.tokens), *_kinds_not_seen(kinds, layers)]
            sys.stdout.write(show(facts, findings, refusal, not_seen) + "\n")
            sys.stdout.flush()
    return 0 if _is_exact(findings, refusal) else 1


def _model(given: argparse.Namespace, config: Any, where: torch.device) -> tuple[Any, bool]:
    """The model with eager attention, and True if its weights were loaded; random ones are the same on every rank."""
    text, dtype = config.get_text_config(), DTYPES[given.dtype]
    if given.layers is not None and given.layers < text.num_hidden_layers:
        _keep_first(text, given.layers)
    model = loading.trained_model(given.model, config, dtype, "eager")
    loaded = model is not None
    if model is None:
        # Larger than usual in small models: attention must look at some tokens and not at others.
        text.initializer_range = max(getattr(text, "initializer_range", 0.0), (1.5 / text.hidden_size) ** 0.5)
        torch.manual_seed(0)
        model = loading.random_model(config, dtype, "eager")
    return model.to(where).eval(), loaded


def _keep_first(text: Any, layers: int) -> None:
    """Takes all but the first layers out of a config."""
    total = text.num_hidden_layers
    for name, value in list(vars(text).items()):  # of kinds, widths or windows, perhaps
        of_layers = isinstance(value, (list, tuple)) and len(value) == total
        if of_layers and (total > FEW or all(isinstance(x, str) for x in value)):
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    if total_shared := getattr(text, "num_kv_shared_layers", None):  # the last ones take others' keys and values
        kinds, shared = layer_kinds(text), max(0, layers - (total - total_shared))
        while shared and not {*kinds[layers - shared :]} <= {*kinds[: layers - shared]}:
            shared -= 1
        text.num_kv_shared_layers = shared


def _is_exact(findings: list[Finding], refusal: str) -> bool:
    return not refusal and all(one.exact for one in findings)


def _windows_not_seen(config: Any, tokens: int) -> list[str]:
    """Windows of the config that a row of so many tokens does not reach."""
    text = config.get_text_config()
    reaches = {name: getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")}
    return [
        f"{name} = {value} begins beyond the row: --tokens {2 * value} would show it"
        for name, value in reaches.items()
        if isinstance(value, int) and value >= tokens
    ]


def _kinds_not_seen(kinds: list[str], layers: int) -> list[str]:
    """The kinds of the whole model's layers that none of its first ``layers`` has."""
    return [
        f"layers of kind {kind}, which begin after the first {layers}: --layers {kinds.index(kind) + 1} would show one"
        for kind in dict.fromkeys(kinds)
        if kind not in kinds[:layers]
    ]


def _as_json(facts: dict[str, Any], findings: list[Finding], refusal: str, not_seen: list[str]) -> str:
    rows = [{"what": x.what, "error": x.error, "limit": x.limit, "exact": x.exact, "where": x.where} for x in findings]
    whole = {**facts, "exact": _is_exact(findings, refusal), "findings": rows, "self_check": refusal or "passed"}
    return json.dumps({**whole, "not_seen": not_seen}, indent=1)


def _table(facts: dict[str, Any], findings: list[Finding], refusal: str, not_seen: list[str]) -> str:
    lines = [
        "{model}, {layers} layers, {weights} weights, {dtype}: {tokens} tokens, {ranks} ranks on {device}".format_map(
            facts
        ),
        f"{'ring against one device':66s}{'error':>9s}{'limit':>9s}",
    ]
    for one in findings:
        if one.exact and ": gradients of " in one.what:
            continue  # the table shows kinds of modules only where they differ
        where = f"   {one.where}" if one.where and not one.exact else ""
        lines.append(f"  {one.what:64s}{one.error:9.1e}{one.limit:9.1e}  {'ok' if one.exact else 'DIFFERS'}{where}")
    lines.append(f"self-check: {refusal or 'passed'}")
    lines += [f"not seen: {one}" for one in not_seen]
    exact = "exact, but not all was seen" if not_seen else "exact"
    lines.append(exact if _is_exact(findings, refusal) else "NOT exact")
    return "\n".join(lines)
