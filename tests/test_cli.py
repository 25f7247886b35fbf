"""The subcommands, as far as they need no model; `functional/test_cli.py` has them with one."""

from __future__ import annotations

import argparse
import asyncio
import codecs
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from aioinfer.__main__ import main
from aioinfer.batch_file import check_input, open_results, read_requests, take_up
from aioinfer.cli.bench import find_bench
from aioinfer.cli.chat import ChatError, ChatServer, Event, _Pace
from aioinfer.cli.commands import COMMANDS
from aioinfer.cli.model_options import add_model_options, load
from aioinfer.errors import ConfigError
from tests.scripted_server import USAGE_EVENT, serving, sse, stream

ROOT = Path(__file__).parents[1]


def line(number: int, **fields: Any) -> bytes:
    usual = {"custom_id": str(number), "url": "/v1/completions", "body": {"prompt": "x" * number}}
    return json.dumps(usual | fields).encode() + b"\n"


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "bench"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert COMMANDS[command].split(":")[0] in " ".join(capsys.readouterr().out.split())


def test_a_command_without_a_model_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 2
    assert "which model?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"rope_parameters": {"rope_theta": 1e6}, "a": null}', None),
        ("{", "--hf-overrides must be a JSON object"),
        ("[1]", "model.hf_overrides must be table, not [1]"),
    ],
)
def test_overrides_of_config_json(text: str, expected: str | None) -> None:
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    options = parser.parse_args(["a/model", "--hf-overrides", text, "--set", "model.seed=3"])
    if expected is not None:
        with pytest.raises(ConfigError, match=re.escape(expected)):
            load(options)
        return
    model = load(options).model
    assert (model.path, model.seed, model.hf_overrides) == ("a/model", 3, json.loads(text))


def test_bench_is_the_load_generator() -> None:
    assert find_bench() == ROOT / "scripts" / "bench.py"
    command = [sys.executable, "-m", "aioinfer", "bench", "--help"]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert "--concurrency" in ended.stdout


