r"""Merges an adapter into its model, and checks the merged model's logits against the adapter's before it is saved.

    python recipes/merge.py outputs/lora-128k merged

The weights of base + adapter are rounded to the model's dtype. How far that moves the logits is measured: the merged
weights are moved by one unit in their last place, at random. A difference from the adapter's logits that is three times
as large is refused; not twice, since activations are rounded, too.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import prepare
import torch
from peft import PeftModel
from settings import BadRecipe
from torch import Tensor
from train import SAVED, load_model, saved_at, saved_settings
from transformers import AutoTokenizer

ALLOWED = 3
OF_ANOTHER_PROGRAM = f"""{{0}}: an adapter of another program than train.py, which writes {SAVED}. PEFT merges it:
    from peft import AutoPeftModelForCausalLM
    model = AutoPeftModelForCausalLM.from_pretrained("{{0}}", dtype="bfloat16")
    model.merge_and_unload().save_pretrained("merged")"""
SERVE = """
    vllm serve {folder} --max-model-len {tokens}
    python -m sglang.launch_server --model-path {folder} --context-length {tokens}
    transformers serve {folder}
"""


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the output folder of train.py, or one of its checkpoints")
    parser.add_argument("output", type=Path, help="a folder for the merged model")
    parser.add_argument("--tokens", type=int, default=512, help="in the text that logits are compared on")
    return parser.parse_args()


def settings_of(run: Path) -> dict[str, Any]:
    """The settings of a run; its model is loaded whole, not quantized, without a ring.

    Raises:
        SystemExit: it is no run of an adapter.
    """
    if saved_at(run) is None and (run / "adapter_config.json").is_file():
        raise SystemExit(OF_ANOTHER_PROGRAM.format(run))
    settings = saved_settings(run)
    if settings["lora"] is None:
        raise SystemExit(f"{run}: all weights were trained, so there is nothing to merge; the folder is the model")
    return {**settings, "quantization": None, "attention": "sdpa", "ring": {}}


def merged_weights(model: Any) -> list[Tensor]:
    """The weights that an adapter's matrices are added to."""
    return [part.get_base_layer().weight for part in model.modules() if hasattr(part, "lora_A")]


def distance(one: Tensor, other: Tensor) -> float:
    """The root of the mean square of a difference of logits."""
    return float((one.double() - other.double()).square().mean().sqrt())


@torch.no_grad()
def merge(model: Any, tokens: Tensor, folder: Path) -> tuple[Any, dict[str, float]]:
    """Merges, and saves into ``folder``.

    Returns:
        The merged model, whose weights are moved afterwards, and distances of logits: "merged" from the adapter's,
        "rounding" of weights that are moved by a unit in their last place, and "adapter" from the model without one.
    """
    model.eval()
    with_adapter = model(input_ids=tokens).logits
    with model.disable_adapter():
        without = model(input_ids=tokens).logits
    weights = merged_weights(model)
    model = model.merge_and_unload(safe_merge=True)
    merged = model(input_ids=tokens).logits
    model.save_pretrained(folder)
    torch.manual_seed(0)
    for weight in weights:
        unit = torch.finfo(weight.dtype).eps
        weight.mul_(1 + unit * (2 * torch.randint(0, 2, weight.shape, device=weight.device) - 1).to(weight.dtype))
    moved = model(input_ids=tokens).logits
    found = {"merged": distance(merged, with_adapter), "rounding": distance(moved, merged)}
    return model, {**found, "adapter": distance(with_adapter, without)}


def main() -> None:
    options = parsed()
    if options.output.exists():
        raise SystemExit(f"{options.output} exists already")
    try:
        settings = settings_of(options.run)
        base = load_model(settings)
    except BadRecipe as error:
        raise SystemExit(str(error)) from None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = PeftModel.from_pretrained(base, options.run).to(device)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], revision=settings["revision"])
    text = "\n".join(file.read_text(errors="replace") for file in prepare.stdlib()[:8])
    tokens = torch.tensor([tokenizer.encode(text, add_special_tokens=False)[: options.tokens]], device=device)
    part = options.output.with_name(f"{options.output.name}.part")
    model, found = merge(model, tokens, part)
    print(f"logits, root mean square: merged - adapter {found['merged']:.3g}, by one unit of rounding "
          f"{found['rounding']:.3g}, adapter - base {found['adapter']:.3g}")  # fmt: skip
    if found["merged"] > ALLOWED * found["rounding"]:
        shutil.rmtree(part)
        raise SystemExit("the merged model's logits differ from the adapter's by more than rounding: nothing is saved")
    if found["adapter"] < ALLOWED * found["rounding"]:
        print("the adapter moves logits hardly more than rounding does: merging loses a part of it; serve it by itself")
    tokenizer.save_pretrained(part)
    part.replace(options.output)
    limit = model.config.get_text_config().max_position_embeddings
    print(f"saved in {options.output}; to serve it, one of:" + SERVE.format(folder=options.output, tokens=limit))


if __name__ == "__main__":
    main()
