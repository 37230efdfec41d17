"""Which modules are the program's: see `context.program_states`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hf_ring_attn.integration.context.program_states import is_of_program


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
    assert is_of_program("__main__") and is_of_program(__name__)
