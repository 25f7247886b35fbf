r"""Measures prefill and decode on different servers: one computes prompts, one generates, behind a
gateway; beside two servers that do both, behind a gateway as well.

    python scripts/bench_handover.py --model FOLDER --json handover.json

Takes two GPUs, one for each server. A folder contains config.json; its weights are random and no
tokenizer is needed. Figures of each pair of servers:

- ttft_s: to the first token of a prompt of `--prompt` tokens that is new, alone;
- gb_per_s: of the KV blocks that are handed over, over the difference of `ttft_s` to that of one
  server (0 where that is not longer); below what the link carries, since the rest of the prompt
  behind its last block is computed after that;
- itl_p50_ms, itl_p99_ms: between the tokens of `--streams` streams while `--prompts` such prompts
  come one after the other; this is what handing over is for;
- cached: the part of the prompts that was not computed where it was generated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter

import aiohttp
import numpy as np

from bench_conversations import send_turn
from bench_kv_store import Load
from benchlib.server_process import ROOT, ServerProcess, exiting_at_signals

Figures = dict[str, float]


def free_port() -> int:
    """Returns a port at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def gateway(settings: Sequence[str], urls: Sequence[str], prefill: Sequence[str]) -> Iterator[str]:
    """Runs a gateway to servers and yields its URL."""
    port = free_port()
    command = [sys.executable, "-m", "aioinfer", "gateway", "--host", "127.0.0.1"]
    command += ["--port", str(port)]
    for name, values in (("--set", settings), ("--server", urls), ("--prefill", prefill)):
        command += [part for value in values for part in (name, value)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


async def measure(options: argparse.Namespace, url: str, num_servers: int) -> Figures:
    """Returns the figures of the servers behind a gateway."""
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        async with asyncio.timeout(60):
            while not await is_ready(session, url, num_servers):  # noqa: ASYNC110  # no event
                await asyncio.sleep(0.2)
        await asyncio.sleep(2)  # the servers that compute prompts are known by then as well
        async with session.get(f"{url}/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        load = Load(session, options, url, model)
        fields = argparse.Namespace(url=url, model_name=model, output=2)

        async def send() -> tuple[float, float]:
            record = await send_turn(session, fields, 1, load.prompt(options.prompt))
            return record.ttft_s, record.cached_tokens / options.prompt

        await send()
        alone = [await send() for _ in range(5)]
        times: list[float] = []
        ends = asyncio.Event()
        streams = [asyncio.create_task(load.stream(times, ends)) for _ in range(options.streams)]
        await asyncio.sleep(2)
        times.clear()
        began = perf_counter()
        for _ in range(options.prompts):
            await send()
        seconds = perf_counter() - began
        found = np.array(times) * 1000
        ends.set()
        await asyncio.gather(*streams)
    return {
        "ttft_s": statistics.median(ttft for ttft, _ in alone),
        "cached": statistics.median(cached for _, cached in alone),
        "itl_p50_ms": float(np.percentile(found, 50)),
        "itl_p99_ms": float(np.percentile(found, 99)),
        "prompts_per_s": options.prompts / seconds,
    }


async def is_ready(session: aiohttp.ClientSession, url: str, num_servers: int) -> bool:
    """Whether the gateway sends requests to so many servers."""
    try:
        async with session.get(f"{url}/health") as response:
            reply = await response.json()
            return response.status == 200 and reply["replicas"] >= num_servers
    except aiohttp.ClientError:
        return False


def run(options: argparse.Namespace, *, hands_over: bool) -> Figures:
    """Returns the figures of two servers of their own."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        key = Path(folder) / "key"
        key.write_text(secrets.token_hex(32))
        common = [
            f"model.path={options.model}", "model.load_format=dummy", "model.tokenizer=none",
            f"cache.peer_key_file={key}", f"cache.host_bytes={int(options.host_gib * 2**30)}",
            *options.set,
        ]  # fmt: skip
        urls = []
        for number in range(2):
            settings = [*common, f"cache.peer_address=127.0.0.1:{free_port()}"]
            gpus = {"CUDA_VISIBLE_DEVICES": str(number)} if options.gpus else {}
            server = stack.enter_context(ServerProcess(os.devnull, settings, gpus))
            print(f"ready after {server.ready_s:.1f} s", file=sys.stderr)
            urls.append(server.url)
        serving, prefill = (urls[:1], urls[1:]) if hands_over else (urls, [])
        url = stack.enter_context(gateway(common, serving, prefill))
        found = asyncio.run(measure(options, url, len(serving)))
    print(found, file=sys.stderr)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, metavar="FOLDER", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--no-gpus", dest="gpus", action="store_false", help="servers on CPUs")
    parser.add_argument("--host-gib", type=float, default=40.0, help="of each server's store")
    parser.add_argument("--token-bytes", type=int, default=147_456, help="of a token's keys")
    parser.add_argument("--prompt", type=int, default=16_000, help="tokens of a prompt")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--token-ids", type=int, nargs=2, default=(1000, 100_000))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    with exiting_at_signals():
        apart, both = (run(options, hands_over=on) for on in (True, False))
    more = apart["ttft_s"] - both["ttft_s"]
    moved = apart["cached"] * options.prompt * options.token_bytes
    apart["gb_per_s"], both["gb_per_s"] = (moved / more / 1e9 if more > 0 else 0.0), 0.0
    print("| figure | prefill apart | two servers | ratio |\n|--|--:|--:|--:|")
    for name, here in apart.items():
        ratio = f"{here / both[name]:.3f}" if both[name] else ""
        print(f"| {name} | {here:.4g} | {both[name]:.4g} | {ratio} |")
    if options.json:
        options.json.write_text(json.dumps({"apart": apart, "both": both}))


if __name__ == "__main__":
    main()
