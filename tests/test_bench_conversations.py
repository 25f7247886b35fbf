"""scripts/bench_conversations.py: a short run over two real servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bench_conversations
from tests.tiny_models import tiny_model


@pytest.mark.extended
def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each turn finds all but the last one, the answer included, in blocks of 16 tokens."""
    folder, file = tiny_model("qwen3_5_text", tmp_path / "model"), tmp_path / "records.json"
    sizes = "--conversations 3 --turns 3 --system 100 --input 40 --output 20 --token-ids 3 500"
    settings = "--set parallel.device=cpu --set cache.num_blocks=300"
    settings += " --set scheduler.max_num_seqs=8"
    paths = ["--model", str(folder), "--json", str(file)]
    bench_conversations.main([*sizes.split(), *settings.split(), *paths])
    runs = json.loads(file.read_text())
    found = {(r["turn"], r["cached_tokens"]) for r in runs["cached"] if r["turn"] > 1}
    assert found == {(2, 159 // 16 * 16), (3, 219 // 16 * 16)}
    assert {record["cached_tokens"] for record in runs["cold"]} == {0}
    assert len(runs["cold"]) == len(runs["cached"]) == 9
    assert "| 2-3 | 1380 | " in capsys.readouterr().out
