"""What ranks run to compare the loss in chunks with that of all logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import CohereConfig, CohereForCausalLM, GraniteConfig, GraniteForCausalLM, PhiConfig, PhiForCausalLM

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.config import Loss
from hf_ring_attn.integration.batch.announce import loss_in_words
from hf_ring_attn.integration.model import lazy_logits
from hf_ring_attn.integration.model.lazy_logits import ChunkedLoss, LazyLogits
from hf_ring_attn.layers import chunked_loss
from tests.helpers.hosts import stays_float64
from tests.helpers.jobs.plain_jobs import Batch, gradients_of, tokens
from tests.helpers.live_bytes import Largest
from tests.helpers.models.tiny_models import SIZES, tiny

OTHERS: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "phi": (PhiForCausalLM, PhiConfig, {}),  # its head has a bias
    "cohere": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.4}),
    "granite": (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 3.0}),
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of a model of `tiny_models` or of `OTHERS`.

    ``lora``: what LoraConfig is given; None for a full fine-tuning. ``wrap``: "", "DDP", or a way of `sharded`.
    ``change``: changes the model first. ``autocast``: to float16.
    """

    why: str
    model: str = "llama"
    config: dict[str, Any] = field(default_factory=dict)
    batch: Batch = field(default_factory=lambda: tokens(23))
    lora: dict[str, Any] | None = None
    wrap: str = ""
    trains: bool = True
    change: Callable[[Any], None] | None = None
    autocast: bool = False


@dataclass
class Answer:
    """Of one rank: the loss, gradients by parameter, losses in chunks, the most logits made at once, why more were."""

    loss: Tensor
    gradients: dict[str, Tensor]
    losses: int
    made: int
    why: str


def model_of(step: Step) -> Any:
    torch.manual_seed(3)
    if step.model in OTHERS:
        kind, config, more = OTHERS[step.model]
        options = {name: x for name, x in {**SIZES, **more, **step.config}.items() if name != "head_dim"}
        model: Any = kind._from_config(config(**options), attn_implementation="ring_fp32")
    else:
        model = tiny(step.model, "ring_fp32", **step.config)
    model.to(torch.float64)
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        nn.init.normal_(model.get_output_embeddings().bias)
    if step.lora is not None:
        model = get_peft_model(model, LoraConfig(r=4, **step.lora)).to(torch.float64)
        for name, weight in model.named_parameters():
            if "lora_B" in name:  # it would be 0
                nn.init.normal_(weight, std=0.1)
    if step.change is not None:
        step.change(model)
    return model.train(step.trains)


def sharded(model: Any, way: str) -> None:
    """Under FSDP2: the layers, and the head "with the rest", "by itself", with the norm ("tail"), or "in parts"."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in inner.model.layers:
        fully_shard(layer, mesh=mesh)
    if way == "by itself":
        fully_shard(inner.lm_head, mesh=mesh)
    if way == "tail":
        fully_shard([inner.model.norm, inner.lm_head], mesh=mesh, reshard_after_forward=False)
    if way == "in parts":  # as accelerate wraps a PEFT model
        for part in inner.lm_head.modules():
            if not part._modules and any(weight.requires_grad for weight in part.parameters()):
                fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


@contextmanager
def in_float64(rows: int = 5) -> Iterator[list[int]]:
    """Losses stay in float64, and chunks are short. Gives the numbers of tokens whose logits were made at once."""
    made: list[int] = []
    logits_of = lazy_logits.Head.logits_of

    def counted(self: Any, hidden: Tensor, weights: Any) -> Tensor:
        made.append(len(hidden))
        return logits_of(self, hidden, weights)

    with (
        mock.patch.object(Tensor, "float", stays_float64),
        mock.patch.object(lazy_logits, "rows_per_chunk", return_value=rows),
        mock.patch.object(lazy_logits.Head, "logits_of", counted),
    ):
        yield made


def step_of(step: Step, loss: Loss) -> Answer:
    """One rank's step; gradients are averaged over ranks."""
    model = model_of(step)
    if step.wrap == "DDP":
        model = DistributedDataParallel(model, find_unused_parameters=True)
    elif step.wrap:
        sharded(model, step.wrap)
    with in_float64() as made:
        batch = hf_ring_attn.shard(step.batch, config=RingConfig(loss=loss, self_check=False))
        half = torch.autocast("cpu", torch.float16, enabled=step.autocast)
        with batch, torch.set_grad_enabled(step.trains), half:
            out = model(**batch.inputs)
        state = batch.context.state(ChunkedLoss)
        if step.trains:
            out.loss.backward()
            if not step.wrap:
                batch.reduce_gradients(model)
    gradients = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in gradients_of(model).items()}
    return Answer(out.loss.detach(), gradients, state.losses, max(made, default=0), state.why)


