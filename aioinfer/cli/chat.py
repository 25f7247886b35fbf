"""`aioinfer chat`: a chat in the terminal, with a server (`--url`) or with an engine of its own.

Either way the conversation goes over HTTP, so that both show the same: with an engine of its own
the command serves it on a loopback address, behind a key that nobody else has.
"""

from __future__ import annotations

import argparse
import json
import secrets
import ssl
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from aioinfer.cli.model_options import add_model_options, load
from aioinfer.config import Config
from aioinfer.errors import AioinferError, ConfigError

HELP = """\
/clear          forget the conversation
/system TEXT    set the system prompt and begin anew
/undo           take back the last question and its answer
/save FILE      write the conversation as JSON
/quit           end (Ctrl-D does, too); Ctrl-C stops an answer
"""


#: What is new of an answer, piece by piece.
Deltas = Generator[dict[str, Any], None, None]


class ChatError(AioinferError):
    """The server cannot be reached, or refuses the conversation."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_model_options(parser)
    parser.add_argument("--url", help="a running server, such as http://127.0.0.1:8000")
    parser.add_argument("--api-key-file", metavar="FILE", help="a file with the server's API key")
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--max-tokens", type=int, metavar="N")


def run(options: argparse.Namespace) -> int:
    """Chats until the user ends it. Returns the exit status."""
    with _server(options) as server:
        fields = {"temperature": options.temperature, "max_tokens": options.max_tokens}
        given = {name: value for name, value in fields.items() if value is not None}
        chat = Chat(server, given, options.system)
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  # gives `input` a history
            print_(f"{server.model()} at {server.url}; /help lists the commands\n")
        return chat.run()


@dataclass(slots=True)
class ChatServer:
    """A server of OpenAI's chat completions."""

    url: str
    key: str | None = None

    def _request(self, method: str, path: str, body: Any = None) -> HTTPResponse:
        """Returns the response, which must have status 200. Raises `ChatError`."""
        place = urlsplit(self.url if "//" in self.url else f"http://{self.url}")
        if place.hostname is None or place.scheme not in ("http", "https"):
            raise ChatError(f"{self.url!r} is not the URL of a server")
        if place.scheme == "https":
            context = ssl.create_default_context()
            connection: HTTPConnection = HTTPSConnection(
                place.hostname, place.port, context=context
            )
        else:
            connection = HTTPConnection(place.hostname, place.port)
        # closing: then the end of the response is that of the socket, and of the request
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        base = place.path.rstrip("/").removesuffix("/v1")
        try:
            connection.request(
                method, f"{base}{path}", None if body is None else json.dumps(body), headers
            )
            response = connection.getresponse()
            if response.status == 200:
                return response
            raise ChatError(_message(response))
        except (OSError, HTTPException) as error:
            raise ChatError(f"{self.url}: {error}") from error

    def model(self) -> str:
        """Returns the first model that the server lists."""
        with self._request("GET", "/v1/models") as response:
            return str(json.load(response)["data"][0]["id"])

    def answer(self, messages: list[dict[str, str]], fields: dict[str, Any]) -> Deltas:
        """Yields the deltas of an answer. Closing this iterator ends the request."""
        body = {"messages": messages, "stream": True} | fields
        with closing(self._request("POST", "/v1/chat/completions", body)) as response:
            for raw in response:
                data = raw.strip().removeprefix(b"data:").strip()
                if not raw.startswith(b"data:") or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise ChatError(event["error"]["message"])
                for choice in event["choices"]:
                    yield choice["delta"]


def _message(response: HTTPResponse) -> str:
    data = response.read()
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answers {response.status} {response.reason}"


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
        while (text := _read()) is not None:
            if text.startswith("/"):
                if text.split()[0] in ("/quit", "/exit"):
                    break
                self._command(text)
            elif text:
                failed |= not self._ask(text)
        return int(failed and not sys.stdin.isatty())

    def _ask(self, question: str) -> bool:
        """Prints the answer to a question as it comes. Returns whether there is one; a question
        without is forgotten."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = [*self.messages, {"role": "user", "content": question}]
        answer = ""
        try:
            with closing(self.server.answer([*system, *asked], self.fields)) as deltas:
                for delta in deltas:
                    answer += _show(delta)
        except KeyboardInterrupt:
            print_(" [stopped]")
        except (ChatError, OSError, HTTPException) as error:
            print_("\n" if answer else "")
            sys.stderr.write(f"aioinfer: {error}\n")
            return False
        print_("\n")
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
                print_(f"{error}\n")
        else:
            print_(HELP)


def _show(delta: dict[str, Any]) -> str:
    """Prints what is new of an answer: its thoughts and tool calls too, where there are any.
    Returns the new text of the answer itself."""
    if thought := delta.get("reasoning_content") or delta.get("reasoning"):
        print_(f"\x1b[2m{thought}\x1b[0m" if sys.stdout.isatty() else thought)
    for call in delta.get("tool_calls") or ():
        function = call.get("function", {})
        if function.get("name"):
            print_(f"\n[calls {function['name']}] ")
        print_(function.get("arguments") or "")
    text = str(delta.get("content") or "")
    print_(text)
    return text


def _read() -> str | None:
    """Returns the next line without blanks around it, None at the end of the input. Ctrl-C drops
    what was typed."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            print_("\n")


def print_(text: str) -> None:
    """Prints a text at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def _server(options: argparse.Namespace) -> Iterator[ChatServer]:
    """Returns the server of `--url`, or launches one and ends it with the block."""
    if options.url is not None:
        yield ChatServer(options.url, _key(options.api_key_file))
        return
    key = secrets.token_urlsafe(32)
    config = _private(load(options), key)
    from aioinfer.api.server import HttpServer
    from aioinfer.llm import LLM

    with LLM.of(config) as llm:
        server = HttpServer(config, llm.frontend)
        try:
            yield ChatServer(llm.run(server.start()), key)
        finally:
            llm.run(server.close())


def _private(config: Config, key: str) -> Config:
    """Returns the configuration of a server that only the holder of `key` can use."""
    server = replace(
        config.server,
        host="127.0.0.1",
        port=0,
        unix_socket=None,
        tls_certificate=None,
        tls_key=None,
        allowed_hosts=[],
        api_keys=[key],
        api_key_file=None,
        files_folder=None,
    )
    return replace(config, server=server, logging=replace(config.logging, requests=False))


def _key(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        with open(file, encoding="utf-8") as stream:
            return stream.read().strip()
    except OSError as error:
        raise ConfigError(f"--api-key-file {file}: {error.strerror}") from error
