r"""What a model does with long rows: its loss by position, and numbers that it finds in them, by depth and length.

    python recipes/evaluate.py --model Qwen/Qwen3-8B-Base --rows data/long-eval.parquet --output outputs/before
    accelerate launch --config_file recipes/accelerate/gpu_8_ddp.yaml recipes/evaluate.py \
        --run outputs/extend-context --rows data/long-eval.parquet --output outputs/after --beside outputs/before

Several processes share each row in a ring. Rows are those of prepare.py with --pack wrapped or none.
The number counts as found if each of its tokens is the model's first choice: greedy decoding would write it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from peft import PeftModel
from plots import draw
from settings import BadRecipe, read
from torch import Tensor
from train import ON_CPU, load_model, saved_settings
from transformers import AutoTokenizer

import hf_ring_attn

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
NAMES = ("Ada", "Alan", "Barbara", "Donald", "Edsger", "Grace", "John", "Leslie")
CHUNK = 2048
"""Tokens whose logits exist at a time."""
Probe = tuple[list[int], list[int]]
"""Tokens of a row, and of the answer at its end."""


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="a model of the Hub or a folder")
    which.add_argument("--run", type=Path, help="the output folder of train.py, or a checkpoint in it: its model, or "
                       "its adapter on its model")  # fmt: skip
    which.add_argument("--recipe", type=Path, help="the model of a config.yaml, with its config, before it is trained")
    parser.add_argument("--rows", type=Path, required=True, help="a file of prepare.py")
    parser.add_argument("--count", type=int, default=8, help="rows for the loss by position")
    parser.add_argument(
        "--lengths", type=int, nargs="*", help="of rows with a number in them; default: 1/8 to all of a row"
    )
    parser.add_argument("--trials", type=int, default=4, help="rows for each length and depth; 0: no numbers")
    parser.add_argument("--output", type=Path, required=True, help="a folder for results.json and plots")
    parser.add_argument("--beside", type=Path, nargs="*", default=[], help="folders of earlier results, for the plot")
    return parser.parse_args()


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that say which model is meant."""
    if options.run is not None:
        saved = saved_settings(options.run)
        whole = {"model": str(options.run), "revision": None, "config": {}} if saved["lora"] is None else {}
        return {**saved, **whole, "attention": "ring_fp32"}
    if options.recipe is not None:
        return read(options.recipe)
    plain = {"revision": None, "dtype": "bfloat16", "attention": "ring_fp32", "quantization": None}
    return {**plain, "model": options.model, "config": {}, "lora": None, "ring": {}, "training": {"max_length": 0}}


def logits_of(model: Any, hidden: Tensor) -> Tensor:
    """[n, D] hidden states -> [n, V] float32 logits, as the model's forward makes them."""
    logits = model.get_output_embeddings()(hidden).float()
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def check_logits(model: Any, tokens: Tensor) -> None:
    """Refuses a model whose forward makes its logits otherwise than `logits_of`.

    Raises:
        SystemExit: they differ.
    """
    given = tokens[:, :32]
    want, got = model(input_ids=given).logits.float(), logits_of(model, model.get_decoder()(input_ids=given)[0])
    if not torch.allclose(got, want, rtol=1e-2, atol=1e-2 * want.abs().max().item()):
        raise SystemExit(f"{type(model).__name__} scales its logits in a way that evaluate.py does not know")


