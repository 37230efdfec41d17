"""Which modules are the program's: see `context.program_states`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from hf_ring_attn.integration.context.program_states import is_of_program, preserved_objects


@pytest.mark.parametrize("one_file", [True, False])
def test_a_package_that_pip_put_into_a_folder_is_not_the_programs(
    one_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, folder in enumerate(("program", "target")):
        name = f"package_of_{folder}_{int(one_file)}"
        file = tmp_path / folder / (f"{name}.py" if one_file else f"{name}/__init__.py")
        file.parent.mkdir(parents=True)
        file.write_text("")
        if number:
            (tmp_path / folder / f"{name}-1.0.dist-info").mkdir()
        monkeypatch.syspath_prepend(str(tmp_path / folder))
        __import__(name)
        try:
            assert is_of_program(f"{name}.inner") == (folder == "program")
        finally:
            del sys.modules[name]


def test_installed_packages_and_this_one_are_not_the_programs() -> None:
    assert not any(map(is_of_program, ("transformers.models", "json", "hf_ring_attn.config", "pytest", None, "")))
    assert is_of_program("__main__") and is_of_program(__name__) and is_of_program("never_imported.inner")


class Counter:
    def __init__(self) -> None:
        self.calls = 0


class Counting(nn.Module):
    """A program's module that counts its calls in an object of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()


def test_what_a_program_s_module_holds_is_restored_though_fully_shard_made_a_subclass_of_its_class() -> None:
    """The subclass is in a file of torch, so the module was taken for an installed package's."""
    module = Counting()
    for name in ("Counting", "FSDPCounting"):
        module.__class__ = type(
            name, (Counting,), {"__module__": "torch.distributed.fsdp" if "FSDP" in name else __name__}
        )
        with preserved_objects([module], [module]):
            module.counter.calls += 1
        assert module.counter.calls == 0, name


class Growing:
    """An object of the program with a tensor that it makes longer, and a list after it."""

    def __init__(self, at: list[int]) -> None:
        self.seen, self.at = torch.zeros(2), at

    def grow(self) -> None:
        self.seen.resize_(4).fill_(1.0)
        self.at.append(1)

    def replace(self) -> None:
        """Takes memory of numpy, which cannot grow."""
        self.seen.set_(torch.from_numpy(numpy.zeros(1)).untyped_storage())
        self.at.append(1)


def test_a_tensor_that_grew_is_restored_and_what_comes_after_it() -> None:
    """It had another shape than its values before, which ended all restoring."""
    growing = Growing([0])
    with preserved_objects([growing], []):
        growing.grow()
    assert growing.at == [0]
    assert torch.equal(growing.seen, torch.zeros(2))


def test_what_cannot_be_restored_does_not_keep_others_from_it() -> None:
    growing = Growing([0])
    growing.seen = growing.seen.double()
    with pytest.raises(RuntimeError, match="resize"), preserved_objects([growing], []):
        growing.replace()
    assert growing.at == [0]
