"""scripts/bench_adapters.py: a short run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

import bench_adapters
from tests.tiny_models import tiny_model


def run(model: Path, work: Path, *more: str) -> None:
    """Runs the script with a small model, for which a tokenizer is made."""
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
        f"--work={work}", f"--json={work / 'rows.jsonl'}", *more,
        *(f"--set={key}={value}" for key, value in settings.items()),
    ])  # fmt: skip


@pytest.mark.extended
def test_adapters_of_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tiny_model("qwen3_moe", tmp_path / "model"), tmp_path, "--experts", "--streams=4")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["row"] for row in rows] == ["plain", "many", "half"]
    assert all(row["tokens_per_s"] > 0 for row in rows)


@pytest.mark.extended
def test_all_rows_of_a_small_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tiny_model("qwen3", tmp_path / "model"), tmp_path)
    printed = capsys.readouterr().out
    assert (tmp_path / "rows.jsonl").read_text("utf-8") == printed
    rows = [json.loads(line) for line in printed.splitlines()]
    names = [(row["row"], row["streams"]) for row in rows]
    each = [(name, streams) for name in ("plain", "many", "half", "wide") for streams in (1, 4)]
    assert names == [*each, ("plain", 64), ("zipf", 64)]
    plain, zipf = rows[-2:]
    assert zipf["requests"] == zipf["cold_requests"] + zipf["warm_requests"] == 320
    ratio = zipf["tokens_per_s"] / plain["tokens_per_s"]
    assert zipf["of_plain"] == pytest.approx(ratio, rel=0.01)
    assert zipf["cold_requests"] <= 40
