"""A load generator for any OpenAI-compatible server.

    python scripts/bench.py --concurrency 8 --num-requests 64 --input-len 128 --output-len 128 --ignore-eos
    python scripts/bench.py --rate 4 --input-len 100-1024 --output-len 100-1024
    python scripts/bench.py --file prompts.jsonl --endpoint chat

A closed loop keeps `--concurrency` requests under way; an open loop (`--rate`) sends them at the times of a
Poisson process, whether or not the server keeps up. It needs aiohttp, numpy and rich, and nothing of aioinfer.

What the figures mean (only requests that succeeded count, failed ones are reported apart):
    output tokens    what the server's `usage` says; chunks are counted apart, since a chunk may hold several
                     tokens or a token no text. Without `usage`, chunks stand for tokens, and the report says so.
    output tokens/s  output tokens over the time from the first request's sending to the last reply's end.
    TTFT             time to first token: from sending a request, connection included, to its first chunk that
                     holds output (text, a tool call, token ids), not just a role.
    ITL              inter-token latency: the time between two chunks that hold output, over all requests. Chunks
                     that arrive in one piece are 0 apart, as they are for whoever reads the stream.
    TPOT             time per output token, a figure for each request: (e2e - TTFT) / (output tokens - 1).
    end to end       from sending a request to the end of its reply.
    client's CPU     of this process; near 100 % of a core it is the client that is measured.

The exit status is 1 if a request failed. Random prompts differ from each other, so that a prefix cache does not
help; for the same `--seed` they are the same again in the next run: change it, or restart the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchlib.client import Client, Record, ReplyError
from benchlib.load import Run, run_load
from benchlib.report import count_errors, show, summarize
from benchlib.workload import Call, IntRange, RequestShape, file_calls, random_token_calls, random_word_calls, read_entries

DEFAULT_CONCURRENCY = 8
#: An open loop's bound on requests under way, so that a server that hangs cannot exhaust the client.
OPEN_LOOP_CONCURRENCY = 1024


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Returns the options of the command line; ends the process with status 2 where they are wrong."""
    parser = argparse.ArgumentParser(description="Load generator for OpenAI-compatible servers.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--endpoint", choices=["completions", "chat"], default="completions")
    parser.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help="sent with each request (repeatable)")
    load = parser.add_argument_group("load")
    load.add_argument("--concurrency", type=int, help=f"requests at a time (default: {DEFAULT_CONCURRENCY}); with --rate, the most")
    load.add_argument("--rate", type=float, help="open loop: requests a second on average, Poisson arrivals")
    load.add_argument("--num-requests", type=int, help="default: 100, or the lines of --file")
    load.add_argument("--warmup", type=int, default=0, help="requests to send before, which do not count")
    load.add_argument("--seed", type=int, default=0, help="of prompts, lengths and arrivals (default: %(default)s)")
    load.add_argument("--timeout", type=float, default=600.0, help="seconds a request may take (default: %(default)s)")
    prompts = parser.add_argument_group("requests")
    prompts.add_argument("--input-len", type=IntRange.parse, default="128", help="tokens of random prompts: 128 or 100-1024")
    prompts.add_argument("--output-len", type=IntRange.parse, default="128", help="max_tokens: 128 or 100-1024")
    prompts.add_argument("--prompts", choices=["tokens", "words"], help="random token ids (default), or words (default for chat)")
    prompts.add_argument("--token-ids", type=IntRange.parse, default="1000-10000", help="range of random ids (default: %(default)s)")
    prompts.add_argument("--file", type=Path, help="JSONL: a `prompt` or `messages` a line, and `max_tokens` if wanted")
    prompts.add_argument("--temperature", type=float, default=0.0)
    prompts.add_argument("--ignore-eos", action="store_true", help="ask for all of --output-len (not every server can)")
    prompts.add_argument("--no-stream", dest="stream", action="store_false", help="whole replies: no TTFT, ITL, TPOT")
    parser.add_argument("--output", type=Path, help="file for the figures as JSON")
    options = parser.parse_args(arguments)
    for name in ("concurrency", "rate", "num_requests", "timeout"):
        if (value := getattr(options, name)) is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if options.endpoint == "chat" and options.prompts == "tokens":
        parser.error("the chat endpoint takes no token ids: use --prompts words")
    if any(":" not in header for header in options.header):
        parser.error("--header is NAME:VALUE")
    return options


def endless_calls(options: argparse.Namespace, shape: RequestShape, entries: list[dict[str, Any]] | None) -> Iterator[Call]:
    """Yields the requests that the options describe, without end."""
    if entries is not None:
        return file_calls(shape, entries, options.output_len, options.seed)
    if shape.chat or options.prompts == "words":
        return random_word_calls(shape, options.input_len, options.output_len, options.seed)
    return random_token_calls(shape, options.input_len, options.output_len, options.token_ids, options.seed)


async def bench(options: argparse.Namespace, entries: list[dict[str, Any]] | None) -> tuple[str, Run]:
    """Warms up and runs the load. Returns the model's name and the run. Raises `ReplyError` if the warm-up fails."""
    headers = {name.strip(): value.strip() for name, _, value in (header.partition(":") for header in options.header)}
    num_requests = options.num_requests or (len(entries) if entries else 100)
    concurrency = options.concurrency or (OPEN_LOOP_CONCURRENCY if options.rate else DEFAULT_CONCURRENCY)
    async with Client(options.url, timeout_s=options.timeout, headers=headers) as client:
        model = options.model or await client.first_model()
        shape = RequestShape(model, options.endpoint == "chat", options.stream, options.temperature, options.ignore_eos)
        calls = endless_calls(options, shape, entries)
        with LoadProgress() as progress:
            if options.warmup:
                on_done = progress.add_load("warm-up", options.warmup)
                warmup = await run_load(client, shape, calls, num_requests=options.warmup, concurrency=concurrency, on_done=on_done)
                for error in count_errors(warmup):
                    raise ReplyError(error["kind"], f"warm-up failed: {error['kind']}: {error['example']}")
            run = await run_load(
                client,
                shape,
                calls,
                num_requests=num_requests,
                concurrency=concurrency,
                rate=options.rate,
                seed=options.seed,
                on_done=progress.add_load("load", num_requests),
            )
    return model, run


class LoadProgress(Progress):
    """A progress bar on stderr for each part of a load."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        # a file or a pipe gets no bar; four refreshes a second take no time from the client
        super().__init__(*columns, console=console, disable=not console.is_terminal, transient=True, refresh_per_second=4)

    def add_load(self, name: str, total: int) -> Callable[[Record], None]:
        """Adds a bar, and returns the function that moves it on by a record."""
        task = self.add_task(name, total=total)
        failed = 0

        def on_done(record: Record) -> None:
            nonlocal failed
            failed += record.error is not None
            self.update(task, advance=1, description=f"{name}, {failed} failed" if failed else name)

        return on_done


def main(arguments: list[str] | None = None) -> int:
    """Runs a load and prints its figures. Returns the exit status."""
    options = parse_arguments(arguments)
    try:
        entries = read_entries(options.file, options.endpoint == "chat") if options.file else None
        model, run = asyncio.run(bench(options, entries))
    except (ReplyError, OSError, ValueError) as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    figures = summarize(run)
    show(figures, f"{model} at {options.url}", Console())
    if options.output:
        # headers may hold a key
        settings = {name: value for name, value in vars(options).items() if name not in ("header", "output")}
        text = json.dumps({"model": model, "settings": settings, **figures}, indent=2, default=str)
        options.output.write_text(text + "\n", "utf-8")
    return 1 if figures["requests"]["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
