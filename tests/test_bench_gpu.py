"""The GPU benchmark on a CPU with a tiny model: engines, server and client processes are real."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bench_gpu
from aioinfer.features.speculation.costs import StepCosts
from benchlib.gpu_cases import HTTP_CASES, OFFLINE_CASES, Case, Model
from benchlib.gpu_report import compare
from benchlib.vllm_figures import VLLM_H200, Figures
from tests.real_tokenizers import smollm2_folder
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.slow

TINY = (
    "--set parallel.executor=inline --set parallel.device=cpu --set parallel.cpu_threads=1 "
    "--set cache.num_blocks=256 --set scheduler.max_num_seqs=8 --idle 0"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer_cache: Path) -> Path:
    folder = tiny_model("qwen3", tmp_path_factory.mktemp("bench_gpu") / "tiny", vocab_size=49_152)
    shutil.copytree(smollm2_folder(tokenizer_cache), folder, dirs_exist_ok=True)
    for file in folder.glob("*.safetensors"):  # the weights are random ones anyway
        file.unlink()
    return folder


@dataclass(frozen=True, slots=True)
class Ended:
    status: int
    rows: dict[str, dict[str, Any]]
    table: str
    errors: str


def run(capsys: pytest.CaptureFixture[str], arguments: str) -> Ended:
    status = bench_gpu.main(f"{arguments} {TINY}".split())
    printed, errors = capsys.readouterr()
    lines = printed.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    return Ended(status, {row["case"]: row for row in rows}, "\n".join(lines[len(rows) :]), errors)


# ---------------------------------------------------------------- whole runs


def test_offline(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures = {"k3x20x9": Figures(vllm=1e-3, mark=1e9), "p2": Figures(vllm=1.0)}
    monkeypatch.setitem(VLLM_H200, (64, 2, 1), figures)
    file = tmp_path / "rows.jsonl"
    ended = run(capsys, f"--model {folder} --cases k3x20x9,p2,d1 --rounds 2 --json {file}")
    # a prompt of 4096 tokens does not fit into this model: its row shows it, and the others are
    # measured
    assert ended.status == 1
    assert list(ended.rows) == ["startup", "k3x20x9", "p2", "d1"]
    assert "the prompt has 4096 tokens" in ended.rows["p2"]["error"]
    assert "the prompt has 4096 tokens" in ended.errors
    assert ended.rows["startup"]["seconds"] > 0
    assert ended.rows["startup"]["max_model_len"] == 512
    row = ended.rows["k3x20x9"]
    assert len(row["seconds_each_round"]) == 2
    assert row["output_tokens_per_s"] == pytest.approx(27 / np.median(row["seconds_each_round"]))
    assert row["input_tokens_per_s"] == pytest.approx(row["output_tokens_per_s"] * 60 / 27)
    assert row["ratio_to_vllm"] == pytest.approx(row["output_tokens_per_s"] * 1000)
    assert row["mark_reached"] is False
    assert 9 <= row["steps"] <= 11
    assert row["engine_last_round"]["prefix_tokens_hit"] == 0
    assert ended.rows["d1"]["steps"] >= 256
    assert "ratio_to_vllm" not in ended.rows["d1"]
    written = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert written == list(ended.rows.values())
    assert "failed" in ended.table
    assert "✗" in ended.table


def test_weights_that_are_quantized(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Random weights in the format of the setting."""
    ended = run(capsys, f"--model {folder} --cases k2x20x4 --set model.quantization=fp8")
    assert ended.status == 0
    assert ended.rows["k2x20x4"]["output_tokens_per_s"] > 0


@pytest.mark.extended
@pytest.mark.parametrize(
    ("load_format", "bounds"), [("dummy", (0.1, 0.2)), ("dummy_skewed", (0.4, 0.6))]
)
def test_tokens_of_experts(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    load_format: str,
    bounds: tuple[float, float],
) -> None:
    """With the experts of Qwen3-30B-A3B, made small."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    fields = json.loads((folder / "config.json").read_text("utf-8"))
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 16}
    fields |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **experts}
    (tmp_path / "config.json").write_text(json.dumps(fields), "utf-8")
    settings = f"--set model.load_format={load_format}"
    # reports come every second, with a step: the long case brings one of many tokens
    ended = run(capsys, f"--model {tmp_path} --cases k8x200x100 {settings}")
    assert ended.status == 0
    low, high = bounds
    assert low < ended.rows["experts"]["busiest_tenth"] < high


@pytest.mark.extended
def test_gpt_oss_made_small(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Random weights in MXFP4, from the configuration of gpt-oss-20b."""
    config = Path(bench_gpu.__file__).parent / "benchlib/models/gpt-oss-20b/config.json"
    fields = json.loads(config.read_text("utf-8"))
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    small = {
        "hidden_size": 64, "num_hidden_layers": 2, "layer_types": fields["layer_types"][:2],
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "num_local_experts": 4, "num_experts_per_tok": 2, "experts_per_token": 2,
        "intermediate_size": 64, "vocab_size": 49_152,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields | small), "utf-8")
    settings = "--set model.max_model_len=512"
    ended = run(capsys, f"--model {tmp_path} --cases k4x300x8 {settings}")
    assert ended.status == 0
    assert "quantized weights (mxfp4)" in ended.rows["startup"]["implementation"]
    assert ended.rows["k4x300x8"]["output_tokens_per_s"] > 0


