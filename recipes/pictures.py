r"""Makes rows of pictures and words for a model that reads both: conversations from JSONL, or drawings of shapes.

    python recipes/pictures.py chats.jsonl --processor google/gemma-3-4b-it --length 32768 --output data/chats.parquet
    python recipes/pictures.py --drawn --processor google/gemma-3-4b-it --length 32768 --output data/drawn.parquet

A line is {"messages": [{"role": "user", "content": "..."}, ...], "images": ["a.png", ...]}; paths begin at the file's
folder. The pictures stand before the first user's words, and the last turn, an assistant's, is learned. A row that is
longer than --length is left out: a cut through a picture's tokens is an error in the model.
--drawn fills each row with pictures of coloured shapes, and asks for all of them in order.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Pictures
from PIL import ImageDraw
from prepare import samples, show
from transformers import AutoProcessor
from trl import prepare_multimodal_messages

TURN = {"role": Value("string"), "content": Value("string")}
FEATURES = Features({"prompt": List(TURN), "completion": List(TURN), "images": List(Image()), "tokens": Value("int32")})
"""``tokens``: of the whole row, with its pictures."""
COLOURS = ("red", "green", "blue", "orange", "purple", "black")
SHAPES = ("circle", "square", "triangle")
QUESTION = "Name the shapes in order."
Row = dict[str, Any]


def parsed(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="*", type=Path, help="files in JSONL")
    parser.add_argument("--drawn", action="store_true", help="drawings of shapes")
    parser.add_argument("--processor", required=True, help="a model of the Hub or a folder")
    parser.add_argument("--length", type=int, required=True, help="most tokens in a row")
    parser.add_argument("--rows", type=int, default=200, help="of drawings")
    parser.add_argument("--output", type=Path, required=True, help="a .parquet file")
    options = parser.parse_args(given)
    if bool(options.inputs) == options.drawn:
        parser.error("give files, or --drawn")
    return options


def split(sample: dict[str, Any], where: str, folder: Path) -> Row:
    """A conversation as prompt, completion and pictures.

    Raises:
        SystemExit: it has another form.
    """
    turns, names = sample.get("messages") or [], sample.get("images", [])
    if len(turns) < 2 or turns[-1]["role"] != "assistant" or not all(isinstance(x["content"], str) for x in turns):
        raise SystemExit(f"{where}: messages must be turns of text, the last one an assistant's")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise SystemExit(f"{where}: there is no picture {folder / missing[0]}")
    return {"prompt": turns[:-1], "completion": turns[-1:], "images": [Pictures.open(folder / x) for x in names]}


def drawing(dice: random.Random, side: int = 224) -> tuple[Pictures.Image, str]:
    """A shape somewhere on a white square, and its name."""
    colour, shape = dice.choice(COLOURS), dice.choice(SHAPES)
    picture = Pictures.new("RGB", (side, side), "white")
    size = dice.randrange(side // 4, side // 2)
    x, y = (dice.randrange(side - size) for _ in "xy")
    pen, box = ImageDraw.Draw(picture), (x, y, x + size, y + size)
    if shape == "circle":
        pen.ellipse(box, fill=colour)
    elif shape == "square":
        pen.rectangle(box, fill=colour)
    else:
        pen.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], fill=colour)
    return picture, f"{colour} {shape}"


def drawn(dice: random.Random, count: int) -> Row:
    """A row of ``count`` drawings."""
    pictures, names = zip(*(drawing(dice) for _ in range(count)), strict=True)
    answer = ", ".join(names) + "."
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}]
    return {"prompt": turns[:1], "completion": turns[1:], "images": list(pictures)}


def tokens_of(row: Row, processor: Any) -> int:
    """Tokens of a row, as TRL makes them."""
    turns = prepare_multimodal_messages(row["prompt"], images=row["images"])
    turns += prepare_multimodal_messages(row["completion"])
    made = processor.apply_chat_template(turns, tokenize=True, return_dict=True, return_tensors="pt")
    return int(made["input_ids"].shape[-1])


def drawn_rows(options: argparse.Namespace, processor: Any) -> Iterator[Row]:
    """Rows of as many drawings as fit."""
    dice = random.Random(0)
    one, two = (tokens_of(drawn(random.Random(0), count), processor) for count in (1, 2))
    for _ in range(options.rows):
        count = max(1, 1 + (options.length - one) // (two - one))
        row = drawn(dice, count)
        while count > 1 and tokens_of(row, processor) > options.length:  # names are of several lengths
            count -= 1
            row = drawn(dice, count)
        yield row


def main(given: Sequence[str] | None = None) -> None:
    options = parsed(given)
    processor = AutoProcessor.from_pretrained(options.processor)
    if options.drawn:
        rows = drawn_rows(options, processor)
    else:
        rows = (split(sample, where, Path(where.rpartition(":")[0]).parent)
                for where, sample in samples(options.inputs))  # fmt: skip
    kept, lengths = [], []
    for row in rows:
        lengths.append(tokens_of(row, processor))
        if lengths[-1] <= options.length:
            kept.append({**row, "tokens": lengths[-1]})
    if not kept:
        raise SystemExit(f"none of {len(lengths)} rows has at most {options.length:,} tokens")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    show(lengths, options.output)
    part = options.output.with_suffix(".part")
    Dataset.from_list(kept, features=FEATURES).to_parquet(str(part))
    part.replace(options.output)  # complete, or not there
    print(f"{options.output}: {len(kept):,} rows of up to {options.length:,} tokens, {sum(lengths):,} in all; "
          f"{len(lengths) - len(kept):,} longer ones were left out", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
