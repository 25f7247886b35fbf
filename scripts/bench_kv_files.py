"""Measures how fast files of KV blocks are written and read: what `cache.disk_path` can bring.

    python scripts/bench_kv_files.py FOLDER
    python scripts/bench_kv_files.py FOLDER --blocks 256 --mib 18 --threads 1 4

Blocks of `--mib` MiB (18 are 128 tokens of Qwen3-8B) are written to a new folder below FOLDER, and
read back by `ipc.kv_files`, checksums included: from the page cache, and from the disk, once the
kernel has been asked to forget them (a virtual disk may have a cache of its own). "cpu" are
nanoseconds of all threads' processor time for each byte that is read from the page cache.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from aioinfer.ipc.kv_files import KVFiles


def make_files(folder: Path, count: int, size: int) -> tuple[KVFiles, list[bytes], float]:
    """Writes blocks. Returns the files, the blocks' hashes, and the seconds of the writes."""
    files, hashes = KVFiles(folder, b"bench".ljust(16)), [b"%16d" % n for n in range(count)]
    files.prepare()
    block, seconds = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8), 0.0
    for number, block_hash in enumerate(hashes):
        block[:8] = np.frombuffer(b"%8d" % number, np.uint8)
        data, began = block.tobytes(), time.perf_counter()
        files.write(0, block_hash, data)
        seconds += time.perf_counter() - began
    return files, hashes, seconds


def read_all(
    files: KVFiles, hashes: Sequence[bytes], memory: npt.NDArray[np.uint8], threads: int
) -> tuple[float, float]:
    """Reads each block into a row of `memory`, uint8 [blocks, size]. Returns seconds, and seconds
    of processor time."""
    with ThreadPoolExecutor(threads) as pool:
        began, cpu = time.perf_counter(), time.process_time()
        reads = [
            pool.submit(files.read, 0, block_hash, row.data)
            for block_hash, row in zip(hashes, memory, strict=True)
        ]
        for read in reads:
            read.result()
        return time.perf_counter() - began, time.process_time() - cpu


def forget_file(path: Path) -> None:
    """Has the kernel forget what it has cached of a file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--mib", type=int, default=18, help="of a block")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3, help="the best one counts")
    options = parser.parse_args(arguments)
    size = options.mib * 2**20
    nbytes = options.blocks * size
    memory = np.ones((options.blocks, size), np.uint8)  # its pages are there
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        files, hashes, seconds = make_files(Path(folder), options.blocks, size)
        print(f"written, not synced: {nbytes / seconds / 1e9:.2f} GB/s\n")
        print("| threads | cached GB/s | cpu ns/byte | disk GB/s |\n|--:|--:|--:|--:|")
        for threads in options.threads:
            disk = []
            for _ in range(options.rounds):
                for block_hash in hashes:
                    forget_file(files.path_of(0, block_hash))
                disk.append(read_all(files, hashes, memory, threads))
            cached = [read_all(files, hashes, memory, threads) for _ in range(options.rounds)]
            (best, _), (from_disk, _) = min(cached), min(disk)
            cpu = min(cpu for _, cpu in cached)
            print(
                f"| {threads} | {nbytes / best / 1e9:.2f} | {1e9 * cpu / nbytes:.3f} "
                f"| {nbytes / from_disk / 1e9:.2f} |"
            )


if __name__ == "__main__":
    main()
