"""Short runs of benchmarks: over real servers, real files, and engines of small models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

import bench_adapters
import bench_conversations
import bench_embeddings
import bench_handover
import bench_kv_copies
import bench_kv_files
import bench_kv_store
import bench_speculation
import bench_start
from aioinfer.features.speculation.costs import RowTimes
from bench_embeddings import BGE_M3, flops_of, measure_floor
from tests.tiny_models import tiny_model
from time_steps import rates


def test_copies_of_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    sizes = "--device cpu --blocks 5 --block-size 4 --layers 2 --weights 0 --rounds 2"
    bench_kv_copies.main([*sizes.split(), "--json", str(file)])
    assert len(json.loads(file.read_text())["load"]["plain"]["GB/s"]) == 2
    assert "save  plain" in capsys.readouterr().out


def test_files_of_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--blocks 3 --mib 1 --threads 1 2 --rounds 1"
    bench_kv_files.main([str(tmp_path), *options.split()])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[4:]]
    assert [row[0] for row in rows] == ["1", "2"]
    assert all(float(figure) >= 0.0 for row in rows for figure in row)
    assert not [*tmp_path.iterdir()]


@pytest.mark.extended
def test_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("llama", tmp_path)
    config = tmp_path / "config.toml"
    config.write_text(f'[model]\npath = "{tmp_path}"\ntokenizer = "none"\n')
    bench_start.main(["--config", str(config), "--runs", "1", "--set", "parallel.device=cpu"])
    lines = [line.split(": ") for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in lines] == [
        "first start of all", "empty caches", "full caches",
        "empty caches, median of 1", "full caches, median of 1",
    ]  # fmt: skip
    assert all(float(figure.removesuffix(" s")) > 0.5 for _, figure in lines)
    assert lines[1][1] == lines[3][1]


@pytest.mark.extended
def test_speculation(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer repeats the prompt's code: drafts are kept, wherever a row costs nothing."""
    monkeypatch.setattr(RowTimes, "seconds", lambda self, rows: 0.001)
    options = ["--streams", "2", "--tokens", "40", "--rounds", "1", "--task"]
    bench_speculation.main([*options, "repeat code"])
    *_, row = capsys.readouterr().out.splitlines()
    task, plain, _, _, plain_steps, steps, kept, same = [
        column.strip() for column in row.strip("|").split("|")
    ]
    assert (task, same) == ("repeat code", "yes")
    assert float(plain) > 0
    assert int(steps) < int(plain_steps)
    assert int(kept.split()[0]) > 5


@pytest.mark.extended
def test_conversations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.extended
@pytest.mark.timeout(500)
def test_handover(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.extended
def test_kv_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    bench_kv_store.main(
        [*sizes.split(), *settings.split(), "--model", str(folder), "--restart", str(tmp_path)]
    )
    restarted = json.loads(capsys.readouterr().out)
    assert restarted["files"] >= 3 * 62
    # later ones are computed where that is faster, as for a model of this size on a busy machine
    assert restarted["found_of_the_first"] > 0.95


TINY: dict[str, Any] = BGE_M3 | {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": 100, "max_position_embeddings": 40, "dtype": "float32",
}  # fmt: skip


def test_the_floor_counts_what_torch_multiplies() -> None:
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import CONFIG_MAPPING, AutoModel

    fields = {name: value for name, value in TINY.items() if name != "architectures"}
    kind = fields.pop("model_type")
    model = AutoModel.from_config(CONFIG_MAPPING[kind](**fields, attn_implementation="eager"))
    base = model.encoder  # without the pooler
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        base(torch.randn(3, 20, 32))
    assert counter.get_total_flops() == flops_of(TINY, 3, 20)


def test_steps_of_whole_batches() -> None:
    found = measure_floor(TINY, 4, 12, 1, 1e9, {"parallel.executor": "inline"})
    assert found["steps_of_a_round"] == bench_embeddings.STEPS
    assert found["part"] == pytest.approx(found["floor_s"] / found["step_s"])
    assert found["tokens_per_s"] > 0


def run_adapters(model: Path, work: Path, *more: str) -> None:
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
    run_adapters(tiny_model("qwen3_moe", tmp_path / "model"), tmp_path, "--experts", "--streams=4")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["row"] for row in rows] == ["plain", "many", "half"]
    assert all(row["tokens_per_s"] > 0 for row in rows)


@pytest.mark.extended
def test_all_rows_of_a_small_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_adapters(tiny_model("qwen3", tmp_path / "model"), tmp_path)
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


def test_rates_follow_the_next_larger_captured_step() -> None:
    plain, ahead = {1: 1.0, 128: 2.0}, {2: 1.0, 128: 2.0, 192: 3.0, 256: 4.0}
    assert rates(plain, ahead, 1, [0.5, 0.25]) == [1.0, 1.5, pytest.approx(1.75 / 2.0)]
    assert rates(plain, ahead, 90, [0.5]) == [45.0, 45.0]
    assert rates(plain, ahead, 128, [0.5, 0.5]) == [64.0, 48.0], "no step has 384 rows"
