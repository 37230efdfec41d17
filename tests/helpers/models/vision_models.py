"""Tiny models of many families that take images, each with two rows of text and an image in either."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

import hf_ring_attn
from hf_ring_attn.integration.context.mesh import ring_group
from tests.helpers.jobs.plain_jobs import Batch, gradients_of, own_loss
from tests.helpers.jobs.runs import Mesh, Row, Rows, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, numbers, trainer_of
from tests.sweep.configs import randomise, shrunk

LENGTH = 23
IMAGE = 95
VIT = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
QWEN = {
    "patch_size": 4, "depth": 2, "num_heads": 2, "hidden_size": 16, "intermediate_size": 24, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "in_channels": 3, "out_hidden_size": 32,
}  # fmt: skip
MARKERS = {
    "video_token_id": 96, "vision_start_token_id": 93, "vision_end_token_id": 94, "image_start_token_id": 93,
    "image_end_token_id": 94, "video_start_token_id": 91, "video_end_token_id": 92, "boi_token_id": 93,
    "boi_token_index": 93, "eoi_token_id": 94, "eoi_token_index": 94, "audio_token_id": 92,
}  # fmt: skip
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}


def pixels(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def pictures(size: int = 16) -> Batch:
    return {"pixel_values": pixels(2, 3, size, size)}


def patches() -> Batch:
    """As Qwen's processors make them: of two images of 4 x 4 patches, four tokens each."""
    return {"image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]), "pixel_values": pixels(32, 96)}


def places() -> Tensor:
    """[2, 16, 2]: column and row of each patch of two images of 4 x 4."""
    across, down = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy")
    return torch.stack([across, down], -1).reshape(1, 16, 2).repeat(2, 1, 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class Kind:
    """A family.

    Args:
        name: of the class, before ForConditionalGeneration; config: what it has beyond sizes that are shrunk by name.
        images: inputs of two images; tokens: how many of them stand for one, from where they do in each row.
        types: the name of the input that tells tokens of images, if there is one.
        dtype: float32 where the host's code takes no other. length: of the rows.
    """

    name: str
    config: dict[str, Any]
    images: Callable[[], Batch] = pictures
    tokens: int = 4
    starts: tuple[int, int] = (4, 9)
    types: str = ""
    dtype: torch.dtype = torch.float64
    length: int = LENGTH


GEMMA4 = {
    "model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "pooling_kernel_size": 2, "patch_size": 4,
    "position_embedding_size": 16,
}  # fmt: skip
MUSE = {
    "out_hidden_size": 64, "projector_hidden_size": 48,
    "vision_config": {
        **VIT, "pos_emb_height": 2, "pos_emb_width": 2, "max_position_embeddings": 4,
        "layer_types": ["window_attention", "full_attention"],
    },
}  # fmt: skip
KINDS: dict[str, Kind] = {
    "LLaVA": Kind(name="Llava", config={"image_seq_length": 4, "vision_config": {**VIT, "image_size": 8}},
                  images=lambda: pictures(8)),
    "LLaVA-NeXT": Kind(
        name="LlavaNext", tokens=10,
        config={"image_seq_length": 4, "image_grid_pinpoints": [[8, 8]], "vision_config": {**VIT, "image_size": 8}},
        images=lambda: {"pixel_values": pixels(2, 2, 3, 8, 8), "image_sizes": torch.full((2, 2), 8)},
    ),
    "Idefics 3": Kind(name="Idefics3", config={"scale_factor": 2, "vision_config": VIT},
                      images=lambda: {"pixel_values": pixels(2, 1, 3, 16, 16)}),
    "SmolVLM": Kind(name="SmolVLM", config={"scale_factor": 2, "vision_config": VIT},
                    images=lambda: {"pixel_values": pixels(2, 1, 3, 16, 16)}),
    "InternVL": Kind(
        name="InternVL",
        config={"image_seq_length": 4, "downsample_ratio": 0.5,
                "vision_config": {**VIT, "image_size": [16, 16], "patch_size": [4, 4]}},
    ),
    "Mistral 3": Kind(name="Mistral3", config={"spatial_merge_size": 2, "vision_config": {**VIT, "head_dim": 8}},
                      images=lambda: {**pictures(), "image_sizes": torch.full((2, 2), 16)}),
    "Qwen2-VL": Kind(
        name="Qwen2VL", types="mm_token_type_ids", images=patches,
        config={"text_config": {"rope_parameters": SECTIONS},
                "vision_config": {**QWEN, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}},
    ),
    "Qwen3-VL, experts": Kind(
        name="Qwen3VLMoe", types="mm_token_type_ids", images=patches, dtype=torch.float32,
        config={"text_config": {"rope_parameters": SECTIONS},
                "vision_config": {**QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}},
    ),
    "GLM-4V": Kind(
        name="Glm4v", types="mm_token_type_ids", images=patches,
        config={"text_config": {"rope_parameters": {**SECTIONS, "partial_rotary_factor": 1.0}},
                "vision_config": {**QWEN, "image_size": 16}},
    ),
    "Llama 4": Kind(
        name="Llama4",
        config={"text_config": {"num_hidden_layers": 2, "no_rope_layers": [1, 0]}, "vision_config": {
            **VIT, "intermediate_size": 64, "pixel_shuffle_ratio": 0.5, "projector_input_dim": 16,
            "projector_output_dim": 16, "vision_output_dim": 16,
        }},
    ),
    "Gemma 4, inputs for each layer": Kind(
        name="Gemma4", types="mm_token_type_ids", config={"vision_config": GEMMA4},
        images=lambda: {"pixel_values": pixels(2, 16, 48), "image_position_ids": places()},
    ),
    "Gemma 4, images both ways": Kind(
        name="Gemma4", types="mm_token_type_ids",
        config={"vision_config": GEMMA4,
                "text_config": {"use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0}},
        images=lambda: {"pixel_values": pixels(2, 16, 48), "image_position_ids": places()},
    ),
    "PaliGemma, a mask that is handed on": Kind(
        name="PaliGemma", starts=(0, 0), images=lambda: {**pictures(8), "token_type_ids": prefix(10)},
        config={"projection_dim": 32, "vision_config": {**VIT, "image_size": 8, "projection_dim": 32}},
    ),
    "Aya Vision": Kind(name="AyaVision", config={"downsample_factor": 2, "vision_config": VIT}),
    "LFM2-VL": Kind(
        name="Lfm2Vl",
        config={"downsample_factor": 2, "projector_hidden_size": 64, "vision_config": {**VIT, "num_patches": 16},
                "text_config": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}},
        images=lambda: {"pixel_values": pixels(2, 16, 48), "spatial_shapes": torch.full((2, 2), 4),
                        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.int64)},
    ),
    "LFM3-VL, convolutions in its tower": Kind(
        name="Lfm3Vl", images=patches,
        config={"projector_hidden_size": 64,
                "vision_config": {**VIT, "num_key_value_heads": 1, "layer_types": ["conv", "full_attention"]},
                "text_config": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}},
    ),
    "Muse Glimmer, windows in its tower": Kind(name="MuseGlimmer", images=patches, config=MUSE),
    "Muse Spark, windows in its tower": Kind(name="MuseSpark", images=patches, config=MUSE, dtype=torch.float32),
    "DeepSeek-VL, a tower with a table of attentions": Kind(
        name="DeepseekVLHybrid",
        config={"vision_config": {**VIT, "image_size": 8}, "high_res_vision_config": {
            **VIT, "output_channels": 4, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 24}},
        images=lambda: {**pictures(8), "high_res_pixel_values": pixels(2, 3, 16, 16)},
    ),
    "DeepSeek-OCR 2": Kind(
        name="DeepseekOcr2", tokens=145, starts=(5, 20), length=171, images=lambda: pictures(32), dtype=torch.float32,
        config={
            "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_hidden_layers": 2, "num_experts_per_tok": 2},
            "vision_config": {
                "sam_config": {
                    **VIT, "image_size": 32, "output_channels": 16, "window_size": 2, "global_attn_indexes": [1],
                    "mlp_dim": 24, "downsample_channels": [16, 16],
                },
                "encoder_config": {**VIT, "num_key_value_heads": 1, "vocab_size": 8},
            },
        },
    ),
    "Mistral Large 4, an indexer and shared keys": Kind(
        name="MistralLarge4", images=lambda: {**pictures(), "image_sizes": torch.full((2, 2), 16)},
        config={"spatial_merge_size": 2, "vision_config": {**VIT, "head_dim": 8}, "text_config": {
            "num_hidden_layers": 4, "mlp_layer_types": ["dense"] * 4, "kv_source_layers": [0, 1, 0, 1],
            "no_rope_layers": [1, 0, 1, 0], "indexer_types": ["full", "full", "shared", "full"], "index_n_heads": 32,
            "index_topk": 6, "num_key_value_heads": 4,
        }},
    ),
    "HY V4, an indexer": Kind(
        name="HYV4VL", tokens=6, types="mm_token_type_ids",
        images=lambda: {**patches(), "pixel_values": pixels(32, 48)},
        config={"vision_config": {**VIT, "out_hidden_size": 32, "spatial_merge_size": 2, "num_channels": 3},
                "text_config": {
            "num_hidden_layers": 3, "mlp_layer_types": ["dense"] * 3, "indexer_types": ["full", "shared", "full"],
            "index_n_heads": 32, "index_topk": 6, "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        }},
    ),
    "GLM-5.3-Flash, an indexer of pooled keys beside linear attention": Kind(
        name="Glm5Next", types="mm_token_type_ids", images=patches,
        config={"vision_config": {**QWEN, "projection_intermediate_size": 24}, "text_config": {
            "num_hidden_layers": 4, "mlp_layer_types": ["dense"] * 4,
            "indexer_types": ["full", "full", "shared", "full"],
            "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
            "index_n_heads": 32, "index_head_dim": 8, "index_topk": 6, "index_kpool": 3, "num_key_value_heads": 4,
            "qk_rope_head_dim": 0, "linear_head_dim": 8, "linear_num_heads": 2, "hc_mult": 2,
        }},
    ),
    "Aria, images as answers of a cross attention": Kind(
        name="Aria", config={"projector_patch_to_query_dict": {16: 4}, "vision_config": VIT}, dtype=torch.float32,
    ),
    "GOT-OCR 2": Kind(
        name="GotOcr2", images=lambda: pictures(32),
        config={"image_seq_length": 4, "vision_config": {
            **VIT, "output_channels": 16, "image_size": 32, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 24,
        }},
    ),
}  # fmt: skip
"""By what people call them; models that `tiny_models` has are left out."""


def prefix(length: int) -> Tensor:
    return (torch.arange(LENGTH) >= length).long().repeat(2, 1)


def batch_of(kind: Kind, flipped: bool = False, right: int = 0, seed: int = 2) -> Batch:
    """Two rows; ``flipped``: with their images exchanged; ``right``: padding after the second; ``seed``: of text."""
    ids = torch.randint(3, 90, (2, kind.length), generator=torch.Generator().manual_seed(seed))
    for row, start in zip(ids, kind.starts, strict=True):
        row[start : start + kind.tokens] = IMAGE
    batch = {"input_ids": ids, **kind.images()}
    if right:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, kind.length - right :] = 0
    if flipped:
        batch["pixel_values"] = batch["pixel_values"].flip(0)
    if kind.types:
        batch[kind.types] = (ids == IMAGE).long()
    return {name: x.to(kind.dtype) if x.is_floating_point() else x for name, x in batch.items()}


def build(kind: Kind, attention: str) -> PreTrainedModel:
    model_class: Any = getattr(transformers, f"{kind.name}ForConditionalGeneration")
    own = {"image_token_id": IMAGE, "image_token_index": IMAGE, **MARKERS, **kind.config}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = model_class.config_class(**shrunk(model_class.config_class, own, {}, causal=True))
        torch.manual_seed(0)
        made: PreTrainedModel = model_class._from_config(config, attn_implementation=attention, dtype=torch.float32)
    randomise(made, {})
    for module in made.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if kind.dtype == torch.float64:
        made.double()
    made.train()
    return made


Answer = tuple[Tensor, Tensor, dict[str, Tensor]]
"""Logits [2, S, V], the model's own loss, and the gradients of `plain_jobs.own_loss`."""


def labelled(batch: Batch) -> Batch:
    labels = batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, -100)
    return {**batch, "labels": labels.masked_fill(batch.get("attention_mask", torch.ones(1)) == 0, -100)}


