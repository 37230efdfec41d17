"""A recipe at toy size: the same settings with a tiny model, short rows and float32, for two CPU processes.

python recipes/toy.py FOLDER [llama]    # only the model, with random weights, and its tokenizer
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import prepare
from accelerate import PartialState
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, set_seed
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LENGTH, STEPS, ROWS = 256, 3, 8
SPECIALS = ["<end>", "<user>", "<assistant>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% else %}{{ message['content'] }}"
    "{% endif %}{% endfor %}"
)
SIZES = {
    "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32,
    "num_key_value_heads": 1, "vocab_size": 256 + len(SPECIALS), "max_position_embeddings": LENGTH,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


def byte_tokenizer(specials: Sequence[str], **options: Any) -> PreTrainedTokenizerFast:
    """A byte is a token, after those of ``specials``, among them "<end>"; ``options`` are those of its class."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate([*specials, *letters])}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(specials))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>", **options)


def tokenizer() -> PreTrainedTokenizerFast:
    """Of bytes; a conversation's turns begin with <user> and <assistant>."""
    found = byte_tokenizer(SPECIALS)
    found.chat_template = CHAT_TEMPLATE
    return found


def write_model(folder: Path, model_type: str = "llama", **sizes: Any) -> None:
    """Writes a model with random weights and its tokenizer into a folder; ``sizes`` are entries of its config."""
    set_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **sizes})
    model = AutoModelForCausalLM.from_config(config)
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    # save_pretrained of a model writes on one rank of all; each machine makes a toy of its own.
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    tokenizer().save_pretrained(folder)


def write_texts(path: Path, chat: bool = False) -> None:
    """Writes real texts, the functions and classes of the standard library, or conversations about them, as JSONL."""
    pieces = (piece.strip() for file in prepare.stdlib() for piece in file.read_text(errors="replace").split("\n\n\n"))
    with path.open("w", encoding="utf-8") as file:
        for piece in islice((piece for piece in pieces if "\n" in piece), 200):
            head, _, rest = piece.partition("\n")
            turns = [{"role": "user", "content": f"Complete: {head}"}, {"role": "assistant", "content": rest}]
            file.write(json.dumps({"messages": turns} if chat else {"text": piece}) + "\n")


def write_toy(folder: Path, model_type: str, rows: str) -> None:
    """Writes a model and rows of it: "wrapped" texts, "chat", or "pictures" with words."""
    ends = ["--length", str(LENGTH), "--rows", str(ROWS), "--output", str(folder / "rows.parquet")]
    if rows == "pictures":
        pictures, toy_pictures = (importlib.import_module(name) for name in ("pictures", "toy_pictures"))
        toy_pictures.write_model(folder / "model", LENGTH)
        pictures.main(["--drawn", "--processor", str(folder / "model"), *ends])
        return
    write_model(folder / "model", model_type)
    write_texts(folder / "texts.jsonl", chat=rows == "chat")
    packing = "wrapped" if rows == "wrapped" else "bfd"
    prepare.main([str(folder / "texts.jsonl"), "--tokenizer", str(folder / "model"), "--pack", packing, *ends])


def toy(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The settings of a recipe with sizes of a toy; its model and rows are made in ``folder`` by the first process."""
    state = PartialState()
    with state.local_main_process_first():
        if state.is_local_main_process:
            write_toy(folder, settings["toy"].get("model_type", "llama"), settings["toy"].get("rows", "wrapped"))
    training = {**settings["training"], "max_length": LENGTH, "max_steps": STEPS, "bf16": False, "fp16": False}
    training |= {"learning_rate": 1e-3, "output_dir": str(folder / "output"), "dataloader_num_workers": 0}
    training["warmup_steps"] = 0
    training.pop("num_train_epochs", None)
    if training.get("save_strategy", "steps") == "steps":
        training["save_steps"] = STEPS - 1
    ring = dict(settings["ring"])
    if ring.get("mlp_tokens"):
        ring["mlp_tokens"] = LENGTH // 8
    if ring.get("offload_above"):
        ring["offload_above"] = 0  # a toy has no GiB to keep
    data = dict.fromkeys(settings["data"], str(folder / "rows.parquet"))
    changes = {"model": str(folder / "model"), "revision": None, "dtype": "float32"}
    changes |= {"training": training, "ring": ring, "data": data, "config": shrunk(settings["config"])}
    if settings["quantization"] is not None:
        dtypes = {
            key: "float32" for key in settings["quantization"] if key.endswith(("compute_dtype", "quant_storage"))
        }
        changes["quantization"] = {**settings["quantization"], **dtypes}
    return {**settings, **changes}


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """A config's entries for rows of a toy: RoPE is scaled by the same factor, from fewer positions."""
    found = {**config}
    if "max_position_embeddings" in found:
        found["max_position_embeddings"] = LENGTH
    rope = found.get("rope_parameters")
    if rope and "original_max_position_embeddings" in rope:
        original = round(LENGTH / rope["factor"])
        found["rope_parameters"] = {**rope, "original_max_position_embeddings": original}
    return found


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3 or sys.argv[1].startswith("-"):
        sys.exit("usage: python recipes/toy.py FOLDER [MODEL_TYPE]")
    if sys.argv[2:] and sys.argv[2] not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        sys.exit(
            f"MODEL_TYPE {sys.argv[2]} is no causal language model of transformers. Take llama, qwen3, gemma3_text ..."
        )
    write_model(Path(sys.argv[1]), *sys.argv[2:], max_position_embeddings=2**17)
