"""Measures how fast one process reads KV blocks from another's memory of the host: over plain TCP,
over NIXL with UCX's TCP, and over NIXL with what UCX chooses (between two processes of one host:
shared memory).

    python scripts/bench_peer_links.py

Needs the extra `nixl`. Prints MB/s over all readers' threads, the best and the median of `--runs`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection

import torch

from aioinfer.ipc import nixl_link, peer_link
from aioinfer.ipc.kv_spec import AttentionSpec, KVGroup
from aioinfer.worker.host_blocks import HostBlocks, make_host_blocks
from aioinfer.worker.kv_peers import PeerConnector
from aioinfer.worker.kv_tensors import KVTensors

KEY, MODEL = b"k" * 32, b"m" * 16
#: Transports by what is printed of them: whether NIXL is there, and UCX's transports.
KINDS = {"TCP": (False, ""), "NIXL, tcp": (True, "tcp"), "NIXL, all": (True, "all")}


def make_host(options: argparse.Namespace) -> HostBlocks:
    """Returns places for the blocks, of 128 tokens of 8 heads each."""
    layers = tuple(range(options.layers))
    groups = (KVGroup(AttentionSpec(8, 128), layers),)
    kv = KVTensors(groups, (1,), 128, torch.bfloat16, torch.device("cpu"))
    return make_host_blocks(kv, options.blocks * kv.nbytes, shared=True)


def connect(name: str, host: HostBlocks, address: tuple[str, int] | None) -> PeerConnector:
    """Returns one side's connector."""
    has_nixl, transports = KINDS[name]
    os.environ["UCX_TLS"] = transports
    peer_link.unix_name = lambda address: "\0aioinfer-kv nowhere"
    nixl_link.has_rdma = lambda: has_nixl
    return PeerConnector(host, KEY, lambda: MODEL, address)


def block_hash(number: int) -> bytes:
    """Returns the hash of a block."""
    return number.to_bytes(16, "little")


def serve(name: str, options: argparse.Namespace, connection: Connection) -> None:
    """Serves blocks until the other side closes the connection."""
    host = make_host(options)
    host.groups[0].random_(0, 255)
    server = connect(name, host, options.address)
    for number in range(options.blocks):
        server.save(0, number, block_hash(number), lambda: None)
    connection.send(host.groups[0].long().sum().item())
    connection.recv()
    server.close()


def read(name: str, options: argparse.Namespace, connection: Connection) -> None:
    """Reads all blocks again and again, and sends the seconds and the sum of the last bytes."""
    host = make_host(options)
    reader = connect(name, host, None)
    blocks = [(0, number, block_hash(number)) for number in range(options.blocks)]
    times = []
    for run in range(options.runs + 1):
        host.groups[0].zero_()
        began = time.perf_counter()
        reader.read(run, blocks, lambda: None, "{}:{}".format(*options.address))
        ended: list[tuple[int, int]] = []
        while not ended:
            ended = reader.take_read(1.0)
        times.append(time.perf_counter() - began)
        if ended[0][1] != options.blocks:
            raise RuntimeError(f"{ended[0][1]} blocks have come")
    connection.send((times[1:], host.groups[0].nbytes, host.groups[0].long().sum().item()))
    reader.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--port", type=int, default=28_123)
    options = parser.parse_args()
    options.address = ("127.0.0.1", options.port)
    context = multiprocessing.get_context("spawn")
    for name in KINDS:
        pipes = [context.Pipe() for _ in range(2)]
        sides = [
            context.Process(target=target, args=(name, options, pipe[1]))
            for target, pipe in zip((serve, read), pipes, strict=True)
        ]
        sides[0].start()
        expected = pipes[0][0].recv()
        sides[1].start()
        times, size, found = pipes[1][0].recv()
        pipes[0][0].send(None)
        for side in sides:
            side.join()
        if found != expected:
            raise RuntimeError("other bytes have come")
        rates = [size / seconds / 1e6 for seconds in times]
        print(f"{name}: {max(rates):.0f} MB/s, median {statistics.median(rates):.0f}")


if __name__ == "__main__":
    main()
