"""Arguments that several commands read alike."""

from __future__ import annotations

import argparse
from types import ModuleType

import pytest

from hf_ring_attn.bench import command as bench
from hf_ring_attn.command_line import count
from hf_ring_attn.plan import command as plan
from hf_ring_attn.verify import command as verify


@pytest.mark.parametrize(
    ("command", "line"),
    [(bench, ""), (plan, "--model x --gpus 8"), (verify, "--model x")],
    ids=lambda given: given.__name__ if isinstance(given, ModuleType) else "",
)
def test_every_command_reads_tokens_with_a_unit(command: ModuleType, line: str) -> None:
    """``bench`` and ``verify`` refused the 128K that ``plan`` read."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    for text, tokens in {"128K": 131072, "1m": 1048576, "96": 96}.items():
        found = parser.parse_args([*line.split(), "--tokens", text]).tokens
        assert found in (tokens, [tokens]), text


@pytest.mark.parametrize("text", ["", "K", "1.5K", "1KK", "++1", "-1", "0", "0M", "many"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="a whole number from 1 on"):
        count()(text)


def test_the_least_is_that_of_the_whole_number() -> None:
    assert count(1024)("1K") == 1024 and count(0)("0") == 0 and count()("+5") == 5
    with pytest.raises(argparse.ArgumentTypeError, match="got 1K, which must be a whole number from 1025 on"):
        count(1025)("1K")
