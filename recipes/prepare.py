r"""Makes rows of tokens from texts, JSONL or conversations: tokenizes them, packs them, and says how long they are.

    python recipes/prepare.py books/ --tokenizer meta-llama/Llama-3.1-8B --length 131072 --pack wrapped \
        --output data/books.parquet
    python recipes/prepare.py chats.jsonl --tokenizer Qwen/Qwen3-8B --length 32768 --output data/chats.parquet

A file that ends in .jsonl has an object a line: {"text": ...}, {"prompt": ..., "completion": ...} or
{"messages": [...]}. Any other file is one text; a folder stands for all files in it.
--stdlib takes the source of Python's standard library.
Of conversations only the assistant's turns are learned, of prompts only their completions.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value
from plots import draw
from transformers import AutoTokenizer
from trl import pack_dataset
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

PACKS = {
    "bfd": "whole texts, several in a row, none sees another; what is longer than a row is cut off",
    "bfd_split": "the same, but a text that is longer than a row goes on in another one, as a text of its own",
    "wrapped": "texts follow each other without a gap, and see what came before in their row: long rows of short texts",
    "none": "a text a row; what is longer than a row is cut off",
}
Text = dict[str, "np.ndarray[Any, np.dtype[np.int32]]"]
"""Tokens and labels of a text."""
FEATURES = Features({"input_ids": List(Value("int32")), "labels": List(Value("int32"))})


def parsed(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="*", type=Path, help="files and folders")
    parser.add_argument("--stdlib", action="store_true", help="the source of Python's standard library")
    parser.add_argument("--tokenizer", required=True, help="a model of the Hub or a folder")
    parser.add_argument("--length", type=int, required=True, help="tokens in a row")
    parser.add_argument("--pack", choices=PACKS, default="bfd", help="; ".join(f"{k}: {v}" for k, v in PACKS.items()))
    parser.add_argument("--rows", type=int, help="end after so many rows")
    parser.add_argument("--eval-every", type=int, metavar="N", default=0,
                        help="every Nth text goes to a second file, NAME-eval.parquet")  # fmt: skip
    parser.add_argument("--output", type=Path, required=True, help="a .parquet file")
    options = parser.parse_args(given)
    if bool(options.inputs) == options.stdlib:
        parser.error("give files and folders, or --stdlib")
    missing = [str(path) for path in options.inputs if not path.exists()]
    if missing:
        parser.error(f"no such file or folder, from {Path.cwd()}: {' '.join(missing)}")
    if options.length < 2:
        parser.error("--length: at least 2 tokens")
    if options.eval_every < 0 or options.eval_every == 1:
        parser.error("--eval-every: at least 2, since the other texts are trained on; 0: no second file")
    if options.rows is not None and options.rows < 1:
        parser.error("--rows: at least 1")
    return options


def stdlib() -> list[Path]:
    """The modules of the standard library, in alphabetical order."""
    found = sorted(Path(os.__file__).parent.rglob("*.py"))
    return [path for path in found if not {"site-packages", "dist-packages"} & set(path.parts)]


def samples(paths: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every text or conversation, with the place it came from."""
    for path in paths:
        if path.is_dir():
            yield from samples(sorted(file for file in path.rglob("*") if file.is_file()))
        elif path.suffix == ".jsonl":
            with path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield f"{path}:{number}", json.loads(line)
        else:
            yield str(path), {"text": path.read_text(encoding="utf-8", errors="replace")}


def tokenized(sample: dict[str, Any], tokenizer: Any, where: str) -> Text:
    """Tokens of a sample and their labels, -100 where nothing is learned.

    Raises:
        SystemExit: the sample has none of the known forms.
    """
    end = [tokenizer.eos_token_id]
    if "messages" in sample:
        if not tokenizer.chat_template:
            raise SystemExit(f"{where}: the tokenizer has no chat template")
        marked = has_generation_markers(tokenizer.chat_template)
        made = tokenizer.apply_chat_template(
            sample["messages"], tools=sample.get("tools"), return_dict=True, return_assistant_tokens_mask=True,
            chat_template=None if marked else get_training_chat_template(tokenizer),
        )  # fmt: skip
        tokens, learned = list(made["input_ids"]), made["assistant_masks"]
    elif "prompt" in sample and "completion" in sample:
        prompt = tokenizer.encode(sample["prompt"])
        answer = tokenizer.encode(sample["completion"], add_special_tokens=False) + end
        tokens, learned = prompt + answer, [0] * len(prompt) + [1] * len(answer)
    elif "text" in sample:
        tokens = tokenizer.encode(sample["text"])
        tokens += end if tokens[-1:] != end else []
        learned = [1] * len(tokens)
    else:
        raise SystemExit(f"{where}: it has neither text, nor messages, nor prompt and completion, but {list(sample)}")
    ids = np.array(tokens, dtype=np.int32)
    return {"input_ids": ids, "labels": np.where(np.array(learned, dtype=bool), ids, -100).astype(np.int32)}


