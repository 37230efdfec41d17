"""The package's lines are seen, whatever logging a program has set up."""

from __future__ import annotations

import io
import logging
import logging.config
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from accelerate.logging import get_logger
from transformers.utils import logging as of_transformers

from hf_ring_attn.integration import log


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The loggers of a process that has set up nothing."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    monkeypatch.setattr(log, "_said", set())
    yield root
    root.handlers[:], log.logger.handlers[:] = handlers, []
    root.setLevel(level)
    log.logger.setLevel(logging.NOTSET)
    log.logger.propagate, log.logger.disabled = True, False


@pytest.fixture
def begin(fresh: logging.Logger) -> Callable[[], None]:
    """To be called in a test: pytest adds handlers of its own after the fixtures."""

    def begin() -> None:
        fresh.handlers[:], log.logger.handlers[:] = [], []
        fresh.setLevel(logging.WARNING)
        log.logger.setLevel(logging.NOTSET)

    return begin


def at_warning(stream: Any) -> None:
    logging.basicConfig(stream=stream)
    logging.getLogger().handlers[0].setLevel(logging.WARNING)


def by_dict(stream: Any) -> None:
    handlers = {"one": {"class": "logging.StreamHandler", "stream": stream}}
    logging.config.dictConfig({"version": 1, "handlers": handlers, "root": {"handlers": ["one"], "level": "ERROR"}})


SETUPS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nothing": (lambda stream: None, "stderr"),
    "basicConfig": (lambda stream: logging.basicConfig(stream=stream), "program"),
    "basicConfig at ERROR": (lambda stream: logging.basicConfig(stream=stream, level="ERROR"), "program"),
    "a handler at WARNING": (at_warning, "stderr"),
    "dictConfig": (by_dict, "program"),
    "transformers": (lambda stream: of_transformers.set_verbosity(logging.ERROR), "stderr"),
    "accelerate": (lambda stream: get_logger("train", log_level="ERROR"), "stderr"),
    "a null handler": (lambda stream: logging.getLogger().addHandler(logging.NullHandler()), "stderr"),
    "its own handler": (lambda stream: log.logger.addHandler(logging.StreamHandler(stream)), "program"),
}


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("speak", [log.say, log.warn], ids=["line", "warning"])
def test_a_line_is_seen_once(
    begin: Callable[[], None], setup: str, speak: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    begin()
    of_program = io.StringIO()
    set_up, where = SETUPS[setup]
    verbosity = of_transformers.get_verbosity()
    set_up(of_program)
    speak("a line")
    of_transformers.set_verbosity(verbosity)
    seen = {"program": of_program.getvalue(), "stderr": capsys.readouterr().err}
    if setup == "a handler at WARNING" and speak is log.warn:
        where = "program"
    assert seen[where].count("a line") == 1
    assert sum(text.count("a line") for text in seen.values()) == 1


def test_logging_may_be_set_up_later(begin: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    begin()
    of_program = io.StringIO()
    log.say("a first line")
    logging.basicConfig(stream=of_program)
    log.say("a second line")
    assert capsys.readouterr().err == "[hf_ring_attn] a first line\n"
    assert of_program.getvalue().count("a second line") == 1


def test_a_program_may_silence_it(begin: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    begin()
    log.logger.setLevel(logging.ERROR)
    log.say("a line")
    log.warn("a warning")
    assert capsys.readouterr().err == ""


def test_what_was_not_said_in_quiet_may_be_said_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    with log.quiet():
        log.say("a line")
        log.warn("a warning")
    assert caplog.messages == ["a warning"]
    log.say("a line")
    assert caplog.messages == ["a warning", "a line"]


def test_a_new_run_says_its_lines_again_and_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        log.say_again()
        for _ in range(2):
            log.say("a line", ("a", "key"))
            log.warn("a warning")
    assert caplog.messages == ["a line", "a warning", "a line"]


def test_a_test_sees_it(caplog: pytest.LogCaptureFixture) -> None:
    log.say("a line")
    assert caplog.messages == ["a line"]
