"""All traffic between ranks: gather by head groups, ring pass, float32 sums, agreement. Nothing here knows a mask."""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from ..dtypes import accumulate_dtype
from ..errors import BadOption, NotSendable, PeerLost, RanksDiffer, RefusedElsewhere
from .fingerprint import first_difference, numbers_of, row_of
from .groups import group_of, name_of, state_of

S = TypeVar("S")

# torch renamed these in 2.13 and warns about the old names on every call.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

LOCAL = ""
"""The name of the ring of one, which needs no process group."""
_CPU = torch.device("cpu")

_OWN = re.compile(r"cuda (error|failure)|out of memory|device-side assert", re.IGNORECASE)
"""Words of errors of this rank's own GPU, also of those that NCCL reports."""
_LATE = re.compile(r"timed out|time-?out", re.IGNORECASE)
_UNKNOWN = re.compile(
    r"scalar type|unsupported (data ?type|dtype)|(backend|support)[^.]* device|must be CUDA", re.IGNORECASE
)


@contextmanager
def following_peers(doing: str, ring: Ring) -> Iterator[None]:
    """Turns errors of the backend into `PeerLost` (another rank failed or is late) or `NotSendable`."""
    started = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        own = (PeerLost, NotImplementedError, torch.OutOfMemoryError, torch.AcceleratorError)
        if isinstance(error, own) or _OWN.search(text):
            raise
        if _UNKNOWN.search(text):
            raise NotSendable(doing, text) from error
        waited = time.monotonic() - started if _LATE.search(text) else None
        raise PeerLost(doing, ring.rank, ring.size, waited) from error


@dataclass(frozen=True, eq=False)
class Pending:
    """Tensors in transfer. `wait` returns them; on a GPU it orders streams and does not stop the host."""

    ring: Ring
    doing: str
    tensors: list[Tensor]
    works: Sequence[Any]

    def wait(self) -> list[Tensor]:
        with following_peers(self.doing, self.ring):
            for work in self.works:
                work.wait()
        return self.tensors


