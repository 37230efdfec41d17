"""Adapters of PEFT, one of each type, and what ranks do with them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, PrinterCallback
from trl.trainer.sft_trainer import SFTTrainer

import hf_ring_attn
from hf_ring_attn import errors
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.sft_jobs import Case, config, lora, rows, tokenizer
from tests.helpers.jobs.trainer_jobs import a_folder, launched
from tests.helpers.jobs.trl_runs import OFFLINE, quiet
from tests.helpers.models.tiny_models import VOCABULARY, tiny

SQUARE = ["q_proj", "o_proj"]
"""Layers of one shape: some types share matrices among all that they adapt."""
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LORA": ("LoraConfig", {"r": 4, "target_modules": "all-linear"}),
    "LORA, as DoRA": ("LoraConfig", {"r": 4, "use_dora": True}),
    "LORA, with biases and whole modules": (
        "LoraConfig", {"r": 4, "lora_bias": True, "modules_to_save": ["lm_head", "input_layernorm"]},
    ),
    "LORA, of embeddings and tokens": (
        "LoraConfig", {"r": 4, "target_modules": ["embed_tokens", "v_proj"], "target_parameters": None},
    ),
    "LORA, KaSA": ("LoraConfig", {"r": 4, "kasa_config": {}}),
    "ADALORA": ("AdaLoraConfig", {"total_step": 9}),
    "ADAMSS": ("AdamssConfig", {"r": 8, "num_subspaces": 3}),
    "ADAPTION_PROMPT": ("AdaptionPromptConfig", {"target_modules": None, "adapter_len": 4, "adapter_layers": 2}),
    "BEFT": ("BeftConfig", {}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4}),
    "C3A": ("C3AConfig", {"block_size": 8}),
    "DEFT": ("DeftConfig", {}),
    "DELORA": ("DeloraConfig", {"r": 4}),
    "FOURIERFT": ("FourierFTConfig", {"n_frequency": 20}),
    "FROD": ("FrodConfig", {}),
    "GLORA": ("GloraConfig", {"r": 4}),
    "GRALORA": ("GraloraConfig", {"r": 4, "gralora_k": 2}),
    "HIRA": ("HiraConfig", {"r": 4}),
    "HRA": ("HRAConfig", {"r": 4}),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "LN_TUNING": ("LNTuningConfig", {"target_modules": ["input_layernorm", "post_attention_layernorm"]}),
    "LOHA": ("LoHaConfig", {"r": 4}),
    "LOKR": ("LoKrConfig", {"r": 4}),
    "MISS": ("MissConfig", {"r": 4}),
    "OFT": ("OFTConfig", {"oft_block_size": 4}),
    "OSF": ("OSFConfig", {}),
    "PEANUT": ("PeanutConfig", {"r": 4}),
    "PSOFT": ("PsoftConfig", {"r": 4}),
    "RANDLORA": ("RandLoraConfig", {"r": 4}),
    "ROAD": ("RoadConfig", {"group_size": 8}),
    "SHIRA": ("ShiraConfig", {"r": 4}),
    "SUPERTUNING": ("SupertuningConfig", {"target_modules": None}),
    "TINYLORA": ("TinyLoraConfig", {"r": 4}),
    "TRAINABLE_TOKENS": ("TrainableTokensConfig", {"target_modules": None, "token_indices": [10, 40, 70]}),
    "UNILORA": ("UniLoraConfig", {"r": 4}),
    "VBLORA": ("VBLoRAConfig", {"r": 4, "num_vectors": 8, "vector_length": 8, "topk": 2}),
    "VERA": ("VeraConfig", {"r": 4}),
    "WAVEFT": ("WaveFTConfig", {"n_frequency": 20}),
}  # fmt: skip
"""Exact in a ring: name, beginning with the type; its config's class; that config beyond `SQUARE`."""

PROMPT = {"target_modules": None, "num_virtual_tokens": 4}
PREPENDS = r"prepends its prompt to every rank's tokens"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "PROMPT_TUNING": ("PromptTuningConfig", PROMPT, PREPENDS),
    "PREFIX_TUNING": ("PrefixTuningConfig", PROMPT, PREPENDS),
    "P_TUNING": ("PromptEncoderConfig", PROMPT, PREPENDS),
    "MULTITASK_PROMPT_TUNING": ("MultitaskPromptTuningConfig", {**PROMPT, "num_tasks": 2}, PREPENDS),
    "CARTRIDGE": ("CartridgeConfig", PROMPT, PREPENDS),
    "aLoRA": ("LoraConfig", {"alora_invocation_tokens": [3, 4]}, "looks for its invocation tokens in each rank's"),
    "VeLoRA": ("LoraConfig", {"velora_config": {}}, "compresses activations by an average over the tokens of each"),
    "MonteCLoRA": ("LoraConfig", {"monteclora_config": {}}, "draws other noise on each rank"),
    "LILY": ("LilyConfig", {"r": 4}, "mixes its experts by the mean over the tokens of each rank"),
    "POLY": ("PolyConfig", {"r": 4}, "chooses its skills by task ids"),
    "PVERA": ("PveraConfig", {}, "draws other noise for the tokens of each rank"),
    "SHADOW": ("ShadowConfig", {"target_modules": None}, "runs a second model, and adds its loss"),
}
"""Name as the refusal has it, its config's class, that config, and the reason it gives."""
SUB_CONFIGS = {"kasa_config": "KasaConfig", "velora_config": "VeloraConfig", "monteclora_config": "MontecloraConfig"}


