"""The texts of errors: short, in plain words, and each with something to do."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest

from hf_ring_attn.errors import batches, core, hosts

FILES: list[ModuleType] = [batches, core, hosts]
"""The files of errors that are held to this."""

MOST_WORDS = 60
BANNED = re.compile(r"\b(told|tells?|dealt|deals?|lies?|kept|half-way|let go|to be had|of (one|its|their)s? own|say)\b")

ARGUMENTS: dict[str, Any] = {
    "made": [5, 5, 3, 3],
    "length": 4097, "world_size": 8, "pads": True, "name": "documents", "got": (2, 4096), "what": "input_ids[0, 17]",
    "need": "[2, 4096], the whole row", "per_rank": [5, 7], "todo": "Give every rank the same whole batch.",
    "messages": {0: "images cannot be sharded.", 3: "images cannot be sharded."}, "doing": "gathered keys and values",
    "rank": 1, "size": 8, "reasons": {"triton": ["needs an NVIDIA GPU, got tensors on cpu"]}, "ring_size": 8,
    "reason": "the GPUs of ranks 0 and 1 have no peer-to-peer access", "failures": {0: "raised ValueError"},
    "silent": {1: ""}, "seconds": 12.0, "file": "speed.json", "why": "no runs", "row": 3, "token": 17, "rows": 2,
    "tokens": 64, "model": "LlamaForCausalLM", "missing": ["attention_mask"], "other": ["shift_labels"], "keys": 4096,
    "known": ["and_mask", "causal_mask_function", "or_mask", "sliding_window_overlay"], "queries": 4096, "local": 512,
    "kind": "LlamaAttention", "error": 0.1, "tolerance": 1e-3, "where": "model.layers.0.self_attn", "output": "pooler",
    "module": "LlamaAttention", "scored": 1, "plain": 2, "use": ".shape", "call": "called attention with",
    "waited": 30.0, "text": "ProcessGroupGloo does not support float8_e4m3fn", "weight": "lm_head.weight",
    "target": "trl.trainer.sft_trainer:SFTTrainer.compute_loss", "found": "(self, model, inputs)",
    "needed": "(self, model, inputs, return_outputs=, num_items_in_batch=)", "host": "trl", "version": "1.17.0",
    "tested": "1.16", "requirement": "trl>=1.16,<1.17",
    "untested": [], "sizes": {"dp_replicate": 1, "dp_shard": 2, "cp": 4, "sp": 1, "tp": 1}, "processes": 4,
    "variable": "ACCELERATE_USE_PARALLELISM_CONFIG", "handler": object(), "implementations": ["sdpa"], "cp_size": 4,
    "how": "dispatch_batches=True", "labels": 4000, "program": "train.py", "options": ["--num_processes"],
    "trainer": "MyTrainer", "method": "MyTrainer.compute_loss", "option": "dispatch_batches=True", "shape": (2, 4096),
    "checkpoint": "outputs/checkpoint-20", "complete": "outputs/checkpoint-10",
    "wanted": 2**32, "free": 2**30, "total": 2**37, "optimizer": "AdamW", "completions": 4, "generations": 8,
    "value": 0, "folder": "run", "names": ["ring.yaml", "train.py"],
    "counted": "per_device_train_batch_size 4 x 1 rings x steps_per_generation 1",
    "own": False, "states": "model.layers.0.mlp.largest",
}  # fmt: skip
"""What a class is given, by the names of its parameters."""


VARIANTS: dict[str, list[dict[str, Any]]] = {
    "EncoderDecoder": [{"name": "models/t5-base", "kind": "t5"}],
    "CheckpointNotSaved": [{"failures": {1: "OSError: [Errno 28] No space left on device"}}, {"complete": None}],
    "HostMemoryFull": [{"said": ""}, {"said": "8 ranks ask for as much at once, and 4.0 GiB stay free"}],
    "FeaturesSplit": [{"names": ["values"]}],
    "IncompleteCheckpoint": [{"complete": None}],
    "LossNotSharded": [{"gathers": False, "again": again} for again in (False, True)]
    + [{"gathers": True, "again": True}, {"gathers": False, "again": True, "own": True}],
    "GradientDiffers": [{"own": False}, {"own": True}],
    "SelfCheckFailed": [{"where": ""}, {"where": "model.layers.0.self_attn"}],
    "MeshMismatch": [{"processes": 4}, {"processes": 1}],
    "SelfCheckNotRun": [
        {"rows": 1, "error": "KeyError: 'position_ids'", "untested": []},
        {"rows": 2, "error": "KeyError: 'position_ids'", "untested": ["trl>=1.16,<1.17", "peft>=0.21,<0.22"]},
    ],
    "SelfCheckRowFailed": [{"error": "OutOfMemoryError: CUDA out of memory"}],
    "ShardedMask": [{"kind": "blocks"}, {"kind": "documents"}, {"kind": "chunks"}],
}
"""The arguments that choose among a class's texts: each is held to this."""


def classes() -> list[type[Exception]]:
    return [
        value
        for file in FILES
        for value in vars(file).values()
        if isinstance(value, type) and issubclass(value, Exception) and "__init__" in vars(value)
    ]


def texts_of(kind: type[Exception]) -> list[str]:
    names = list(inspect.signature(kind).parameters)
    given = [ARGUMENTS | variant for variant in VARIANTS.get(kind.__name__, [{}])]
    return [str(kind(*(arguments[name] for name in names))) for arguments in given]


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_an_error_has_few_words_and_plain_ones(kind: type[Exception]) -> None:
    for text in texts_of(kind):
        assert len(text.split()) <= MOST_WORDS, text
        assert not BANNED.search(text), text


def test_there_are_errors_to_read() -> None:
    assert len(classes()) >= 40


def test_classes_of_others_keep_their_modules() -> None:
    assert Mapping.__module__ == Sequence.__module__ == "collections.abc"
    assert core.BadOption.__module__ == "hf_ring_attn.errors"
