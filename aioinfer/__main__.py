"""The command line: `aioinfer COMMAND ...` (see `aioinfer.cli`), and
`python -m aioinfer --config FILE [--set section.key=value ...]`, which serves."""

from __future__ import annotations

import argparse
import sys

from aioinfer import __version__
from aioinfer.cli.commands import COMMANDS, report
from aioinfer.cli.commands import run as run_command
from aioinfer.cli.model_options import add_model_options
from aioinfer.config import describe_keys, load_config
from aioinfer.errors import AioinferError


def main(arguments: list[str] | None = None) -> int:
    """Runs a subcommand; without one, serves a model until a signal or a failure ends it. Returns
    the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    if given and given[0] in COMMANDS:
        return run_command(given)
    parser = argparse.ArgumentParser(
        prog="aioinfer",
        description="Serves a large language model over an OpenAI-compatible HTTP API.",
        epilog="Subcommands, each with a --help of its own: "
        + "; ".join(f"{name} ({doc})" for name, doc in COMMANDS.items()),
    )
    add_model_options(parser, positional=False)
    parser.add_argument(
        "--keys", action="store_true", help="list every key of the configuration and exit"
    )
    parser.add_argument("--version", action="version", version=f"aioinfer {__version__}")
    options = parser.parse_args(given)
    if options.keys:
        for dotted, kind, default, doc in describe_keys():
            sys.stdout.write(f"{dotted} ({kind}{f', {default}' if default else ''})\n    {doc}\n")
        return 0
    if not options.config and not options.set:
        parser.error("a subcommand, --config FILE or --set model.path=... is needed")
    try:
        config = load_config(options.config, options.set)
        # imported late: --help and a wrong configuration answer at once
        from aioinfer.api.app import run

        return run(config)
    except AioinferError as error:
        return report(error)


if __name__ == "__main__":
    sys.exit(main())
