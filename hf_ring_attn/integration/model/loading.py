"""Loads a model for the commands: its config alone, its modules without memory, or its weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from ... import errors


def load_config(source: str) -> Any:
    """Reads the transformers config of a model of the Hub, of a folder, or of a config file.

    Raises:
        UnknownModel: there is none, transformers does not know its kind, or has no language model of it.
        EncoderDecoder: it is one, which no ring trains.
    """
    if _is_missing_path(source):
        raise errors.UnknownModel(source, "no such file or folder")
    try:
        if Path(source).is_file():
            entries = json.loads(Path(source).read_text())
            config = AutoConfig.for_model(entries.pop("model_type"), **entries)
        else:
            config = AutoConfig.from_pretrained(source)
    except Exception as error:  # a hub, a file system and every config class raise their own
        raise errors.UnknownModel(source, f"{type(error).__name__}: {_first_line(error)}") from error
    config.name_or_path = source
    if getattr(config, "is_encoder_decoder", False):
        raise errors.EncoderDecoder(source, config.model_type)
    if _auto_class(config) is None:
        raise errors.UnknownModel(source, f"transformers has no causal language model of kind {config.model_type}")
    return config


def class_name(config: Any) -> str:
    """The auto class that makes this config's model: the causal one, or that of images and text."""
    return str(_auto_class(config).__name__)


def empty_model(config: Any, implementation: str | None = None) -> nn.Module:
    """Builds the causal language model of a config on the meta device: shapes without memory.

    Raises:
        UnknownModel: transformers cannot build it. Refused: ``implementation`` is the ring's, which it cannot take.
    """
    return _built(config, torch.device("meta"), torch.float32, implementation)


def random_model(config: Any, dtype: torch.dtype, implementation: str) -> nn.Module:
    """Builds the causal language model of a config on the CPU, with random weights.

    Raises:
        As `empty_model`.
    """
    return _built(config, torch.device("cpu"), dtype, implementation)


def trained_model(source: str, config: Any, dtype: torch.dtype, implementation: str) -> nn.Module | None:
    """Loads the weights of ``source``; None if it is a config file, or a folder or repository without weights.

    Raises:
        UnknownModel: there are weights, and they cannot be loaded.
    """
    if Path(source).is_file():
        return None
    try:
        model: nn.Module = _auto_class(config).from_pretrained(
            source, config=config, dtype=dtype, attn_implementation=implementation
        )
    except Exception as error:  # file formats and quantizers raise their own
        if "no file named" in str(error) or "does not appear to have a file" in str(error):
            return None
        raise errors.UnknownModel(source, _first_line(error)) from error
    return model


def _auto_class(config: Any) -> Any:
    """None if transformers has no causal language model of this config, nor one of images and text."""
    kinds = {
        AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    }
    return next((auto for auto, known in kinds.items() if type(config) in known), None)


def _is_missing_path(source: str) -> bool:
    """Returns True for what can only be a path, of which there is none; names of the Hub are "name" or "owner/name"."""
    path, begins = Path(source), source.partition("/")[0]
    is_path = source.endswith((".json", "/")) or source.count("/") > 1 or begins in ("", ".", "..", "~")
    return (is_path or ("/" in source and path.parent.is_dir())) and not path.exists()


def _built(config: Any, device: torch.device, dtype: torch.dtype, implementation: str | None) -> nn.Module:
    try:
        with device:
            model: nn.Module = _auto_class(config).from_config(config, dtype=dtype, attn_implementation=implementation)
    except errors.Refused:
        raise
    except Exception as error:  # models of some configs cannot be built, each for a reason of its own
        raise errors.UnknownModel(config.name_or_path or type(config).__name__, _first_line(error)) from error
    return model


def _first_line(error: Exception) -> str:
    """The first line with words; what only heads others, as in "Validation error:", goes on in the next line."""
    return next(filter(None, re.sub(r":\s*\n\s*", ": ", str(error)).splitlines()), "")[:200]
