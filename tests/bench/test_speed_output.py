"""What ``bench`` prints: a line before it measures, and rates of fast and slow devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_ring_attn import cli
from hf_ring_attn.bench import contenders, speed
from hf_ring_attn.bench.clock import Timed
from hf_ring_attn.bench.command import TOKENS


def test_a_cpu_gets_short_rows_and_a_line_comes_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def measure(work: Any, *_: Any, **__: Any) -> list[dict[str, Any]]:
        asked.append(work.tokens)
        text = capsys.readouterr().out
        assert text.startswith("measuring one device, rank 4 of 8: 512 tokens on cpu, about 36 calls (short ones")
        return []

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(speed, "measure", measure)
    assert cli.main(["bench"]) == 0
    assert asked == [TOKENS["cpu"]] == [512]


def test_the_calls_are_those_that_are_made(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[None] = []
    one_device = contenders.one_device

    def counting(timed: Timed) -> Timed:
        def run() -> object:
            made.append(None)
            return timed.run()

        return timed._replace(run=run)

    def counted(*given: Any) -> contenders.Contender:
        found = one_device(*given)
        return found._replace(forward=counting(found.forward), both=counting(found.both))

    monkeypatch.setattr(contenders, "one_device", counted)
    monkeypatch.setattr("hf_ring_attn.bench.clock.SECONDS_PER_TURN", 0.0)
    shape = "--tokens 64 --heads 2 --kv-heads 1 --head-dim 8 --device cpu --ring 1 --rounds 3"
    assert cli.main(["bench", *shape.split()]) == 0
    assert f"measuring one device: 64 tokens on cpu, about {len(made)} calls" in capsys.readouterr().out


@pytest.mark.parametrize(("tflops", "text"), [(612.4, "612"), (10.0, "10"), (1.234, "1.2"), (0.0085, "0.0085")])
def test_a_rate_has_digits(tflops: float, text: str) -> None:
    part = {"seconds": [1.0], "tflops": tflops, "share": 1.0, "peak_bytes": 0}
    (line,) = speed.table([{"contender": "one device", "tokens": 64, "forward": part, "both": part}])
    assert line.count(f" {text} TFLOP/s") == 2
