"""Files of KV blocks, and the threads of the disk tier that write and read them."""

from __future__ import annotations

import logging
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from aioinfer.features.kv_store.sections import KVMoves
from aioinfer.features.kv_store.worker import Work
from aioinfer.ipc.kv_files import BrokenFileError, KVFiles, list_common
from aioinfer.ipc.kv_spec import AttentionSpec, KVGroup
from aioinfer.ipc.read_tally import ADAPTERS, KV_BLOCKS, MAX_READS, ReadTally, StoreTally, Tally
from aioinfer.scheduler.stored_blocks import Move
from aioinfer.worker import kv_connector
from aioinfer.worker.host_blocks import BlockCopies, make_host_blocks
from aioinfer.worker.kv_connector import DiskConnector
from aioinfer.worker.kv_tensors import KVTensors

OURS, OTHER = b"1" * 16, b"2" * 16
NAME, BLOCK = b"n" * 16, bytes(range(256)) * 40


@pytest.fixture
def files(tmp_path: Path) -> KVFiles:
    found = KVFiles.of(str(tmp_path), 0, 0).of_model(OURS)
    found.prepare()
    found.write(1, NAME, BLOCK)
    return found


def read(files: KVFiles, group: int = 1, name: bytes = NAME, size: int = len(BLOCK)) -> bytes:
    out = bytearray(size)
    files.read(group, name, memoryview(out))
    return bytes(out)


def test_a_block_comes_back_and_is_listed(files: KVFiles) -> None:
    assert read(files) == BLOCK
    assert files.list(2) == [[], [NAME]]
    assert files.list(1) == [[]]


def test_the_least_recently_used_are_listed_first(files: KVFiles) -> None:
    for number in range(3):
        files.write(0, b"%016d" % number, BLOCK)
        os.utime(files.path_of(0, b"%016d" % number), (number, number))
    read(files, 0, b"%016d" % 0)
    assert files.list(1) == [[b"%016d" % number for number in (1, 2, 0)]]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


