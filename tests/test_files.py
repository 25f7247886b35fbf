"""Files: digests, safetensors written in pieces, files without a name, JSON of a model folder."""

from __future__ import annotations

import os
import random
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import multiprocessing
from torch.distributed import FileStore

from aioinfer.checkpoint.safetensors_writer import SafetensorsWriter, TensorSpec
from aioinfer.errors import ConfigError
from aioinfer.ipc.anonymous_file import RendezvousFile, StackDump, anonymous_file
from aioinfer.ipc.content_digest import digest_files
from aioinfer.ipc.heartbeat import Heartbeat
from aioinfer.ipc.ring import Ring
from aioinfer.models.json_file import read_json

CONTENT = random.Random(1).randbytes(3 << 20)
SIZES = (("matrix", 90_000), ("norm", 100))


def write(folder: Path, content: bytes, name: str = "weights") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return folder


def test_names_and_contents_count_alone(tmp_path: Path) -> None:
    first, second = (write(tmp_path / name, CONTENT) for name in ("a", "b"))
    os.utime(second / "weights", (1, 1))
    (second / "sub").mkdir()
    digest = digest_files(first)
    assert digest_files(second) == digest
    assert digest_files(write(tmp_path / "c", CONTENT, "other")) != digest
    changed = bytes(value ^ 1 for value in CONTENT)
    assert digest_files(write(tmp_path / "d", changed)) != digest


def test_both_ends_of_samples_count(tmp_path: Path) -> None:
    digest = digest_files(write(tmp_path / "a", CONTENT))
    for place in (0, len(CONTENT) - 1):
        changed = bytearray(CONTENT)
        changed[place] ^= 1
        assert digest_files(write(tmp_path / "b", bytes(changed))) != digest


def test_a_tensor_that_alone_has_changed_counts(tmp_path: Path) -> None:
    tensors = {f"layers.{n}.{kind}": torch.zeros(size) for n in range(9) for kind, size in SIZES}
    digests = set()
    for name in (None, "layers.4.norm", "layers.7.matrix"):
        changed = {each: tensor + (each == name) for each, tensor in tensors.items()}
        save_file(changed, tmp_path / "model.safetensors")
        digests.add(digest_files(tmp_path))
    assert len(digests) == 3


def test_pieces_in_any_order_from_many_threads_make_the_tensors(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    source = np.random.default_rng(1)
    tensors = {
        "half": source.standard_normal((7, 3)).astype(np.float16),
        "wide": source.standard_normal((50, 33)).astype(np.float32),
        "vector": source.standard_normal(9).astype(np.float32),
    }
    specs = {
        name: TensorSpec("F16" if values.dtype == np.float16 else "F32", values.shape)
        for name, values in tensors.items()
    }
    pieces = [
        (name, row * values[:1].nbytes, values[row : row + 2])
        for name, values in tensors.items()
        for row in range(0, len(values), 2)
    ]
    order = source.permutation(len(pieces))
    with SafetensorsWriter(path, specs) as writer, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda index: writer.write(*pieces[index]), order))
    with safe_open(path, framework="np") as file:
        assert set(file.keys()) == set(tensors)
        for name, values in tensors.items():
            stored = file.get_tensor(name)
            assert stored.dtype == values.dtype
            assert np.array_equal(stored, values), name


