"""The life cycle of a server process, from the configuration to the exit status.

`serve.start` calls `run`: signals, the ready line and the exit status are of the process; what it
serves is `aioinfer.api`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvloop

from aioinfer.api.event_stream import GatewayAccess
from aioinfer.api.server import HttpServer
from aioinfer.config import Config
from aioinfer.engine.frontend import Frontend
from aioinfer.engine.model_group import ModelGroup
from aioinfer.engine.served_model import find_model
from aioinfer.executor.base import WorkerReport
from aioinfer.executor.torchrun import follow
from aioinfer.process_log import FieldsMessage, LogWriter, LoopErrors
from aioinfer.startup import (
    StartupDisplay,
    describe_workers,
    longest_phases,
    settle_process,
)
from aioinfer.tasks import end_tasks

_log = logging.getLogger(__name__)

#: When the engine has died, `/health` reports the reason for this long before the socket closes.
_DEATH_NOTICE_S = 1.0
#: Threads for what blocks for a moment, such as decoding a large body. (asyncio's own default is 32
#: on a large machine; they come with the load and stay.)
_MAX_THREADS = 8


def run(configs: Sequence[Config]) -> int:
    """Serves models, with a configuration for each, until a signal or the engine's death.

    Under torchrun, the processes of all ranks but the first become workers, and end without
    returning. Returns the exit status. Raises what `serve` does.
    """
    follow(configs[0], find_model)
    with (
        LogWriter(configs[0].logging.format),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(serve(configs))


async def serve(configs: Sequence[Config], announce: Callable[[str], None] | None = None) -> int:
    """Listens, launches the engines, serves once it is ready, and ends in order.

    Until the engine is ready, requests are answered 503. After the first SIGTERM or SIGINT the
    server reports that it is not ready, goes on for `server.shutdown_delay_s`, then refuses new
    requests and waits for the requests under way, at most `server.shutdown_timeout_s`; a second
    signal does not wait. When the engine dies, running streams get their error events and the
    server ends by itself.

    Args:
        configs: the configuration of each model; what concerns the server is the same in all.
        announce: gets the ready line; prints it if missing.

    Returns:
        the exit status: 0 after a signal, 1 after the engine's death.

    Raises:
        ConfigError: the configuration does not go with the model, the machine or the address.
        EngineDeadError: a worker failed to start.
    """
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(_MAX_THREADS, "blocking"))
    errors = LoopErrors(loop)
    stop = StopSignals()
    config = configs[0]
    server = HttpServer(config, gateways=GatewayAccess.of(config))
    try:
        # a taken port or a missing file is reported now, and not after the model has been loaded
        url = await server.start()
        models = await _launch(configs, server, stop)
        if models is None:
            return 0
        try:
            await server.serve(models)
            if isinstance(config.server.api_keys, str):
                stop.on_hangup(server.reload_keys)
            (announce or _print)(_ready_text(url, models.first))
            return await _run(server, models, stop)
        finally:
            await models.close()  # ends what still runs, with error events
    finally:
        await server.close()
        stop.close()
        errors.close()


async def _launch(
    configs: Sequence[Config], server: HttpServer, stop: StopSignals
) -> ModelGroup | None:
    """Returns the models, or None if a signal came before they were ready."""
    logs_json = configs[0].logging.format == "json"
    with StartupDisplay(quiet=logs_json) as display:

        def on_progress(phase: str, done: int, total: int) -> None:
            display.on_progress(phase, done, total)
            server.on_progress(phase, done, total)

        launching = asyncio.ensure_future(ModelGroup.launch(configs, on_progress))
        await _first(launching, stop.first.wait())
    if launching.cancelled():
        return None
    models = launching.result()
    for each in models:
        reports, names = [engine.report for engine in each.engines], each.config.served_model_names
        if logs_json:
            _log.info(_started_message(reports, names[0]))
        else:
            display.show(reports, names)
    settle_process()
    return models


def _started_message(reports: Sequence[WorkerReport], name: str) -> FieldsMessage:
    """Returns the start-up table as a log message. Times are in seconds."""
    described = describe_workers(reports)
    fields: dict[str, str | float | None] = {
        "model": name,
        "implementation": described.pop("model"),
        **{_field_name(key): value for key, value in described.items()},
    }
    for phase, seconds in longest_phases(reports).items():
        fields[f"{_field_name(phase)}_s"] = round(seconds, 2)
    return FieldsMessage("started", fields)


def _field_name(text: str) -> str:
    return re.sub(r"\W+", "_", text.lower())


async def _run(server: HttpServer, models: ModelGroup, stop: StopSignals) -> int:
    """Waits for a signal or the engine's death, and after a signal for the requests under way.

    Returns the exit status.
    """
    settings = models.first.config.server
    await _first(stop.first.wait(), models.wait_dead())
    if models.is_healthy():
        server.leave()
        delay = asyncio.sleep(settings.shutdown_delay_s)
        await _first(delay, stop.second.wait(), models.wait_dead())
    if models.is_healthy() and not stop.second.is_set():
        drained = asyncio.wait_for(server.drain(), settings.shutdown_timeout_s)
        await _first(drained, stop.second.wait(), models.wait_dead())
    if models.is_healthy():
        return 0
    _log.error("the engine has died: %s", models.dead_reason)
    await asyncio.sleep(_DEATH_NOTICE_S)
    return 1


class StopSignals:
    """SIGTERM and SIGINT as events: the first requests a graceful shutdown, the second for an
    immediate one. SIGHUP ends the process, as a terminal that closes wants it, until `on_hangup`
    gives it another meaning."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._hangup: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._receive)

    def _receive(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    def on_hangup(self, reload: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """From now on runs `reload` for each SIGHUP."""

        def begin() -> None:
            self._hangup = self._loop.create_task(reload())  # a task needs an owner

        self._loop.add_signal_handler(signal.SIGHUP, begin)

    def close(self) -> None:
        """Restores the default handling: from now on a signal ends the process, whatever hangs."""
        self._loop.remove_signal_handler(signal.SIGHUP)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)


async def _first(*waits: asyncio.Future[Any] | Coroutine[Any, Any, Any]) -> None:
    """Returns when the first of these has ended, however it did; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(tasks)


def _ready_text(url: str, frontend: Frontend) -> str:
    """Returns the ready line, the page's address and a command to try."""
    path = "/v1/completions"
    prompt: dict[str, Any] = {"prompt": "The capital of France is"}
    if frontend.tokenizer is None:
        prompt = {"prompt": [1, 2, 3]}
    elif frontend.tokenizer.has_chat_template:
        path = "/v1/chat/completions"
        prompt = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    body = prompt | {"max_tokens": 64, "stream": True}
    if not frontend.generates:
        path, body = "/v1/embeddings", {"input": prompt.get("prompt", "The capital of France")}
    server = frontend.config.server
    scheme = "https" if server.tls_files else "http"
    base = (
        url
        if server.unix_socket is None
        else f"--unix-socket {server.unix_socket} {scheme}://localhost"
    )
    key = ' -H "Authorization: Bearer $API_KEY"' if server.api_keys else ""
    options = f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'"
    if "text" not in frontend.input_modalities:
        path, options = "/v1/audio/transcriptions", "-F file=@speech.wav"
    curl = f"curl -N {base}{path}{key} {options}"
    has_page = path.endswith("completions") and not server.unix_socket
    page = f"Chat in a browser: {url}/\n" if has_page else ""
    name = frontend.config.name
    return f"\n{name} is ready at {url}\n{page}Try it:\n  {curl}\n"


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
