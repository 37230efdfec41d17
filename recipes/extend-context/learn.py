r"""Does a context extension learn? A small base is trained here at one length, then extended to four times it by YaRN.

    python recipes/extend-context/learn.py --size toy                      # a CPU, a minute: that it runs, not more
    accelerate launch --config_file recipes/accelerate/gpu_8_ddp.yaml --num_processes 2 --parallelism_config_cp_size 2 \
        recipes/extend-context/learn.py --size small --output outputs/learn-2

The text is the source of Python's standard library, a byte a token; some rows tell numbers and ask for them at their
end. Losses by position and numbers found are measured on modules that were held out: of the base, of the base with YaRN
but without training, and of the extended model. The extension is this folder's recipe with other sizes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the programs of all recipes

from evaluate import NAMES, evaluate, plot, tables
from prepare import stdlib
from settings import read
from toy import write_model
from train import ON_CPU, load_model, train

FACTOR = 4
SIZES: dict[str, dict[str, Any]] = {
    "toy": {
        "length": 64, "steps": (24, 12), "batch": 2, "rate": 3e-3, "rows": 60, "trials": 1,
        "model": {"num_hidden_layers": 2},
    },
    "small": {
        "length": 2048, "steps": (6000, 600), "batch": 16, "rate": 6e-4, "rows": 12000, "trials": 20,
        "model": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
                  "num_key_value_heads": 4, "head_dim": 64},
    },
}  # fmt: skip
"""Tokens of a row of the base, steps of base and extension, rows in a step of the base (the extension has a fourth)."""
TOLD = 4
"""Numbers in a row that asks for some; every third row does."""


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="toy")
    parser.add_argument("--output", type=Path, default=Path("outputs/learn"))
    parser.add_argument("--seed", type=int, default=0, help="of the order of rows")
    parser.add_argument("--from", type=Path, metavar="OUTPUT", dest="earlier",
                        help="extend the base of an earlier run, with its rows: to compare rings or seeds")  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes",
                        help="another value of the size, such as 'steps=[600, 60]'")  # fmt: skip
    return parser.parse_args()


def changed(size: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """A size with other values.

    Raises:
        SystemExit: there is no such key.
    """
    found = dict(size)
    for change in changes:
        key, _, value = change.partition("=")
        if key not in size:
            raise SystemExit(f"--set {change}: a size has {', '.join(size)}")
        found[key] = json.loads(value)
    return found


def asking(text: Sequence[int], length: int, encode: Any, dice: random.Random) -> list[int]:
    """A row of ``length`` tokens that tells numbers at random places, and asks for all of them at its end."""
    names = dice.sample(NAMES, TOLD)
    facts = [
        (encode(f"\nThe secret number of {name} is"), encode(f" {dice.randrange(10**4, 10**5)}.\n")) for name in names
    ]
    room = length - 2 * sum(len(ask) + len(answer) for ask, answer in facts)
    if room < 0:  # rows of a toy have room for one of them, or none
        return list(text[:length])
    places = sorted(dice.randrange(room + 1) for _ in facts)
    row: list[int] = []
    for begin, end, fact in zip([0, *places], [*places, room], [*facts, None], strict=True):
        row += text[begin:end]
        row += [] if fact is None else [*fact[0], *fact[1]]
    dice.shuffle(facts)
    return row + [token for ask, answer in facts for token in (*ask, *answer)]


def write_rows(path: Path, tokens: Sequence[int], length: int, count: int, encode: Any, seed: int, ask: bool) -> None:
    """Rows from places all over the text, in Parquet; every third asks for numbers."""
    dice = random.Random(seed)
    rows = []
    for number in range(count):
        begin = dice.randrange(len(tokens) - length)
        text = tokens[begin : begin + length]
        rows.append(asking(text, length, encode, dice) if ask and number % 3 == 0 else list(text))
    Dataset.from_dict({"input_ids": rows, "labels": rows}).to_parquet(str(path))


def write_data(folder: Path, size: dict[str, Any]) -> None:
    """The random base and all rows: short and long ones for training, long ones of other modules to measure with."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "random", "llama", max_position_embeddings=size["length"], **size["model"])
    tokenizer = AutoTokenizer.from_pretrained(folder / "random")
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731  handed on
    files = stdlib()[:: 40 if size["rows"] < 100 else 1]
    held = [path for number, path in enumerate(files) if number % 10 == 9]
    both = [[token for path in some for token in encode(path.read_text(errors="replace"))]
            for some in ([path for path in files if path not in set(held)], held)]  # fmt: skip
    length, count = size["length"], size["rows"]
    write_rows(folder / "short.parquet", both[0], length, count, encode, 1, ask=True)
    write_rows(folder / "long.parquet", both[0], FACTOR * length, count // 6, encode, 2, ask=True)
    write_rows(folder / "held.parquet", both[1], FACTOR * length, 16 if count > 100 else 4, encode, 3, ask=False)


def phase(
    given: dict[str, Any], size: dict[str, Any], made: Path, model: str, name: str, long: bool, folder: Path
) -> Any:
    """The recipe's settings for one training: of the base, without its YaRN, or the extension.

    Args:
        made: the folder of models and rows.
        model: the one in it to begin with.
        name: where in ``folder`` the trained one goes.
    """
    length = size["length"] * (FACTOR if long else 1)
    training = {
        **given["training"], "max_length": length, "max_steps": size["steps"][long], "save_strategy": "no",
        "learning_rate": size["rate"] / (3 if long else 1), "bf16": not ON_CPU, "output_dir": str(folder / name),
        "per_device_train_batch_size": max(1, size["batch"] // (FACTOR if long else 1)), "weight_decay": 0.1,
        "warmup_steps": size["steps"][long] // 10, "adam_beta2": 0.95, "max_grad_norm": 1.0,
        "logging_steps": 1 if ON_CPU else 50,
    }  # fmt: skip
    training.pop("save_steps", None)
    rope = {**given["config"]["rope_parameters"], "original_max_position_embeddings": size["length"]}
    config = {"max_position_embeddings": length, "rope_parameters": rope}
    rows = {"train": str(made / ("long.parquet" if long else "short.parquet"))}
    return {**given, "model": str(made / model), "revision": None, "dtype": "float32", "config": config if long else {},
            "data": rows, "training": training}  # fmt: skip


def measured(settings: dict[str, Any], size: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Losses by position and numbers found, of a model as the settings load it."""
    model = load_model({**settings, "training": {"max_length": 0}}).to(PartialState().device)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    rows = Dataset.from_parquet(str(folder / "held.parquet"))
    lengths = [size["length"] * times for times in (1, 2, FACTOR) if size["length"] * times >= 128]
    return evaluate(model, tokenizer, rows, len(rows), lengths, size["trials"])


def main() -> None:
    options = parsed()
    folder, size = options.output, changed(SIZES[options.size], options.changes)
    state = PartialState(cpu=ON_CPU)
    is_first = options.earlier is None
    made = folder if is_first else options.earlier
    if is_first:
        with state.local_main_process_first():
            if state.is_local_main_process:
                write_data(folder, size)
    given = read(Path(__file__).with_name("config.yaml"), [f"training.seed={options.seed}"])
    if is_first:
        train(phase(given, size, made, "random", "base", False, folder))
    long = phase(given, size, made, "base", "extended", True, folder)
    found = {}
    if is_first:
        found["base"] = measured({**long, "config": {}}, size, made)
        found["YaRN, not trained"] = measured(long, size, made)
    train(long)
    found["extended"] = measured({**long, "model": str(folder / "extended"), "config": {}}, size, made)
    if state.is_main_process:
        (folder / "results.json").write_text(json.dumps(found, indent=1) + "\n")
        for name, results in found.items():
            print(f"\n{name}\n\n{tables(results)}", flush=True)
        plot(found["extended"], {name: found[name] for name in found if name != "extended"}, folder)
    state.destroy_process_group()


if __name__ == "__main__":
    main()
