"""Loads a model for the commands: its config alone, its modules without memory, or its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ... import errors


def load_config(source: str) -> Any:
    """Reads the transformers config of a model of the Hub, of a folder, or of a config file.

    Raises:
        UnknownModel: there is none, or transformers does not know its kind.
    """
    try:
        if Path(source).is_file():
            entries = json.loads(Path(source).read_text())
            return AutoConfig.for_model(entries.pop("model_type"), **entries)
        return AutoConfig.from_pretrained(source)
    except Exception as error:  # a hub, a file system and every config class raise their own
        raise errors.UnknownModel(source, f"{type(error).__name__}: {_first_line(error)}") from error


def empty_model(config: Any) -> nn.Module:
    """Builds the causal language model of a config on the meta device: shapes without memory.

    Raises:
        UnknownModel: transformers has no causal language model for it.
    """
    return _built(config, torch.device("meta"), torch.float32, None)


def random_model(config: Any, dtype: torch.dtype, implementation: str) -> nn.Module:
    """Builds the causal language model of a config on the CPU, with random weights.

    Raises:
        UnknownModel: as for `empty_model`.
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
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=dtype, attn_implementation=implementation
        )
    except OSError as error:
        if "no file named" in str(error) or "does not appear to have a file" in str(error):
            return None
        raise errors.UnknownModel(source, _first_line(error)) from error
    return model


def _built(config: Any, device: torch.device, dtype: torch.dtype, implementation: str | None) -> nn.Module:
    try:
        with device:
            auto: Any = AutoModelForCausalLM
            model: nn.Module = auto.from_config(config, dtype=dtype, attn_implementation=implementation)
    except Exception as error:  # models of some configs cannot be built, each for a reason of its own
        raise errors.UnknownModel(type(config).__name__, _first_line(error)) from error
    return model


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:200]
