"""`python -m aioinfer.deploy`: the same as `aioinfer deploy`."""

from __future__ import annotations

import sys

from aioinfer.cli.commands import run

if __name__ == "__main__":
    sys.exit(run(["deploy", *sys.argv[1:]]))
