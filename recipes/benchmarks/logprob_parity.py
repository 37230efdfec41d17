"""Log-probabilities of a row's tokens in rings of several sizes against one device's, with the same weights.

    torchrun --nproc_per_node 8 recipes/benchmarks/logprob_parity.py --rings 8 --kernels flash4 triton [--save FOLDER]

Ranks may share a GPU; then give each job one ring, since P2P copies of rings that overlap do not work in today's
torch. Rows are real text of uneven lengths, padded on the right; the model is a Llama with random weights. For each
kernel and each ring this shows

    attention      of every layer, given one device's queries, keys and values: rows whose outputs have other bits
    log-probs      how far they are from one device's, beside how far smaller batches are from it on one device
    fixed height   the same if matrix products and norms always get chunks of `HEIGHT` tokens: then no bit may differ
    ratio          exp(new - old) of a first step: with gradients in training, against without any in evaluation

and which modules of a layer round otherwise when they get fewer tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.bench import results
from hf_ring_attn.bench.provenance import facts
from hf_ring_attn.command_ranks import world

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "long_context_lora"))

from texts import modules  # type: ignore[import-not-found]

HEIGHT = 512
"""Tokens of each matrix product, where it is fixed."""
SIZES: dict[str, dict[str, int]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 16,
           "num_key_value_heads": 4, "vocab_size": 16384},
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512},
}  # fmt: skip
Batch = tuple[Tensor, Tensor]
"""input_ids and attention_mask, [B, S] each."""


def model_of(size: str, device: torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    kind: Any = LlamaForCausalLM
    with device:  # random weights of this size take half a minute on a CPU
        model = kind._from_config(LlamaConfig(**SIZES[size]), attn_implementation="ring_fp32")  # type: ignore[arg-type]
    with torch.no_grad():
        model.lm_head.weight.mul_(3)  # logits as far apart as a trained model's
    return model.to(device, dtype).eval()


def batches(rows: int, in_batch: int, shortest: int, longest: int, vocabulary: int) -> Iterator[Batch]:
    """Rows of the standard library's source, two bytes a token, of lengths between two bounds."""
    text = b"".join(piece.encode() for piece, _ in zip(modules(), range(2000), strict=False))
    pairs = torch.frombuffer(bytearray(text[: len(text) // 2 * 2]), dtype=torch.uint8).view(-1, 2).long()
    tokens, dice, at = (pairs[:, 0] * 131 + pairs[:, 1]) % vocabulary, torch.Generator().manual_seed(0), 0
    for first in range(0, rows, in_batch):
        count = min(in_batch, rows - first)
        lengths = torch.randint(shortest, longest + 1, (count,), generator=dice)
        ids = torch.zeros(count, int(lengths.max()), dtype=torch.int64)
        for row, length in enumerate(lengths.tolist()):
            if at + length > len(tokens):
                raise SystemExit(f"the standard library has {len(tokens)} tokens, too few for {rows} rows")
            ids[row, :length] = tokens[at : at + length]
            at += length
        yield ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()


# ---- one device's attention, and a ring's of the same numbers ----


class Taps:
    """Records a model's queries, keys, values and attention; or replaces the former, and compares the latter.

    Args:
        whole: what was recorded, by layer and name; shared with other models.
    """

    def __init__(self, model: Any, whole: dict[str, Tensor]) -> None:
        self.active, self.places = False, torch.empty(0)
        self.whole = whole
        self.recording = True
        self.mask = torch.empty(0)
        self.differs = torch.empty(0)
        for number, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(attention, name).register_forward_hook(self._projected(f"{number}.{name}"))
            attention.o_proj.register_forward_pre_hook(self._attended(f"{number}.attention"))

    def _projected(self, name: str) -> Callable[..., Any]:
        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor | None:
            if not self.active:
                return None
            if self.recording:
                self.whole[name] = output
                return None
            return self.whole[name][:, self.places].contiguous()

        return hook

    def _attended(self, name: str) -> Callable[..., Any]:
        def hook(_module: nn.Module, inputs: tuple[Tensor]) -> None:
            if not self.active:
                return
            if self.recording:
                self.whole[name] = inputs[0]
                return
            other = (inputs[0] != self.whole[name][:, self.places]).any(-1)
            self.differs |= (other & self.mask).any(-1)

        return hook

    @contextmanager
    def record(self) -> Iterator[None]:
        self.active = self.recording = True
        yield
        self.active = False

    @contextmanager
    def replay(self, places: Tensor, mask: Tensor) -> Iterator[None]:
        """``places`` [T] of this rank's tokens in the recorded rows; ``mask`` [B, T]: the tokens to compare."""
        self.active, self.recording, self.places, self.mask = True, False, places, mask
        self.differs = torch.zeros(len(mask), dtype=torch.bool, device=mask.device)
        yield
        self.active = False


def log_probs(model: Any, batch: Batch, group: Any, config: RingConfig, taps: Taps | None = None) -> Tensor:
    """[B, S - 1] float32: of each token but the first. ``taps``: attention gets what they hold."""
    ids, mask = batch
    sharded = hf_ring_attn.shard({"input_ids": ids, "attention_mask": mask}, group, config=config)
    places = sharded.positions.clamp(max=ids.shape[1] - 1)
    real = mask[:, places].bool() & (sharded.positions < ids.shape[1]).to(
        mask.device
    )  # a row that the ring divides has pads
    with sharded:
        if taps is None:
            logits = model(**sharded.inputs).logits
        else:
            with taps.replay(places, real):
                logits = model(**sharded.inputs).logits
    wanted = ids.roll(-1, 1)[:, places, None]
    mine = logits.float().log_softmax(-1).gather(-1, wanted)[..., 0]
    whole: Tensor = sharded.gather(mine)
    return whole[:, :-1]


# ---- matrix products of one height ----


@contextmanager
def fixed_height() -> Iterator[None]:
    """Linear layers and norms compute `HEIGHT` tokens at a time, the last ones padded: a token's bits are its own."""
    linear, norm = functional.linear, LlamaRMSNorm.forward

    def in_chunks(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        parts = [
            compute(functional.pad(part, (0, 0, 0, HEIGHT - len(part))))[: len(part)] for part in flat.split(HEIGHT)
        ]
        return torch.cat(parts).view(*x.shape[:-1], -1)

    def chunked_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return in_chunks(lambda part: linear(part, weight, bias), x)

    def chunked_norm(self: Any, x: Tensor) -> Tensor:
        return in_chunks(lambda part: norm(self, part), x)

    with (
        mock.patch.object(functional, "linear", chunked_linear),
        mock.patch.object(LlamaRMSNorm, "forward", chunked_norm),
    ):
        yield


def modules_that_round(model: Any, batch: Batch, rings: Sequence[int]) -> dict[str, float]:
    """Of modules of the first layer, and of the head: the share of tokens with other bits on the first of W ranks."""
    layer = model.model.layers[0]
    found: dict[str, list[float]] = {}
    given: dict[str, Tensor] = {}
    named = {**{name: one for name, one in layer.named_modules() if not list(one.children())}, "lm_head": model.lm_head}
    handles = [
        one.register_forward_pre_hook(lambda _module, inputs, name=name: given.update({name: inputs[0]}))
        for name, one in named.items() if name and any(True for _ in one.parameters())
    ]  # fmt: skip
    with torch.no_grad():
        model(input_ids=batch[0], attention_mask=batch[1])
        for handle in handles:
            handle.remove()
        for size in rings:
            length = batch[0].shape[1]
            places = torch.as_tensor(hf_ring_attn.positions(length, rank=0, world_size=size)).to(batch[0].device)
            places = places[places < length]
            for name, x in given.items():
                whole, part = named[name](x)[:, places], named[name](x[:, places].contiguous())
                found.setdefault(name, []).append(float((whole != part).any(-1).float().mean()))
    return {name: max(shares) for name, shares in found.items()}


# ---- what is measured ----


class Distance:
    """How far log-probabilities are from one device's, over all batches."""

    def __init__(self) -> None:
        self.largest, self.total, self.tokens, self.same = 0.0, 0.0, 0, 0

    def add(self, got: Tensor, want: Tensor, mask: Tensor) -> None:
        apart = (got - want)[mask[:, 1:].bool()].abs()
        self.largest = max(self.largest, float(apart.max()))
        self.total += float(apart.double().sum())
        self.tokens += apart.numel()
        self.same += int((apart == 0).sum())

    def row(self) -> dict[str, float]:
        share = self.same / self.tokens
        return {"largest": self.largest, "mean": self.total / self.tokens, "same_bits": share, "tokens": self.tokens}


def measured(given: argparse.Namespace, device: torch.device, rank: int) -> list[dict[str, Any]]:
    """One row for each kernel and ring. Those of rank 0 count: only it compares log-probabilities with one device's."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    whole: dict[str, Tensor] = {}
    # A model for each ring, since one that trains in a ring stays in it.
    models = {size: model_of(given.size, device, dtype) for size in (1, *given.rings) if rank < size or size == 1}
    taps, model = {size: Taps(one, whole) for size, one in models.items()}, models[1]
    mine = [dist.new_group([one]) for one in range(dist.get_world_size())][rank]
    groups = {size: dist.new_group(list(range(size))) for size in given.rings}
    rows = []
    count = -(-given.rows // given.batch)
    for kernel in given.kernels:
        config = RingConfig(kernel=kernel)
        near = {name: Distance() for name in ("batches of half", "batches of one")}
        apart = {size: (Distance(), Distance()) for size in given.rings}
        differs, ratios = dict.fromkeys(given.rings, 0), dict.fromkeys(given.rings, 0.0)
        bounds = (given.rows, given.batch, given.shortest, given.longest, SIZES[given.size]["vocab_size"])
        for number, (ids, mask) in enumerate(batches(*bounds)):
            batch = ids.to(device), mask.to(device)
            if rank == 0:
                sys.stderr.write(f"{kernel}, batch {number + 1} of {count}: alone")
            with torch.no_grad():
                with taps[1].record():
                    alone = log_probs(model, batch, mine, config)
                steady = alone
                if rank == 0:
                    with fixed_height():
                        steady = log_probs(model, batch, mine, config)
                for name, height in zip(near, (max(1, len(ids) // 2), 1), strict=True):
                    if rank == 0:
                        parts = zip(*(x.split(height) for x in batch), strict=True)
                        got = torch.cat([log_probs(model, part, mine, config) for part in parts])
                        near[name].add(got, alone, batch[1])
                for size in given.rings:
                    if rank >= size:
                        continue
                    if rank == 0:
                        sys.stderr.write(f", ring of {size}")
                    ours = models[size]
                    plain = log_probs(ours, batch, groups[size], config)
                    apart[size][0].add(plain, alone, batch[1])
                    with fixed_height():
                        apart[size][1].add(log_probs(ours, batch, groups[size], config), steady, batch[1])
                    log_probs(ours, batch, groups[size], config, taps[size])
                    other = taps[size].differs.long()
                    dist.all_reduce(other, group=groups[size])
                    differs[size] += int((other > 0).sum())
                    if number < given.ratios:
                        with torch.enable_grad():
                            new = log_probs(ours.train(), batch, groups[size], config).detach()
                        ours.eval()
                        ratio = ((new - plain).exp() - 1)[batch[1][:, 1:].bool()]
                        ratios[size] = max(ratios[size], float(ratio.abs().max()))
            if rank == 0:
                sys.stderr.write("\n")
        rows += [
            {
                "kernel": kernel, "ring": size, "rows": given.rows, "attention_rows_that_differ": differs[size],
                "ratio_off_one": ratios[size], "log_probs": apart[size][0].row(), "fixed_height": apart[size][1].row(),
                **({name.replace(" ", "_"): one.row() for name, one in near.items()} if rank == 0 else {}),
            }
            for size in given.rings if rank < size
        ]  # fmt: skip
    if rank == 0:
        first = next(batches(*bounds))
        with mock.patch.dict("os.environ", {"HF_RING_ATTN_KERNEL": given.kernels[0]}):
            rows.append(
                {
                    "modules_that_round": modules_that_round(
                        model, (first[0].to(device), first[1].to(device)), given.rings
                    )
                }
            )
    return rows


def failures(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows that break what a ring promises, in words."""
    found = []
    for row in rows:
        if "ring" not in row:
            continue
        where = f"{row['kernel']}, ring of {row['ring']}"
        if row["attention_rows_that_differ"]:
            found.append(f"{where}: attention of {row['attention_rows_that_differ']} rows has other bits")
        if row["ratio_off_one"]:
            found.append(f"{where}: a first ratio is off 1 by {row['ratio_off_one']:.2g}")
        if row["fixed_height"]["same_bits"] < 1:
            found.append(
                f"{where}: at a fixed height log-probabilities are off by {row['fixed_height']['largest']:.2g}"
            )
        near = max(row["batches_of_half"]["mean"], row["batches_of_one"]["mean"])
        if row["log_probs"]["mean"] > 1.25 * near:
            found.append(f"{where}: further off than other batches: {row['log_probs']['mean']:.2g} for {near:.2g}")
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "kernel    ring  attention  ratio - 1  log-probs off by: mean  largest   fixed height  batches of half, of one"
    ]
    for row in rows:
        if "ring" in row:
            off, steady = row["log_probs"], row["fixed_height"]
            lines.append(
                f"{row['kernel']:9} {row['ring']:4}  {row['attention_rows_that_differ']:9}  {row['ratio_off_one']:9.1e}"
                f"  {off['mean']:21.2e}  {off['largest']:7.1e}  {steady['largest']:13.1e}"
                f"  {row['batches_of_half']['mean']:.2e}, {row['batches_of_one']['mean']:.2e}"
            )
    rounds = rows[-1]["modules_that_round"]
    return "\n".join([*lines, "modules that round otherwise: " + ", ".join(f"{x} {y:.0%}" for x, y in rounds.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rings", type=int, nargs="+", default=[2], help="sizes; the first ranks are the ring")
    parser.add_argument("--kernels", nargs="+", default=["auto"])
    parser.add_argument("--size", choices=SIZES, default="1B")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8, help="rows of a batch")
    parser.add_argument("--shortest", type=int, default=200)
    parser.add_argument("--longest", type=int, default=2000)
    parser.add_argument("--ratios", type=int, default=16, metavar="N", help="batches whose ratios are measured")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the numbers into its results.jsonl")
    given = parser.parse_args()
    head = facts()
    with world(None, may_share=True) as (ring, device):
        if max(given.rings) > ring.size:
            raise SystemExit(
                f"rings of {max(given.rings)} need as many ranks: torchrun --nproc_per_node {max(given.rings)}"
            )
        rows = measured(given, device, ring.rank)
        dist.barrier()
        if ring.rank > 0:
            return
        print("\n" + table(rows))
        if given.save:
            results.save(given.save, "logprob_parity", {**head, "options": {**vars(given), "save": None}}, rows)
        wrong = failures(rows)
        print("\n".join(wrong) or "all as promised")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