def pack(texts: list[Text], length: int, how: str, folder: str) -> Dataset:
    """Rows of at most ``length`` tokens; column seq_lengths says where texts begin that do not see each other."""
    made = Dataset.from_dict({name: [text[name] for text in texts] for name in FEATURES}, features=FEATURES)
    if how == "none":
        return made.map(lambda row: {name: row[name][:length] for name in row}, cache_file_name=f"{folder}/cut.arrow")
    packed: Dataset = pack_dataset(made, length, how, {"cache_file_name": f"{folder}/packed.arrow"})
    return packed


def histogram(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Counts of lengths by power of two: (upper bound, how many are above half of it and not above it)."""
    counts = Counter(max(0, (length - 1).bit_length()) for length in lengths)
    return [(2**power, counts[power]) for power in range(min(counts), max(counts) + 1)] if counts else []


def show(lengths: Sequence[int], path: Path) -> None:
    """Prints the histogram of lengths, and saves it as a plot if matplotlib is there."""
    bars = histogram(lengths)
    most = max(count for _, count in bars)
    for bound, count in bars:
        print(f"{'<= ' + format(bound, ','):>14} tokens {count:8,} {'#' * -(-40 * count // most)}")

    def onto(axes: Any) -> None:
        axes.bar([f"{bound:,}" for bound, _ in bars], [count for _, count in bars])
        axes.set(xlabel="tokens in a text, at most", ylabel="texts", title=path.stem)
        axes.tick_params(axis="x", rotation=45)

    draw(path.with_suffix(".svg"), onto)


def save(texts: list[Text], options: argparse.Namespace, output: Path) -> None:
    """Packs texts, writes the file and says what is in it."""
    with tempfile.TemporaryDirectory() as folder:
        rows = pack(texts, options.length, options.pack, folder)
        if options.rows is not None:
            rows = rows.select(range(min(options.rows, len(rows))))
        tokens = sum(map(len, rows["input_ids"]))
        given = sum(len(text["input_ids"]) for text in texts)
        output.parent.mkdir(parents=True, exist_ok=True)
        part = output.with_suffix(".part")
        rows.to_parquet(str(part))
        part.replace(output)  # complete, or not there
        cut = "" if options.rows is not None else f"; {given - tokens:,} were cut off"
        print(f"{output}: {len(rows):,} rows of up to {options.length:,} tokens, {tokens:,} in all{cut}", flush=True)


def main(given: Sequence[str] | None = None) -> None:
    options = parsed(given)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    kept: tuple[list[Text], list[Text]] = ([], [])
    lengths, unlearned, in_rows = [], 0, 0
    for where, sample in samples(stdlib() if options.stdlib else options.inputs):
        text = tokenized(sample, tokenizer, where)
        lengths.append(len(text["input_ids"]))
        reach = options.length if options.pack in ("bfd", "none") else None  # what is behind is cut off
        if not (text["labels"][1:reach] != -100).any():
            unlearned += 1
            continue
        held_out = options.eval_every > 0 and len(lengths) % options.eval_every == 0
        kept[held_out].append(text)
        in_rows += 0 if held_out else len(text["labels"][:reach])
        if len(lengths) % 1000 == 0:
            print(f"{len(lengths):,} texts, {sum(lengths):,} tokens", flush=True)
        if options.rows is not None and in_rows > 2 * options.rows * options.length:
            break
    if not kept[0]:
        raise SystemExit(f"no token is learned of any of the {len(lengths)} texts")
    print(f"{len(lengths):,} texts, {sum(lengths):,} tokens")
    show(lengths, options.output)
    if unlearned:
        print(f"{unlearned:,} texts were left out: no token of theirs is learned")
    save(kept[0], options, options.output)
    if kept[1]:
        save(kept[1], options, options.output.with_name(f"{options.output.stem}-eval.parquet"))


if __name__ == "__main__":
    main()
