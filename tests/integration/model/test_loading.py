"""Models for the commands: from a folder or without memory, of the class that transformers has for their config."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_ring_attn import errors
from hf_ring_attn.integration.model import loading
from tests.helpers.models.tiny_models import tiny


@pytest.mark.parametrize("name", ["llama", "qwen3 vision"])
def test_weights_of_a_folder_are_loaded(name: str, tmp_path: Path) -> None:
    saved = tiny(name, "eager")
    saved.save_pretrained(tmp_path)
    config = loading.load_config(str(tmp_path))
    model = loading.trained_model(str(tmp_path), config, torch.float32, "eager")
    assert type(model) is type(saved)
    want = saved.state_dict()
    assert all(torch.equal(x, want[key]) for key, x in model.state_dict().items())


def test_a_folder_without_weights_and_a_config_file_have_no_trained_model(tmp_path: Path) -> None:
    tiny("llama", "eager").config.save_pretrained(tmp_path)
    for source in (str(tmp_path), str(tmp_path / "config.json")):
        config = loading.load_config(source)
        assert loading.trained_model(source, config, torch.float32, "eager") is None
        assert all(x.is_meta for x in loading.empty_model(config).parameters())


def test_weights_that_cannot_be_loaded_are_refused_in_words(tmp_path: Path) -> None:
    """Such as the pointers of a checkout without git-lfs; an error of another kind would say that the ring differs."""
    tiny("llama", "eager").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    config = loading.load_config(str(tmp_path))
    with pytest.raises(errors.UnknownModel, match="header"):
        loading.trained_model(str(tmp_path), config, torch.float32, "eager")


def test_what_is_wrong_with_a_config_is_said(tmp_path: Path) -> None:
    """transformers says it in the second line."""
    path = tmp_path / "odd.json"
    path.write_text('{"model_type": "llama", "hidden_size": 33, "num_attention_heads": 4}')
    with pytest.raises(errors.UnknownModel, match=r"hidden size \(33\) is not a multiple"):
        loading.load_config(str(path))


def test_a_model_that_cannot_be_built_is_named_as_the_user_did(tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_text('{"model_type": "nemotron"}')  # its defaults have no number of heads
    config = loading.load_config(str(path))
    with pytest.raises(errors.UnknownModel) as refused:
        loading.empty_model(config)
    assert f"'{path}'" in str(refused.value) and "NemotronConfig" not in str(refused.value)


@pytest.mark.parametrize("source", ["owner/name", "gpt2"])
def test_names_of_the_hub_are_no_missing_paths(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else it asks again and again, 24 s a name
    with pytest.raises(errors.UnknownModel) as refused:
        loading.load_config(source)
    assert "no such file or folder" not in str(refused.value)


def test_a_missing_file_in_a_folder_that_exists_is_a_missing_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.UnknownModel, match="no such file or folder"):
        loading.load_config("models/mine")
