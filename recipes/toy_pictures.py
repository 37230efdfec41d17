"""A tiny model of the Gemma 3 family that reads pictures, with its processor: for the recipe with pictures."""

from __future__ import annotations

from pathlib import Path

from toy import byte_tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText, Gemma3Processor, set_seed
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

SPECIALS = ["<end>", "<user>", "<assistant>", "<begin>", "<stop>", "<image>"]
MARKERS = {"boi_token": "<begin>", "eoi_token": "<stop>", "image_token": "<image>"}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<begin>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% if message['role'] == 'assistant' %}{{ '<end>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
SIDE, PATCH, TOKENS = 16, 4, 4
"""Pixels of a picture's side and of a patch's; tokens of a picture."""


def write_model(folder: Path, length: int) -> None:
    """Writes a model with random weights for rows of ``length`` tokens, and its processor."""
    set_seed(0)
    text = {
        "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32,
        "num_key_value_heads": 1, "vocab_size": 256 + len(SPECIALS), "max_position_embeddings": length,
        "sliding_window": length // 4, "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0,
        "bos_token_id": None, "eos_token_id": 0,
    }  # fmt: skip
    tower = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": SIDE, "patch_size": PATCH,
    }  # fmt: skip
    config = AutoConfig.for_model(
        "gemma3", text_config=text, vision_config=tower, mm_tokens_per_image=TOKENS, eos_token_id=0,
        image_token_index=SPECIALS.index("<image>"), boi_token_index=SPECIALS.index("<begin>"),
        eoi_token_index=SPECIALS.index("<stop>"),
    )  # fmt: skip
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    images = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    words = byte_tokenizer(SPECIALS, extra_special_tokens=MARKERS)
    Gemma3Processor(images, words, chat_template=CHAT_TEMPLATE, image_seq_length=TOKENS).save_pretrained(folder)
