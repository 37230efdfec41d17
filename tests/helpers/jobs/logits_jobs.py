"""What programs do with logits that a loss in chunks has not made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.integration.losses.head import ChunkedLoss
from hf_ring_attn.integration.losses.lazy_logits import LazyLogits
from tests.helpers.jobs.chunked_jobs import Step, model_of, sharded
from tests.helpers.jobs.plain_jobs import gradients_of, tokens
from tests.helpers.models.tiny_models import tiny


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


def _changed_by(write: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """Logits that were scaled before the program wrote to the memory of those that it scaled."""

    def use(logits: Tensor) -> Tensor:
        logits = logits.detach()
        before = logits * 2
        write(logits)
        return torch.cat([before.flatten(), logits.flatten()])

    return use


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
    "a part changed in place": _changed_by(lambda x: x[..., 3].fill_(-1.0)),
    "transposed and changed in place": _changed_by(lambda x: x.transpose(0, 1).add_(1)),
    "changed by a function": _changed_by(lambda x: nn.functional.relu(x, inplace=True)),
    "changed by .data": _changed_by(lambda x: x.data.add_(1)),
    "changed by numpy": _changed_by(lambda x: x.numpy().fill(1)),
    "changed in a list": _changed_by(lambda x: torch._foreach_add_([x], 1.0)),
    "the bits": lambda x: x.detach().float().view(torch.int32) * 1,
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


def left_by_a_late_loss(wrap: str) -> tuple[str, str]:
    """The error of a loss of logits that can no longer be made, and the class of the head's weight after it."""
    model: Any = model_of(Step(why="", wrap=wrap))
    sharded(model, wrap)
    batch = hf_ring_attn.shard(tokens(23))
    with batch:
        logits = model(**batch.inputs).logits
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.5)
    try:
        nn.functional.cross_entropy(logits.flatten(0, 1), batch.inputs["shift_labels"].flatten(), reduction="sum")
    except hf_ring_attn.RingAttentionError as error:
        return type(error).__name__, type(model.lm_head.weight).__name__
    return "", ""


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


def nans() -> Tensor:
    """Logits that are read after a forward whose first token's are nan."""
    model = model_of(Step(why=""))
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    batch = hf_ring_attn.shard(tokens(23), config=RingConfig(self_check=False))
    with batch:
        logits = model(**batch.inputs).logits
    counts: Tensor = logits.isnan().sum((0, 1))
    return counts


def gradients_of_heads() -> list[Tensor]:
    """The gradient of a head whose hook halves its logits' gradient, and without that hook."""
    found = []
    for halved in (True, False):
        model = model_of(Step(why=""))
        if halved:
            model.lm_head.register_forward_hook(_halve)
        batch = hf_ring_attn.shard(tokens(23), config=RingConfig(self_check=False))
        with batch:
            out = model(**batch.inputs)
        out.loss.backward()
        found.append(model.lm_head.weight.grad)
    return found


def hooked_late() -> str:
    """The error of a hook on the gradient of logits whose loss was computed already; "" if there is none."""
    model = model_of(Step(why=""))
    batch = hf_ring_attn.shard(tokens(23))
    with batch:
        out = model(**batch.inputs)
    try:
        _halve(None, None, out.logits)
    except hf_ring_attn.RingAttentionError as error:
        return f"{type(error).__name__}: {error}"
    return ""


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