def alone(name: str, flipped: bool = False, right: int = 0) -> Answer:
    made: Any = build(KINDS[name], "eager")
    batch = batch_of(KINDS[name], flipped, right)
    logits = made(**batch, use_cache=False).logits
    own_loss(logits, batch).backward()
    with torch.no_grad():
        return logits.detach(), made(**labelled(batch), use_cache=False).loss, gradients_of(made)


def in_a_ring(name: str, right: int = 0) -> Answer:
    made: Any = build(KINDS[name], "ring_fp32")
    batch = batch_of(KINDS[name], right=right)
    sharded = hf_ring_attn.shard(batch)
    with sharded:
        logits = sharded.gather(made(**sharded.inputs).logits)
    own_loss(logits, batch).backward()
    sharded.reduce_gradients(made)
    again = hf_ring_attn.shard(labelled(batch))
    with again, torch.no_grad():
        loss = again.reduce(made(**again.inputs).loss)
    return logits.detach(), loss, gradients_of(made)


@dataclass(frozen=True, kw_only=True)
class Pairs(Rows):
    """Samples that are batches: two rows of a family, with other text, images and labels in each."""

    kind: str

    def make(self) -> list[Row]:
        batches = [
            labelled(batch_of(KINDS[self.kind], flipped=bool(at % 2), seed=self.seed + at)) for at in range(self.count)
        ]
        for at, batch in enumerate(batches):
            batch["labels"][1, : 3 * at] = -100
        return batches

    def collate(self, rows: list[Row]) -> Row:
        (batch,) = rows
        return batch


def trained(name: str, mesh: Mesh) -> list[dict[str, float]]:
    """What Trainer logs of three steps and an evaluation."""
    arguments = {
        "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "learning_rate": 0.0005, "eval_steps": 3,
        "include_num_input_tokens_seen": "no",
    }  # fmt: skip
    rows, others = Pairs(kind=name, count=3), Pairs(kind=name, count=2, seed=7)
    run = Run(why=name, rows=rows, evaluated=others, steps=3, arguments=arguments)
    with launched(mesh), a_folder(None) as folder:
        made = build(KINDS[name], "ring_fp32" if mesh.cp > 1 else "eager")
        trainer = trainer_of(run, mesh, folder, model=made)
        assert mesh.cp == 1 or ring_group(trainer.accelerator).size() == mesh.cp  # type: ignore[union-attr]
        trainer.train()
        return numbers(trainer.state.log_history)
