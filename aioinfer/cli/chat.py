"""`aioinfer chat`: a chat in the terminal, with a server (`--url`, or the one on this machine) or
with an engine of its own.

Either way the conversation goes over HTTP, so that both show the same: with an engine of its own
the command serves it on a loopback address, behind a key that no other process has.
"""

from __future__ import annotations

import argparse
import json
import secrets
import ssl
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from aioinfer.checkpoint.source import check_files
from aioinfer.cli.commands import discard_output
from aioinfer.cli.interrupts import ended_by_interrupts
from aioinfer.cli.model_options import add_model_options, announce, load
from aioinfer.cli.terminal import AnswerView, MessageReader, make_view, write
from aioinfer.config import Config, ServerConfig
from aioinfer.errors import AioinferError, ConfigError, no_answer

HELP = """\
/clear          forget the conversation
/system TEXT    set the system prompt and forget the conversation
/undo           take back the last question and its answer
/save FILE      write the conversation as JSON
/help           list the commands
/quit           end (Ctrl-D does, too); Ctrl-C stops an answer
Several lines that are pasted are one message.
"""
#: Listing its models takes a server no time, unless it is something else.
_LIST_TIMEOUT_S = 10.0
COMMANDS = tuple(line.split()[0] for line in HELP.splitlines() if line.startswith("/"))


class Function(Struct):
    """The function of a call, or a part of it."""

    name: str | None = None
    arguments: str | None = None


class Call(Struct):
    """A tool call, or a part of one."""

    function: Function | None = None


class Delta(Struct):
    """What an event adds to an answer; servers have two names for its thoughts."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Call] | None = None


class Choice(Struct):
    """An answer of the server's; one is asked for."""

    delta: Delta | None = None
    finish_reason: str | None = None


class Usage(Struct):
    """The tokens that the server has counted."""

    completion_tokens: int | None = None


class Event(Struct):
    """An event of a stream of chat completions: what is read of it."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None

    def deltas(self) -> list[Delta]:
        """Returns what it adds to the answer."""
        return [choice.delta for choice in self.choices or () if choice.delta is not None]


Events = Generator[Event, None, None]


class ChatError(AioinferError):
    """The server cannot be reached, or refuses the conversation."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_model_options(parser)
    parser.add_argument(
        "--url",
        help="a running server, of which MODEL is a model; without it and without a model "
        f"{_local_url()}, if a server answers there",
    )
    parser.add_argument("--api-key-file", metavar="FILE", help="a file with the server's API key")
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--max-tokens", type=int, metavar="N")


