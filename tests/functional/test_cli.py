"""Subcommands with a real model: a batch that is killed and goes on, and chats."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from aioinfer.__main__ import main
from tests.functional.conftest import SMOLLM2, Served

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "parallel.executor=inline", "parallel.cpu_threads=1", "cache.num_blocks=64",
    "model.max_model_len=256", "scheduler.max_num_seqs=4",
)  # fmt: skip
OPTIONS = [SMOLLM2, *(word for setting in SETTINGS for word in ("--set", setting))]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "aioinfer", *words]


def request(number: int) -> dict[str, Any]:
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 4}
    if number % 2:
        body["messages"] = [{"role": "user", "content": f"Count to {number}."}]
        url = "/v1/chat/completions"
    else:
        body["prompt"] = f"{number} and"
        url = "/v1/completions"
    if number == 5:
        body["top_p"] = 7
    return {"custom_id": f"c{number}", "method": "POST", "url": url, "body": body}


def test_a_batch_that_is_killed_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [request(number) for number in range(14)]
    requests.write_text("".join(json.dumps(item) + "\n" for item in lines))
    call = ["batch", "-i", str(requests), "-o", str(results), *OPTIONS]
    with subprocess.Popen(command(*call), cwd=ROOT, stderr=subprocess.DEVNULL) as first:
        until = time.monotonic() + 120
        while not results.exists() or results.read_bytes().count(b"\n") < 4:
            assert first.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        first.kill()
    kept = results.read_bytes()
    assert kept.count(b"\n") < 14
    results.write_bytes(kept + b'{"id":"batch_req_1","cust')
    second = subprocess.run(
        command(*call), cwd=ROOT, capture_output=True, text=True, timeout=150, check=False
    )
    assert second.returncode == 1, second.stderr  # one request is wrong
    assert "14 results" in second.stderr
    assert "14/14" in second.stderr
    data = results.read_bytes()
    assert data.startswith(kept)
    found = [json.loads(item) for item in data.splitlines()]
    assert [item["custom_id"] for item in found] == [item["custom_id"] for item in lines]
    statuses = [item["response"]["status_code"] for item in found]
    assert statuses == [400 if number == 5 else 200 for number in range(14)]
    assert found[5]["response"]["body"]["error"]["param"] == "top_p"
    assert found[7]["response"]["body"]["choices"][0]["message"]["content"]
    # nothing is left to do: no model is loaded
    assert main([*call[:5], "./nowhere"]) == 1
    assert "14 results" in capsys.readouterr().err
    assert results.read_bytes() == data


async def chat(served: Served, text: str, *words: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *command("chat", "--url", served.url, "--temperature", "0", "--max-tokens", "12", *words),
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    output, errors = await process.communicate(text.encode())
    return process.returncode or 0, output.decode(), errors.decode()


@pytest.mark.asyncio(loop_scope="session")
async def test_a_chat_with_a_server_remembers_what_was_said(
    speaking: Served, tmp_path: Path
) -> None:
    saved = tmp_path / "chat.json"
    questions = f"What is the capital of France?\n\nAnd of Italy?\n/save {saved}\n/quit\nnever\n"
    status, output, _ = await chat(speaking, questions, "--system", "Be brief.")
    assert status == 0
    assert "Paris" in output
    messages = json.loads(await asyncio.to_thread(saved.read_text))
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert messages[1]["content"] in output
    fields = {"temperature": 0, "max_tokens": 12}
    system = {"role": "system", "content": "Be brief."}
    reply = await speaking.post("/v1/chat/completions", messages=[system, *messages[:3]], **fields)
    assert reply["choices"][0]["message"]["content"] == messages[3]["content"]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_chat_on_a_terminal(served: Served) -> None:
    """What is pasted is one question; the answer is rendered, and its pace is shown."""
    controller, device = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *command("chat", "--url", served.url, "--temperature", "0", "--max-tokens", "12"),
        cwd=ROOT, stdin=device, stdout=device, stderr=device, env=os.environ | {"TERM": "xterm"},
    )  # fmt: skip
    os.close(device)

    def talk() -> str:
        """Asks at the first prompt, ends at the second, and returns all that was shown."""
        output = b""
        keys = [b"\x1b[200~Count to\nthree.\x1b[201~\r", b"\x04"]
        with suppress(OSError):  # the process has ended
            while data := os.read(controller, 4096):
                output += data
                if keys and output.count(b"> ") == 3 - len(keys):
                    os.write(controller, keys.pop(0))
        os.close(controller)
        return output.decode()

    output = await asyncio.to_thread(talk)
    assert await process.wait() == 0
    assert re.search(r"12 tokens, [\d.]+ tokens/s, the first after [\d.]+ s", output)
    messages = [{"role": "user", "content": "Count to\nthree."}]
    reply = await served.post(
        "/v1/chat/completions", messages=messages, temperature=0, max_tokens=12
    )
    words = reply["choices"][0]["message"]["content"].split()
    assert words[0] in output


@pytest.mark.asyncio(loop_scope="session")
async def test_a_chat_that_cannot_be_answered_says_why(served: Served) -> None:
    status, _, errors = await chat(served, "Hello\n", "--max-tokens", "0")
    assert status == 1
    assert "max_tokens" in errors


@pytest.mark.extended
def test_a_chat_with_an_engine_of_its_own() -> None:
    ended = subprocess.run(
        command("chat", *OPTIONS, "--temperature", "0", "--max-tokens", "8"),
        cwd=ROOT, input="What is the capital of France?\n/undo\n/clear\n/help\n",
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "capital" in ended.stdout
    assert "/system TEXT" in ended.stdout
