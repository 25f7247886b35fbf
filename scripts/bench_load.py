"""Measures how fast a GPU worker loads a real checkpoint, and how fast its files can be read.

    python scripts/bench_load.py --model FOLDER --out FOLDER_ON_THE_DISK
    python scripts/bench_load.py --model FOLDER --out FOLDER --threads 2 4 8 --keep

Weights of random bits in the shapes of the model's config.json are written to `--out` as a
checkpoint of files of 4 GB, unless it is there already; it is removed at the end but with `--keep`.
For each number of threads, two figures: from the disk, once the kernel has been asked to forget the
files, and from the page cache. "read" is what as many threads take for plain reads of 16 MiB into
memory, "load" what the worker takes from the first tensor to the last one on the GPU. (A virtual
disk may have a cache of its own.)
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from aioinfer.checkpoint.safetensors_writer import SafetensorsWriter, TensorSpec
from aioinfer.config import load_config
from aioinfer.layers.parallel import ProcessGroups
from aioinfer.models import loader
from aioinfer.models.registry import load_model_config
from aioinfer.worker.peers import Peers
from aioinfer.worker.rank_model import RankModel
from aioinfer.worker.selection import select_backend
from bench_kv_files import forget_file

FILE_BYTES, PIECE = 4 * 10**9, 16 * 2**20


def make_layers(folder: Path) -> RankModel:
    """Returns the layers of a model in bf16 on the first GPU, their weights unset."""
    settings = [f"model.path={folder}", "model.dtype=bfloat16", "parallel.device=cuda"]
    config, device = load_config(None, settings), torch.device("cuda", 0)
    peers = Peers(config, ProcessGroups.single(), device)
    backend = select_backend(config, device, torch.bfloat16, peers)
    length = load_model_config(folder, config.model).max_len
    return RankModel(config, folder, backend, peers, length)


def write_checkpoint(model: Path, out: Path) -> None:
    """Writes the files, their index, and what else the model's folder has."""
    out.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        shutil.copy(file, out / file.name)
    shapes = {
        name: tuple(shard.checkpoint_shape)
        for name, shard in make_layers(model).model.weight_shards()  # type: ignore[attr-defined]
    }
    files: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes.items():
        if sum(2 * prod(each) for each in files[-1].values()) >= FILE_BYTES:
            files.append({})
        files[-1][name] = shape
    bits = np.random.default_rng(0).integers(0, 0x3C00, PIECE // 2, np.uint16)  # numbers below 1
    index = {}
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        specs = {each: TensorSpec("BF16", shape) for each, shape in tensors.items()}
        with SafetensorsWriter(out / name, specs) as writer, ThreadPoolExecutor(4) as threads:
            writes = []
            for each, shape in tensors.items():
                size = 2 * prod(shape)
                for at in range(0, size, PIECE):
                    values = bits[: min(PIECE, size - at) // 2]
                    writes.append(threads.submit(writer.write, each, at, values))
                index[each] = name
            for write in writes:
                write.result()
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def read_plainly(files: Sequence[Path], threads: int) -> float:
    """Returns the seconds that threads take to read all files, a quarter of a GB each at a time."""
    parts = [(file, at) for file in files for at in range(0, file.stat().st_size, 2**28)]

    def read(part: tuple[Path, int]) -> None:
        memory = memoryview(bytearray(PIECE))
        fd = os.open(part[0], os.O_RDONLY)
        for at in range(part[1], part[1] + 2**28, PIECE):
            os.preadv(fd, [memory], at)
        os.close(fd)

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, parts))
    return time.perf_counter() - began


def load(folder: Path) -> float:
    """Returns the seconds that a worker's load of the weights takes."""
    layers = make_layers(folder)
    torch.cuda.synchronize()
    began = time.perf_counter()
    layers.load(lambda done, total: None, None)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    del layers
    torch.cuda.empty_cache()
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the checkpoint and prints a line a measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, nargs="+", default=[loader.READING_THREADS])
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint there")
    options = parser.parse_args(arguments)
    if not (options.out / "model.safetensors.index.json").is_file():
        began = time.perf_counter()
        write_checkpoint(options.model, options.out)
        print(f"written in {time.perf_counter() - began:.1f} s")
    files = sorted(options.out.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files) / 1e9
    for threads in options.threads:
        loader.READING_THREADS = threads
        for where in ("disk", "page cache"):
            for name, run in (
                ("read", lambda: read_plainly(files, threads)),  # noqa: B023  (at once)
                ("load", lambda: load(options.out)),
            ):
                if where == "disk":
                    for file in files:
                        forget_file(file)
                seconds = run()
                print(
                    f"{threads} threads, {where}: {name} {seconds:.2f} s, {size / seconds:.2f} GB/s"
                )
    if not options.keep:
        shutil.rmtree(options.out)


if __name__ == "__main__":
    main()
