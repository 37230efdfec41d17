"""Images for SFTTrainer: processors made of a tokenizer and an image processor from here, and rows with pictures."""

from __future__ import annotations

import random
from typing import Any

from datasets import Dataset, Features, Image, List
from PIL import Image as Pictures
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Gemma3Processor, PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin, Qwen2_5_VLProcessor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.helpers.models.tiny_models import VISION, tiny

SPECIALS = ["<eos>", "<|user|>", "<|assistant|>", "<begin>", "<end>", "<image>", "<video>"]
BEGIN, END, IMAGE, VIDEO = 3, 4, 5, 6
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}PICTURE{% elif message['role'] == 'assistant' %}"
    "{% generation %}{{ part['text'] + eos_token }}{% endgeneration %}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
PROMPTS = {name: "<begin>" if name == "gemma3 vision" else "<begin><image><end>" for name in VISION}
"""What stands for a picture in a text that is given to a processor."""


class ImagesOnly(Qwen2_5_VLProcessor):
    """Qwen's processor without its part for videos, which needs torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        self.image_token, self.image_token_id = tokenizer.image_token, tokenizer.image_token_id
        self.video_token, self.video_token_id = tokenizer.video_token, tokenizer.video_token_id
        start: Any = ProcessorMixin.__init__
        start(self, image_processor, tokenizer, chat_template=chat_template)


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, with the markers of images."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_ = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate([*SPECIALS, *letters])}, merges=[]))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    bytes_.add_special_tokens(SPECIALS)
    kind: Any = PreTrainedTokenizerFast
    markers = {"boi_token": "<begin>", "eoi_token": "<end>", "image_token": "<image>", "video_token": "<video>"}
    made: PreTrainedTokenizerFast = kind(
        tokenizer_object=bytes_, eos_token="<eos>", pad_token="<eos>", extra_special_tokens=markers
    )
    return made


def processor(name: str) -> ProcessorMixin:
    """Of the family of this model of `tiny_models.VISION`: the real class, with its real image processor."""
    template = CHAT_TEMPLATE.replace("PICTURE", PROMPTS[name])
    if name == "gemma3 vision":
        images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
        return Gemma3Processor(images, tokenizer(), chat_template=template, image_seq_length=4)
    patches = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 512})
    return ImagesOnly(patches, tokenizer(), template)


def model(name: str, attention: str) -> PreTrainedModel:
    _, own = VISION[name]
    text = {**own["text_config"], "vocab_size": 256 + len(SPECIALS), "max_position_embeddings": 256}
    if name == "gemma3 vision":
        markers = {"image_token_index": IMAGE, "boi_token_index": BEGIN, "eoi_token_index": END}
    else:
        markers = {
            "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": BEGIN,
            "vision_end_token_id": END,
        }  # fmt: skip
    return tiny(name, attention, text_config=text, **markers)


def picture(seed: int) -> Pictures.Image:
    """Noise, of another size for each seed."""
    width, height = 8 + seed % 3 * 8, 8 + seed % 2 * 8
    return Pictures.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height))


def with_pictures(dataset: Dataset, prompt: str, none: int = 0) -> Dataset:
    """The rows of a dataset of `sft_jobs.rows`, with a picture in each.

    Args:
        prompt: what to put before the prompts of rows that are not conversations.
        none: every so many rows have no picture; 0: all have one.
    """
    made = []
    for number, row in enumerate(dataset.to_list()):
        images = [] if none and number // none % 2 else [picture(number)]
        if isinstance(row.get("prompt"), str):
            row["prompt"] = (prompt if images else "") + row["prompt"]
        made.append({**row, "images": images})
    features = Features({**dataset.features, "images": List(Image())})
    return Dataset.from_list(made, features=features)
