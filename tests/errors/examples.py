"""Arguments that make each error as a user meets it, for the tests of texts and the page of errors."""

from __future__ import annotations

from typing import Any

LLAMA = "LlamaForCausalLM"
TAKES_NO_COUNT = "the loss of MyModel, which takes no num_items_in_batch,"

ARGUMENTS: dict[str, Any] = {
    "made": [5, 5, 3, 3], "highest": 4,
    "length": 4097, "world_size": 8, "pads": True, "ring_size": 8, "size": 8, "cp_size": 4, "processes": 4,
    "rank": 1, "row": 3, "rows": 2, "token": 17, "tokens": 64, "local": 512, "queries": 4096, "keys": 4096,
    "scored": 1, "plain": 2, "labels": 4000, "completions": 4, "generations": 8, "value": 0, "shape": (4096, 16),
    "error": 0.1, "tolerance": 1e-3, "waited": 30.0, "wanted": 2**32, "free": 2**30, "total": 80 * 2**30,
    "model": LLAMA, "module": "LlamaAttention", "kind": "LlamaAttention", "where": "model.layers.0.self_attn",
    "weight": "lm_head.weight", "states": "model.layers.0.mlp.largest", "output": "pooler_output", "own": False,
    "missing": ["attention_mask"], "other": ["shift_labels"], "untested": [], "implementations": ["sdpa"],
    "doing": "gathered keys and values", "call": "called attention with",
    "target": "trl.trainer.sft_trainer:SFTTrainer.compute_loss", "found": "(self, model, inputs)",
    "needed": "(self, model, inputs, return_outputs=, num_items_in_batch=)", "host": "trl", "version": "1.17.0",
    "tested": "1.16", "requirement": "trl>=1.16,<1.17", "optimizer": "AdamW",
    "sizes": {"dp_replicate": 1, "dp_shard": 2, "cp": 4, "sp": 1, "tp": 1},
    "trainer": "MyTrainer", "method": "get_batch_samples", "program": "train.py", "options": ["--num_processes"],
    "checkpoint": "outputs/checkpoint-20", "complete": "outputs/checkpoint-10", "folder": "run",
    "names": ["ring.yaml", "train.py"], "file": "speed.json",
    "counted": "per_device_train_batch_size 4 x 1 rings x steps_per_generation 1",
}  # fmt: skip
"""Values by the names of parameters, where they mean the same in every class."""