class Ring:
    """The ranks that share a sequence, by the name of their process group (names, unlike groups, go through ops).

    The name is not always torch's: `groups` gives each once. So what is cached by it cannot be another group's.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def of(cls, group: dist.ProcessGroup | DeviceMesh | None) -> Ring:
        """The ring over ``group``, maybe a mesh of one axis; over the world if that is None, and of one rank where
        nothing is distributed."""
        if isinstance(group, DeviceMesh) and group.ndim == 1:
            group = group.get_group()
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise BadOption("group", group, "a process group that this rank is in, a mesh of one axis, or None")
        if not dist.is_initialized():
            return cls(LOCAL)
        group = group if group is not None else dist.group.WORLD
        assert group is not None
        return cls(LOCAL if dist.get_world_size(group) == 1 else name_of(group))

    @classmethod
    def simulated(cls, size: int, rank: int) -> Ring:
        """A simulated rank: it has a size and a rank, but no process group."""
        ring = cls(LOCAL)
        ring.__dict__.update(size=size, rank=rank)
        return ring

    def _key(self) -> object:
        return self.name if self.name != LOCAL else (self.size, self.rank)  # a simulated rank has no group's name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ring) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    @property
    def group(self) -> dist.ProcessGroup:
        """Its process group, which a ring does not keep alive. Raises GroupDestroyed."""
        return group_of(self.name)

    def state(self, kind: type[S]) -> S:
        """A feature's own state of this ring: an instance of its class, made at first use.

        It is dropped when a group is made after this one was destroyed. Raises GroupDestroyed.
        """
        return state_of(self.name, kind)

    @cached_property
    def backend(self) -> str:
        """Its name; "" in a ring of one."""
        return "" if self.size == 1 else dist.get_backend(self.group)

    @cached_property
    def size(self) -> int:
        return 1 if self.name == LOCAL else dist.get_world_size(self.group)

    @cached_property
    def rank(self) -> int:
        return 0 if self.name == LOCAL else dist.get_rank(self.group)

    def ranks(self) -> set[int]:
        """The numbers of its ranks in the world."""
        return {world_rank()} if self.name == LOCAL else set(dist.get_process_group_ranks(self.group))

    # ---- keys and values, forward ------------------------------------------------------------------------------

    def gather(self, tensor: Tensor, doing: str = "gathered keys and values") -> Pending:
        """Starts an all-gather of ``tensor`` [...]; gives [W, ...] in rank order."""
        if self.size == 1:
            return Pending(self, doing, [tensor[None]], ())
        tensor = tensor.contiguous()
        everyone = tensor.new_empty(self.size, *tensor.shape)
        with following_peers(doing, self):
            work = _all_gather_single(everyone.view(-1), tensor.view(-1), group=self.group, async_op=True)
        return Pending(self, doing, [everyone], (work,))

    def by_heads(
        self, tensors: Sequence[Tensor], groups: Sequence[slice], send: Callable[[Tensor], Pending]
    ) -> Iterator[tuple[slice, list[Tensor]]]:
        """Sends tensors [B, T, G, ...] one group of heads at a time; yields each group and the tensors received for it.

        The first group is sent now; each later one while the caller uses the group before it.

        Args:
            send: starts a transfer, such as `gather`, which gives [W, B, T, heads, ...] in rank order.
        """

        def launch(group: slice) -> list[Pending]:
            return [send(tensor[:, :, group]) for tensor in tensors]

        def arriving(ahead: list[Pending]) -> Iterator[tuple[slice, list[Tensor]]]:
            for here, following in zip(groups, [*groups[1:], None], strict=True):
                arrived, ahead = ahead, [] if following is None else launch(following)
                yield here, [arrived.pop(0).wait()[0] for _ in tensors]  # from here on the caller alone holds them

        return arriving(launch(groups[0]))

    def all_to_all(self, tensor: Tensor, sends: list[int], receives: list[int], doing: str) -> Pending:
        """Starts an all-to-all from [sum(sends), ...] to [sum(receives), ...]: rows for each rank, in order."""
        tensor = tensor.contiguous()
        arriving = tensor.new_empty(sum(receives), *tensor.shape[1:])
        with following_peers(doing, self):
            work = dist.all_to_all_single(arriving, tensor, receives, sends, group=self.group, async_op=True)
        return Pending(self, doing, [arriving], (work,))

    # ---- the ring, backward --------------------------------------------------------------------------------------

    def send_on(self, tensors: Sequence[Tensor], doing: str) -> Pending:
        """Starts to send tensors to the next rank, and to receive the previous rank's, which have the same shapes."""
        tensors = [tensor.contiguous() for tensor in tensors]
        arriving = [torch.empty_like(tensor) for tensor in tensors]
        following, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        moves = []
        for tag, (mine, theirs) in enumerate(zip(tensors, arriving, strict=True)):
            moves.append(dist.P2POp(dist.isend, mine, group=self.group, tag=tag, group_peer=following))
            moves.append(dist.P2POp(dist.irecv, theirs, group=self.group, tag=tag, group_peer=previous))
        with following_peers(doing, self):
            return Pending(self, doing, arriving, dist.batch_isend_irecv(moves))

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Reduce-scatters [W, ...] in rank order to this rank's entry [...], summed in the tensor's dtype."""
        tensor = tensor.contiguous()
        mine = torch.empty_like(tensor[0])
        with following_peers("summed gradients of keys and values", self):
            _reduce_scatter_single(mine.view(-1), tensor.view(-1), group=self.group)
        return mine

    # ---- small things --------------------------------------------------------------------------------------------

    def mean(self, tensor: Tensor) -> Tensor:
        """Averages over the ring; sums in float32 (float64 for float64), returns the tensor's dtype."""
        return self.means([tensor])[0]

    def total(self, tensor: Tensor) -> Tensor:
        """Sums over the ring in float32 (float64 for float64, int64 for integers), returns the tensor's dtype."""
        wide = _wide_copy(tensor)
        if self.size > 1:
            with following_peers("added up over the ring", self):
                dist.all_reduce(wide, group=self.group)
        return wide.to(tensor.dtype)

    def means(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Averages each tensor, as `mean`; small ones share a message of up to `TOGETHER` numbers."""
        if self.size == 1:
            return list(tensors)
        found: list[Tensor] = []
        for run in _together(tensors):
            # A large one alone is not copied twice.
            wide = _wide_copy(run[0]).view(-1) if len(run) == 1 else torch.cat([_wide_copy(x).view(-1) for x in run])
            with following_peers("averaged over the ring", self):
                dist.all_reduce(wide, group=self.group)
            wide = (wide if wide.is_floating_point() else wide.double()).div_(self.size)
            parts = wide.split([x.numel() for x in run])
            found += [part.view(x.shape).to(x.dtype) for part, x in zip(parts, run, strict=True)]
        return found

    def agree(
        self, facts: Mapping[str, object], device: torch.device, todo: str = "", failure: Exception | None = None,
        collect: Sequence[int | Tensor] = (), *, doing: str,
    ) -> list[list[int]]:  # fmt: skip
        """`start_agreement`, and its end at once."""
        return self.start_agreement(facts, device, todo, failure, collect, doing=doing)()

    def start_agreement(
        self, facts: Mapping[str, object], device: torch.device, todo: str = "", failure: Exception | None = None,
        collect: Sequence[int | Tensor] = (), *, doing: str,
    ) -> Callable[[], list[list[int]]]:  # fmt: skip
        """Compares facts among ranks in one small collective; if any differs, all ranks raise.

        Args:
            facts: values by name, the same names in the same order on every rank: numbers, strings, tensors, and
                collections of them. Each is sent as one integer (`numbers_of`); if one differs, the ranks search for
                the value that does.
            todo: advice if they differ.
            failure: the error that this rank must raise; then no rank goes on.
            collect: numbers that may differ, equally many on every rank.
            doing: this rank's activity, in words of its own, by which ranks at different places are told apart.

        Returns:
            a function that ends the comparison: it waits, and returns for each number of ``collect`` those of all
            ranks. Other messages of the ring may start before, in one order on all ranks.

        Raises (that function):
            this rank's ``failure``; RefusedElsewhere: another rank has one, with its name and words.
            RanksDiffer: on every rank, the first fact that differs.
        """

        def finish() -> list[list[int]]:
            if receive is None:
                if failure is not None:
                    raise failure
                return [[int(number)] for number in collect]
            table = receive()
            if any(line[0] for line in table):
                texts = self.objects(None if failure is None else f"{type(failure).__name__}: {failure}")
                elsewhere = RefusedElsewhere({rank: text for rank, text in enumerate(texts) if text is not None})
                raise failure or elsewhere
            same = all(line[1 : 1 + len(facts)] == table[0][1 : 1 + len(facts)] for line in table)
            for column, (name, value) in enumerate(() if same else facts.items(), start=1):
                if len({line[column] for line in table}) > 1:
                    raise RanksDiffer(*first_difference(name, value, self.objects), todo)
            return [[line[1 + len(facts) + place] for line in table] for place in range(len(collect))]

        receive = None
        if self.size > 1:
            receive = self.start_rows([int(failure is not None), *numbers_of(facts.values()), *collect], device, doing)
        return finish

    def objects(self, mine: object, doing: str = "collected what ranks refuse") -> list[Any]:
        """All-gathers a picklable object."""
        if self.size == 1:
            return [mine]
        everyone: list[Any] = [None] * self.size
        with following_peers(doing, self):
            dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def of_first(self, mine: Any, doing: str) -> Any:
        """Broadcasts the first rank's picklable object; the others' are ignored."""
        if self.size == 1:
            return mine
        sent = [mine]
        with following_peers(doing, self):
            dist.broadcast_object_list(sent, group=self.group, group_src=0)
        return sent[0]

    def small_device(self, device: torch.device = _CPU) -> torch.device:
        """The device for small messages about tensors on one: the GPU for NCCL, which cannot send CPU tensors."""
        if self.backend == "nccl":
            return device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
        return _CPU if self.backend == "gloo" else device

    def start_rows(
        self, numbers: Sequence[int | Tensor], device: torch.device, doing: str
    ) -> Callable[[], list[list[int]]]:
        """Starts an all-gather of integers; the function returned ends it, and gives those of each rank.

        Messages have one size and name their rank's activity, so a mix-up is detected.

        Raises (that function):
            RanksDiffer: the ranks are at different places of the program.
        """
        row = [*_packed(doing), *numbers]
        pending = self.gather(row_of(row + [0] * (-len(row) % ROW), device), doing)

        def receive() -> list[list[int]]:
            table = pending.wait()[0].tolist()
            if any(line[:8] != table[0][:8] for line in table):
                doings: list[object] = [_WORDS.pack(*line[:8]).decode(errors="replace").strip() for line in table]
                error = RanksDiffer("place in the program", doings, _IN_STEP)
                error.of_program = True
                raise error
            return [line[8 : len(row)] for line in table]

        return receive

    def numbers(self, number: int | Tensor, device: torch.device, doing: str) -> list[int]:
        """All-gathers an integer. Raises as `start_rows`."""
        return [line[0] for line in self.start_rows([number], device, doing)()]


ROW = 128
"""Integers in a small message; longer ones have a multiple, and gloo aborts where ranks send different sizes. A
comparison of losses has 75."""

_WORDS = struct.Struct("<8q")
"""The start of a small message: 64 letters of its rank's activity."""


@cache
def _packed(doing: str) -> tuple[int, ...]:
    return _WORDS.unpack(doing.encode()[: _WORDS.size].ljust(_WORDS.size))


_IN_STEP = "Ranks of a ring must call shard(), the model, reduce() and gather() in one order, with the same options."

TOGETHER = 2**24
"""Most numbers in one message of `Ring.means`: 64 MiB in float32."""


def _wide_copy(tensor: Tensor) -> Tensor:
    """A copy to add up, which ranks do by memory, whatever its order: one of them may hold a transposed tensor."""
    return tensor.to(accumulate_dtype(tensor.dtype), copy=True, memory_format=torch.contiguous_format)


def _together(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Splits tensors into runs of one device and one summation dtype that fit in one message."""
    run: list[Tensor] = []
    count = 0
    for x in tensors:
        like = not run or (accumulate_dtype(x.dtype), x.device) == (accumulate_dtype(run[0].dtype), run[0].device)
        if not like or count + x.numel() > TOGETHER:
            yield from [run] if run else []
            run, count = [], 0
        run.append(x)
        count += x.numel()
    yield from [run] if run else []


def world_rank() -> int:
    """This process's rank in the job; 0 if nothing is distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Processes in the job; 1 if nothing is distributed."""
    return dist.get_world_size() if dist.is_initialized() else 1


def set_timeout(group: dist.ProcessGroup, timeout: timedelta | None) -> None:
    """Sets the timeout of a group's operations; None: that of the world's group.

    A mesh gives the groups of its axes the default of 30 (NCCL: 10) minutes, whatever the world's group has.
    """
    if timeout is None:
        assert dist.group.WORLD is not None
        timeout = dist.group.WORLD._get_backend(dist.group.WORLD._device_types[0]).options._timeout
    _set_pg_timeout(timeout, group)