def run(options: argparse.Namespace) -> int:
    """Chats until the user ends it. Returns the exit status."""
    with _server(options) as server:
        model = (options.url and options.model) or server.model()
        fields = {
            "model": model,
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        chat = Chat(server, given, options.system)
        if sys.stdin.isatty():
            write(f"{model} at {server.url}; /help lists the commands\n")
        try:
            return chat.run()
        except OSError as error:  # of stdout: a server's are `ChatError`
            discard_output()
            if isinstance(error, BrokenPipeError):  # `| head` is no error
                return 0
            raise ChatError(f"the answer cannot be written: {error.strerror}") from error


@dataclass(slots=True)
class ChatServer:
    """A server of OpenAI's chat completions."""

    url: str
    key: str | None = None

    def _request(
        self, method: str, path: str, body: Any = None, timeout_s: float | None = None
    ) -> HTTPResponse:
        """Returns the response, which must have status 200. Raises `ChatError`; its cause is a
        `ConnectionRefusedError` where nothing listens."""
        connection, base = self._connection(timeout_s)
        # closing: then the end of the response also ends the socket, and the request
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            connection.request(
                method, f"{base}{path}", None if body is None else json.dumps(body), headers
            )
            response = connection.getresponse()
            if response.status == 200:
                return response
            reason = _message(response)
        except OSError as error:
            connection.close()
            raise ChatError(no_answer(self.url, error)) from error
        except HTTPException as error:
            connection.close()
            raise ChatError(f"what answers at {self.url} does not speak HTTP") from error
        raise ChatError(f"{self.url}: {reason}")

    def _connection(self, timeout_s: float | None) -> tuple[HTTPConnection, str]:
        """Returns a connection that is not open yet, and the beginning of its paths. Raises
        `ChatError`."""
        try:
            place = urlsplit(self.url if "//" in self.url else f"http://{self.url}")
            if place.hostname is None or place.scheme not in ("http", "https"):
                raise ValueError
            base = place.path.rstrip("/").removesuffix("/v1")
            if place.scheme == "http":
                return HTTPConnection(place.hostname, place.port, timeout=timeout_s), base
            context = ssl.create_default_context()
            return HTTPSConnection(
                place.hostname, place.port, timeout=timeout_s, context=context
            ), base
        except (ValueError, HTTPException):  # also what a host or a port cannot be
            raise ChatError(f"{self.url!r} is not the URL of a server") from None

    def model(self) -> str:
        """Returns the first model that the server lists. Raises `ChatError`."""
        with self._request("GET", "/v1/models", timeout_s=_LIST_TIMEOUT_S) as response:
            try:
                return str(json.load(response)["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise ChatError(
                    f"{self.url} does not list a model at /v1/models, as OpenAI-compatible servers "
                    f"do: name another server with --url"
                ) from error

    def answer(self, messages: list[dict[str, str]], fields: dict[str, Any]) -> Events:
        """Yields the events of an answer. Closing this iterator ends the request. Raises
        `ChatError`, also for an answer without an end."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"messages": messages} | options | fields
        with closing(self._request("POST", "/v1/chat/completions", body)) as response:
            has_ended = False
            for raw in self._lines(response):
                data = raw.strip().removeprefix(b"data:").strip()
                if not raw.startswith(b"data:"):
                    continue
                if data == b"[DONE]":
                    has_ended = True
                elif raw.endswith(b"\n"):
                    event = self._decode(data)
                    has_ended |= any(choice.finish_reason for choice in event.choices or ())
                    yield event
            if not has_ended:
                raise ChatError(f"{self.url} broke off its answer")

    def _lines(self, response: HTTPResponse) -> Iterator[bytes]:
        """Yields the lines of a response. Raises `ChatError` where the connection is lost."""
        try:
            yield from response
        except (OSError, HTTPException) as error:
            raise ChatError(f"{self.url} broke off its answer") from error

    def _decode(self, data: bytes) -> Event:
        """Returns an event. Raises `ChatError` for an error of the server's, and for what is no
        event of a chat."""
        try:
            event = msgspec.json.decode(data, type=Event)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ChatError(f"an event of {self.url} is none of a chat: {error}") from error
        if found := event.error:
            raise ChatError(str(found.get("message", found) if isinstance(found, dict) else found))
        return event


def _message(response: HTTPResponse) -> str:
    data = response.read()
    hint = "; --api-key-file names a file with a key" if response.status == 401 else ""
    try:
        return str(json.loads(data)["error"]["message"]) + hint
    except (ValueError, KeyError, TypeError):
        return (
            f"{response.status} {response.reason} is no answer of an OpenAI-compatible server: "
            f"name another with --url"
        )


@dataclass(slots=True)
class Chat:
    """A conversation in the terminal."""

    server: ChatServer
    fields: dict[str, Any]
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def run(self) -> int:
        """Reads questions and commands, and answers them, until the end of the input. Returns 1 if
        the input is no terminal and an answer failed."""
        failed = False
        reader = MessageReader()
        while (text := reader.read()) is not None:
            # of several lines it is a text that begins with a slash
            if text.startswith("/") and "\n" not in text:
                if text.split()[0] in ("/quit", "/exit"):
                    break
                self._command(text)
            elif text:
                failed |= not self._ask(text)
        return int(failed and not sys.stdin.isatty())

    def _ask(self, question: str) -> bool:
        """Shows the answer to a question as it comes. Returns whether there is one; a question
        without is forgotten."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = [*self.messages, {"role": "user", "content": question}]
        view, pace = make_view(), _Pace()
        answer = figures = ""
        try:
            with closing(self.server.answer([*system, *asked], self.fields)) as events:
                for event in events:
                    pace.count(event)
                    for delta in event.deltas():
                        answer += _show(delta, view)
            figures = pace.describe()
        except KeyboardInterrupt:
            figures = "stopped"
        except ChatError as error:
            if answer:
                view.end("")
            sys.stderr.write(f"aioinfer: {error}\n")
            return False
        view.end(figures)
        self.messages = [*asked, {"role": "assistant", "content": answer}]
        return True

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        if name == "/clear":
            self.messages = []
        elif name == "/system":
            self.system, self.messages = rest.strip() or None, []
        elif name == "/undo":
            self.messages = self.messages[:-2]
        elif name == "/save" and rest.strip():
            try:
                with open(rest.strip(), "w", encoding="utf-8") as stream:
                    json.dump(self.messages, stream, ensure_ascii=False, indent=2)
            except OSError as error:
                write(f"{error}\n")
        elif name == "/help":
            write(HELP)
        elif name in COMMANDS:
            write(f"{name} needs a file to write to\n")
        else:
            write(f"there is no command {name}; /help lists them\n")


class _Pace:
    """How fast an answer comes, by the client's clock and the tokens that the server counts."""

    def __init__(self) -> None:
        self._asked = time.monotonic()
        self._first: float | None = None
        self._last = self._asked
        self._tokens = 0

    def count(self, event: Event) -> None:
        """Takes note of an event that has come."""
        if event.usage is not None:
            self._tokens = event.usage.completion_tokens or self._tokens
        if any(
            d.content or d.reasoning_content or d.reasoning or d.tool_calls for d in event.deltas()
        ):
            self._last = time.monotonic()
            self._first = self._first or self._last

    def describe(self) -> str:
        """Returns tokens, tokens a second after the first, and the time to the first; nothing for a
        server that counts no tokens."""
        if self._first is None or not self._tokens:
            return ""
        text = f"{self._tokens} token{'s' if self._tokens > 1 else ''}"
        if self._tokens > 1 and self._last > self._first:
            text += f", {(self._tokens - 1) / (self._last - self._first):.1f} tokens/s"
        return f"{text}, the first after {self._first - self._asked:.2f} s"


def _show(delta: Delta, view: AnswerView) -> str:
    """Shows the delta of an answer: its thoughts and tool calls too, where there are any. Returns
    the new text of the answer itself."""
    if thought := delta.reasoning_content or delta.reasoning:
        view.thought(thought)
    for call in delta.tool_calls or ():
        if call.function is not None:
            view.call(call.function.name, call.function.arguments or "")
    if delta.content:
        view.text(delta.content)
    return delta.content or ""


def _local_url() -> str:
    """Returns the default address of a server."""
    return f"http://{ServerConfig().host}:{ServerConfig().port}"


@contextmanager
def _server(options: argparse.Namespace) -> Iterator[ChatServer]:
    """Returns the server of `--url` or, where no model is named, the one on this machine; or
    launches one of the model, and ends it with the block."""
    key = _key(options.api_key_file)
    if options.url is not None:
        yield ChatServer(options.url, key)
        return
    if options.model is None and options.config is None and not options.set:
        yield _local_server(key)
        return
    key = secrets.token_urlsafe(32)
    config = _private(load(options), key)
    check_files(config.model)
    announce(f"loads {config.name}")

    with ended_by_interrupts():
        from aioinfer.api.server import HttpServer  # imports PyTorch, which takes seconds
        from aioinfer.llm import LLM

    with LLM.of(config) as llm:

        async def make() -> HttpServer:
            return HttpServer(config, llm.frontend)

        server = llm.run(make())
        try:
            yield ChatServer(llm.run(server.start()), key)
        finally:
            llm.run(server.close())


def _local_server(key: str | None) -> ChatServer:
    """Returns the server on this machine. Raises `ConfigError` if nothing listens there."""
    server = ChatServer(_local_url(), key)
    try:
        server.model()
    except ChatError as error:
        if not isinstance(error.__cause__, ConnectionRefusedError):
            raise
        raise ConfigError(
            f"no server answers at {server.url}: start one (aioinfer serve MODEL), name another "
            f"(aioinfer chat --url URL), or name a model to load (aioinfer chat MODEL)"
        ) from None
    return server


def _private(config: Config, key: str) -> Config:
    """Returns the configuration of a server that only the holder of `key` can use."""
    server = replace(
        config.server,
        host="127.0.0.1",
        port=0,
        tls_files=[],
        allowed_hosts=[],
        api_keys=[key],
        files_folder=None,
    )
    return replace(config, server=server, logging=replace(config.logging, requests=False))


def _key(file: str | None) -> str | None:
    """Returns the key in a file. Raises `ConfigError`."""
    if file is None:
        return None
    try:
        with open(file, encoding="utf-8") as stream:
            key = stream.read().strip()
    except OSError as error:
        raise ConfigError(f"--api-key-file {file}: {error.strerror}") from error
    except UnicodeDecodeError:
        key = ""
    if not (key.isascii() and key.isprintable() and key):
        raise ConfigError(f"--api-key-file {file} must hold one line, a key of ASCII characters")
    return key
