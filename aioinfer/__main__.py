"""The command line: `aioinfer COMMAND ...` (see `aioinfer.cli`), and
`python -m aioinfer --config FILE [--set section.key=value ...]`, which serves."""

from __future__ import annotations

import argparse
import sys

from aioinfer import __version__
from aioinfer.cli.commands import COMMANDS
from aioinfer.cli.commands import run as run_command
from aioinfer.config import describe_keys, load_config
from aioinfer.errors import AioinferError, ConfigError


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
    parser.add_argument("--config", metavar="FILE", help="the TOML file, such as configs/qwen.toml")
    parser.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="lay a value over the file's (repeatable)",
    )
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
    except ConfigError as error:
        # messages of libraries, which some errors quote, may have several lines
        sys.stderr.write(f"aioinfer: {' '.join(str(error).split())}\n")
        return 2
    except AioinferError as error:
        sys.stderr.write(f"aioinfer: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
