"""scripts/bench_adapters.py: a short run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

import bench_adapters
from tests.tiny_models import tiny_model


@pytest.mark.extended
def test_all_rows_of_a_small_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model("qwen3", tmp_path / "model")
    size = json.loads((model / "config.json").read_text("utf-8"))["vocab_size"]
    tokenizer = Tokenizer(models.WordLevel({f"word{n}": n for n in range(size)}, "word0"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(model / "tokenizer.json"))
    settings = {
        "parallel.device": "cpu", "model.dtype": "float32", "cache.block_size": 16,
        "cache.num_blocks": 300,
    }  # fmt: skip
    bench_adapters.main([
        f"--model={model}", "--streams=1,4", "--input-len=20", "--output-len=8", "--disk=40",
        f"--work={tmp_path}", f"--json={tmp_path / 'rows.jsonl'}",
        *(f"--set={key}={value}" for key, value in settings.items()),
    ])  # fmt: skip
    printed = capsys.readouterr().out
    assert (tmp_path / "rows.jsonl").read_text("utf-8") == printed
    rows = [json.loads(line) for line in printed.splitlines()]
    names = [(row["row"], row["streams"]) for row in rows]
    each = [(name, streams) for name in ("plain", "many", "half", "wide") for streams in (1, 4)]
    assert names == [*each, ("plain", 64), ("zipf", 64)]
    zipf = rows[-1]
    assert zipf["requests"] == zipf["cold_requests"] + zipf["warm_requests"] == 320
    assert 0 < zipf["of_plain"] < 1.2
    assert zipf["cold_requests"] <= 40
