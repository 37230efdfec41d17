"""Context-parallel attention for Hugging Face Transformers whose answer is the single-GPU answer at any ring size.

>>> import hf_ring_attn                                                     # registers "ring_fp32"
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="ring_fp32")

With ``parallelism_config_cp_size: N`` in accelerate's launch config, Trainer, TRL's SFTTrainer and plain loops then
train on sequences that are sharded over N ranks.
"""

from __future__ import annotations

from . import biases
from .attention.function import ring_attention
from .config import RingConfig
from .errors import Refused, RingAttentionError
from .integration import install, uninstall
from .integration.batch.shard import Sharded, shard
from .integration.batch.whole_row_calls import WholeRows, whole_rows
from .integration.context.model_record import configure
from .sharding.layout import positions

__version__ = "0.3.11"

__all__ = [
    "Refused",
    "RingAttentionError",
    "RingConfig",
    "Sharded",
    "WholeRows",
    "biases",
    "configure",
    "install",
    "positions",
    "ring_attention",
    "shard",
    "uninstall",
    "whole_rows",
]

install()
