"""The command line, as a process: what a person sees who mistypes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import aioinfer
from aioinfer.config import describe_keys

ROOT = Path(__file__).parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aioinfer", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


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


def test_version_and_a_call_without_arguments():
    assert run("--version").stdout == f"aioinfer {aioinfer.__version__}\n"
    ended = run()
    assert ended.returncode == 2
    assert "--config" in ended.stderr