def test_bash_completes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    script = capsys.readouterr().out

    def complete(*words: str) -> list[str]:
        ask = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _aioinfer 2>/dev/null"
        ask += '; printf "%s\\n" "${COMPREPLY[@]}"'
        ended = subprocess.run(
            ["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True
        )
        return ended.stdout.split()

    assert complete("aioinfer", "'se'") == ["serve"]
    assert complete("aioinfer", "batch", "--con") == ["--concurrency", "--config"]
    assert "server.port=" in complete("aioinfer", "serve", "--set", "server.p")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_of_other_shells(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", shell])
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)
    if (program := shutil.which(shell)) is not None:
        subprocess.run([program, "-n", "-c", script], check=True)


# ---------------------------------------------------------------- batch files


def test_a_wrong_batch_is_refused_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    call = ["batch", "-i", str(requests), "-o", str(results), "./nowhere"]
    assert main(call) == 2
    assert "in.jsonl" in capsys.readouterr().err
    requests.write_bytes(line(1) + b"\n" + line(1) + line(2, url="/v1/images") + b"[]\n")
    assert main(call) == 2
    faults = capsys.readouterr().err.splitlines()
    assert [fault.split(":")[1] for fault in faults] == ["3", "4", "5"]
    assert not results.exists()
    requests.write_bytes(line(1))
    results.write_bytes(b"somebody's file\n")
    assert main(call) == 2
    assert "is not a result of a batch" in capsys.readouterr().err
    assert results.read_bytes() == b"somebody's file\n"


def test_an_output_of_another_input_or_another_run_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_bytes(line(1))
    call = ["batch", "-i", str(requests), "-o", str(results), "./nowhere"]
    other = b'{"id":"a","custom_id":"other","response":{"status_code":200},"error":null}\n'
    results.write_bytes(other)
    assert main(call) == 2
    assert "the custom_id 'other' is not in this one" in capsys.readouterr().err
    with open_results(results):
        assert main(call) == 2
    assert "another process writes its results there" in capsys.readouterr().err
    assert results.read_bytes() == other
    # an output that cannot be written is reported before the files of the model are
    assert main([*call[:4], str(tmp_path / "none" / "out.jsonl"), "./nowhere"]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_a_pipe_is_no_input_of_a_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would be empty where it is read the second time, and the results would be none."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for call in (
        ["-i", str(pipe), "-o", str(tmp_path / "out.jsonl")],
        ["-i", __file__, "-o", str(pipe)],
    ):
        assert main(["batch", *call, "./nowhere"]) == 2
        assert f"{pipe} is not a regular file" in capsys.readouterr().err


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "in"
    file.write_bytes(codecs.BOM_UTF8 + line(1) + line(2))
    total, names, faults = check_input(file, paths=("/v1/completions",), max_line_bytes=1000)
    assert (total, names, faults) == (2, {"1", "2"}, [])
    (piece,) = read_requests(file, ())
    assert [request.custom_id for request in piece] == ["1", "2"]


def test_a_long_line_is_a_fault_and_the_next_is_read(tmp_path: Path) -> None:
    file = tmp_path / "in"
    file.write_bytes(line(1) + line(5000) + line(2) + b"\n \n" + line(3).rstrip())
    total, _, faults = check_input(file, paths=("/v1/completions",), max_line_bytes=1000)
    assert total == 4
    assert [(fault.line, fault.code) for fault in faults] == [(2, "line_too_long")]


def test_requests_that_are_done_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "in"
    file.write_bytes(b"".join(line(number) for number in range(300)))
    *pieces, last = read_requests(file, {str(number) for number in range(200)})
    assert [len(piece) for piece in (*pieces, last)] == [64, 36]
    found = [request.custom_id for piece in (*pieces, last) for request in piece]
    assert found == [str(number) for number in range(200, 300)]


def test_a_half_written_result_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "out"
    assert take_up(file).custom_ids == set()
    good = b'{"id":"a","custom_id":"1","response":{"status_code":200},"error":null}\n'
    bad = b'{"id":"b","custom_id":"2","response":{"status_code":400},"error":null}\n'
    never = b'{"id":"b","custom_id":"3","response":null,"error":{}}\n'
    for end in range(1, len(good)):
        file.write_bytes(good + bad + never + good[:end])
        written = take_up(file)
        assert (written.custom_ids, written.num_succeeded) == ({"1", "2", "3"}, 1)
        assert file.read_bytes() == good + bad + never
    file.write_bytes(good + bad + good)
    written = take_up(file)
    assert (written.custom_ids, written.num_succeeded) == ({"1", "2"}, 1)
    file.write_bytes(good + b"{}\n" + bad)
    with pytest.raises(ConfigError, match="line 2"):
        take_up(file)


# ---------------------------------------------------------------- chat


def chunk(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


async def chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, *words: str
) -> tuple[int, str, str]:
    """Returns the exit status, and what is written to stdout and to stderr."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    status = await asyncio.to_thread(main, ["chat", *words])
    written = capsys.readouterr()
    return status, written.out, written.err


async def test_a_chat_over_pipes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bodies: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        if bodies[-1]["model"] == "locked":
            return web.json_response({"error": {"message": "a key is needed"}}, status=401)
        events = [chunk(role="assistant"), chunk(content="**Hel"), chunk(content="lo**")]
        return await stream(request, sse(*events, USAGE_EVENT, "[DONE]"))

    async with serving(answer) as url:
        monkeypatch.setattr("aioinfer.cli.chat._local_url", lambda: url)
        saved = tmp_path / "saved.json"
        lines = f"one\n/sav {saved}\n/save {saved}\ntwo\n/save\n"
        status, output, errors = await chat(monkeypatch, capsys, lines)
        assert (status, errors) == (0, "")
        assert output == (
            "**Hello**\nthere is no command /sav; /help lists them\n**Hello**\n"
            "/save needs a file to write to\n"
        )
        first = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "**Hello**"}]
        assert json.loads(saved.read_text()) == first
        assert bodies[1]["messages"] == [*first, {"role": "user", "content": "two"}]
        assert bodies[1]["model"] == "known-model", "OpenAI's API needs one"
        await chat(monkeypatch, capsys, "one\n", "other-model", "--url", url)
        assert bodies[2]["model"] == "other-model"
        status, _, errors = await chat(monkeypatch, capsys, "one\n", "locked", "--url", url)
        assert status == 1
        assert (
            errors == f"aioinfer: {url}: a key is needed; --api-key-file names a file with a key\n"
        )
        status, _, errors = await chat(monkeypatch, capsys, "", "--url", f"{url}/nowhere")
        assert status == 2
        assert "404 Not Found is no answer of an OpenAI-compatible server" in errors
    status, _, errors = await chat(monkeypatch, capsys, "")
    assert status == 2
    assert errors.startswith(f"aioinfer: no server answers at {url}: start one (aioinfer serve")


async def test_the_pace_of_an_answer_is_shown_on_a_terminal() -> None:
    pace = _Pace()
    assert pace.describe() == ""
    for event in (chunk(role="assistant"), chunk(content="a"), chunk(content="b")):
        await asyncio.sleep(0.05)
        pace.count(msgspec.convert(event, Event))
    pace.count(msgspec.convert(USAGE_EVENT, Event))
    found = re.fullmatch(
        r"4 tokens, ([\d.]+) tokens/s, the first after ([\d.]+) s", pace.describe()
    )
    assert found
    assert 0 < float(found[1]) <= 3 / 0.05
    assert float(found[2]) >= 0.1


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'data: {"choices": [{"delta": {"content": "Hel', "broke off its answer"),
        (b'data: {"choices": [{"delta": {"content": "Hel"}}]}\n\n', "broke off its answer"),
        (b'data: {"choices": [{"delta": null}, {"index": 1}]}\n\n', "broke off its answer"),
        (b'data: {"error": "no memory"}\n\n', "aioinfer: no memory"),
        (b"data: [1, 2]\n\n", "is none of a chat: Expected `object`, got `array`"),
        (b"data: <html>\n\n", "is none of a chat: JSON is malformed"),
        (b'data: {"choices": [{"delta": {"content": "\xff"}}]}\n\n', "is none of a chat: "),
    ],
)
async def test_a_chat_with_a_server_of_its_own_ways_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: bytes, reason: str
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return await stream(request, data)

    async with serving(answer) as url:
        status, _, errors = await chat(monkeypatch, capsys, "one\n", "--url", url)
    assert status == 1
    (line,) = errors.splitlines()
    assert reason in line


@pytest.mark.parametrize(
    ("output", "status", "errors"),
    [
        (None, 0, ""),  # a pipe that is not read
        ("/dev/full", 2, "aioinfer: the answer cannot be written: No space left on device\n"),
    ],
)
async def test_a_chat_whose_output_cannot_be_written_ends(
    output: str | None, status: int, errors: str
) -> None:
    asked = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        return await stream(request, sse(chunk(content="Hello"), "[DONE]"))

    def talk(url: str) -> subprocess.CompletedProcess[str]:
        if output is None:
            reading, writing = os.pipe()
            os.close(reading)
        else:
            writing = os.open(output, os.O_WRONLY)
        with os.fdopen(writing, "wb") as stdout:
            return subprocess.run(
                [sys.executable, "-m", "aioinfer", "chat", "--url", url],
                input="one\n" * 5, stdout=stdout, stderr=subprocess.PIPE, text=True,
                timeout=60, cwd=ROOT, check=False,
            )  # fmt: skip

    async with serving(answer) as url:
        ended = await asyncio.to_thread(talk, url)
    assert (ended.returncode, ended.stderr) == (status, errors)
    assert len(asked) <= 1, "the other questions are not asked"


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:99999", "http://a:b", "http://[::1", "http://a b/"]
)
def test_what_is_no_url_is_named(url: str) -> None:
    with pytest.raises(ChatError, match=f"^{re.escape(repr(url))} is not the URL of a server$"):
        ChatServer(url).model()


@pytest.mark.parametrize("data", ["two\nlines", "a\u20acb", "", b"\xff"])
async def test_a_file_without_a_key_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    data: str | bytes,
) -> None:
    file = tmp_path / "key"
    file.write_bytes(data if isinstance(data, bytes) else data.encode())
    words = ["--url", "http://127.0.0.1:9", "--api-key-file", str(file)]
    status, _, errors = await chat(monkeypatch, capsys, "", *words)
    assert status == 2
    assert (
        errors == f"aioinfer: --api-key-file {file} must hold one line, a key of ASCII characters\n"
    )


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1:9", "connection refused"),
        ("https://127.0.0.1:9/v1", "connection refused"),
        ("http://no-such-host.invalid", "[a-z ]+"),
    ],
)
def test_a_chat_with_no_server_says_so_in_one_sentence(url: str, reason: str) -> None:
    with pytest.raises(ChatError, match=f"^nothing answers at {re.escape(url)}: {reason}$"):
        ChatServer(url).model()


def test_a_chat_with_what_is_no_http_server_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"

        def greet() -> None:
            with server.accept()[0] as connection:
                connection.recv(1000)
                connection.sendall(b"220 mail ESMTP\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(ChatError, match=f"^what answers at {url} does not speak HTTP$"):
            ChatServer(url).model()
        thread.join()
