"""Settings of a recipe: one YAML file, every key of which is known, and no two of which contradict each other."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import inspect
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from peft import LoraConfig
from transformers import BitsAndBytesConfig
from trl import SFTConfig

from hf_ring_attn import RingConfig
from hf_ring_attn.errors import BadOption

SECTIONS: dict[str, str] = {
    "model": "a model of the Hub, or a folder",
    "revision": "of the model",
    "dtype": "bfloat16, float16 or float32: what weights are loaded in",
    "attention": "ring_fp32, or another attn_implementation to compare with",
    "config": "entries of the model's config.json that are changed, such as rope_parameters",
    "quantization": "arguments of BitsAndBytesConfig",
    "lora": "arguments of LoraConfig; without it all weights are trained",
    "compile": "layers: torch.compile each layer of the decoder, in place; null: none",
    "ring": "options of hf_ring_attn.RingConfig",
    "data": "train and eval: files of prepare.py, or of pictures.py",
    "training": "arguments of SFTConfig (and TrainingArguments)",
    "toy": "the config that --toy takes in place of the model's",
}
DTYPES = ("bfloat16", "float16", "float32")
COMPILED = ("layers",)
CHECKPOINTING_NAMES = ("activation_checkpointing", "gradient_checkpointing")
"""Two names of one argument of TrainingArguments: since transformers 5.23, and before. A recipe may use either."""
CHECKPOINTING = next(name for name in CHECKPOINTING_NAMES if name in SFTConfig.__dataclass_fields__)
DECIDED_ELSEWHERE = {
    **dict.fromkeys(("packing", "packing_strategy", "padding_free", "eval_packing", "pad_to_multiple_of"),
                    "prepare.py packs, and train.py reads from its file how"),
    **dict.fromkeys(("fsdp", "fsdp_config", "deepspeed", "parallelism_config", "accelerator_config", "use_cpu"),
                    "the launch config says how processes share the work"),
    "model_init_kwargs": "the keys model, revision, dtype and config stand for it",
}  # fmt: skip
"""Arguments of SFTConfig that a recipe leaves out, with the reason."""
NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    **dict.fromkeys(("lora.r", "training.max_length", "training.per_device_train_batch_size",
                     "training.per_device_eval_batch_size", "training.gradient_accumulation_steps"),
                    (lambda number: number >= 1, "at least 1")),
    "training.max_steps": (lambda number: number >= 1 or number == -1, "at least 1, or -1 to count epochs"),
    "training.num_train_epochs": (lambda number: number > 0, "more than 0"),
    "lora.lora_dropout": (lambda number: 0 <= number < 1, "at least 0 and less than 1"),
}  # fmt: skip
"""Numbers that peft and transformers take without a check, and what they need."""


class BadRecipe(ValueError):
    """The settings of a recipe cannot be used; its text names every key that is at fault."""

    def __init__(self, where: object, faults: Sequence[str]) -> None:
        super().__init__("\n".join([f"{where} cannot be used:", *(f"  {fault}" for fault in faults)]))


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-4 is a number and a key that stands twice is an error; PyYAML has it otherwise."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]  # type: ignore[no-untyped-call]
    twice = sorted({str(key) for key in keys if keys.count(key) > 1})
    if twice:
        raise yaml.constructor.ConstructorError(None, None, f"{', '.join(twice)} stands twice", node.start_mark)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def _parse(text: str) -> Any:
    return yaml.load(text, _Loader)


def read(path: Path, changes: Iterable[str] = ()) -> dict[str, Any]:
    """Reads and checks a recipe.

    Args:
        changes: such as "training.max_steps=3": a key, with dots between levels, and its value in YAML.

    Returns:
        All sections, those that were left out with their default; arguments have the installed SFTConfig's names.

    Raises:
        BadRecipe: a key is unknown, or contradicts another; all of them are named.
    """
    try:
        given = _parse(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise BadRecipe(path, [str(error)]) from None
    if not isinstance(given, dict):
        raise BadRecipe(path, ["it is no table of keys and values"])
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise BadRecipe(path, [f"--set {change}: write KEY=VALUE"])
        *levels, last = name.split(".")
        place = given
        for level in levels:
            below = place.get(level) or {}
            if not isinstance(below, dict):
                raise BadRecipe(path, [f"--set {change}: {level} is {below!r}, no table of keys and values"])
            place[level] = place = dict(below)
        try:
            place[last] = _parse(value)
        except yaml.YAMLError as error:
            raise BadRecipe(path, [f"--set {change}: {error}"]) from None
    return checked(given, path)


def checked(given: dict[str, Any], where: object = "the recipe") -> dict[str, Any]:
    """Returns all sections of settings that can be used.

    Raises:
        BadRecipe: as in `read`.
    """
    faults = list(_unknown("", given, SECTIONS))
    settings: dict[str, Any] = {
        "model": None, "revision": None, "dtype": "bfloat16", "attention": "ring_fp32", "config": {},
        "quantization": None, "lora": None, "compile": None, "ring": {}, "data": {}, "training": {}, "toy": {}, **given,
    }  # fmt: skip
    top = {"model": str | None, "revision": str | None, "attention": str}
    wrong = list(_mistyped("", {key: settings[key] for key in top}, top))
    training = _kinds(SFTConfig)
    training |= {key: training.get(name, Any) for key, name in _checkpointing_keys().items()}
    for section, allowed in {
        "quantization": _kinds_of_defaults(BitsAndBytesConfig), "lora": _kinds(LoraConfig), "ring": _kinds(RingConfig),
        "data": {"train": str, "eval": str}, "training": training, "config": None, "toy": None,
    }.items():  # fmt: skip
        values = settings[section]
        if values is None and section in ("quantization", "lora"):
            continue
        if not isinstance(values, dict):
            raise BadRecipe(where, [*faults, f"{section}: {values!r} is no table of keys and values"])
        if allowed is not None:
            faults += _unknown(f"{section}.", values, allowed)
            # YAML reads the word no as false
            settings[section] = {key: "no" if value is False and "no" in _choices(allowed.get(key)) else value
                                 for key, value in values.items()}  # fmt: skip
            wrong += _mistyped(f"{section}.", settings[section], allowed)
    faults += wrong or _contradictions(settings)
    faults += [] if faults else _refused(settings)
    if faults:
        raise BadRecipe(where, faults)
    settings["training"] = {_checkpointing_keys().get(key, key): value for key, value in settings["training"].items()}
    return settings


def _checkpointing_keys() -> dict[str, str]:
    """Each key for checkpointing, and the key that the installed SFTConfig has for it."""
    return {f"{name}{end}": f"{CHECKPOINTING}{end}" for name in CHECKPOINTING_NAMES for end in ("", "_kwargs")}


def _unknown(prefix: str, given: Iterable[Any], allowed: Iterable[str]) -> Iterable[str]:
    for key in given:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, 1)
            yield f"{prefix}{key}: there is no such key" + (f"; the nearest is {prefix}{near[0]}" if near else "")


def _kinds(options: type) -> dict[str, Any]:
    """The type of each argument of a dataclass."""
    hints = get_type_hints(options)
    return {field.name: hints[field.name] for field in dataclasses.fields(options) if field.init}


def _kinds_of_defaults(options: type) -> dict[str, Any]:
    """The type of each argument of a class without annotations, by its default; Any where that is None."""
    found = inspect.signature(options).parameters.values()
    named = [each for each in found if each.kind is each.POSITIONAL_OR_KEYWORD]
    return {each.name: Any if each.default is None else type(each.default) for each in named}


def _choices(kind: Any) -> list[str]:
    """The values of the enumeration in a type: transformers writes ``Enumeration | str``, and takes no other text."""
    parts = get_args(kind) or (kind,)
    return [member.value for part in parts if isinstance(part, enum.EnumMeta) for member in part]


def _fits(value: Any, kind: Any) -> bool:
    parts = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts if not (part is str and _choices(kind)))
    if choices := _choices(kind):
        return value in choices
    if get_origin(kind) is Literal:  # peft writes "pissa_niter_[number of iters]" for a family of values
        return any(value == part or ("[" in str(part) and str(value).startswith(part.split("[")[0])) for part in parts)
    if kind in (int, float):
        is_number = isinstance(value, int | kind) and not isinstance(value, bool)
        return is_number and math.isfinite(value)
    kind = get_origin(kind) or kind
    return kind is Any or isinstance(value, kind)


def _need(kind: Any) -> str:
    """A type in words."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "null",
             list: "a list", dict: "a table"}  # fmt: skip
    if choices := _choices(kind):
        return f"one of {', '.join(choices)}"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(sorted(map(_need, get_args(kind)), key=lambda need: (need == "null", need)))
    kind = get_origin(kind) or kind
    return words.get(kind, str(kind))