def config_of(kind: str, options: dict[str, Any]) -> Any:
    options = {"target_modules": SQUARE, "task_type": "CAUSAL_LM", **options}
    options = {name: x for name, x in options.items() if x is not None}
    for name, sub_config in SUB_CONFIGS.items():
        if name in options:
            options[name] = getattr(peft, sub_config)(**options[name])
    return getattr(peft, kind)(**options)


def adapted(kind: str, options: dict[str, Any], attention: str) -> Any:
    with quiet():
        model: Any = peft.get_peft_model(tiny("llama", attention), config_of(kind, options))
    torch.manual_seed(1)
    for parameter in model.parameters():  # adapters begin as no change at all, which would hide a mistake
        if parameter.requires_grad:
            parameter.data.add_(0.05 * torch.randn_like(parameter))
    return model.train()


def row() -> dict[str, Tensor]:
    torch.manual_seed(7)
    ids = torch.randint(0, VOCABULARY, (2, 38))
    return {"input_ids": ids, "labels": ids.clone()}


def shares(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Loss and gradients of an adapter in the ring of this world, and in this process by transformers' attention."""
    with launched(Mesh()):
        hf_ring_attn.install()
        kind, options = ADAPTERS[name]
        model = adapted(kind, options, "ring_fp32")
        sharded = hf_ring_attn.shard(row())
        with sharded:
            out = model(**sharded.inputs)
        out.loss.backward()
        sharded.reduce_gradients(model)
        got = {"loss": sharded.reduce(out.loss), **gradients(model)}
        alone = adapted(kind, options, "sdpa")
        loss = alone(**row()).loss
        loss.backward()
        return got, {"loss": loss.detach(), **gradients(alone)}


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def refusal(name: str) -> str:
    with launched(Mesh()):
        hf_ring_attn.install()
        kind, options, _ = REFUSED[name]
        model = adapted(kind, options, "ring_fp32")
        try:
            with hf_ring_attn.shard(row()) as sharded:
                model(**sharded.inputs)
        except errors.UnsupportedModel as error:
            return str(error)
        return "no refusal"


def classifier_refusal(kind: str, rate: str, trains: bool) -> str:
    """``rate``: at which the adapter drops weights."""
    with launched(Mesh()):
        hf_ring_attn.install()
        options = {rate: 0.5, "target_modules": SQUARE, **({"oft_block_size": 4} if kind == "OFTConfig" else {"r": 4})}
        model: Any = peft.get_peft_model(tiny("llama of rows", "ring_fp32"), getattr(peft, kind)(**options))
        model.train(trains)
        try:
            with hf_ring_attn.shard({**row(), "labels": torch.tensor([0, 2])}, model=model) as sharded:
                model(**sharded.inputs)
        except errors.UnsupportedModel as error:
            return str(error)
        return "no refusal"


def refusal_of_a_part(name: str) -> str:
    """As `refusal`, of an adapter that one layer of the model has, where the model has LoRA in others."""
    with launched(Mesh()):
        hf_ring_attn.install()
        kind, options, _ = REFUSED[name]
        model: Any = tiny("llama", "ring_fp32")
        peft.inject_adapter_in_model(config_of(kind, options), model.model.layers[1])
        peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["v_proj"]), model)
        try:
            with hf_ring_attn.shard(row()) as sharded:
                model.train()(**sharded.inputs)
        except errors.UnsupportedModel as error:
            return str(error)
        return "no refusal"


def seeded_shares(alike: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]] | str:
    """As `shares`, of LoHa that drops half of its weights' rows, or the refusal. ``alike``: ranks have one seed."""
    with launched(Mesh()):
        hf_ring_attn.install()
        loha, answers = {"r": 4, "rank_dropout": 0.5}, []
        for attention in ("ring_fp32", "sdpa"):
            model = adapted("LoHaConfig", loha, attention)
            try:
                with hf_ring_attn.shard(row()) if attention == "ring_fp32" else nullcontext() as sharded:
                    batch = row() if sharded is None else sharded.inputs
                    torch.manual_seed(3 if alike else 3 + dist.get_rank())
                    loss = model(**batch).loss
            except errors.RanksDiffer as error:
                return str(error)
            loss.backward()
            if sharded is not None:
                sharded.reduce_gradients(model)
                loss = sharded.reduce(loss)
            answers.append({"loss": loss.detach(), **gradients(model)})
        return answers[0], answers[1]


def train_an_adapter(base: str, folder: str, mesh: Mesh) -> Tensor:
    """Fine-tunes the model at ``base`` with LoRA in a ring, and saves the adapter; returns its logits [1, S, V]."""
    case = Case("an adapter", {"packing": True, "max_steps": 4})
    with launched(mesh, **OFFLINE), a_folder(None) as scratch, quiet():
        model: Any = AutoModelForCausalLM
        sft = SFTTrainer(
            model=model.from_pretrained(base, attn_implementation="ring_fp32"), args=config(scratch, **case.args),
            train_dataset=rows("text", 40), processing_class=tokenizer(), peft_config=lora(),
        )  # fmt: skip
        sft.remove_callback(PrinterCallback)
        sft.train()
        sft.save_model(folder)
        trained: Any = sft.model
        logits: Tensor = trained.eval()(input_ids=torch.arange(40)[None] * 5 + 3).logits
        return logits.detach()
