"""Processes that torchrun starts: a server and a script of two ranks each, the same over two hosts,
which are both this machine, and what becomes of the others when one ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from aioinfer.errors import ConfigError
from aioinfer.executor.torchrun import torchrun_place
from aioinfer.executor.torchrun_hosts import config_digest
from tests.adapter_files import write_adapter
from tests.executor_runs import PROMPT, tiny_config, tiny_llama
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
    "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
}  # fmt: skip
SETTINGS = {
    "model.tokenizer": "none", "cache.block_size": 4, "cache.num_blocks": 64,
    "scheduler.max_num_seqs": 4, "parallel.cpu_threads": 1, "parallel.device": "cpu",
    "parallel.tensor_parallel_size": 2,
}  # fmt: skip
SCRIPT = """
    import os, sys
    from aioinfer import LLM, SamplingParams
    def say(text):
        os.write(1, f"{{text}}\\n".encode())  # as a whole, for lines of several ranks
    say("begin of rank " + os.environ.get("RANK", "none"))
    def main():
        with LLM(sys.argv[1], settings={settings}, progress=False) as llm:
            params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, adapter={adapter})
            say(llm.generate([{prompt}], params)[0].token_ids)
        say("end of rank " + os.environ.get("RANK", "none"))
    main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


def meeting_places() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("aioinfer-")}


ONE_HOST = ("--nproc-per-node", "2", "--master-port", "0")