def both(step: Step) -> tuple[Answer, Answer]:
    """With the loss in chunks, as by default, and with all logits."""
    return step_of(step, "auto"), step_of(step, "sharded")


# ---- logits that are read --------------------------------------------------------------------------------------------


def uses(model: str = "gemma2") -> dict[str, tuple[Any, Any]]:
    """What programs do with ``out.logits``: on lazy logits and on ordinary ones."""
    found: dict[str, list[Any]] = {}
    for loss in ("auto", "sharded"):
        net = model_of(Step(why="", model=model))
        batch = hf_ring_attn.shard(tokens(23), config=RingConfig(loss=loss))
        with batch:
            net(**batch.inputs)  # the first call, in which models are met
        for name, use in USES.items():
            with batch:
                out = net(**batch.inputs)
            assert isinstance(out.logits, LazyLogits) == (loss == "auto")
            assert not isinstance(out.logits, LazyLogits) or out.logits.made is None
            result = use(out.logits)
            if isinstance(result, Tensor) and result.requires_grad:
                result.double().square().sum().backward()
            found.setdefault(name, []).append((result, gradients_of(net)))
    return {name: (one, other) for name, (one, other) in found.items()}


def reading_the_embedding(model: Any) -> None:
    """Gives a head that reads a weight of another module, beside its own."""
    head, embedding = model.lm_head, model.get_input_embeddings()
    head.forward = lambda x: nn.functional.linear(x, head.weight + embedding.weight)


def in_float32(model: Any) -> None:
    """Autocast leaves float64 alone."""
    model.float()


def normalized(model: Any) -> None:
    """Gives a head whose weight a hook computes from a trained one."""
    nn.utils.spectral_norm(model.lm_head)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def _metrics_then_gradients(logits: Tensor) -> Tensor:
    with torch.no_grad():
        logits.argmax(-1)
    return logits.softmax(-1)


def _changed(logits: Tensor) -> Tensor:
    before, flat = logits * 2, logits.view(-1, logits.shape[-1])
    logits[..., 3] = -1.0
    return torch.cat([before.flatten(), flat.flatten(), logits.flatten()])


def _without_gradients(logits: Tensor) -> Tensor:
    with torch.no_grad():
        half = logits / 2
    return half * 3


def _a_factor_that_changes(logits: Tensor) -> Tensor:
    factor = torch.tensor(2.0)
    scaled = logits.detach() * factor
    factor.fill_(100.0)
    return scaled + 0


def _a_loss_of_constants(logits: Tensor) -> Tensor:
    constants = logits.detach().flatten(0, 1)
    return logits[..., 0].sum() + nn.functional.cross_entropy(constants, torch.zeros(46, dtype=torch.int64))


USES: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda x: (tuple(x.shape), x.dtype, x.device, x.dim(), len(x), x.requires_grad),
    "argmax": lambda x: x.argmax(-1),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()),
    "list": lambda x: x.tolist(),
    "scaled": lambda x: x * 0.7,
    "from the left": lambda x: 3.0 - 2.0 * x,
    "softmax": lambda x: x.float().log_softmax(-1),
    "a slice": lambda x: x[..., :-1, :],
    "an autograd function": Doubled.apply,
    "two tensors": lambda x: torch.stack([x, x.detach()]),
    "metrics, then gradients": _metrics_then_gradients,
    "changed in place": _changed,
    "detached": lambda x: (x.detach() / 2).softmax(-1),
    "leaves of their own": lambda x: 2 * x.detach().requires_grad_(),
    "without gradients": _without_gradients,
    "a factor that changes": _a_factor_that_changes,
    "a loss of constants": _a_loss_of_constants,
    "a loss of their own": lambda x: nn.functional.cross_entropy(x.flatten(0, 1), torch.zeros(46, dtype=torch.int64)),
    "a loss of each token": lambda x: nn.functional.cross_entropy(
        x.flatten(0, 1), torch.zeros(46, dtype=torch.int64), reduction="none"
    ),
}


