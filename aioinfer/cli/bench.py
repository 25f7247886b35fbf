"""`aioinfer bench`: the load generator, which is a program of its own (`scripts/bench.py`) and
needs nothing of the server's."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from aioinfer.errors import ConfigError

#: In an installed package, and in a checkout.
_PLACES = ("scripts/bench.py", "../scripts/bench.py")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options: all are the load generator's own."""
    parser.add_argument("arguments", nargs=argparse.REMAINDER)


def find_bench() -> Path:
    """Returns the load generator's file. Raises `ConfigError` if it was not installed."""
    package = Path(__file__).resolve().parents[1]
    for place in _PLACES:
        if (file := (package / place).resolve()).is_file():
            return file
    raise ConfigError("the load generator (scripts/bench.py) is not installed")


def run(options: argparse.Namespace) -> int:
    """Becomes the load generator; returns only where that fails."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, str(find_bench()), *options.arguments])