def test_bfloat16_is_written_as_bytes_and_what_nobody_writes_is_zero(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    values = torch.tensor([1.0, -2.5, 3.0], dtype=torch.bfloat16)
    with SafetensorsWriter(
        path, {"some": TensorSpec("BF16", (3,)), "none": TensorSpec("F32", (2, 2))}
    ) as writer:
        writer.write("some", 0, values.view(torch.uint8).numpy())
    with safe_open(path, framework="pt") as file:
        assert torch.equal(file.get_tensor("some"), values)
        assert torch.equal(file.get_tensor("none"), torch.zeros(2, 2))


def test_tensors_are_aligned_to_their_items(tmp_path: Path):
    """Mapped memory is read as it lies: an odd number of halves must not shift what follows."""
    path = tmp_path / "model.safetensors"
    specs = {"half": TensorSpec("F16", (3,)), "full": TensorSpec("F32", (1,))}
    with SafetensorsWriter(path, specs) as writer:
        writer.write("full", 0, np.float32([7]))
        writer.write("half", 0, np.float16([1, 2, 3]))
    content = path.read_bytes()
    assert int.from_bytes(content[:8], "little") % 8 == 0
    assert content.index(np.float32(7).tobytes()) % 4 == 0


def test_a_file_that_cannot_be_created(tmp_path: Path):
    with pytest.raises(OSError, match="no-such-folder"):
        SafetensorsWriter(tmp_path / "no-such-folder" / "model.safetensors", {})


def mode(fd: int) -> int:
    return stat.S_IMODE(os.fstat(fd).st_mode)


def test_it_has_its_size_and_no_name() -> None:
    fd = anonymous_file("test", 4096)
    assert os.fstat(fd).st_size == 4096
    assert os.fstat(fd).st_nlink == 0
    assert not os.get_inheritable(fd)
    assert os.pread(fd, 4096, 0) == bytes(4096)
    os.close(fd)


def test_all_shared_memory_is_readable_by_the_owner_alone() -> None:
    ring, heartbeat, stacks = Ring(2), Heartbeat(2), StackDump()
    assert [mode(fd) for fd in (ring._memory_fd, heartbeat._fd, stacks._fd)] == [0o600] * 3
    for shared in (ring, heartbeat, stacks):
        shared.close()


def meet(rendezvous: RendezvousFile, rank: int, found: Any) -> None:
    store = FileStore(rendezvous.path, 2)
    store.set(f"rank {rank}", str(os.getpid()))
    found.put((rank, int(store.get(f"rank {1 - rank}"))))


@pytest.mark.slow
def test_two_processes_meet() -> None:
    rendezvous, context = RendezvousFile(), multiprocessing.get_context("spawn")
    status = os.fstat(rendezvous._fd)
    assert (status.st_nlink, stat.S_IMODE(status.st_mode)) == (0, 0o600)
    found = context.Queue()
    processes = [context.Process(target=meet, args=(rendezvous, rank, found)) for rank in range(2)]
    for process in processes:
        process.start()
    others = dict(found.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert others == {0: processes[1].pid, 1: processes[0].pid}
    found.close()
    rendezvous.close()
    rendezvous.close()


def wait_in_two_threads(stacks: StackDump, ready: Any) -> None:
    stacks.register()
    prompt = "a secret prompt"
    threading.Thread(target=hold_the_lock, args=(prompt, ready), daemon=True).start()
    time.sleep(60)


def hold_the_lock(prompt: str, ready: Any) -> None:
    ready.set()
    sum(range(10**12))  # a call in C that does not let other threads run


def test_a_process_that_is_busy_in_c_gives_the_stacks_of_all_threads() -> None:
    stacks, context = StackDump(), multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=wait_in_two_threads, args=(stacks, ready), daemon=True)
    process.start()
    assert ready.wait(30)
    time.sleep(0.2)
    assert stacks.read() == ""
    stacks.request(process.pid or 0)
    deadline = time.monotonic() + 20
    while not ("hold_the_lock" in stacks.read() and "wait_in_two_threads" in stacks.read()):
        assert time.monotonic() < deadline, stacks.read()
        time.sleep(0.01)
    assert "secret" not in stacks.read()
    assert process.is_alive()
    process.kill()
    process.join()
    stacks.request(process.pid or 0)
    process.close()
    stacks.close()
    stacks.close()


def test_its_own() -> None:
    stacks = StackDump()
    stacks.write_own()
    assert "test_its_own" in stacks.read()
    stacks.close()


def test_an_object_or_nothing(tmp_path: Path):
    file = tmp_path / "some.json"
    assert read_json(file, missing_ok=True) == {}
    with pytest.raises(ConfigError, match=r"some\.json cannot be read"):
        read_json(file)
    file.write_text('{"a": [1, "é"]}', "utf-8")
    assert read_json(file) == {"a": [1, "é"]}


@pytest.mark.parametrize(
    "content", [b"{", b"[1]", b"\xff", b'{"a":' * 100_000],
    ids=["cut off", "a list", "not UTF-8", "too deep"],
)  # fmt: skip
def test_a_file_that_holds_something_else(tmp_path: Path, content: bytes):
    (tmp_path / "some.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"some\.json"):
        read_json(tmp_path / "some.json", missing_ok=True)