def read_late(wrap: str) -> str:
    """The error of a program that reads logits when they can no longer be made; "" if it may."""
    step = Step(why="", wrap=wrap)
    model = model_of(step)
    if wrap:
        sharded(model, wrap)
    batch = hf_ring_attn.shard(tokens(23))
    with batch:
        out = model(**batch.inputs)
    out.loss.backward()
    try:
        out.logits.argmax(-1)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        with batch:
            out = model(**batch.inputs)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(0.5)
        out.logits.argmax(-1)
    except hf_ring_attn.RingAttentionError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _other_adapter(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def _by_data(model: Any) -> None:
    model.lm_head.weight.data.mul_(1.01)


def _other_mode(model: Any) -> None:
    model.train()


CHANGES: dict[str, tuple[Step, Callable[[Any], None]]] = {
    "an adapter is switched off": (Step(why="", lora={"target_modules": ["lm_head"]}), _other_adapter),
    "a weight is changed by .data": (Step(why=""), _by_data),
    "dropout of an adapter is on": (
        Step(why="", lora={"target_modules": ["lm_head"], "lora_dropout": 0.5}, trains=False), _other_mode,
    ),
}  # fmt: skip


def read_after(change: str) -> str:
    """The error of a program that changes a head between a forward and a use of its logits; "" if it may."""
    step, apply = CHANGES[change]
    model = model_of(step)
    batch = hf_ring_attn.shard(tokens(23))
    with batch:
        logits = model(**batch.inputs).logits
    apply(model)
    try:
        logits.argmax(-1)
    except hf_ring_attn.RingAttentionError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def hooked(late: bool) -> tuple[Tensor, Tensor] | str:
    """The gradient of a head whose logits' gradient a hook halves, and without it; or the error of a hook set late."""
    found = []
    for half in (True, False):
        model = model_of(Step(why=""))
        if half and not late:
            model.lm_head.register_forward_hook(_halve)
        batch = hf_ring_attn.shard(tokens(23), config=RingConfig(self_check=False))
        with batch:
            out = model(**batch.inputs)
        try:
            if late:
                _halve(None, None, out.logits)
        except hf_ring_attn.RingAttentionError as error:
            return f"{type(error).__name__}: {error}"
        out.loss.backward()
        found.append(model.lm_head.weight.grad)
    return found[0], found[1]


def _halve(_module: Any, _args: Any, logits: Tensor) -> None:
    logits.register_hook(lambda gradient: gradient / 2)


def losses_of_one_rank() -> float:
    """The first rank alone computes a loss of whole logits, after the forward of a model with a whole head."""
    model = tiny("llama of tokens", "ring_fp32").train()
    batch = {**tokens(23), "labels": tokens(23)["input_ids"] % 3}
    sharded = hf_ring_attn.shard(batch, model=model)
    with sharded:
        out = model(**sharded.inputs)
    if dist.get_rank():
        return float(out.loss)
    return float(nn.functional.cross_entropy(out.logits.flatten(0, 1).float(), batch["labels"].flatten()))


def read_after_eval(wrap: str) -> tuple[Tensor, Tensor]:
    """Logits of an evaluation that asked for them as Trainer does, and those of a forward without labels."""
    model = model_of(Step(why="", trains=False))
    sharded(model, wrap)
    batch = hf_ring_attn.shard(tokens(23))
    batch.context.state(ChunkedLoss).keeps = True
    with batch, torch.no_grad():
        kept = model(**batch.inputs).logits
    return kept * 1.0, without_labels(wrap)[1]


def most_values(loss: Loss) -> int:
    """The most values of any tensor that one step makes."""
    model = model_of(Step(why=""))
    batch = hf_ring_attn.shard(tokens(57), config=RingConfig(loss=loss))
    with in_float64(), Largest() as largest:
        with batch:
            out = model(**batch.inputs)
        out.loss.backward()
    found: int = largest.values
    return found


def with_a_defect() -> str:
    """The error of a model whose gradients are too large in chunks."""
    model = model_of(Step(why=""))
    batch = hf_ring_attn.shard(tokens(23))
    wrong = mock.patch.object(chunked_loss, "_scaled", lambda x, factor, dtype, _rows: (x * factor * 1.5).to(dtype))
    try:
        with wrong, batch:
            model(**batch.inputs)
    except hf_ring_attn.RingAttentionError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def without_labels(wrap: str) -> tuple[Tensor, Tensor]:
    """Logits of a loop that leaves the labels of its batch out of the call, and those of a batch without labels."""
    model, found = model_of(Step(why="")), []
    if wrap:
        sharded(model, wrap)
    for batch in (tokens(23), {"input_ids": tokens(23)["input_ids"]}):
        shared = hf_ring_attn.shard(batch)
        with shared:
            given = {
                name: x for name, x in shared.inputs.items() if name in ("input_ids", "position_ids", "attention_mask")
            }
            found.append(model(**given, use_cache=False).logits.detach() * 1.0)
    return found[0] + 0, found[1]


class OddHead(nn.Module):
    """A head that is no linear layer."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def odd_head(loss: Loss) -> str:
    """Says how the loss was computed, or the error."""
    model = model_of(Step(why=""))
    model.lm_head = OddHead(model.lm_head.weight.detach())
    batch = hf_ring_attn.shard(tokens(23), config=RingConfig(loss=loss))
    try:
        with batch:
            out = model(**batch.inputs)
    except hf_ring_attn.RingAttentionError as error:
        return f"{type(error).__name__}: {error}"
    assert not isinstance(out.logits, LazyLogits)
    return loss_in_words(batch.context)
