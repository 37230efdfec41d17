"""Code blocks of README.md and docs: how each is marked, and what runs one.

The line before a block says what happens to it:

    <!-- run -->              in one process
    <!-- run: ranks=2 -->     on two CPU ranks (gloo), as accelerate launch starts them with a ring of two
    <!-- run: gpu -->         parsed, since it needs a GPU or a download; test_launches.py starts what it launches on
                              CPU ranks, tests/gpu/test_docs_on_gpu.py on a GPU
    <!-- run: no, REASON -->  only shown

Blocks of one page and one mark share a process. Names that a block uses without making them, such as ``model``, come
from `PRELUDE`; a model of the Hub is a folder of that name with a tiny one.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import traceback
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from hf_ring_attn import cli
from tests.helpers.live_ranks import start_fork_server
from tests.helpers.patience import patient
from tests.helpers.stacks import stack_of, write_on_signal

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- run(?:: (.*?))? -->")
HUB = re.compile(r"(meta-llama|Qwen|mistralai|google|openai|deepseek-ai|my-org)/[\w.-]+")
FAMILIES = {
    "Qwen/Qwen3": "qwen3",
    "Qwen/Qwen2": "qwen2",
    "mistralai": "mistral",
    "deepseek-ai/DeepSeek-V3.2": "deepseek_v32",
}  # any other one: llama
MUST_BE_MARKED = ("python", "bash")
OURS = re.compile(r"(?:hf-ring-attn|python -m hf_ring_attn) (.*)")
SECONDS = 150.0


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        mark: "" (one process), "ranks=2", "gpu", "no, REASON"; None: the block is not marked.
    """

    page: str
    line: int
    language: str
    mark: str | None
    code: str

    @property
    def ranks(self) -> int:
        """Processes that run it; 0: none."""
        if self.mark == "":
            return 1
        return int(self.mark.removeprefix("ranks=")) if self.mark and self.mark.startswith("ranks=") else 0

    def fault(self) -> str | None:
        """Words for what is wrong with the block as text; None: nothing."""
        where = f"{self.page}:{self.line}"
        if self.mark is None and self.language in MUST_BE_MARKED:
            return f"{where}: the line before a {self.language} block must be a comment <!-- run ... -->"
        if self.mark is not None and not re.fullmatch(r"|ranks=\d|gpu|no, .+", self.mark):
            return f"{where}: unknown mark {self.mark!r}"
        if self.mark is not None and self.mark.startswith("no, "):
            return None
        try:
            if self.language == "python":
                ast.parse(self.code)
            elif self.language == "yaml":
                yaml.safe_load(self.code)
            elif self.language == "json":
                json.loads(self.code)
            elif self.language == "bash":
                said = subprocess.run(["bash", "-n"], input=self.code, capture_output=True, text=True, check=False)
                return f"{where}: {said.stderr}" if said.returncode else None
        except (SyntaxError, ValueError, yaml.YAMLError) as error:
            return f"{where}: {error}"
        return None


def blocks_of(text: str, page: str) -> list[Block]:
    """All fenced blocks of a page, in their order."""
    found = []
    for match in BLOCK.finditer(text):
        indent, language, code = match.groups()
        before = text[: match.start()].rstrip("\n").rpartition("\n")[2]
        mark = MARK.fullmatch(before.strip())
        code = "".join(line.removeprefix(indent) for line in code.splitlines(keepends=True))
        line = text[: match.start()].count("\n") + 1
        found.append(Block(page, line, language, (mark[1] or "") if mark else None, code))
    return found


# ---- running ---------------------------------------------------------------------------------------------------------


def run_blocks(blocks: list[Block], folder: Path) -> str:
    """Runs blocks that share a mark in new processes, in ``folder``. Returns what rank 0 printed.

    Raises:
        AssertionError: a block failed, with its place and traceback.
    """
    start_fork_server()
    context = get_context("forkserver")
    size = blocks[0].ranks
    # Each block has a port: a rank that is early would meet the store of the block before.
    with contextlib.ExitStack() as open_sockets:
        free = [open_sockets.enter_context(socket.socket()) for _ in blocks]
        for each in free:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in free]
    ranks = []
    for rank in range(size):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(theirs, blocks, str(folder), rank, size, ports))
        process.start()
        theirs.close()
        ranks.append((process, mine))
    said: list[tuple[str, str]] = []
    try:
        for process, wire in ranks:
            ready = wire.poll(patient(SECONDS))
            said.append(wire.recv() if ready else ("", f"no answer in time:\n{stack_of(process.pid, folder)}"))
            if said[-1][1]:  # the rank that failed first may be another
                said += [other.recv() for _, other in ranks[len(said) :] if other.poll(5)]
                raise AssertionError("\n".join(failure for _, failure in said if failure))
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()
    return str(said[0][0])