VARIANTS: dict[str, list[dict[str, Any]]] = {
    "GradientsChanged": [
        {"what": "weights were changed after the forward", "todo": "Call it before optimizer.step()."}
    ],
    "NotEntered": [{"what": "sharded.reduce() was called"}],
    "UnknownMask": [
        {
            "name": "my_model.prefix_mask",
            "known": ["and_mask", "causal_mask_function", "or_mask", "sliding_window_overlay"],
        }
    ],
    "ShardedMask": [{"kind": "blocks"}, {"kind": "documents"}, {"kind": "chunks"}],
    "UnsupportedModel": [
        {
            "model": "BloomForCausalLM",
            "reasons": [
                "its code does not use transformers' attention interface, so its attention would stay on each rank",
                "no part of it takes position_ids, so each rank would number its own tokens from 0",
            ],
        }
    ],
    "SelfCheckFailed": [{"where": ""}, {"where": "model.layers.0.self_attn"}],
    "SelfCheckRaised": [{"error": "IndexError: index 64 is out of bounds"}],
    "OtherCheckpoint": [{"by_fsdp": False}, {"by_fsdp": True}],
    "GradientDiffers": [{"own": False}, {"own": True}],
    "SelfCheckNotRun": [
        {"rows": 1, "error": "KeyError: 'position_ids'", "untested": []},
        {"rows": 2, "error": "KeyError: 'position_ids'", "untested": ["trl>=1.16,<1.17", "peft>=0.21,<0.22"]},
    ],
    "SelfCheckRowFailed": [{"error": "OutOfMemoryError: CUDA out of memory"}],
    "LayerWithoutSpec": [{"got": "Tensor"}, {"got": "nothing"}],
    "MaskIsNoTensor": [{"use": ".shape"}],
    "StatesLeftOut": [{"use": ".mean"}],
    "UnsupportedArgument": [
        {
            "module": "a model", "name": "a cache", "call": "was called with",
            "why": "it was made in a ring, so it holds one rank's tokens; make it outside, from whole rows",
        }
    ],
    "NoRingAttention": [{"ran": True}, {"ran": False}],
    "OtherIgnoreIndex": [{"what": f"{LLAMA} was called in a ring with"}],
    "LossNotSharded": [{"what": TAKES_NO_COUNT, "gathers": False, "again": again} for again in (False, True)]
    + [
        {"what": "label smoothing (label_smoothing_factor)", "gathers": True, "again": True},
        {"what": "the loss of MyTrainer", "gathers": False, "again": True, "own": True},
    ],
    "ShardedLoss": [{"name": "MyTrainer"}],
    "LossNotChunked": [{"why": "argmax() was called on the logits"}],
    "LogitsNotMade": [{"why": "FSDP2 has freed the weights of its head since the forward"}],
    "InputsNotHandedOn": [{"method": "_prepare_context_parallel_inputs"}],
    "UnsupportedOption": [
        {"option": "return_dict=False", "why": "predictions in a ring need a model that returns a dict"}
    ],
    "GradientOfState": [{"output": "hidden_states.1"}],
    "NotOfTokens": [{"output": "arcs", "got": (1, 512, 512)}],
    "UnknownOutput": [{"name": "image_hidden_states", "got": (1, 576, 4096)}],
    "BadShape": [{"name": "k", "got": (1, 512, 8), "need": "it must be [1, 512, G, 128] to go with q"}],
    "BadOption": [{"name": "mlp_tokens", "got": 0, "need": "a positive number of tokens, or None"}],
    "BadScoreMod": [{"name": "my_bias", "what": "cannot be run for many scores at once (data-dependent control flow)"}],
    "ScoreModChanged": [{"name": "my_bias", "what": "a tensor of shape (32,) that it uses was written"}],
    "UnsupportedAttention": [
        {
            "reasons": {
                "flash4": ["needs an NVIDIA GPU, got tensors on cpu"],
                "triton": ["needs a CUDA or ROCm GPU, got tensors on cpu"],
            }
        },
        {"reasons": {"triton": ["needs a CUDA or ROCm GPU, got tensors on cpu"]}, "others": ["reference"]},
    ],
    "NoPulls": [{"reason": "the GPUs of ranks 0 and 1 have no peer-to-peer access"}],
    "NoMemoryForBuffers": [{"size": 2**31}],
    "SecondGradient": [{"what": "ring attention"}],
    "UnsupportedTransform": [{"what": "ring attention"}],
    "UnsupportedVmap": [{"use": "ring attention was called with documents"}],
    "NotByToken": [{"module": "model.layers.0.mlp", "what": "changes its buffers in each call"}],
    "HiddenWeight": [{"module": "model.layers.0.mlp"}],
    "HostMemoryFull": [{"said": ""}, {"said": "8 ranks ask for as much at once, and 4.0 GiB stay free"}],
    "GroupDestroyed": [{"name": "1"}],
    "RanksDiffer": [
        {"what": "input_ids", "per_rank": [5, 7], "todo": "Give every rank the same whole batch."},
    ],
    "RefusedElsewhere": [
        {"messages": dict.fromkeys((0, 3), "BadBatch: the batch holds neither input_ids nor inputs_embeds.")}
    ],
    "NotSendable": [{"text": "ProcessGroupGloo does not support float8_e4m3fn"}],
    "ResultsNotSaved": [{"why": "FileExistsError: it is a file"}],
    "NotAResult": [{"why": "it has no speed, errors or depth"}],
    "MeshMismatch": [{"processes": 4}, {"processes": 1}],
    "OneProcess": [{"found": "PARALLELISM_CONFIG_CP_SIZE is 8", "variable": "PARALLELISM_CONFIG_CP_SIZE"}],
    "NoSmallerBatch": [{"text": "CUDA out of memory"}],
    "UntestedParallelism": [{"what": "tensor parallelism (tp_size=2)", "todo": "set tp_size=1"}],
    "TorchHandlerWithRing": [{"handler": type("TorchContextParallelConfig", (), {})()}],
    "TorchContextParallelRefused": [
        {"reasons": ["cp_size > 1 needs an fsdp_plugin (FSDP2), but distributed_type is MULTI_GPU"]}
    ],
    "DispatchedBatches": [
        {"how": "a DataLoader was prepared with dispatch_batches=True"},
        {"how": "dispatch_batches=True with use_stateful_dataloader=True", "why": "ranks would save unlike states"},
    ],
    "BadBuffers": [{"got": "buffer 1 that requires a gradient", "needed": "it cannot be sharded in place"}],
    "UnclearCount": [{"got": 1000, "why": "it is neither"}],
    "UnclearScheduler": [{"why": "100 was computed from it, and 7 was not"}],
    "TiedByFsdp": [{"names": ["model.embed_tokens.weight", "lm_head.weight"]}],
    "UnevenBatches": [{"fewest": 2, "most": 3}],
    "SharedMemoryLost": [{"names": ["embed_tokens.lora_embedding_A.default", "lm_head.lora_B.default.weight"]}],
    "OtherAttention": [{"name": "flash_attention_2"}],
    "NoSuchProgram": [{"why": "there is no such file (looked in /workspace)"}],
    "CheckpointNotSaved": [
        {"failures": {1: "OSError: [Errno 28] No space left on device"}, "complete": complete}
        for complete in ("outputs/checkpoint-10", None)
    ],
    "IncompleteCheckpoint": [{"complete": None}, {"complete": "outputs/checkpoint-10"}],
    "NotWritable": [{"where": "/usr/lib/python3/site-packages", "why": "Permission denied"}],
    "UnknownModel": [{"name": "meta-llama/Llama-3.1-8B", "why": "OSError: You are trying to access a gated repo."}],
    "EncoderDecoder": [{"name": "google-t5/t5-base", "kind": "t5"}],
    "CannotPlan": [
        {
            "name": "BambaForCausalLM",
            "why": "the memory and time of its BambaMixer ('linear_attention') are not known",
        }
    ],
    "PlanNotWritten": [{"why": "it is a file"}],
    "UnknownToken": [{"table": "Embedding", "value": 32000, "size": 32000}],
    "PooledOutput": [{"gathers": False}, {"gathers": True}],
    "PooledLoss": [{"what": "the loss of MyTrainer"}],
    "FeaturesSplit": [{"names": ["values"]}],
}  # fmt: skip
"""The arguments of a class: its own, and those that choose among its texts. The page of errors shows the first."""


def given(kind: type[Exception], names: list[str]) -> list[dict[str, Any]]:
    """The arguments of each text of a class, by the names of its parameters."""
    each = [ARGUMENTS | variant for variant in VARIANTS.get(kind.__name__, [{}])]
    return [{name: arguments[name] for name in names if name in arguments} for arguments in each]
