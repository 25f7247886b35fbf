"""The command line: `aioinfer COMMAND ...` (see `aioinfer.cli`), and
`python -m aioinfer --config FILE [--set section.key=value ...]`, which serves."""

from __future__ import annotations

import sys

from aioinfer.cli.interrupts import ended_by_interrupts


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line, by default that of the process. Returns the exit status: 130 after
    Ctrl-C, which shows no traceback."""
    with ended_by_interrupts():  # which may come as soon as a command line was entered
        from aioinfer.cli.commands import run
    try:
        return run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