FAULTS: dict[str, Callable[[Path], object]] = {
    "a flipped bit": flip,
    "cut": lambda path: os.truncate(path, 5000),
    "cut in its header": lambda path: os.truncate(path, 10),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "not ours": lambda path: path.write_bytes(b"x" * (len(BLOCK) + 56)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_file_is_no_block(files: KVFiles, fault: str) -> None:
    FAULTS[fault](files.path_of(1, NAME))
    with pytest.raises(BrokenFileError):
        read(files)


def test_a_file_of_another_block_group_size_or_model_is_no_block(files: KVFiles) -> None:
    path, other = files.path_of(1, NAME), b"o" * 16
    files.path_of(1, other).write_bytes(path.read_bytes())
    files.path_of(0, NAME).write_bytes(path.read_bytes())
    for wrong in (
        lambda: read(files, name=other),
        lambda: read(files, group=0),
        lambda: read(files, size=len(BLOCK) - 1),
        lambda: read(KVFiles(files.folder, OTHER)),
    ):
        with pytest.raises(BrokenFileError):
            wrong()


def test_the_files_of_another_model_are_removed_at_the_start(files: KVFiles) -> None:
    (files.folder / "half.tmp").write_bytes(b"")
    files.prepare()
    assert files.list(2) == [[], [NAME]]
    assert not (files.folder / "half.tmp").exists()
    KVFiles(files.folder, OTHER).prepare()
    assert files.list(2) == [[], []]


def until(condition: Callable[[], object]) -> None:
    ends = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)


def make_tier(folder: Path) -> tuple[DiskConnector, KVFiles, list[torch.Tensor]]:
    kv = KVTensors(
        (KVGroup(AttentionSpec(1, 64), (0,)),), (4,), 16, torch.float32, torch.device("cpu")
    )
    host = make_host_blocks(kv, 4 * kv.nbytes)
    for number, place in enumerate(host.groups[0]):
        place.fill_(number)
    files = KVFiles.of(str(folder), 0, 0).of_model(OURS)
    return DiskConnector(files, host, lambda: OURS), files, host.groups


def test_threads_write_and_read(tmp_path: Path) -> None:
    tier, files, groups = make_tier(tmp_path)
    tier.save(0, 3, NAME, lambda: None)
    until(lambda: files.list(1)[0])
    tier.read(7, [(0, 5, NAME), (0, 6, b"m" * 16)], lambda: None)
    assert tier.has_reads
    assert tier.take_read(10) == [(7, 1)], "there is no second file"
    assert not tier.has_reads
    assert (groups[0][5] == 3).all()
    tier.delete(0, NAME)
    tier.close()
    assert files.list(1) == [[]]


def test_a_place_that_was_overwritten_is_not_written(tmp_path: Path) -> None:
    tier, files, _ = make_tier(tmp_path)
    tier.save(0, 3, NAME, lambda: tier._host.overwrite(0, 3))
    tier.close()
    assert files.list(1) == [[]]


def test_a_block_that_makes_room_for_another_is_not_written_as_the_other(tmp_path: Path) -> None:
    """A write that waits for its turn begins when the first bytes of the next block are there."""
    tier, files, groups = make_tier(tmp_path)
    may_begin = threading.Event()
    tier.save(0, 3, NAME, lambda: may_begin.wait(10) and None)

    class Copies:
        def save(self, moves: np.ndarray) -> Callable[[], None]:
            groups[0][3].fill_(9)
            may_begin.set()
            until(lambda: tier._waiting_writes._value == kv_connector._MAX_WRITES)
            return lambda: None

    work = Work.__new__(Work)
    work.connectors, work.host = {0: tier}, tier._host
    other = Move(0, 3, 1, block_hash=b"o" * 16)
    work._save(KVMoves.of((), (), [other]), cast(BlockCopies, Copies()))
    tier.close()
    assert files.list(1) == [[]]


def test_files_change_in_the_order_in_which_it_was_asked(tmp_path: Path) -> None:
    tier, files, _ = make_tier(tmp_path)
    names = [bytes([number]) * 16 for number in range(20)]
    for _ in range(8):
        for name in names:
            tier.delete(0, name)
            tier.save(0, 1, name, lambda: None)
    tier.close()
    assert not tier.is_full
    assert sorted(files.list(1)[0]) == names


def test_a_full_disk_turns_writing_off_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier, files, _ = make_tier(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    caplog.set_level(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        for number in range(5):
            tier.save(0, number, b"%016d" % number, lambda: None)
        tier.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert tier.is_full
    assert files.list(1) == [[]]
    assert not list(files.folder.glob("*.tmp"))
    assert sum("no further KV blocks" in record.message for record in caplog.records) == 1


def test_a_block_that_a_rank_lacks_is_on_no_disk(tmp_path: Path) -> None:
    ranks = [KVFiles.of(str(tmp_path), 0, rank).of_model(OURS) for rank in range(2)]
    names = [bytes([number]) * 16 for number in range(4)]
    for files, own in zip(ranks, (names[:3], names[1:]), strict=True):
        files.prepare()
        for name in own:
            files.write(0, name, BLOCK)
    assert list_common(ranks, 1) == [names[1:3]]
    assert [sorted(files.list(1)[0]) for files in ranks] == [names[1:3]] * 2


@pytest.mark.parametrize("is_local", [True, False])
def test_a_read_has_ended_when_it_has_on_every_rank(is_local: bool) -> None:
    tally: Tally = ReadTally(3) if is_local else StoreTally(HashStore(), 1, 3)
    for number in (
        0,
        MAX_READS - 1,
        MAX_READS,
        5 * MAX_READS,
    ):  # a record takes a former one's place
        for rank, count in enumerate((7, 5, 9)):
            assert tally.fewest(KV_BLOCKS, number) is None
            tally.record(KV_BLOCKS, rank, number, count)
        assert tally.fewest(KV_BLOCKS, number) == 5
        assert tally.fewest(KV_BLOCKS, number + 1) is None
        assert tally.fewest(ADAPTERS, number) is None
    if isinstance(tally, ReadTally):
        tally.close()


def test_files_of_new_weights_are_not_those_of_the_old_ones(tmp_path: Path) -> None:
    tier, files, _ = make_tier(tmp_path)
    tier.save(0, 3, NAME, lambda: None)
    until(lambda: files.list(1)[0])
    tier._identify = lambda: OTHER
    tier.delete(-1, bytes(16))
    tier.read(1, [(0, 5, NAME)], lambda: None)
    assert tier.take_read(10) == [(1, 0)]
    tier.save(0, 3, NAME, lambda: None)
    tier.close()
    assert read(files.of_model(OTHER), 0, NAME, 16 * 64 * 4 * 2)
    files.prepare()  # with the old weights again
    assert files.list(1) == [[]]
