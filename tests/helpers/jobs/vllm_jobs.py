"""Reinforcement runs for live ranks whose completions come from a stand-in for vLLM, as a server or colocated.

The stand-in answers by prompt and by the weights that it was sent, with probabilities that are not the policy's.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import Tensor

from tests.helpers.jobs import grpo_jobs
from tests.helpers.jobs.grpo_jobs import Case
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.sft_jobs import texts, tokenizer
from tests.helpers.jobs.trl_runs import Outcome

VLLM = "trl.generation.vllm_generation"


def answer(prompt: list[int], number: int, weights: float) -> tuple[list[int], list[float]]:
    """Token ids of uneven lengths of a prompt's completion ``number``, and their log-probabilities."""
    words: Any = tokenizer()
    at = zlib.crc32(bytes(token % 256 for token in prompt)) + 31 * number
    ids = [*words(texts(200, 1000)[at % 200][: 1 + at % 19])["input_ids"], words.eos_token_id]
    return ids, [-5 - math.tanh(weights) - place / 50 for place in range(len(ids))]


class Server:
    """In place of TRL's client: it lives in one process, and gets each prompt of all rings once."""

    def __init__(self, **_: Any) -> None:
        self.weights = math.nan
        self.asked: list[int] = []

    def init_communicator(self, device: Any) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    def get_server_info(self) -> Any:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata: list[Any], named: Iterator[tuple[str, Tensor]]) -> None:
        sent = [(name, float(parameter.double().sum())) for name, parameter in named]
        assert [name for name, *_ in metadata] == [name for name, _ in sent]
        self.weights = sum(number for _, number in sent)

    def generate(self, prompts: list[list[int]], n: int, logprobs: int | None, **_: Any) -> dict[str, Any]:
        self.asked.append(len(prompts))
        found = [answer(prompt, number, self.weights) for prompt in prompts for number in range(n)]
        shown = None if logprobs is None else [[[x] for x in row] for _, row in found]
        return {"prompt_ids": prompts, "completion_ids": [ids for ids, _ in found], "logprobs": shown}


class Engine:
    """In place of vLLM's LLM: one in each process. Two rows after another are of one group."""

    def __init__(self, **_: Any) -> None:
        self.sent: dict[str, float] = {}
        self.asked: list[int] = []
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self._load))
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        )

    def _load(self, named: list[tuple[str, Tensor]]) -> None:
        self.sent.update((name, float(parameter.double().sum())) for name, parameter in named)

    def reset_prefix_cache(self) -> None: ...

    def generate(self, prompts: list[Any], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        self.asked.append(len(prompts))
        found = []
        for place, prompt in enumerate(prompts):
            ids, shown = answer(prompt["prompt_token_ids"], place % 2, sum(self.sent.values()))
            steps = [
                {token: SimpleNamespace(rank=1, logprob=log_prob)} for token, log_prob in zip(ids, shown, strict=True)
            ]
            output = SimpleNamespace(token_ids=ids, logprobs=None if sampling_params["logprobs"] is None else steps)
            found.append(SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[output]))
        return found


@contextmanager
def stand_in() -> Iterator[list[Any]]:
    """Puts the stand-in in vLLM's place; gives the servers and engines of this process."""
    made: list[Any] = []

    def make(kind: Any) -> Any:
        def one(**given: Any) -> Any:
            made.append(kind(**given))
            return made[-1]

        return one

    with ExitStack() as stack:
        for name, value in {
            "is_vllm_available": lambda: True, "VLLMClient": make(Server), "LLM": make(Engine), "SamplingParams": dict,
        }.items():  # fmt: skip
            stack.enter_context(mock.patch(f"{VLLM}.{name}", value, create=True))
        yield made


def trained(case: Case, mesh: Mesh) -> tuple[Outcome, list[int]]:
    """A run, and the prompts of each generation on this rank."""
    with stand_in() as made:
        outcome = grpo_jobs.trained(case, mesh)
    return outcome, [count for one in made for count in one.asked]