def start(*arguments: Any, options: Sequence[str] = ONE_HOST) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options]
    return subprocess.Popen(
        [*torchrun, *map(str, arguments)], cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def write_script(script: Path, settings: dict[str, Any]) -> None:
    """Writes a script whose request has the adapter of the settings, if there is one."""
    adapter = repr(next(iter(settings.get("lora.adapters", ())), None))
    text = textwrap.dedent(SCRIPT)
    script.write_text(text.format(settings=settings, prompt=PROMPT, adapter=adapter))


def run_alone(script: Path, folder: Path, **settings: Any) -> list[str]:
    """Returns what the script says in one process."""
    write_script(script, SETTINGS | {"parallel.tensor_parallel_size": 1} | settings)
    return subprocess.run(
        [sys.executable, script, folder], capture_output=True, text=True, check=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ).stdout.splitlines()  # fmt: skip


def test_a_script_of_two_ranks(tmp_path: Path, folder: Path) -> None:
    """The first goes on behind `LLM`, the other does not; the tokens are those of one worker."""
    script = tmp_path / "script.py"
    single = run_alone(script, folder)
    write_script(script, SETTINGS)
    before = meeting_places()
    process = start(script, folder)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert sorted(output.splitlines()) == sorted(
        ["begin of rank 0", "begin of rank 1", single[1], "end of rank 0"]
    )
    assert len(json.loads(single[1])) == 9
    assert meeting_places() == before


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    settings = [
        f"--set={name}={json.dumps(value)}"
        for name, value in (SETTINGS | {"server.port": 0, "model.path": str(folder)}).items()
    ]
    process = start("-m", "aioinfer", *settings)
    children: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://127.0.0.1:\d+", line):
                break
        assert found is not None
        children = psutil.Process(process.pid).children(recursive=True)
        yield process, found[0]
    finally:
        process.kill()
        assert psutil.wait_procs(children, timeout=20)[1] == []
        process.communicate()


def complete(url: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps({"prompt": PROMPT, "temperature": 0, "return_token_ids": True} | body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


@pytest.mark.extended
def test_a_server_of_two_ranks(server: tuple[subprocess.Popen[str], str]) -> None:
    """It answers, drains at SIGTERM as without torchrun, and leaves nothing."""
    process, url = server
    reply = complete(url, max_tokens=7, ignore_eos=True)
    assert reply["choices"][0]["token_ids"] == [23, 35, 54, 42, 43, 34, 26]
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    assert psutil.wait_procs(children, timeout=20)[1] == []


@pytest.mark.extended
def test_all_end_when_one_does(server: tuple[subprocess.Popen[str], str]) -> None:
    process, _ = server
    ranks = [
        child
        for child in psutil.Process(process.pid).children()
        if "aioinfer" in " ".join(child.cmdline())
    ]
    follower = next(rank for rank in ranks if rank.environ()["RANK"] == "1")
    children = psutil.Process(process.pid).children(recursive=True)
    began = time.monotonic()
    follower.kill()
    assert process.wait(60) != 0
    assert time.monotonic() - began < 40
    assert psutil.wait_procs(children, timeout=20)[1] == []


# ---------------------------------------------------------------- two hosts


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def start_two_hosts(ranks: int, *arguments: Any) -> list[subprocess.Popen[str]]:
    """Returns torchrun's processes of two hosts with so many ranks each. They share nothing but
    the address of the first."""
    common = ["--nnodes", "2", "--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1"]
    common += ["--master-port", str(free_port())]
    return [start(*arguments, options=[*common, "--node-rank", str(number)]) for number in range(2)]


def end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Ends what is left of torchrun's processes, ranks included."""
    for process in processes:
        if process.poll() is None:
            children = psutil.Process(process.pid).children(recursive=True)
            for each in (process, *children):
                each.kill()
        process.communicate()


@pytest.mark.extended
def test_a_script_on_two_hosts(tmp_path: Path) -> None:
    """Stages on two hosts, each of two ranks, which all read an adapter: the tokens are those of
    one worker."""
    folder = tiny_model("qwen2", tmp_path / "qwen2", tie_word_embeddings=True)
    modules = {f"model.layers.{layer}.mlp.down_proj": (64, 96) for layer in range(2)}
    write_adapter(tmp_path / "adapter", modules, rank=4, deviation=1.0)
    lora = {"lora.adapters": {"one": str(tmp_path / "adapter")}}
    script = tmp_path / "script.py"
    single = run_alone(script, folder, **lora)
    write_script(script, SETTINGS | lora | {"parallel.pipeline_parallel_size": 2})
    before = meeting_places()
    processes = start_two_hosts(2, script, folder)
    try:
        first, second = (process.communicate(timeout=150) for process in processes)
        assert [process.returncode for process in processes] == [0, 0], first[1] + second[1]
    finally:
        end(processes)
    lines = ["begin of rank 0", "begin of rank 1", single[1], "end of rank 0"]
    assert sorted(first[0].splitlines()) == sorted(lines)
    assert sorted(second[0].splitlines()) == ["begin of rank 2", "begin of rank 3"]
    assert len(json.loads(single[1])) == 9
    assert meeting_places() == before


@pytest.mark.extended
def test_a_server_on_two_hosts_one_of_which_is_lost(folder: Path) -> None:
    """A tensor-parallel group over both; when the second host ends, so does the first, soon, and
    says which it was."""
    given = SETTINGS | {"server.port": 0, "model.path": str(folder)}
    settings = [f"--set={name}={json.dumps(value)}" for name, value in given.items()]
    processes = start_two_hosts(1, "-m", "aioinfer", *settings)
    try:
        assert processes[0].stdout is not None
        found = None
        for line in processes[0].stdout:
            if found := re.search(r"http://127.0.0.1:\d+", line):
                break
        assert found is not None
        reply = complete(found[0], max_tokens=7, ignore_eos=True)
        assert reply["choices"][0]["token_ids"] == [23, 35, 54, 42, 43, 34, 26]
        children = [
            child
            for process in processes
            for child in psutil.Process(process.pid).children(recursive=True)
        ]
        for child in (processes[1], *psutil.Process(processes[1].pid).children(recursive=True)):
            child.kill()
        lost = time.monotonic()
        _, errors = processes[0].communicate(timeout=60)
        assert time.monotonic() - lost < 40
        assert processes[0].returncode != 0
        assert "host 1 (" in errors
        assert "worker 1 was lost, the connection" in errors
        assert psutil.wait_procs(children, timeout=20)[1] == []
    finally:
        end(processes)


def test_hosts_with_different_configurations(folder: Path) -> None:
    """The digest is of what ranks read: hosts may differ in the rest."""
    one, other = tiny_config(folder), tiny_config(folder, **{"cache.num_blocks": 63})
    assert config_digest(one) != config_digest(other)
    served = tiny_config(folder, **{"server.port": 8123})
    assert config_digest(one) == config_digest(served)


def test_where_a_process_stands(folder: Path) -> None:
    config = tiny_config(folder, tensor_parallel_size=2)
    place = torchrun_place(config, TORCHRUN)
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank) == (1, 2, 1)
    assert torchrun_place(config, {}) is None
    alone = TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    assert torchrun_place(tiny_config(folder), alone) is None
    named = tiny_config(folder, executor="multiprocess", tensor_parallel_size=2)
    assert torchrun_place(named, TORCHRUN) is None


@pytest.mark.parametrize(
    ("environ", "settings", "message"),
    [
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, {}, "tensor_parallel_size to 4"),
        ({"WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}, {}, "tensor_parallel_size to 4"),
        ({}, {"parallel.pipeline_parallel_size": 2}, "tensor_parallel_size to 1 and"),
        ({}, {"parallel.pipeline_parallel_size": 3}, "pipeline_parallel_size to 1 and"),
        ({}, {"parallel.data_parallel_size": 2}, "data_parallel_size to 1"),
    ],
)
def test_a_world_that_does_not_fit(
    folder: Path, environ: dict[str, str], settings: dict[str, Any], message: str
) -> None:
    config = tiny_config(folder, tensor_parallel_size=2, **settings)
    with pytest.raises(ConfigError, match=message):
        torchrun_place(config, TORCHRUN | environ)
