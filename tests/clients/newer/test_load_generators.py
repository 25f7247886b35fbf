"""guidellm and aiperf: load generators that measure a server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Server
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

PROMPTS = ["The capital of France is", "Water boils at", "The sun rises in", "Two and two are"]


def run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", ["true", "false"])
def test_guidellm(server: Server, tmp_path: Path, path: str, stream: str) -> None:
    lines = [json.dumps({"prompt": prompt, "output_tokens_count": 8}) for prompt in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    backend = f"kind=openai_http,target={server.url},model={server.model}"
    run(
        [
            *(str(Path(sys.executable).with_name("guidellm")), "run"),
            *("--backend", f"{backend},request_format={path},stream={stream}"),
            *("--profile", "kind=concurrent,streams=2"),
            *("--constraint", "kind=max_requests,count=4"),
            *("--data", "kind=json_file,path=prompts.jsonl"),
            *("--output", f"kind=json,path={tmp_path}/report.json", "--disable-console"),
        ],
        tmp_path,
    )
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == 4
    assert not requests["errored"]
    for request in requests["successful"]:
        assert request["output_metrics"]["text_tokens"] == 8
        assert request["output"]


def make_tokenizer(folder: Path) -> Path:
    """Saves a tokenizer of a few words, since the client makes prompts of random tokens and would
    otherwise fetch one."""
    words = {word: number for number, word in enumerate(["[UNK]", *"abcdefghijk"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


@pytest.mark.parametrize("kind", ["chat", "completions", "responses"])
@pytest.mark.parametrize("further", [[], ["--streaming"]])
def test_aiperf(
    server: Server, tmp_path: Path, request: pytest.FixtureRequest, kind: str, further: list[str]
) -> None:
    run(
        [
            *(request.config.getoption("--aiperf"), "profile", "--model", server.model),
            *("--url", server.url, "--endpoint-type", kind, *further),
            *("--tokenizer", str(make_tokenizer(tmp_path / "words"))),
            *("--request-count", "4", "--concurrency", "2", "--use-server-token-count"),
            *("--synthetic-input-tokens-mean", "16", "--output-tokens-mean", "8"),
            *("--artifact-dir", str(tmp_path / "out"), "--ui", "none"),
        ],
        tmp_path,
    )
    (report,) = (tmp_path / "out").rglob("profile_export_aiperf.json")
    found: dict[str, Any] = json.loads(report.read_text())
    assert found["request_count"]["avg"] == 4
    assert not found.get("error_request_count", {}).get("avg")
