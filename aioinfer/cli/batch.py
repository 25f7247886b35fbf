"""`aioinfer batch -i in.jsonl -o out.jsonl`: answers a file of requests without a server.

The requests take the same path as requests of the server's clients. Results are written in the
order of the requests; a run that was ended, however it was, goes on where it stopped when it is
started again with the same files.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from aioinfer.batch_file import (
    BATCH_PATHS,
    CheckedInput,
    Written,
    check_input,
    open_results,
    take_up,
    to_lines,
)
from aioinfer.checkpoint.source import check_files
from aioinfer.cli.model_options import add_model_options, announce, load
from aioinfer.config import Config
from aioinfer.errors import ConfigError, EngineDeadError

if TYPE_CHECKING:
    from aioinfer.api.batch.batches import BatchServer


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("-i", "--input", required=True, type=Path, metavar="FILE", help="requests")
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        type=Path,
        metavar="FILE",
        help="results; those that are there already are kept and not computed again",
    )
    parser.add_argument(
        "--concurrency", type=int, metavar="N", help="requests at a time (default: as many as run)"
    )
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    """Answers all requests.

    Returns the exit status: 0 if all were answered, also by an earlier run, 1 if some have an error
    for their result, 2 if the input or the configuration is wrong or the engine died.
    """
    from aioinfer.api.context import MAX_BYTES

    config = _offline(load(options))
    if options.concurrency is not None and options.concurrency < 1:
        raise ConfigError("--concurrency must be at least 1")
    for file in (options.input, options.output):
        if file.exists() and not file.is_file():  # the input is read twice, the output taken up
            raise ConfigError(f"{file} is not a regular file")
    try:
        checked = check_input(options.input, paths=BATCH_PATHS, max_line_bytes=MAX_BYTES)
        for fault in checked.faults:
            sys.stderr.write(f"{options.input}:{fault.line}: {fault.message}\n")
        if checked.faults:
            return 2
        with open_results(options.output) as stream:
            written = _take_up(options.output, checked)
            if len(written.custom_ids) < checked.total:
                check_files(config.model)
                announce(f"loads {config.name}")

                import uvloop

                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(_answer(options, config, stream, checked.total, written))
    except OSError as error:
        raise ConfigError(str(error)) from error
    failed = len(written.custom_ids) - written.num_succeeded
    sys.stderr.write(
        f"{len(written.custom_ids)} results in {options.output}, {failed} of them errors\n"
    )
    return 1 if failed else 0


def _take_up(file: Path, checked: CheckedInput) -> Written:
    """Returns the results that the output holds. Raises `ConfigError` if they are no results, or
    those of another input."""
    written = take_up(file)
    for name in written.custom_ids - checked.custom_ids:
        raise ConfigError(
            f"{file}: it holds results of another input: the custom_id {name!r} is not in this one"
        )
    return written


def _offline(config: Config) -> Config:
    """Returns the configuration without the limits that protect a server from its clients, and
    without the settings that keep streams smooth: no client reads a stream."""
    server = replace(
        config.server,
        api_keys=[],
        limits={},
        files_folder=None,
        request_timeout_s=None,
    )
    scheduler = replace(config.scheduler, max_waiting_requests=None)
    logging = replace(config.logging, requests=False)
    offline = replace(config, server=server, scheduler=scheduler, logging=logging)
    return offline.without_streams()


async def _answer(
    options: argparse.Namespace, config: Config, stream: BinaryIO, total: int, written: Written
) -> None:
    """Writes the results that are missing to `stream`, and notes them in `written`."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from aioinfer.api.batch.batches import run_batch

    async with _server(config, options.concurrency) as server:
        done = frozenset(written.custom_ids)
        with Progress(
            TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), console=Console(stderr=True),
        ) as progress:  # fmt: skip
            task = progress.add_task("requests", total=total, completed=len(done))
            async with aclosing(run_batch(options.input, done, server)) as results:
                async for ready in results:
                    await asyncio.to_thread(stream.write, to_lines(ready))
                    written.add(ready)
                    progress.update(task, completed=len(written.custom_ids))


@asynccontextmanager
async def _server(config: Config, concurrency: int | None) -> AsyncIterator[BatchServer]:
    """Launches the engine, and ends it with the block. Raises `ConfigError`, `EngineDeadError`."""
    from aiohttp import web

    from aioinfer.api.batch.batches import BatchServer
    from aioinfer.api.http.keys import ANONYMOUS
    from aioinfer.api.http.limits import ACCOUNTS
    from aioinfer.api.server import create_app
    from aioinfer.engine.frontend import Frontend
    from aioinfer.startup import StartupDisplay

    with StartupDisplay() as display:
        frontend = await Frontend.launch(config, display.on_progress)
    try:
        app = await create_app(config, frontend)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            places = concurrency or (
                # beyond the slots, some that are ready to take one
                2 * config.scheduler.max_num_seqs * config.parallel.data_parallel_size
            )
            account = app[ACCOUNTS].named(ANONYMOUS)
            if account is None:
                raise EngineDeadError("the server has no account for its own requests")
            yield BatchServer(app, lambda: account, asyncio.Semaphore(places), places)
        finally:
            await runner.cleanup()
    finally:
        await frontend.close()
