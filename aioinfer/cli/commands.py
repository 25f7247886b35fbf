"""The argument parsers, and the functions that run a subcommand, or without one serve a model.

Only modules that read and check the configuration are imported here: `--help` and a mistake on the
command line are answered at once, and not after the seconds that PyTorch takes. A subcommand
imports the rest when it runs.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import sys
import textwrap
from importlib import import_module
from typing import Any

from aioinfer import __version__
from aioinfer.arguments import option_hint
from aioinfer.cli import serve
from aioinfer.cli.interrupts import ended_by_interrupts
from aioinfer.cli.model_options import add_model_options
from aioinfer.config import describe_keys, load_models
from aioinfer.errors import AioinferError, ConfigError

#: Each subcommand with its description; `aioinfer.cli.NAME` has its `add_options` and `run`.
COMMANDS = {
    "serve": "serve a model over HTTP",
    "batch": "answer a file of requests without a server, in OpenAI's batch format",
    "chat": "chat in the terminal, with a server or with an engine of its own",
    "deploy": "serve replicas of a model behind a gateway, under Ray Serve",
    "gateway": "pass requests on to servers, some of which may compute prompts for the others",
    "bench": "measure a server: the load generator scripts/bench.py",
    "completion": "print a script that completes this command line in a shell",
}


class Parser(argparse.ArgumentParser):
    """A parser whose help may be piped into a program that stops reading, and keeps its lines."""

    def __init__(self, *args: Any, **options: Any):
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Returns the options. Of an unknown one the error says how to write it, if it is a key of
        the configuration."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            hint = option_hint(unknown) if hasattr(options, "set") else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return options

    def print_help(self, file: Any = None) -> None:
        """Prints the help, by default to stdout."""
        if file is None:
            write(self.format_help())
        else:
            super().print_help(file)


def make_parser() -> Parser:
    """Returns the parser of all subcommands."""
    parser = Parser(prog="aioinfer")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, doc in COMMANDS.items():
        # what follows `bench` belongs to the load generator, its --help included
        command = commands.add_parser(name, help=doc, description=doc, add_help=name != "bench")
        with ended_by_interrupts():
            module = import_module(f"aioinfer.cli.{name}")
        module.add_options(command)
    return parser


def make_server_parser() -> Parser:
    """Returns the parser of a command line without a subcommand."""
    parser = Parser(
        prog="aioinfer",
        usage="aioinfer COMMAND ...\n       aioinfer --config FILE [--set SECTION.KEY=VALUE ...]",
        description="Serves a large language model over an OpenAI-compatible HTTP API.",
        epilog=list_commands(),
    )
    add_model_options(parser, positional=False)
    parser.add_argument(
        "--keys",
        nargs="?",
        const="",
        metavar="WORD",
        help="list the keys of the configuration, those with WORD in name or description, and exit",
    )
    parser.add_argument("--version", action="version", version=f"aioinfer {__version__}")
    return parser


def run(arguments: list[str]) -> int:
    """Runs a subcommand; without one, serves a model until a signal or a failure ends it. Returns
    the exit status: 2 for a wrong command line or configuration, with a line on stderr."""
    try:
        if arguments and arguments[0] in COMMANDS:
            return _run_command(arguments)
        return _run_server(arguments)
    except AioinferError as error:
        text = str(error)
        if isinstance(error, ConfigError):
            # messages of libraries, which some errors quote, may have several lines
            text = " ".join(text.split())
        sys.stderr.write(f"aioinfer: {text}\n")
        return 2


def _run_command(arguments: list[str]) -> int:
    if arguments[0] == "bench":  # its options are not known here
        options = argparse.Namespace(command="bench", arguments=arguments[1:])
    else:
        options = make_parser().parse_args(arguments)
    return int(import_module(f"aioinfer.cli.{options.command}").run(options))


def _run_server(arguments: list[str]) -> int:
    parser = make_server_parser()
    if arguments and not arguments[0].startswith("-"):
        parser.error(_unknown_command(arguments[0]))
    options = parser.parse_args(arguments)
    if options.keys is not None:
        return print_keys(options.keys)
    if not options.config and not options.set:
        parser.error("a subcommand, --config FILE or --set model.path=... is needed (see --help)")
    return serve.start(load_models(options.config, options.set))


def _unknown_command(word: str) -> str:
    """Returns the message for a first word that is no subcommand: a mistyped one, or a model."""
    if near := difflib.get_close_matches(word, COMMANDS, n=1):
        meant = f"did you mean 'aioinfer {near[0]}'?"
    elif "/" in word or word.endswith(".gguf"):
        meant = f"did you mean 'aioinfer serve {word}'?"
    else:
        meant = f"there are {', '.join(COMMANDS)}"
    return f"there is no command {word!r}: {meant}"


def write(text: str) -> None:
    """Writes to stdout, for as long as it is read: `| head` is no error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()


def discard_output() -> None:
    """Lets what is written to stdout go nowhere from now on: the interpreter flushes once more at
    its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def list_commands() -> str:
    """Returns the subcommands with their descriptions, a line each, for a help text."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {doc}" for name, doc in COMMANDS.items()]
    return "\n".join(["commands, each with a --help of its own:", *lines])


def print_keys(word: str) -> int:
    """Prints the configuration's keys that have a word, in any case, in their name or description:
    all for an empty one. Lines are wrapped to the width of a terminal. Returns the exit status.

    Raises `ConfigError` if there is no such key.
    """
    found = [key for key in describe_keys() if word.lower() in f"{key[0]} {key[-1]}".lower()]
    if not found:
        raise ConfigError(f"no key has {word!r} in its name or description")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    lines = []
    for dotted, kind, default, doc in found:
        head = f"{dotted} ({kind}{f', {default}' if default else ''})"
        lines.append(_wrapped(head, width, "", "        "))
        lines.append(_wrapped(doc, width, "    ", "    "))
    write("".join(f"{line}\n" for line in lines))
    return 0


def _wrapped(text: str, width: int, first: str, others: str) -> str:
    """Returns a text in lines of at most `width` characters, or in one for 0."""
    if not width:
        return f"{first}{text}"
    return textwrap.fill(
        text,
        max(width, 40),
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
