"""Our server as a process of its own, for measurements of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, sleep
from types import FrameType, TracebackType

from benchlib.processes import cpu_seconds, descendants

ROOT = Path(__file__).resolve().parent.parent.parent
#: The longest that a server may take to be ready, and to end.
READY_TIMEOUT_S = 300.0
END_TIMEOUT_S = 60.0


@contextmanager
def exiting_at_signals() -> Iterator[None]:
    """Has SIGTERM and SIGHUP raise `SystemExit` in the block, as SIGINT raises `KeyboardInterrupt`,
    so that a `ServerProcess` is ended. Signals that are ignored stay so. For the main thread."""

    def leave(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # a second one must not interrupt the end
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class ServerProcess:
    """`python -m aioinfer` on a free port, as a context manager: ready on entering, ended on
    leaving.

    Args:
        config: its TOML file.
        settings: `section.key=value` laid over it.
        environment: variables laid over this process's.
        checkout: the folder whose `aioinfer` runs.

    Attributes:
        url: where it listens.
        ready_s: seconds from starting the process to its ready line.
        status: the exit status, once it has ended.
    """

    def __init__(
        self,
        config: str | Path,
        settings: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        checkout: Path = ROOT,
    ):
        laid_over = [
            part for setting in (*settings, "server.port=0") for part in ("--set", setting)
        ]
        self._command = [sys.executable, "-m", "aioinfer", "--config", str(config), *laid_over]
        self._environment = {**os.environ, **(environment or {})}
        self._checkout = checkout
        self.status: int | None = None

    def __enter__(self) -> ServerProcess:
        begin = perf_counter()
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            self._command,
            cwd=self._checkout,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        # ends the wait for a line that never comes
        watchdog = threading.Timer(READY_TIMEOUT_S, self._process.kill)
        watchdog.start()
        try:
            self.url = self._wait_ready()
        except BaseException:
            self._end()
            raise
        finally:
            watchdog.cancel()
        self.ready_s = perf_counter() - begin
        # a pipe without a reader fills, and then blocks the server
        threading.Thread(target=self._discard_output, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _wait_ready(self) -> str:
        """Returns the URL of the ready line.

        Raises `RuntimeError` if the process ends without one.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if match := re.search(r"is ready at (http://\S+)", line):
                return match[1]
        status = self._process.wait()
        self._errors.seek(0)
        raise RuntimeError(
            f"the server ended with status {status} instead of being "
            f"ready:\n{self._errors.read()[-2000:]}"
        )

    def _discard_output(self) -> None:
        assert self._process.stdout is not None
        for _ in self._process.stdout:
            pass

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def log(self) -> str:
        """Returns what the server has written to stderr so far."""
        self._errors.seek(0)
        return self._errors.read()

    def wait(self, timeout_s: float) -> int:
        """Returns the exit status of a process that ends by itself. Raises
        `subprocess.TimeoutExpired`."""
        self.status = self._process.wait(timeout_s)
        return self.status

    def end(self) -> int:
        """Sends SIGTERM, waits for the end (SIGKILL after `END_TIMEOUT_S`), and returns the exit
        status."""
        if self.status is None:
            self._process.terminate()
            try:
                self.status = self._process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self.status = self._process.wait()
        return self.status

    def _end(self) -> None:
        self.end()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()

    def cpu_share(self, seconds: float) -> float:
        """Returns the CPU time of the server and its workers over the next `seconds`, as a share of
        one core."""
        tree = [self._process.pid, *descendants(self._process.pid)]
        before = sum(map(cpu_seconds, tree))
        sleep(seconds)
        return (sum(map(cpu_seconds, tree)) - before) / seconds
