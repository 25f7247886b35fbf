"""The command line: `aioinfer COMMAND ...` (see `aioinfer.cli`), and
`python -m aioinfer --config FILE [--set section.key=value ...]`, which serves.

Only modules that read and check the configuration are imported here: a mistake on the command line
is answered at once, and not after the seconds that PyTorch takes.
"""

from __future__ import annotations

import difflib
import sys

from aioinfer import __version__
from aioinfer.cli import serve
from aioinfer.cli.commands import COMMANDS, Parser, guard, list_commands, print_keys
from aioinfer.cli.commands import run as run_command
from aioinfer.cli.model_options import add_model_options
from aioinfer.config import load_models


def main(arguments: list[str] | None = None) -> int:
    """Runs a subcommand; without one, serves a model until a signal or a failure ends it. Returns
    the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    if given and given[0] in COMMANDS:
        return run_command(given)
    parser = _make_parser()
    if given and not given[0].startswith("-"):
        parser.error(_unknown_command(given[0]))
    options = parser.parse_args(given)
    if options.keys is not None:
        return guard(lambda: print_keys(options.keys))
    if not options.config and not options.set:
        parser.error("a subcommand, --config FILE or --set model.path=... is needed (see --help)")
    return guard(lambda: serve.start(load_models(options.config, options.set)))


def _make_parser() -> Parser:
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


def _unknown_command(word: str) -> str:
    """Returns the message for a first word that is no subcommand: a mistyped one, or a model."""
    if near := difflib.get_close_matches(word, COMMANDS, n=1):
        meant = f"did you mean 'aioinfer {near[0]}'?"
    elif "/" in word or word.endswith(".gguf"):
        meant = f"did you mean 'aioinfer serve {word}'?"
    else:
        meant = f"there are {', '.join(COMMANDS)}"
    return f"there is no command {word!r}: {meant}"


if __name__ == "__main__":
    sys.exit(main())
