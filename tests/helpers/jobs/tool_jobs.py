"""GRPO and distillation with tools for live ranks: conversations that a text fixes, or of which one tool is random."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import trl
from datasets import Dataset
from trl.trainer.distillation_config import DistillationConfig
from trl.trainer.distillation_trainer import DistillationTrainer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

import hf_ring_attn
from tests.helpers.jobs import grpo_jobs, sft_jobs, trl_runs
from tests.helpers.jobs.preference_jobs import policy, teacher
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.trainer_jobs import a_folder, launched
from tests.helpers.jobs.trl_runs import OFFLINE, Outcome, quiet

CALLS: list[str] = []
"""The tools and methods that this process called."""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def tokenizer() -> Any:
    """Bytes, and the chat template of Qwen 3, whose calls of tools TRL can read."""
    words: Any = sft_jobs.tokenizer()
    words.add_special_tokens({"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"})
    words.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    return words


# ---- tools -----------------------------------------------------------------------------------------------------------


def multiply(a: int, b: int) -> int:
    """
    Multiplies.

    Args:
        a: a factor
        b: a factor
    """
    CALLS.append("multiply")
    return a * b


def search(words: str) -> str:
    """
    Finds something else at each call, and on each rank.

    Args:
        words: what to find
    """
    CALLS.append("search")
    drawn = random.Random(len(CALLS) + 100 * rank())
    torch.rand(3)  # moves the random numbers of the rank that calls it
    return words + "".join(drawn.choices("abcdef", k=1 + rank() * 5 + len(CALLS) % 7))


async def late(seconds: float) -> str:
    """
    Waits.

    Args:
        seconds: how long
    """
    CALLS.append("late")
    await asyncio.sleep(seconds)
    if seconds > 0.01:
        raise RuntimeError(f"more than {seconds - 0.001:.3f}")
    return f"slept {seconds}"


BOARD: dict[str, int] = {}


def board(number: int) -> dict[str, int]:
    """
    Returns one object that each call changes.

    Args:
        number: what to put there
    """
    BOARD[f"entry {len(BOARD) % 7}"] = number
    return BOARD


async def cancelled(seconds: float) -> str:
    """
    Gives up.

    Args:
        seconds: how long it would have taken
    """
    raise asyncio.CancelledError(f"after {seconds}")


def unsendable(a: int) -> list[dict[str, Any]]:
    """
    Returns a lock.

    Args:
        a: a number
    """
    return [{"type": "text", "text": str(a), "source": threading.Lock()}]


def fails(a: int) -> int:
    """
    Fails.

    Args:
        a: a number
    """
    CALLS.append("fails")
    raise KeyError(a)


class Counter:
    """An environment that adds what it is told, and rewards the sum."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.total = 0

    def reset(self, **row: Any) -> str:
        CALLS.append("reset")
        self.total = int(row["liked"])
        return f" The sum is {self.total}."

    def add(self, number: int) -> str:
        """
        Adds to the sum.

        Args:
            number: what to add
        """
        CALLS.append("add")
        self.total += number
        return f"sum {self.total}"

    async def add_later(self, number: int) -> str:
        """
        Adds to the sum after a while.

        Args:
            number: what to add
        """
        await asyncio.sleep(0.002 * (5 - number))
        return self.add(number)

    def get_reward(self) -> float:
        CALLS.append("get_reward")
        return float(self.total % 7)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


OF_TOOLS = [
    ["I know it.", "never"],
    [call("multiply", a=3, b=4), "It is 12."],
    [call("fails", a=1) + "\n" + call("nothing", x=1), call("multiply", a=2), "I give up."],
    [call("late", seconds=0.004) + "\n" + call("late", seconds=0.02) + "\n" + call("multiply", a=5, b=5), "Done."],
    [call("late") + "\n" + call("late", seconds=0.001) + "\n" + call("late", seconds=0.0), call("multiply", a=1, b=1)],
    [call("board", number=5) + "\n" + call("board", number=66), "Both were shown at the end."],
    [call("cancelled", seconds=1.5) + "\n" + call("late", seconds=0.003), "Cancelled."],
    ["Let me see." + call("multiply", a=7, b=8), call("multiply", a=9, b=9), "56 and 81."],
]
OF_ENVIRONMENTS = [
    ["Nothing to add."],
    [call("add", number=3), "Added."],
    [call("add", number=1) + "\n" + call("add_later", number=2), call("add", number=4), "Added twice."],
    [call("add_later", number=1) + "\n" + call("add_later", number=4), "Later."],
]
OF_A_STUDENT = OF_TOOLS[:3]
AT_RANDOM = [[call("search", words="x"), call("search", words="yy"), "Found."], ["Nothing."]]


