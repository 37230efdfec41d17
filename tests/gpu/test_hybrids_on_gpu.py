"""Hybrids with the kernels of flash-linear-attention, which transformers takes by itself if it is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

pytestmark = pytest.mark.gpu

DELTA = {
    "model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 4096,
    "linear_num_key_heads": 8, "linear_num_value_heads": 16, "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {
    **DELTA, "model_type": "qwen3_next", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}  # fmt: skip


@pytest.mark.parametrize("config", [DELTA, EXPERTS], ids=["Qwen3.5", "Qwen3-Next"])
def test_flash_linear_attention_is_exact_in_a_ring(tmp_path: Path, config: dict[str, object]) -> None:
    """Two ranks, of one GPU perhaps, against one process; its kernels are tuned for minutes."""
    pytest.importorskip("fla")
    if Version(version("triton")) < Version("3.7.1"):
        pytest.skip("with triton before 3.7.1 its backward refuses Hopper")
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "hf_ring_attn", "verify", "--model", str(tmp_path / "config.json")]
    run = subprocess.run(
        [*command, "--tokens", "2048", "--dtype", "bfloat16", "--json"], capture_output=True, text=True, timeout=900
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    assert found["exact"] is True and found["device"] == "cuda" and found["ranks"] == 2
    assert {"layers of kind linear_attention", "layers of kind full_attention"} <= {
        x["what"] for x in found["findings"]
    }