@torch.no_grad()
def scores(model: Any, row: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Each token given those before it, over the ring: a row is shared by all processes.

    Returns:
        [S - 1] float32 losses in nats, and [S - 1] bool: the token is the model's first choice. In the row's order.
    """
    tokens = torch.tensor([row], device=model.device)
    sharded = hf_ring_attn.shard({"input_ids": tokens}, model=model)
    inputs = {name: x for name, x in sharded.inputs.items() if name in ("input_ids", "attention_mask", "position_ids")}
    with sharded:
        hidden = model.get_decoder()(**inputs, use_cache=False)[0][0]
    following = (sharded.positions.to(tokens.device) + 1).clamp(max=len(row) - 1)
    targets = tokens[0, following]
    found = torch.zeros(1, len(targets), 2, device=tokens.device)
    for start in range(0, len(targets), CHUNK):
        part = slice(start, start + CHUNK)
        logits = logits_of(model, hidden[part])
        found[0, part, 0] = torch.nn.functional.cross_entropy(logits, targets[part], reduction="none")
        found[0, part, 1] = (logits.argmax(-1) == targets[part]).float()
    whole = sharded.gather(found)[0, :-1]
    return whole[:, 0].cpu(), whole[:, 1].cpu() > 0


def by_position(model: Any, rows: Sequence[Sequence[int]]) -> list[dict[str, float]]:
    """The mean loss of tokens between two positions, each bound twice the one before."""
    total, count = torch.zeros(0), torch.zeros(0)
    for row in rows:
        losses = scores(model, row)[0]
        more = max(0, len(losses) - len(total))
        total, count = (torch.nn.functional.pad(x, (0, more)) for x in (total, count))
        total[: len(losses)] += losses
        count[: len(losses)] += 1
    bounds = [0, *(2**power for power in range(5, (len(total) - 1).bit_length())), len(total)]
    return [
        {"from": low, "to": high, "loss": (total[low:high].sum() / count[low:high].sum()).item()}
        for low, high in itertools.pairwise(bounds) if high > low
    ]  # fmt: skip


def probe(haystack: Sequence[int], length: int, depth: float, encode: Callable[[str], list[int]], seed: int) -> Probe:
    """A row of ``length`` tokens of text, with a number told at a depth from 0 to 1, and asked for at its end."""
    dice = random.Random(seed)
    ask = encode(f"\nThe secret number of {dice.choice(NAMES)} is")
    answer = encode(f" {dice.randrange(10**4, 10**5)}")
    told = [*ask, *answer, *encode(".\n")]
    text = length - len(told) - len(ask) - len(answer)
    if text > len(haystack):
        fault = f"a row of {length} tokens needs {text} of text, and --rows has {len(haystack)}"
        raise SystemExit(f"{fault}: give smaller --lengths, or more rows")
    if text < 0:
        least = length - text
        raise SystemExit(
            f"a row of {length} tokens has no room for a number and a question, which take {least}: --lengths"
        )
    begin = dice.randrange(max(1, len(haystack) - text))
    around = list(haystack[begin : begin + text])
    place = round(depth * len(around))
    return [*around[:place], *told, *around[place:], *ask, *answer], answer


def needles(
    model: Any, haystack: Sequence[int], lengths: Sequence[int], trials: int, encode: Callable[[str], list[int]]
) -> list[dict[str, float]]:
    """The share of numbers that are found, by length and depth, and the mean loss of an answer's tokens."""
    found = []
    for length in lengths:
        for depth in DEPTHS:
            hits, losses = 0, 0.0
            for trial in range(trials):
                row, answer = probe(haystack, length, depth, encode, seed=trial)
                loss, right = scores(model, row)
                hits += bool(right[-len(answer) :].all())
                losses += loss[-len(answer) :].mean().item()
            found.append({"length": length, "depth": depth, "found": hits / trials, "loss": losses / trials})
    return found


def tables(results: dict[str, Any]) -> str:
    """Both tables, as Markdown."""
    lines = ["| positions | loss |", "|---|---|"]
    lines += [f"| {row['from']:,} to {row['to']:,} | {row['loss']:.4f} |" for row in results["loss"]]
    if results["needles"]:
        lines += ["", "| tokens | " + " | ".join(f"depth {depth:.0%}" for depth in DEPTHS) + " |"]
        lines += ["|---" * (len(DEPTHS) + 1) + "|"]
        for length in dict.fromkeys(row["length"] for row in results["needles"]):
            mine = [row for row in results["needles"] if row["length"] == length]
            lines.append(f"| {length:,} | " + " | ".join(f"{row['found']:.0%}" for row in mine) + " |")
    return "\n".join(lines)


def plot(results: dict[str, Any], beside: dict[str, dict[str, Any]], folder: Path) -> None:
    """Losses by position of these and earlier results, and a map of the numbers found."""

    def losses(axes: Any) -> None:
        for name, one in {**beside, folder.name: results}.items():
            axes.plot([row["to"] for row in one["loss"]], [row["loss"] for row in one["loss"]], marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="position in the row, up to", ylabel="loss, nats a token")
        axes.legend()

    def found(axes: Any) -> None:
        lengths = list(dict.fromkeys(row["length"] for row in results["needles"]))
        shares = [[row["found"] for row in results["needles"] if row["depth"] == depth] for depth in DEPTHS]
        image = axes.imshow(shares, vmin=0, vmax=1, aspect="auto", cmap="RdYlGn")
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_yticks(range(len(DEPTHS)), [f"{depth:.0%}" for depth in DEPTHS])
        axes.set(xlabel="tokens in the row", ylabel="depth of the number", title="numbers found")
        axes.figure.colorbar(image)

    if draw(folder / "loss.svg", losses) and results["needles"]:
        draw(folder / "needles.svg", found)


def evaluate(
    model: Any, tokenizer: Any, rows: Dataset, count: int, lengths: Sequence[int] | None, trials: int
) -> dict[str, Any]:
    """Both measures of a model, on every process.

    Args:
        rows: of prepare.py, without several texts in a row.

    Raises:
        SystemExit: rows have no tokens; or texts in a row do not see each other, so that a position says nothing.
    """
    if "input_ids" not in rows.column_names:
        got = ", ".join(rows.column_names)
        raise SystemExit(f"rows have the columns {got}: give rows of tokens (input_ids), as prepare.py makes them")
    if "seq_lengths" in rows.column_names:
        raise SystemExit("rows hold several texts that do not see each other: prepare them with --pack wrapped or none")
    model.eval()
    texts = [list(row) for row in rows["input_ids"]]
    check_logits(model, torch.tensor([texts[0]], device=model.device))
    longest = max(map(len, texts))
    wanted = lengths if lengths is not None else [longest // 8, longest // 4, longest // 2, longest]
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731  two places call it
    haystack = [token for text in texts for token in text]
    return {
        "loss": by_position(model, texts[:count]),
        "needles": needles(model, haystack, wanted, trials, encode) if trials else [],
    }


def main() -> None:
    options = parsed()
    state = PartialState(cpu=ON_CPU)
    try:
        settings = settings_of(options)
        model = load_model(settings)
    except BadRecipe as error:
        raise SystemExit(str(error)) from None
    if options.run is not None and settings["lora"] is not None:
        model = PeftModel.from_pretrained(model, options.run).get_base_model()  # its layers have the adapter
    if settings["quantization"] is None:  # else it is there already
        model = model.to(state.device)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], revision=settings["revision"])
    rows = Dataset.from_parquet(str(options.rows))
    results = evaluate(model, tokenizer, rows, options.count, options.lengths, options.trials)
    if state.is_main_process:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        print(tables(results), flush=True)
        beside = {folder.name: json.loads((folder / "results.json").read_text()) for folder in options.beside}
        plot(results, beside, options.output)
    state.destroy_process_group()


if __name__ == "__main__":
    main()
