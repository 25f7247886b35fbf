"""The command line: `aioinfer COMMAND ...` (see `aioinfer.cli`), and
`python -m aioinfer --config FILE [--set section.key=value ...]`, which serves."""

from __future__ import annotations

import os
import sys

from aioinfer.cli.interrupts import ended_by_interrupts


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line, by default that of the process. Returns the exit status: 130 after
    Ctrl-C, which shows no traceback."""
    _open_standard_streams()
    with ended_by_interrupts():  # which may come as soon as a command line was entered
        from aioinfer.cli.commands import run
    try:
        return run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        return 130


def _open_standard_streams() -> None:
    """Opens /dev/null for standard streams that are closed, as some managers of services leave
    them: sockets would get their numbers, with which libuv ends the process."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r", closefd=False))


if __name__ == "__main__":
    sys.exit(main())
