"""The parser of all subcommands, and running one. What a subcommand needs is imported when it
runs: `--help` and a mistyped option answer at once."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from aioinfer.errors import AioinferError, ConfigError

#: Each subcommand with its description; `aioinfer.cli.NAME` has its `add_options` and `run`.
COMMANDS = {
    "serve": "serve a model over HTTP",
    "batch": "answer a file of requests without a server, in OpenAI's batch format",
    "chat": "chat in the terminal, with a server or with an engine of its own",
    "deploy": "serve replicas of a model behind a gateway, under Ray Serve",
    "bench": "measure a server: the load generator scripts/bench.py",
    "completion": "print a script that completes this command line in a shell",
}


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all subcommands."""
    parser = argparse.ArgumentParser(prog="aioinfer")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, doc in COMMANDS.items():
        # what follows `bench` belongs to the load generator, its --help included
        command = commands.add_parser(name, help=doc, description=doc, add_help=name != "bench")
        import_module(f"aioinfer.cli.{name}").add_options(command)
    return parser


def run(arguments: list[str]) -> int:
    """Runs a subcommand. Returns the exit status: 2 for a wrong command line or configuration."""
    if arguments[0] == "bench":  # its options are not known here
        options = argparse.Namespace(command="bench", arguments=arguments[1:])
    else:
        options = make_parser().parse_args(arguments)
    try:
        return int(import_module(f"aioinfer.cli.{options.command}").run(options))
    except AioinferError as error:
        return report(error)
    except KeyboardInterrupt:
        return 130


def report(error: AioinferError) -> int:
    """Writes an error to stderr. Returns the exit status of a start that cannot succeed."""
    text = str(error)
    if isinstance(error, ConfigError):
        # messages of libraries, which some errors quote, may have several lines
        text = " ".join(text.split())
    sys.stderr.write(f"aioinfer: {text}\n")
    return 2
