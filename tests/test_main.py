"""The command line, as a process: what a person sees who mistypes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

import aioinfer
from aioinfer.__main__ import main
from aioinfer.cli.commands import COMMANDS
from aioinfer.config import describe_keys
from tests.functional.test_handover import free_port
from tests.gpu.random_models import random_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aioinfer", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_an_unknown_key_names_the_right_one():
    ended = run("--config", "configs/smollm2.toml", "--set", "scheduler.max_num_seq=3")
    assert ended.returncode == 2
    assert (
        ended.stderr == "aioinfer: unknown key 'scheduler.max_num_seq' (did you mean "
        "'scheduler.max_num_seqs'?)\n"
    )


def test_a_missing_file_and_a_missing_model_are_reported_without_a_traceback():
    for arguments, words in (
        (["--config", "nowhere.toml"], "nowhere.toml"),
        (["--set", "model.path=./nowhere"], "there is no such file or folder"),
        (["--set", "model.path=package:no-such-package/x.gguf"], "is not installed"),
    ):
        ended = run(*arguments, "--set", "server.port=0")
        assert ended.returncode == 2
        assert words in ended.stderr
        assert "Traceback" not in ended.stderr


def test_all_keys_are_listed():
    listed = run("--keys").stdout
    assert [line.split(" ")[0] for line in listed.splitlines()[::2]] == [
        dotted for dotted, *_ in describe_keys()
    ]


def test_keys_are_found_by_a_word():
    found = run("--keys", "ITL").stdout
    assert "scheduler.target_itl_ms (number)\n" in found
    assert "server.port" not in found
    ended = run("--keys", "no such word")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "no key has 'no such word'" in ended.stderr


@pytest.mark.parametrize("words", [("--keys",), ("--help",), ("completion", "bash")])
def test_a_reader_that_stops_is_no_error(words: tuple[str, ...]):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        ended = subprocess.run(
            [sys.executable, "-m", "aioinfer", *words],
            cwd=ROOT, stdout=pipe, stderr=subprocess.PIPE, timeout=60, check=False,
        )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_help_lists_the_subcommands():
    lines = run("--help").stdout.splitlines()
    for name, doc in COMMANDS.items():
        assert any(line.split() == [name, *doc.split()] for line in lines), name


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["sevre", "X"], "did you mean 'aioinfer serve'?"),
        (["Qwen/Qwen3-0.6B"], "did you mean 'aioinfer serve Qwen/Qwen3-0.6B'?"),
        (["?"], f"there are {', '.join(COMMANDS)}"),
    ],
)
def test_a_first_word_that_is_no_command(words: list[str], meant: str):
    ended = run(*words)
    assert ended.returncode == 2
    assert ended.stderr.endswith(f"there is no command {words[0]!r}: {meant}\n")


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--tensor-parallel-size 2", "; write --set parallel.tensor_parallel_size=2"),
        ("--enforce-eager", "; write --set parallel.cuda_graphs=false"),
        ("--served-model-name=x", """; write --set 'server.served_model_names=["x"]'"""),
        (
            "--enable-chunked-prefill",
            "; --enable-chunked-prefill changes nothing here: leave it out",
        ),
        ("--skip-tokenizer-init", "; write --set model.tokenizer=none"),
        ("--enable-lora", ""),
        ("--model x", "; write --set model.path=x"),
        ("--api-key x", " (did you mean 'server.api_keys'?)"),
        ("--qwertz 2", ""),
    ],
)
def test_an_option_of_other_servers_names_its_key(
    option: str, meant: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        main(["serve", "x", *option.split()])
    assert capsys.readouterr().err.endswith(f"unrecognized arguments: {option}{meant}\n")


def test_mistakes_are_answered_before_torch_is_imported(tmp_path: Path):
    """By one process, which PyTorch would take seconds to enter."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "in.jsonl").write_text(
        '{"custom_id": "1", "url": "/v1/completions", "body": {"prompt": "x"}}\n'
    )
    model = f"{tmp_path}/model"
    batch = ["-i", f"{tmp_path}/in.jsonl", "-o", f"{tmp_path}/out.jsonl"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = [
            (["serve", "./nowhere"], "model.path = './nowhere': there is no such file or folder"),
            (["--set", "model.path=./nowhere"], "there is no such file or folder"),
            (["chat", "./nowhere"], "there is no such file or folder"),
            (["batch", *batch, "./nowhere"], "there is no such file or folder"),
            (["deploy", "./nowhere"], "there is no such file or folder"),
            (["deploy", model, "--set", f"server.port={port}"], "[Errno 98] Address already"),
            (["deploy", model, "--replicas", "0"], "--replicas must be at least 1, not 0"),
            (["deploy", model, "--gateways", "0"], "--gateways must be at least 1, not 0"),
            (["deploy", model, "--gpus-per-replica=-1"], "--gpus-per-replica must be at least 0"),
            (["deploy", model, "--target-utilization", "nan"], "above 0 and at most 10, not nan"),
            (["deploy", model, "--name", ""], "--name must not be empty"),
            (
                ["deploy", model, "--replicas", "2", "--max-replicas", "3"],
                "--replicas fixes the number of replicas: leave it out, or",
            ),
            (
                ["deploy", model, "--min-replicas", "3", "--max-replicas", "2"],
                "--max-replicas is 2, less than --min-replicas, 3",
            ),
            (["serve", f"{tmp_path}/empty"], "the folder has no config.json"),
            (["serve", model, "--set", "model.tokenizer=./none"], "model.tokenizer = './none'"),
            (["serve", model, "--set", "model.chat_template=none"], "model.chat_template = 'none'"),
            (["serve", model, "--port", str(port)], f"port = {port}: [Errno 98] Address already"),
            (["serve", model, "--set", "server.api_keys=none"], "server.api_keys: No such file"),
            (["serve", model, "--set", 'server.tls_files=["none"]'], "server.tls_files"),
            (["serve", model, "--set", "server.prt=1"], "did you mean 'server.port'?"),
        ]
        code = (
            "import sys\n"
            "from aioinfer.__main__ import main\n"
            f"for words in {[words for words, _ in cases]}:\n"
            "    assert main(words) == 2, words\n"
            "    assert 'torch' not in sys.modules, words\n"
            "sys.modules['torch'] = None  # importing it fails\n"
            f"try: main(['serve', {model!r}, '--name', 'x', '--port', '0'])\n"
            "except ImportError: pass\n"
        )
        ended = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    *lines, last = ended.stderr.splitlines()
    assert last.endswith(" starts x at a free port (PyTorch is imported first) ...")
    for (words, message), line in zip(cases, lines, strict=True):
        assert line.startswith("aioinfer: "), words
        assert message in line, words


@pytest.mark.parametrize(
    ("command", "seconds"), [(["serve"], 0.0), (["serve"], 1.0), (["chat"], 2.5)]
)
def test_ctrl_c_during_the_start_shows_no_traceback(command: list[str], seconds: float):
    """A terminal sends it to all processes, the fork server among them; `chat` has its engine in a
    thread, which may have begun to start workers."""
    call = [sys.executable, "-m", "aioinfer", *command, "--config", "configs/smollm2.toml"]
    with subprocess.Popen(
        [*call, "--set", "server.port=0"],
        cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell may ignore it
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert "PyTorch is imported first" in process.stderr.readline()
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stderr.read()  # of all processes, until they have ended
    for word in ("Traceback", "destroyed", "never retrieved"):
        assert word not in rest
    assert process.returncode in (0, 130, -signal.SIGINT)


@pytest.mark.parametrize("module", ["config_keys", "cli.commands"])
def test_ctrl_c_during_the_first_imports_ends_quietly(module: str):
    """At the moment when a module has been imported, among the first or as the last."""
    with subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "aioinfer", "--config", "configs/smollm2.toml"],
        cwd=ROOT, stderr=subprocess.PIPE, text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        assert process.stderr is not None
        while not process.stderr.readline().endswith(f" aioinfer.{module}\n"):
            pass
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in process.stderr.read()
    assert process.returncode in (130, -signal.SIGINT)


def test_version_and_a_call_without_arguments():
    assert run("--version").stdout == f"aioinfer {aioinfer.__version__}\n"
    ended = run()
    assert ended.returncode == 2
    assert "--config" in ended.stderr


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_server_whose_standard_streams_are_closed_serves_and_ends(closed: str, tmp_path: Path):
    model, port = random_model(tmp_path, vocab_size=512), free_port(1)
    words = [
        sys.executable, "-m", "aioinfer", "serve", str(model), "--port", str(port),
        *(word for each in (
            "parallel.executor=inline", "parallel.cpu_threads=1", "cache.num_blocks=64",
        ) for word in ("--set", each)),
    ]  # fmt: skip
    script = ["bash", "-c", f'exec "$@" {closed}', "bash", *words]
    with subprocess.Popen(script, cwd=ROOT) as process:
        try:
            url = f"http://127.0.0.1:{port}/health/ready"
            while process.poll() is None:
                with suppress(OSError), urllib.request.urlopen(url) as reply:
                    assert reply.status == 200
                    break
                time.sleep(0.1)
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
