"""scripts/bench_kv_store.py: a short run over two real servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bench_kv_store
from tests.tiny_models import tiny_model


@pytest.mark.extended
def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts and conversations are found with the store, and not without."""
    folder = tiny_model("qwen3", tmp_path / "model", max_position_embeddings=4096)
    file = tmp_path / "figures.json"
    sizes = "--blocks 200 --block-size 16 --host-gib 0.1 --token-bytes 512 --prompt 1000"
    sizes += " --streams 2 --quiet-s 0.3 --conversations 6 --turns 3 --history 900 --misses 3"
    sizes += " --max-preempted 3 --token-ids 3 500"
    settings = "--set parallel.device=cpu --set scheduler.max_num_seqs=8"
    bench_kv_store.main(
        [*sizes.split(), *settings.split(), "--model", str(folder), "--json", str(file)]
    )
    runs = json.loads(file.read_text())
    assert runs["with"]["prefix"]["found"] > 0.98
    assert runs["without"]["prefix"]["found"] < 0.1
    assert runs["with"]["conversations"]["found_of_history"] > 0.9
    assert "| misses | tokens_per_s |" in capsys.readouterr().out