def _rank(wire: Any, blocks: list[Block], folder: str, rank: int, size: int, ports: list[int]) -> None:
    """A new process: runs the blocks one after another, and answers (what it printed, its failure)."""
    os.chdir(folder)
    write_on_signal(folder)
    _environment(rank, size)
    printed = io.StringIO()
    names: dict[str, Any] = {"__name__": "__main__"}
    failure = ""
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        for block, port in zip(blocks, ports, strict=True):
            os.environ["MASTER_PORT"] = str(port)
            try:
                if block.language == "python":
                    _python(block, names)
                else:
                    _bash(block, printed)
            except BaseException:  # noqa: BLE001  SystemExit too: the page is wrong whatever a block raises
                where = f"{block.page}:{block.line}, rank {rank}"
                failure = f"{where}:\n{traceback.format_exc()}\n{printed.getvalue()[-3000:]}"
                break
    wire.send((printed.getvalue(), failure))
    wire.close()
    os._exit(0)  # threads of gloo and of tokenizers need no farewell


def _environment(rank: int, size: int) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ |= {
        "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "GLOO_SOCKET_IFNAME": "lo", "NO_COLOR": "1",
    }  # fmt: skip
    if size > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "PARALLELISM_CONFIG_CP_SIZE": str(size),
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        }  # fmt: skip


def _python(block: Block, names: dict[str, Any]) -> None:
    tree = ast.parse(block.code)
    tiny_models_of(block.code, Path())
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for name, make in PRELUDE.items():
        if name in used and name not in names:
            names[name] = make(names)
    exec(compile(tree, f"{block.page}:{block.line}", "exec"), names)


def _bash(block: Block, printed: io.StringIO) -> None:
    """Runs the commands in a shell; ours in this process, which has imported what would take each of them seconds."""
    tiny_models_of(block.code, Path())
    lines = [line for line in block.code.replace("\\\n", " ").splitlines() if shlex.split(line, comments=True)]
    if all(ours := [OURS.match(line) for line in lines]):
        for found in ours:
            assert found is not None
            if code := cli.main(shlex.split(found[1], comments=True)):
                raise RuntimeError(f"exit code {code}")
        return
    command = ["bash", "-euo", "pipefail", "-c", block.code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=patient(SECONDS))
    printed.write(done.stdout + done.stderr)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}")


# ---- what blocks find ------------------------------------------------------------------------------------------------


def tiny_models_of(code: str, folder: Path) -> None:
    """In ``folder``, a tiny model for each name of the Hub that a program or a command has."""
    for name in HUB.finditer(code):
        _tiny_model(name[0], folder)


def _tiny_model(name: str, parent: Path = Path()) -> None:
    """A tiny model and its tokenizer under the name of one of the Hub, by the first rank that comes."""
    folder = parent / name
    if (folder / "done").exists():
        return
    sys.path.insert(0, str(REPOSITORY / "recipes"))
    import toy  # type: ignore[import-not-found]

    from tests.helpers.models import tiny_models

    kind = next((kind for start, kind in FAMILIES.items() if name.startswith(start)), "llama")
    scratch = Path(f"{folder}.{os.getpid()}")
    more = tiny_models.INDEXED if kind == "deepseek_v32" else {}
    toy.write_model(scratch, kind, **{"max_position_embeddings": 131072, **more})
    (scratch / "done").touch()
    with contextlib.suppress(OSError):  # another rank was first
        scratch.rename(folder)


def _model(_: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    _tiny_model("meta-llama/Llama-3.1-8B")
    return AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B", attn_implementation="ring_fp32")


def _tokenizer(_: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    _tiny_model("meta-llama/Llama-3.1-8B")
    return AutoTokenizer.from_pretrained("meta-llama/Llama-3.1-8B")


def _batch(_: dict[str, Any]) -> Any:
    import torch

    ids = torch.arange(50)[None] * 7 % 250 + 1
    return {"input_ids": ids, "labels": ids}


def _rows(_: dict[str, Any]) -> Any:
    from datasets import Dataset

    ids = [[(7 * n + row) % 250 + 1 for n in range(50)] for row in range(4)]
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def _qkv(heads: int) -> Any:
    import torch

    return torch.randn(1, 64, heads, 16, requires_grad=True)


def _bias(_: dict[str, Any]) -> Any:
    from hf_ring_attn.biases import Alibi

    return Alibi(4, learnable=True)


PRELUDE: dict[str, Any] = {
    "hf_ring_attn": lambda names: __import__("hf_ring_attn"),
    "torch": lambda names: __import__("torch"),
    "model": _model,
    "tokenizer": _tokenizer,
    "batch": _batch,
    "rows": _rows,
    "sharded": lambda names: __import__("hf_ring_attn").shard(names.get("batch") or _batch(names)),
    "q": lambda names: _qkv(4),
    "k": lambda names: _qkv(2),
    "v": lambda names: _qkv(2),
    "bias": _bias,
}
"""Names that blocks may use without making them. Later ones may use earlier ones."""
