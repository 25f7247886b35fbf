"""Samples the resources that a server and its workers hold, and decides from many samples whether
they grow."""

from __future__ import annotations

import re
import shutil
import subprocess
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchlib.processes import open_files, status_sum, worker_processes

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Bound:
    """How much a figure may grow.

    Attributes:
        per_thousand: by which its slope over 1 000 requests may exceed 0, in the figure's unit.
            The slope's lower confidence limit (two standard errors) counts, so that noise is not
            taken for growth, and only of a run of so many requests: a new server's first ones make
            it grow.
        rise: by which the last sample may exceed the first, instead.
    """

    per_thousand: float | None = None
    rise: float | None = None


#: By the beginning of a figure's name. The first that fits counts.
BOUNDS: dict[str, Bound] = {
    "server memory": Bound(per_thousand=1.0),
    "worker": Bound(per_thousand=2.0),
    "GPU": Bound(rise=64.0),
    "descriptors": Bound(rise=4),
    "threads": Bound(rise=8),
    "asyncio tasks": Bound(rise=4),
    "memfd": Bound(rise=0),
    # of all processes of the machine: a file that is left behind belongs to none
    "/dev/shm": Bound(rise=16.0),
    "KV cache in use": Bound(rise=0),
    "requests": Bound(rise=0),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """A row of the table.

    Attributes:
        first, last: the figure in the first and the last sample.
        slope: over 1 000 requests, by least squares.
        error: the slope's standard error.
        limit: the bound, as text.
        judged: whether there were enough requests for a slope to say something.
        grows: whether the figure exceeds its bound.
    """

    first: float
    last: float
    slope: float
    error: float
    limit: str
    judged: bool
    grows: bool


def judge(name: str, requests: Sequence[int], values: Sequence[float]) -> Verdict:
    """Returns whether a figure grows; `values[i]` was sampled after `requests[i]` requests."""
    thousands = [number / 1000 for number in requests]
    slope, error = fit(thousands, values)
    bound = next(bound for start, bound in BOUNDS.items() if name.startswith(start))
    if bound.per_thousand is not None:
        limit = f"{bound.per_thousand:g} per 1 000"
        judged = thousands[-1] - thousands[0] >= 1
        grows = judged and slope - 2 * error > bound.per_thousand
    else:
        assert bound.rise is not None
        limit = f"{bound.rise:g} in all"
        judged, grows = True, values[-1] - values[0] > bound.rise
    return Verdict(values[0], values[-1], slope, error, limit, judged, grows)


def fit(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Returns the slope of the least-squares line through the points, and its standard error; with
    fewer than three points the error is infinite."""
    mean_x, mean_y = fmean(x), fmean(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    if not spread:
        return 0.0, float("inf")
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    if len(x) < 3:
        return slope, float("inf")
    residual = sum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    return slope, float((residual / (len(x) - 2) / spread) ** 0.5)


class Watch:
    """Samples a server. Its load must have ended: resources still held then are held for good."""

    def __init__(self, pid: int, url: str):
        self._url = url
        self._pid = pid

    def metrics(self) -> dict[str, float]:
        """Returns the figures of `/metrics` by name, summed over their labels."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=60) as reply:
            text = reply.read().decode()
        found: dict[str, float] = {}
        for name, value in re.findall(r"^([a-zA-Z_:]+)(?:\{.*\})? (\S+)$", text, re.MULTILINE):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    @property
    def is_idle(self) -> bool:
        """Whether no request runs or waits."""
        found = self.metrics()
        return not found["vllm:num_requests_running"] and not found["vllm:num_requests_waiting"]

    def sample(self) -> dict[str, float]:
        """Returns the figures of now: sizes in MiB, the rest are counts."""
        workers = worker_processes(self._pid)
        processes = [self._pid, *workers]
        figures = {"server memory": _own_memory(self._pid)}
        for number, worker in enumerate(workers):
            figures[f"worker {number} memory"] = _own_memory(worker)
        files = [file for pid in processes for file in open_files(pid)]
        figures["descriptors"] = len(files)
        figures["threads"] = sum(status_sum(pid, "Threads") for pid in processes)
        figures["memfd"] = sum(file.startswith("/memfd:") for file in files)
        figures["/dev/shm"] = _folder_bytes(Path("/dev/shm")) / MIB
        found = self.metrics()
        figures["KV cache in use"] = found["vllm:kv_cache_usage_perc"]
        for state in ("running", "waiting"):
            figures[f"requests {state}"] = found[f"vllm:num_requests_{state}"]
        figures["asyncio tasks"] = found["aioinfer:asyncio_tasks"]
        if (gpu := gpu_memory()) is not None:
            figures["GPU memory"] = gpu
        return figures


def _own_memory(pid: int) -> float:
    """Returns the MiB of a process that no file backs: resident ones and those in swap. Pages of
    files (libraries, mapped weights) come and go with the memory that the machine has left."""
    return status_sum(pid, "RssAnon", "RssShmem", "VmSwap") / 1024


def _folder_bytes(folder: Path) -> int:
    total = 0
    for entry in folder.rglob("*"):
        try:
            total += entry.lstat().st_blocks * 512
        except OSError:  # gone meanwhile, or another user's
            continue
    return total


def gpu_memory() -> float | None:
    """Returns the MiB in use on all GPUs together; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    ended = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    if ended.returncode:
        return None
    return sum(float(line) for line in ended.stdout.split())
