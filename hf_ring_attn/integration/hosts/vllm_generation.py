"""TRL's generation by vLLM in a ring: a server gets a ring's prompts once, colocated engines share them."""

from __future__ import annotations

from typing import Any

from ..context.mesh import ring_of_process
from ..patching.changes import Original, Patch, around
from . import rings_as_processes as rings


@around
def _generate(
    original: Original, self: Any, prompts: list[Any], images: Any, num_generations: int, profiler: Any = None
) -> Any:
    ring = ring_of_process()
    if ring.size == 1:
        return original(self, prompts, images, num_generations, profiler)
    count, rest = divmod(len(prompts), ring.size)
    if self.mode == "server" or rest:  # groups of engines need equally many prompts on each rank
        with rings.rings_as_processes(self):
            return original(self, prompts, images, num_generations, profiler)
    mine = slice(ring.rank * count, (ring.rank + 1) * count)
    found = original(self, prompts[mine], images and images[mine], num_generations, profiler)
    everyone = ring.objects(found, "sent its completions")
    columns = zip(*everyone, strict=True)
    return tuple(None if parts[0] is None else [row for part in parts for row in part] for parts in columns)


_MODULE = "trl.generation.vllm_generation"
PATCHES = [
    Patch(f"{_MODULE}:VLLMGeneration.generate", "(self, prompts, images, num_generations, profiler=)", _generate),
    Patch(f"{_MODULE}:gather_object", "(object)", rings.gather_object),
]