def _mistyped(prefix: str, given: Mapping[str, Any], kinds: Mapping[str, Any]) -> Iterable[str]:
    for key, value in given.items():
        kind, (is_right, need) = kinds.get(key, Any), NUMBERS.get(f"{prefix}{key}", (lambda number: True, ""))
        if not _fits(value, kind):
            yield f"{prefix}{key}: {value!r}, and it must be {_need(kind)}"
        elif value is not None and not is_right(value):
            yield f"{prefix}{key}: {value!r}, and it must be {need}"


def _refused(settings: dict[str, Any]) -> Iterable[str]:
    """Options that RingConfig or LoraConfig refuse."""
    for key, value in settings["ring"].items():
        try:
            RingConfig(**{key: value})
        except BadOption as error:
            yield f"ring.{error}"
    try:
        LoraConfig(**(settings["lora"] or {}))
    except (TypeError, ValueError) as error:
        yield f"lora: {error}"


def _contradictions(settings: dict[str, Any]) -> Iterable[str]:
    training, ring = settings["training"], settings["ring"]
    if not settings["model"]:
        yield "model: it is missing"
    if "train" not in settings["data"]:
        yield "data.train: it is missing"
    if not isinstance(training.get("max_length"), int):
        yield "training.max_length: the number of tokens in a row is missing"
    if settings["dtype"] not in DTYPES:
        yield f"dtype: {settings['dtype']!r} is none of {', '.join(DTYPES)}"
    if settings["compile"] is not None and settings["compile"] not in COMPILED:
        yield f"compile: {settings['compile']!r} is none of {', '.join(COMPILED)}, null"
    if settings["compile"] and training.get("torch_compile"):
        yield "compile, with training.torch_compile: one of them"
    if settings["compile"] and ring.get("offload_above") is not None:
        yield "compile, with ring.offload_above: it moves checkpoints from Python, which torch.compile would trace"
    for key in training.keys() & DECIDED_ELSEWHERE.keys():
        yield f"training.{key}: leave it out; {DECIDED_ELSEWHERE[key]}"
    if settings["quantization"] is not None and settings["lora"] is None:
        yield "quantization, without lora: quantized weights are not trained themselves"
    if ring and settings["attention"] != "ring_fp32":
        yield f"ring.{next(iter(ring))}, with attention {settings['attention']}: only ring_fp32 has these options"
    kept = [f"ring.{key}" for key in ("save_attention", "offload_above") if ring.get(key) not in (None, False)]
    for end in ("", "_kwargs"):
        given = [f"training.{name}{end}" for name in CHECKPOINTING_NAMES if f"{name}{end}" in training]
        if len(given) == 2:
            yield f"{given[0]}, with {given[1]}: two names of one argument"
    for name in CHECKPOINTING_NAMES:
        if kept and training.get(name) is False:
            yield f"{kept[0]}, with training.{name} false: it is about checkpoints"
        if kept and (training.get(f"{name}_kwargs") or {}).get("use_reentrant"):
            yield f"{kept[0]}, with training.{name}_kwargs.use_reentrant: it needs false"
    if training.get("bf16") and training.get("fp16"):
        yield "training.bf16, with training.fp16: one of them"
    if training.get("fp16") and settings["dtype"] == "bfloat16":
        yield "training.fp16, with dtype bfloat16: load the weights in float32 or float16"
    if "num_train_epochs" in training and training.get("max_steps", -1) > 0:
        yield "training.num_train_epochs, with training.max_steps: only max_steps would count"
    evaluates = training.get("eval_strategy", "no") not in ("no", False)
    if evaluates and "eval" not in settings["data"]:
        yield "training.eval_strategy, without data.eval: there is nothing to evaluate"
    if "eval" in settings["data"] and not evaluates:
        yield "data.eval, without training.eval_strategy: it would not be read"
