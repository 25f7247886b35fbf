"""The load generator against the real server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.functional.conftest import Served
from tests.scripted_server import run_bench

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def bench(served: Served, folder: Path, arguments: str) -> tuple[int, dict[str, Any]]:
    """Runs the script as a process. Returns its exit status and its figures."""
    file = folder / "result.json"
    status, output, _ = await run_bench(f"--url {served.url} --seed 7 --output {file} {arguments}")
    assert "output tokens/s" in output
    return status, json.loads(await asyncio.to_thread(file.read_text, "utf-8"))


async def test_a_closed_loop_of_token_ids(served: Served, tmp_path: Path) -> None:
    arguments = "--num-requests 6 --concurrency 3 --warmup 1 --input-len 20-40 --output-len 8"
    status, figures = await bench(served, tmp_path, f"{arguments} --ignore-eos")
    assert status == 0
    assert figures["model"] == "smollm2"
    assert figures["requests"] == {"sent": 6, "succeeded": 6, "failed": 0}
    assert figures["tokens"]["output"] == 48
    assert 120 <= figures["tokens"]["prompt"] <= 240
    assert figures["tokens"]["requests_without_usage"] == 0
    assert figures["tokens"]["requests_shorter_than_asked"] == 0
    assert 0 < figures["tokens"]["output_chunks"] <= 48
    latency = figures["latency_ms"]
    assert 0 < latency["ttft"]["p50"] < latency["e2e"]["p99"]
    assert latency["tpot"]["mean"] > 0


async def test_an_open_loop_of_whole_chats(served: Served, tmp_path: Path) -> None:
    arguments = "--num-requests 4 --rate 50 --endpoint chat --no-stream --output-len 5"
    status, figures = await bench(served, tmp_path, f"{arguments} --input-len 10")
    assert (status, figures["requests"]["succeeded"]) == (0, 4)
    assert 4 <= figures["tokens"]["output"] <= 20
    assert figures["latency_ms"]["ttft"] is None


async def test_conversations_find_their_history_in_the_prefix_cache(
    served: Served, tmp_path: Path
) -> None:
    arguments = "--workload multi-turn --turns 3 --conversations 2 --concurrency 2 --endpoint chat"
    arguments += " --input-len 20 --output-len 8 --ignore-eos"
    status, figures = await bench(served, tmp_path, arguments)
    assert status == 0
    assert figures["requests"] == {"sent": 6, "succeeded": 6, "failed": 0}
    assert [turn["requests"] for turn in figures["turns"]] == [2, 2, 2]
    _, second, third = figures["turns"]
    # the system's text, a turn and its answer, but for a part of a block
    assert second["cached_share"] > 0.2
    assert third["cached_share"] > second["cached_share"]
    assert third["prompt_tokens"] > second["prompt_tokens"] + 20


async def test_shared_prefixes_from_two_processes(served: Served, tmp_path: Path) -> None:
    arguments = "--workload shared-prefix --prefixes 2 --prefix-len 160 --suffix-len 8"
    arguments += " --num-requests 12 --concurrency 2 --processes 2 --output-len 4 --ignore-eos"
    status, figures = await bench(served, tmp_path, f"{arguments} --slo e2e=100s")
    assert status == 0
    assert figures["tokens"]["prompt"] == 12 * 168
    # at most two of twelve at a time find nothing, for each prefix
    assert 0.5 < figures["tokens"]["cached_share"] < 1
    assert len(figures["client_cpus"]) == 2
    assert figures["goodput"]["share"] == 1