@pytest.mark.extended
def test_http(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = run(capsys, f"--model {folder} --http --cases s3,h2 --client-processes 2")
    # 512 tokens and 256 more do not fit into this model
    assert (ended.status, list(ended.rows)) == (1, ["startup", "s3", "h2"]), ended.errors
    assert "2 of 2 requests failed: HTTP 400" in ended.rows["h2"]["error"]
    row = ended.rows["s3"]
    assert (row["requests"], row["errors"]) == (9, 0)
    assert row["output_tokens_per_s"] == pytest.approx(9 * 256 / row["seconds"])
    assert row["input_tokens_per_s"] == pytest.approx(9 * 128 / row["seconds"])
    assert 0 < row["itl_ms"]["p50"] <= row["itl_ms"]["p99"]
    assert 0 < row["ttft_ms"]["mean"] <= row["seconds"] * 1000
    assert 0.5 < row["chunks_per_token"] <= 1
    assert "s3" in ended.table


@pytest.mark.extended
def test_http_with_drafts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The server with speculation has the texts of an engine as drafts."""
    ended = run(
        capsys, f"--model {folder} --http --cases k2x20x60 --client-processes 1 --acceptance 1.0"
    )
    assert ended.status == 0, ended.errors
    assert list(ended.rows) == ["startup", "k2x20x60", "startup+drafts", "k2x20x60+drafts"]
    assert ended.rows["k2x20x60"]["draft_tokens"] == 0
    row = ended.rows["k2x20x60+drafts"]
    assert row["drafts_kept"] > 0.5 * row["draft_tokens"] > 10


def test_an_engine_that_does_not_start_is_a_failed_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run(capsys, f"--model {folder} --cases d1 --set model.max_model_len=100000")
    assert ended.status == 1
    assert "100000" in ended.rows["startup"]["error"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--cases x3", "no offline case 'x3'"),
        ("--cases d0", "'d0'"),
        ("--cases d1 --http", "no HTTP case 'd1'"),
    ],
)
def test_a_mistyped_case(
    folder: Path, arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_gpu.main(f"--model {folder} {arguments}".split())
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


# ---------------------------------------------------------------- cases and figures


def test_the_named_cases() -> None:
    offline = {name: Case.parse(name, http=False) for name in OFFLINE_CASES}
    http = {name: Case.parse(name, http=True) for name in HTTP_CASES}
    assert [
        (len(c.lengths()), c.lengths()[0])
        for c in (offline["d256"], offline["p16"], offline["l32"], offline["k64x2000"])
    ] == [(256, (128, 256)), (16, (4096, 1)), (32, (4096, 128)), (64, (2000, 256))]
    assert [
        (c.streams, len(c.lengths()), c.lengths()[0])
        for c in (http["h512"], http["s256"], http["h1"])
    ] == [(512, 1536, (512, 256)), (256, 768, (128, 256)), (1, 1, (128, 512))]
    long = Case.parse("k256x8192x1024", http=True)
    assert (long.streams, len(long.lengths()), long.lengths()[0]) == (256, 256, (8192, 1024))
    assert (long.num_warmup_requests, http["h512"].num_warmup_requests) == (32, 512)
    for case, count in (
        (offline["nano"], 256),
        (http["mix"], 512),
        (Case.parse("mix512", http=True), 1024),
    ):
        lengths = np.array(case.lengths())
        assert lengths.shape == (count, 2)
        assert 100 <= lengths.min() < 110 < 1010 < lengths.max() <= 1024
    known = {name for figures in VLLM_H200.values() for name in figures} - {"startup"}
    for name in known:
        Case.parse(name, http=name[0] in "hsm")


def test_prompts_differ_between_rounds_and_cases_and_lengths_repeat() -> None:
    case = Case.parse("nano", http=False)
    first, second = (case.prompts(number, vocab_size=512) for number in (1, 2))
    assert (
        [len(prompt) for prompt in first]
        == [len(prompt) for prompt in second]
        == [length for length, _ in case.lengths()]
    )
    assert case.prompts(1, vocab_size=512) == first
    assert {token for prompt in first for token in prompt} == set(range(100, 512))
    other = Case.parse("d8", http=False).prompts(1, vocab_size=512)
    assert len({tuple(prompt[:64]) for prompt in (*first, *second, *other)}) == 256 + 256 + 8


def test_another_number_of_tokens_is_an_error() -> None:
    with pytest.raises(
        RuntimeError, match="1 of 3 requests returned another number of tokens, such as 7 for 8"
    ):
        bench_gpu._require_counts([8, 7, 8], [8, 8, 8])
    with pytest.raises(RuntimeError, match="such as None for 8"):
        bench_gpu._require_counts([None], [8])


def test_marks() -> None:
    times = {"ttft_ms": {"mean": 9.0, "p99": 30.0}, "itl_ms": {"p50": 5.0, "p99": 40.0}}
    row = {"output_tokens_per_s": 120.0, "seconds": 20.0, **times}
    known = Figures(vllm=100, mark=110, ttft=(10, 30), itl=(6, 200), itl_p99_mark=60)
    assert compare(row, known)["mark_reached"] is True
    assert compare(row, known)["ratio_to_vllm"] == pytest.approx(1.2)
    for worse in ({"mark": 121}, {"itl_p99_mark": 40}, {"ttft": (8, 30)}, {"ttft": (10, 29)}):
        assert compare(row, replace(known, **worse))["mark_reached"] is False
    startup = compare(row, Figures(vllm=50, mark=15, unit="s"))
    assert (startup["ratio_to_vllm"], startup["mark_reached"]) == (2.5, False)


def test_figures_belong_to_the_models_shape(tmp_path: Path) -> None:
    fields = {"hidden_size": 4096, "num_hidden_layers": 36, "vocab_size": 151_936}
    fields["max_position_embeddings"] = 40_960
    (tmp_path / "config.json").write_text(json.dumps(fields), "utf-8")
    assert Model.load(tmp_path).figures["d1"].mark == 240
    assert Model.load(tmp_path, 2).figures["d1"].mark == 330
    assert Model.load(tmp_path, 3).figures == {}
    assert Model.load(tmp_path, quantization="fp8").figures["d1"].mark == 400
    assert Model.load(tmp_path, quantization="int8").figures == {}
    quantized = fields | {"quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "config.json").write_text(json.dumps(quantized), "utf-8")
    assert Model.load(tmp_path).figures["d1"].mark == 520
    (tmp_path / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": 28}), "utf-8")
    assert Model.load(tmp_path).figures == {}
    (tmp_path / "config.json").write_text("{}", "utf-8")
    with pytest.raises(ValueError, match=r"describes no language model: .*hidden_size"):
        Model.load(tmp_path)


@pytest.mark.parametrize(("acceptance", "most"), [("1.0,0.9,0.8", 1.0), ("0", 0.0)])
def test_drafts_of_a_given_acceptance(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    acceptance: str,
    most: float,
) -> None:
    """The cases once more, verified with the texts of the first run as drafts. Steps are planned as
    if drafts took no time: what a busy machine measures may say that none pays."""
    monkeypatch.setattr(StepCosts, "learn", lambda *args, **kwargs: None)
    monkeypatch.setattr(StepCosts, "is_stale", lambda self, rows: False)
    monkeypatch.setattr(StepCosts, "plain", lambda self, rows: 1.0)
    monkeypatch.setattr(StepCosts, "with_lookahead", lambda self, rows: 1.0)
    ended = run(capsys, f"--model {folder} --cases k3x20x60,k1x8x60 --acceptance {acceptance}")
    assert ended.status == 0
    assert list(ended.rows)[:4] == ["startup", "k3x20x60", "k1x8x60", "startup+drafts"]
    for case in ("k3x20x60", "k1x8x60"):
        plain, drafted = (
            ended.rows[name]["engine_last_round"] for name in (case, f"{case}+drafts")
        )
        assert plain["spec_draft_tokens"] == 0
        assert drafted["texts_as_recorded"] == 1.0
        kept, verified = drafted["spec_accepted_tokens"], drafted["spec_draft_tokens"]
        assert (kept > 0.7 * verified > 0) if most else (kept == 0)
        assert drafted["steps"] < plain["steps"] if most else True
