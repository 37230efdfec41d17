"""Heads of whole rows in a loop with `shard`: losses, outputs and gradients of one process, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from transformers import LlamaForSequenceClassification

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs.comparison import WITH_TOWERS, Ranks
from tests.helpers.jobs.plain_jobs import Batch, gradients_of
from tests.helpers.jobs.runs import Judged
from tests.helpers.models.tiny_models import SIZES, build, tiny


@dataclass(frozen=True)
class Case:
    """A batch of rows of uneven lengths for a model of `tiny_models`. ``compiled``: as a whole; ``fsdp``: by FSDP2."""

    why: str
    model: str
    by: str = "class"
    pad_to: str = "right"
    packed: bool = False
    ring: RingConfig = RingConfig()
    compiled: bool = False
    fsdp: bool = False

    def batch(self) -> dict[str, Tensor]:
        rows = Judged(count=3, length=23, by=self.by, shortest=None if self.packed else 9, packed=self.packed,
                      pad_to="" if self.packed else self.pad_to)  # fmt: skip
        return rows.collate(rows.make())


CASES = [
    Case("the last token's class", "llama of rows"),
    Case("padded on the left", "llama of rows", pad_to="left"),
    Case("compiled", "llama of rows", compiled=True),
    Case("FSDP2", "llama of rows", fsdp=True),
    Case("classes of tokens, packed", "llama of tokens", "tokens", packed=True),
    Case("spans", "llama of spans", "span"),
    Case("the first token's class, by a pooler", "bert of rows"),
    Case("the mean's class", "modernbert of rows", pad_to="left"),
    Case("masked tokens and pairs, in one loss", "bert of pairs", "pairs"),
    Case("replaced tokens", "electra of replaced tokens", "replaced"),
    Case("masked tokens, a mean", "bert of masked tokens", "masked"),
    Case("masked tokens, all logits", "bert of masked tokens", "masked", ring=RingConfig(loss="sharded")),
    Case("labels of padding, whose embeddings a mask zeroes", "esm of masked tokens", "everywhere"),
    Case("masked tokens, a sum", "modernbert of masked tokens", "masked", ring=RingConfig(loss="chunked")),
]


@dataclass
class Answer:
    loss: Tensor
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]


def answer(case: Case, attention: str | None) -> Answer:
    model: Any = tiny(case.model, attention).double()
    batch = case.batch()
    if attention is None:
        out = model(**batch, use_cache=False)
        out.loss.backward()
        loss = out.loss.detach()
    else:
        if case.compiled:
            model.compile(backend="eager")
        if case.fsdp:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for part in (*model.model.layers, model):
                fully_shard(part, mesh=mesh)
        sharded = hf_ring_attn.shard(batch, model=model, config=case.ring)
        with sharded:
            out = model(**sharded.inputs)
        out.loss.backward()
        if not case.fsdp:
            sharded.reduce_gradients(model)
        loss = sharded.reduce(out.loss)
    outputs = {name: x.detach() for name, x in out.items() if "logits" in name}
    gradients: dict[str, Any] = dict(gradients_of(model))
    if case.fsdp and attention is not None:
        gradients = {name: x.full_tensor() for name, x in gradients.items()}
    return Answer(loss, outputs, gradients)


@pytest.mark.turns
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.why)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_head_of_whole_rows_is_that_of_one_process(ranks: Ranks, case: Case, size: int) -> None:
    want = answer(case, None)
    for got in ranks(size).run(answer, case, "ring_fp32"):
        assert relative_error(got.loss, want.loss) < WITH_TOWERS
        real = case.batch().get("attention_mask", torch.ones(3, 23)).bool()
        for name, x in want.outputs.items():
            at = real if x.shape[:2] == real.shape and case.by != "everywhere" else ...
            assert relative_error(got.outputs[name][at], x[at]) < WITH_TOWERS
        for name, gradient in want.gradients.items():
            nothing = float(gradient.abs().max()) < 1e-12  # of what a softmax does not see
            assert nothing or relative_error(got.gradients[name], gradient) < 2 * WITH_TOWERS, name


ALBERT = {"num_labels": 3, "embedding_size": 32, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
ROWS = Case("", "llama of rows").batch()


class NeedsLabels(LlamaForSequenceClassification):  # type: ignore[no-untyped-call]  # transformers' own
    """A program's own head, the largest value of each feature; its forward fails without labels."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **given: Any) -> Any:
        given = {name: x for name, x in given.items() if name in ("attention_mask", "position_ids")}
        logits = self.score(self.model(input_ids, **given).last_hidden_state.amax(1))
        assert labels is not None
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def loss_of_own_head(attention: str | None) -> float:
    model = tiny("llama of rows", attention).train()
    model.__class__, model.loss_type = NeedsLabels, "ForSequenceClassification"
    ids = torch.arange(46).view(2, 23)
    batch = {"input_ids": ids, "labels": torch.tensor([2, 0])}
    if attention is None:
        return float(model(**batch)["loss"])
    sharded = hf_ring_attn.shard(batch, model=model)
    with sharded:
        return float(model(**sharded.inputs)["loss"])


def test_a_forward_that_needs_labels_is_tried_with_them(ranks: Ranks) -> None:
    """The self-check called it without, so it was refused (`SelfCheckNotRun`)."""
    for found in ranks(2).run(loss_of_own_head, "ring_fp32"):
        assert found == pytest.approx(loss_of_own_head(None), rel=1e-6)


def refused(kind: str, config: dict[str, Any], more: Batch) -> str:
    """What a forward raises."""
    model = build(kind, **{**SIZES, **config})
    try:
        sharded = hf_ring_attn.shard({**ROWS, **more}, model=model)
        with sharded:
            model(**sharded.inputs)
    except hf_ring_attn.RingAttentionError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("kind", "config", "more", "text"),
    [
        ("AlbertForSequenceClassification", ALBERT, {}, "SelfCheckFailed: self-check: AlbertForSequenceClassification"),
        (
            "LlamaForSequenceClassification", {}, {"pixel_values": torch.ones(1, 3)},
            "the batch holds images or sound, and the model classifies: its rows cannot be sharded yet.",
        ),
        (
            "RobertaForSequenceClassification", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, {},
            "UnsupportedModel: RobertaModel cannot be trained in a ring exactly: embeddings (RobertaEmbeddings) num",
        ),
    ],
    ids=["a token selected inside", "images", "positions by tokens"],
)  # fmt: skip
def test_what_would_differ_is_refused(ranks: Ranks, kind: str, config: dict[str, Any], more: Batch, text: str) -> None:
    for said in ranks(2).run(refused, kind, config, more):
        assert text in said, said
