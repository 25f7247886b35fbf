"""Measures a server's start: the seconds from the command to its ready line, with empty caches and
with what the start before has left there.

    python scripts/bench_start.py --config configs/qwen.toml --set model.path=FOLDER \
        --set model.load_format=dummy
    python scripts/bench_start.py --config configs/smollm2.toml --runs 5

Each run has a new folder for compiled kernels, timed choices and converted weights, which the first
of its two starts finds empty. Compiled Python files are not among them: a first start that counts
for nothing writes them where they can be written (`PYTHONPYCACHEPREFIX`, for a Python without any).
The weights may be in the system's page cache; `bench_load.py` empties it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from benchlib.server_process import ServerProcess, exiting_at_signals


def time_start(options: argparse.Namespace, folder: str) -> float:
    """Returns the seconds of a start whose caches are in a folder."""
    environment = {"TRITON_CACHE_DIR": f"{folder}/triton", "XDG_CACHE_HOME": folder}
    with ServerProcess(options.config, options.set, environment) as server:
        return server.ready_s


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line a start, and the medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args(arguments)
    options.config = options.config.resolve()
    seconds: dict[str, list[float]] = {"empty caches": [], "full caches": []}
    with exiting_at_signals():
        with tempfile.TemporaryDirectory() as folder:
            print(f"first start of all: {time_start(options, folder):.2f} s", flush=True)
        for _ in range(options.runs):
            with tempfile.TemporaryDirectory() as folder:
                for name, found in seconds.items():
                    found.append(time_start(options, folder))
                    print(f"{name}: {found[-1]:.2f} s", flush=True)
    for name, found in seconds.items():
        print(f"{name}, median of {len(found)}: {statistics.median(found):.2f} s")


if __name__ == "__main__":
    main()