class Says:
    """Says what ``texts`` has for a row's turn."""

    ring_fp32_exact = True
    texts: ClassVar[list[list[str]]] = []

    def said(self: Any, prompt_ids: Any) -> list[list[int]]:
        found = []
        first = self.accelerator.process_index * len(prompt_ids)
        for number, ids in enumerate(prompt_ids):
            text = self._tokenizer.decode(ids)
            said = text.count("<|im_start|>assistant") - 1
            row = (
                (len(text.split("<|im_start|>assistant")[0]) + first + number) % len(self.texts) if said == 0 else None
            )
            if row is None:
                row = next(n for n, turns in enumerate(self.texts) if turns[0] in text)
            turns = self.texts[row]
            found.append(self._tokenizer(turns[min(said, len(turns) - 1)] + "<|im_end|>")["input_ids"])
        return found


class Said(Says, GRPOTrainer):
    def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
        return self.said(prompt_ids), None


class SaidToTeacher(Says, DistillationTrainer):
    def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
        return self.said(prompt_ids)


def lengths(completions: list[Any], **_: Any) -> list[float]:
    """Rewards a conversation by the letters of all its turns."""
    return [float(sum(len(str(turn["content"])) for turn in turns) % 11) for turns in completions]


def model(attention: str, make: Any = policy) -> Any:
    net = make(attention, "LlamaForCausalLM")
    net.config.max_position_embeddings = 8192
    net.resize_token_embeddings(len(tokenizer()))
    return net


def trainer(what: str, folder: str, attention: str, **args: Any) -> Any:
    words = tokenizer()
    rows = [
        {"prompt": [{"role": "user", "content": "Count " + "again " * (n % 3)}], "liked": n % 5, "number": n}
        for n in range(24)
    ]
    own_args = {"max_steps": 3, "learning_rate": 0.05, "max_completion_length": 700}
    batches = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    given = trl_runs.arguments(folder, **{**own_args, **batches, **args})
    texts = {"tools": OF_TOOLS, "environments": OF_ENVIRONMENTS, "random": AT_RANDOM, "distillation": OF_A_STUDENT}
    texts["unsendable"] = [[call("unsendable", a=1), "Done."]]
    Says.texts = texts[what]
    BOARD.clear()
    own: dict[str, Any] = {"tools": [multiply, late, fails, board, cancelled], "reward_funcs": [lengths]}
    if what == "environments":
        own = {"environment_factory": Counter, "reward_funcs": [lengths]}
    elif what == "random":
        own = {"tools": [search], "reward_funcs": [lengths]}
    elif what == "unsendable":
        own = {"tools": [unsendable], "reward_funcs": [lengths]}
    elif what == "distillation":
        own = {"tools": [multiply, fails], "teacher_model": model(attention, teacher)}
    kind: Any = SaidToTeacher if what == "distillation" else Said
    config: Any = DistillationConfig(**given) if what == "distillation" else GRPOConfig(num_generations=2, **given)
    return kind(
        model=model(attention), args=config, processing_class=words, train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:4]), **own,
    )  # fmt: skip


def refused(what: str, mesh: Mesh) -> str:
    """What a run raises, as "Type: text", or "trained"."""
    try:
        trained(what, mesh)
    except Exception as error:  # noqa: BLE001 - the test judges the text, whatever it is
        return f"{type(error).__name__}: {error}"
    return "trained"


def trained(what: str, mesh: Mesh, **args: Any) -> tuple[Outcome, list[str], int]:
    """The steps and an evaluation on this rank, the tools that it called, and the environments that it made."""
    CALLS.clear()
    Counter.made = 0
    with launched(mesh, **OFFLINE, TRL_EXPERIMENTAL_SILENCE="1"), a_folder(None) as folder, quiet():
        grpo = trainer(what, folder, "ring_fp32" if mesh.cp > 1 else "sdpa", **args)
        hf_ring_attn.configure(grpo.model, hf_ring_attn.RingConfig())
        table = grpo_jobs.table if what != "distillation" else lambda _: {}
        found = trl_runs.outcome(grpo, lambda host: {**trl_runs.evaluation(host), **table(host)})
        return found, [*CALLS], Counter.made
