"""scripts/bench_handover.py: a short run over real servers and gateways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bench_handover
from tests.tiny_models import tiny_model


@pytest.mark.extended
@pytest.mark.timeout(500)
def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts are computed where they are not generated, and where they are."""
    folder = tiny_model("qwen3", tmp_path / "model", max_position_embeddings=4096)
    file = tmp_path / "figures.json"
    sizes = "--no-gpus --host-gib 0.1 --token-bytes 512 --prompt 1000 --prompts 3 --streams 2"
    settings = "--token-ids 3 500 --set parallel.device=cpu --set cache.num_blocks=400"
    bench_handover.main(
        [*sizes.split(), *settings.split(), "--model", str(folder), "--json", str(file)]
    )
    runs = json.loads(file.read_text())
    assert runs["apart"]["cached"] > 0.95
    assert runs["both"]["cached"] < 0.1
    assert "| ttft_s |" in capsys.readouterr().out
