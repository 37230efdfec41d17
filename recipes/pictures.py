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
from tqdm.auto import tqdm
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


def row_of(drawings: Sequence[tuple[Pictures.Image, str]]) -> Row:
    """A row that asks for the names of drawings."""
    pictures, names = zip(*drawings, strict=True)
    answer = ", ".join(names) + "."
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}]
    return {"prompt": turns[:1], "completion": turns[1:], "images": list(pictures)}


def tokens_of(row: Row, processor: Any) -> int:
    """Tokens of a row, as TRL makes them."""
    turns = prepare_multimodal_messages(row["prompt"], images=row["images"])
    turns += prepare_multimodal_messages(row["completion"])
    made = processor.apply_chat_template(turns, tokenize=True, return_dict=True, return_tensors="pt")
    return int(made["input_ids"].shape[-1])


class DrawingTokens:
    """Counts the tokens of rows of drawings by two of their pictures: processing all of them takes seconds a row.

    Drawings have one size, so each after the second adds the same number of tokens.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        drawings = [drawing(random.Random(0)) for _ in range(3)]
        three, two = row_of(drawings), row_of(drawings[:2])
        whole = tokens_of(three, processor)
        self.a_picture = whole - self._by_two(three)
        self.a_drawing = whole - self._by_two(two)
        """With its name."""

    def _by_two(self, row: Row) -> int:
        return tokens_of({**row, "images": row["images"][:2]}, self.processor)

    def count(self, row: Row) -> int:
        """The tokens of a row."""
        return self._by_two(row) + max(0, len(row["images"]) - 2) * self.a_picture


def drawn_rows(options: argparse.Namespace, processor: Any) -> list[Row]:
    """Rows of as many drawings as fit, with their tokens.

    Raises:
        SystemExit: with this processor pictures of one size have different numbers of tokens.
    """
    dice, tokens = random.Random(0), DrawingTokens(processor)
    rows: list[Row] = []
    enough = 1 + options.length // tokens.a_picture
    for _ in tqdm(range(options.rows), desc="rows of drawings", mininterval=2):
        drawings = [drawing(dice) for _ in range(enough)]
        while (counted := tokens.count(row_of(drawings))) > options.length and len(drawings) > 1:
            most = 2 * tokens.a_drawing  # no name is so long, so no more are dropped than must be
            drawings = drawings[: len(drawings) - max(1, (counted - options.length) // most)]
        row = row_of(drawings)
        if not rows and (whole := tokens_of(row, processor)) != counted:
            raise SystemExit(f"{options.processor}: {len(drawings)} pictures of one size have {whole} tokens, not "
                             f"{counted}; give conversations with pictures of your own")  # fmt: skip
        rows.append({**row, "tokens": counted})
        enough = len(drawings) + 2  # the next row's names may be shorter
    return rows


def own_rows(options: argparse.Namespace, processor: Any) -> Iterator[Row]:
    """Rows of conversations, with their tokens."""
    for where, sample in tqdm(list(samples(options.inputs)), desc="conversations", mininterval=2):
        row = split(sample, where, Path(where.rpartition(":")[0]).parent)
        yield {**row, "tokens": tokens_of(row, processor)}


def main(given: Sequence[str] | None = None) -> None:
    options = parsed(given)
    processor = AutoProcessor.from_pretrained(options.processor)
    rows = drawn_rows(options, processor) if options.drawn else list(own_rows(options, processor))
    lengths = [row["tokens"] for row in rows]
    kept = [row for row in rows if row["tokens"] <= options.length]
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
