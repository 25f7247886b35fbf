"""A worker's memory: how much of it the KV cache may have, how the cache's memory is divided among
groups of layers, and the cache's tensors.

The worker calls `check_weights` on a CPU before it loads its weights, `available_bytes` once it
has, then `count_blocks`, and when all ranks agree on the numbers of blocks, `make_kv`.

Each group has blocks of its own, so their numbers decide how many requests run side by side, and
the right proportion depends on how long these are: a long request needs many blocks where all
tokens are attended to, but with a sliding window no more than the window takes. A division that is
made for short requests wastes the blocks of the windows when requests are long, and one for long
requests leaves too few of them for many short ones.

The rule. A division for a reference length gives every group as many blocks as the same number of
requests of that length own. Among the divisions for all reference lengths (the longest request,
half of it, a quarter, and so on) that one is taken whose worst case is best. Its worst case is the
minimum, over all lengths, of the ratio between the requests of that length that it runs at once
and the requests that the division made for that very length would run. So no group starves the
others, whatever comes: with windows that take five times as many bytes a token as full attention
(Gemma 3) the worst ratio is about 0.55, and with plenty of memory it is 1.

Bounds. No group has fewer blocks than one request of the longest length needs. Groups with windows
have no more than all running requests together can own (`enough_blocks`); the rest goes
to the groups that keep all tokens, where it makes room for longer requests and for more blocks of
the prefix cache.

Groups of states (`StateSpec`) have a block for each running request, where memory is plenty two,
and snapshots for the prefix cache beside them: `SNAPSHOT_SHARE` of the memory, which is set aside
before the rest is divided, and in a model that keeps nothing else all that is left. Groups of
sources (`SourceSpec`) have a block for each running request.
"""

from __future__ import annotations

import errno
import math
import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from aioinfer.config import Config
from aioinfer.errors import ConfigError
from aioinfer.ipc.kv_spec import KVGroup
from aioinfer.ipc.placement import RankSpec
from aioinfer.worker.host_memory import available_memory, machine_memory

GIB = 2**30
#: The part of the cache's memory that holds snapshots of states beside the states of running
#: requests.
SNAPSHOT_SHARE = 1 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDemand:
    """The scheduler's demand on the KV cache.

    Attributes:
        groups: the groups of layers.
        block_bytes: bytes of a block of each group.
        block_size: tokens a block.
        max_num_seqs: requests that run at once.
        max_chunk: tokens of a step.
        prefix_caching: whether snapshots of states are kept.
    """

    groups: tuple[KVGroup, ...]
    block_bytes: tuple[int, ...]
    block_size: int
    max_num_seqs: int
    max_chunk: int
    prefix_caching: bool = True

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of a snapshot: a block of each group of states."""
        groups = zip(self.groups, self.block_bytes, strict=True)
        return sum(size for group, size in groups if group.keeps_states)

    def count_snapshots(self, memory: float) -> int:
        """Returns how many snapshots `memory` bytes hold, if any are kept."""
        size = self.snapshot_bytes
        return max(0, int(memory // size)) if size and self.prefix_caching else 0

    def add_snapshots(self, num_blocks: Sequence[int], count: int) -> list[int]:
        """Returns numbers of blocks with `count` more of each group of states."""
        groups = zip(self.groups, num_blocks, strict=True)
        return [blocks + count * group.keeps_states for group, blocks in groups]

    @property
    def len_of_full_windows(self) -> int:
        """The length from which on a request needs no more blocks of any window."""
        longest = max((group.window or 0 for group in self.groups), default=0)
        return longest + self.max_chunk + 2 * self.block_size if longest else self.block_size

    def total_bytes(self, num_blocks: Sequence[int]) -> int:
        """Returns the bytes of so many blocks of each group."""
        return sum(n * size for n, size in zip(num_blocks, self.block_bytes, strict=True))

    def blocks_of_one(self, num_tokens: int) -> list[int]:
        """Returns the blocks of each group that one request of `num_tokens` tokens needs."""
        return [g.max_blocks(num_tokens, self.block_size, self.max_chunk) for g in self.groups]

    def blocks_of_many(self, num_tokens: int, count: float) -> list[float]:
        """Returns the blocks of each group that `count` requests of `num_tokens` tokens own, of
        which one computes its prompt and the others decode."""
        return [
            peak + (count - 1) * self._blocks_of_decode(group, num_tokens)
            for group, peak in zip(self.groups, self.blocks_of_one(num_tokens), strict=True)
        ]

    def _blocks_of_decode(self, group: KVGroup, num_tokens: int) -> int:
        """Returns the blocks of a group that a decoding request of `num_tokens` tokens owns: of
        states one, but for the step that begins a block."""
        return 1 if group.keeps_states else group.max_blocks(num_tokens, self.block_size, 1)

    def num_running(self, num_blocks: Sequence[int], num_tokens: int) -> float:
        """Returns how many requests of `num_tokens` tokens so many blocks hold at once."""
        running = float(self.max_num_seqs)
        peaks = self.blocks_of_one(num_tokens)
        for group, blocks, peak in zip(self.groups, num_blocks, peaks, strict=True):
            decode = self._blocks_of_decode(group, num_tokens)
            running = min(running, 1 + (blocks - peak) / decode)
        return max(0.0, running)

    def enough_blocks(self, num_tokens: int) -> list[int | None]:
        """Returns the blocks of each group that running requests of at most `num_tokens` tokens
        never exceed, snapshots of states not counted; None where all tokens are kept, since a
        prefix cache has use for any number.

        A request of which a step computes c tokens owns at most (window + c + 2 * block_size - 3)
        / block_size blocks (see `KVGroup.max_blocks`), with c = 1 if it is in none. All c of a step
        together are at most `max_chunk`.
        """
        seqs, size = self.max_num_seqs, self.block_size
        enough: list[int | None] = []
        for group in self.groups:
            if group.window is None:
                enough.append(None)
            elif group.keeps_states or group.keeps_source:
                enough.append(seqs * group.max_blocks(num_tokens, size, self.max_chunk))
            else:
                tokens = seqs * (group.window + 2 * size - 2) + self.max_chunk
                enough.append(min(tokens // size, seqs * -(-num_tokens // size)))
        return enough

    def longest_alone(self, available: int, limit: int) -> int:
        """Returns the length of the longest request, of whole blocks and at most about `limit`
        tokens, whose blocks take at most `available` bytes; 0 if there is none."""
        low, high = 0, -(-limit // self.block_size)
        while low < high:
            middle = (low + high + 1) // 2
            if self.total_bytes(self.blocks_of_one(middle * self.block_size)) <= available:
                low = middle
            else:
                high = middle - 1
        return low * self.block_size


def divide_memory(demand: CacheDemand, available: int, min_len: int, max_len: int) -> list[int]:
    """Returns the number of blocks of each group. See the module's docstring for the rule.

    Args:
        demand: of the scheduler.
        available: bytes. One request of `min_len` tokens fits.
        min_len: the length of a request that must fit.
        max_len: the length that no request exceeds, at least `min_len`.
    """
    spare = available - demand.total_bytes(demand.blocks_of_one(min_len))
    snapshots = demand.count_snapshots(min(spare, available * SNAPSHOT_SHARE))
    available -= snapshots * demand.snapshot_bytes
    longest = max(min_len, demand.longest_alone(available, max_len))
    lengths = [longest]
    while lengths[-1] > demand.block_size:
        lengths.append(-(-lengths[-1] // 2))
    divisions = [
        _divide_for(demand, available, reference, min_len, max_len) for reference in lengths
    ]
    best = [demand.num_running(division, n) for division, n in zip(divisions, lengths, strict=True)]

    def worst_case(division: list[int]) -> float:
        return min(
            demand.num_running(division, length) / max(1.0, running)
            for length, running in zip(lengths, best, strict=True)
        )

    division = max(divisions, key=worst_case)
    if None not in demand.enough_blocks(max_len):
        snapshots += demand.count_snapshots(available - demand.total_bytes(division))
    return demand.add_snapshots(division, snapshots)


def _divide_for(
    demand: CacheDemand, available: int, reference: int, min_len: int, max_len: int
) -> list[int]:
    """Returns the division that runs as many requests of `reference` tokens as possible."""
    minimum, enough = demand.blocks_of_one(min_len), demand.enough_blocks(max_len)

    def blocks_for(count: float) -> list[int]:
        return [
            max(low, int(blocks) if high is None else min(high, int(blocks)))
            for low, high, blocks in zip(
                minimum, enough, demand.blocks_of_many(reference, count), strict=True
            )
        ]

    low, high = 0.0, 1.0 + available / min(demand.block_bytes)
    for _ in range(64):
        middle = (low + high) / 2
        if demand.total_bytes(blocks_for(middle)) <= available:
            low = middle
        else:
            high = middle
    division = blocks_for(low)
    keep_all = [number for number, blocks in enumerate(enough) if blocks is None]
    if keep_all:
        left = available - demand.total_bytes(division)
        more = left // sum(demand.block_bytes[number] for number in keep_all)
        for number in keep_all:
            division[number] += more
    return division


def available_bytes(
    config: Config, device: torch.device, largest_step: Callable[[], None], captured: float = 0.0
) -> int:
    """Returns the bytes that the KV cache of this rank may take; 0 or less if nothing is left for
    it.

    On a CPU the number is configured (see `check_weights`), and no more than the machine's memory,
    also where `cache.num_blocks` is given. On a GPU it is the fraction that may be used, less the
    memory in use already (weights, and everything else on the GPU) and the memory that the largest
    step adds, which is measured by running it. Graphs have memory of their own.

    Args:
        largest_step: computes as many tokens as a step may have.
        captured: the fraction of these tokens that the largest graph computes.
    """
    if device.type == "cpu":
        return min(int(config.cache.cpu_memory_gib * GIB), machine_memory())
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    largest_step()
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return (
        int(total * config.cache.gpu_memory_utilization)
        - (total - free)
        - int(activations * (1 + captured))
    )


def count_blocks(
    config: Config, device: torch.device, demand: CacheDemand, model_max_len: int, available: int
) -> tuple[int, ...]:
    """Returns how many KV blocks of each group this rank can have: `cache.num_blocks` of them, or
    what fits into `available` bytes.

    Args:
        config: the whole configuration.
        device: the rank's.
        demand: the groups, and what requests need of them.
        model_max_len: the length that the model was made for.
        available: bytes.

    Raises:
        ConfigError: there is not one block, or too few for `model.max_model_len`, or on a GPU
            `cache.num_blocks` do not fit (on a CPU: into the machine's memory). The message states
            what to change, and to what.
    """
    longest, configured = config.model.max_model_len, config.cache.num_blocks
    max_len = longest or model_max_len
    if configured is not None:
        return _configured_blocks(config, device, demand, configured, max_len, available)
    alone = demand.longest_alone(available, max_len)
    needed = demand.total_bytes(demand.blocks_of_one(longest or demand.block_size))
    if needed > available:
        memory = _memory_remedy(config, device, needed - available)
        if longest is None:
            raise ConfigError(f"not one KV block of {_mib(needed)} fits into memory: set {memory}")
        shorter = f", or model.max_model_len to at most {alone}" if alone else ""
        raise ConfigError(
            f"model.max_model_len = {longest} needs {_mib(needed)} of KV cache, and "
            f"{_mib(max(0, available))} are left: set {memory}{shorter}"
        )
    min_len = longest or min(alone, demand.len_of_full_windows)
    return tuple(divide_memory(demand, available, min_len, max(max_len, min_len)))


def _configured_blocks(
    config: Config,
    device: torch.device,
    demand: CacheDemand,
    configured: int,
    max_len: int,
    available: int,
) -> tuple[int, ...]:
    """Returns the blocks of each group where `cache.num_blocks` is given: so many, but with a
    window or a state no more than running requests can own, and of states a snapshot for each of
    them."""
    snapshots = demand.max_num_seqs if demand.prefix_caching else 0

    def blocks_of(count: int) -> tuple[int, ...]:
        enough = demand.enough_blocks(max_len)
        division = [count if limit is None else min(count, limit) for limit in enough]
        return tuple(demand.add_snapshots(division, min(count, snapshots)))

    longest = config.model.max_model_len
    needed = 1 if longest is None else -(-longest // demand.block_size)
    if configured < needed:
        raise ConfigError(
            f"model.max_model_len = {longest} needs {needed} KV blocks: set cache.num_blocks to "
            f"at least {needed}, "
            f"or model.max_model_len to at most {configured * demand.block_size}"
        )
    wanted = demand.total_bytes(blocks_of(configured))
    if device.type == "cpu":
        available = machine_memory()
    if wanted > available:
        fitting = bisect_right(
            range(configured), available, key=lambda count: demand.total_bytes(blocks_of(count))
        )
        if device.type == "cpu":
            raise ConfigError(
                f"cache.num_blocks = {configured} take {_mib(wanted)}, and the machine has "
                f"{_mib(available)} of memory: set it to less than {fitting}"
            )
        fewer = f", or cache.num_blocks to at most {fitting - 1}" if fitting > 1 else ""
        raise ConfigError(
            f"cache.num_blocks = {configured} take {_mib(wanted)}, and {_mib(max(0, available))} "
            f"are left: set {_memory_remedy(config, device, wanted - available)}{fewer}"
        )
    return blocks_of(configured)


def check_weights(config: Config, weights_bytes: int, dtype: torch.dtype, rank: RankSpec) -> None:
    """Checks that the weights that a CPU worker is about to load, with its KV cache, fit into
    memory: beyond it, the kernel would end some process without a message.

    Workers that start together all see the same free memory, and one that replaces another sees the
    memory that the rest have in use. So one worker alone is compared with the free memory, and all
    of them with the memory of the machine.

    Args:
        config: the whole configuration.
        weights_bytes: of this worker; 0 where it is known only when they are loaded.
        dtype: of its arithmetic.
        rank: this worker's.

    Raises:
        ConfigError: memory is too short. The message states what takes how much, and which setting
            to change.
    """
    # with cache.num_blocks the size of the cache is not known yet
    cache = 0 if config.cache.num_blocks else int(config.cache.cpu_memory_gib * GIB)
    parallel = config.parallel
    on_one_host = rank.master_port == 0 and parallel.executor != "ray"
    num_workers = parallel.world_size * parallel.data_parallel_size if on_one_host else 1
    machine, free = machine_memory(), available_memory()
    for count, memory, what in (
        (num_workers, machine, f"the machine has {_gib(machine)} of memory"),
        (1, free, f"{_gib(free)} of memory are free"),
    ):
        if count * (weights_bytes + cache) <= memory:
            continue
        parts = [f"the weights take {_gib(count * weights_bytes)}"] if weights_bytes else []
        if cache:
            parts.append(f"the KV cache takes {_gib(count * cache)} (cache.cpu_memory_gib)")
        sizes = " and ".join(parts) + (f" in {count} workers" if count > 1 else "")
        place = ", as torch finds no GPU" if parallel.device_type == "auto" else ""
        raise ConfigError(
            f"on the CPU{place}, {sizes}, and {what}: set "
            f"{_smaller(weights_bytes, cache, min(machine // num_workers, free), dtype)}"
        )


def _smaller(weights: int, cache: int, memory: int, dtype: torch.dtype) -> str:
    """Returns which setting would make a worker's weights and KV cache fit, and its value."""
    # the cache of a few thousand tokens, at least
    if cache and memory - weights >= min(cache, GIB // 8):
        return f"cache.cpu_memory_gib to at most {(memory - weights) * 100 // GIB / 100:g}"
    path = "model.path to a smaller model, or to a GGUF file, whose weights stay quantized"
    if dtype == torch.float32 and weights // 2 + min(cache, GIB // 8) <= memory:
        room = (memory - weights // 2) * 100 // GIB / 100
        lower = f" and cache.cpu_memory_gib to at most {room:g}" if cache > room * GIB else ""
        return f"{path}, or model.dtype to 'bfloat16'{lower} (slower on most CPUs)"
    return path


@contextmanager
def report_shortage(what: str, remedy: str) -> Iterator[None]:
    """Raises `ConfigError` where an allocation fails within the block.

    Args:
        what: needs memory.
        remedy: which settings to change.
    """
    try:
        yield
    except (MemoryError, OverflowError, OSError, RuntimeError) as error:
        text = str(error)
        if isinstance(error, RuntimeError):  # torch has a class of its own for GPUs only
            is_shortage = any(
                words in text for words in ("allocate memory", "out of memory", "overflow")
            )
        else:
            is_shortage = not isinstance(error, OSError) or error.errno == errno.ENOMEM
        if not is_shortage:
            raise
        first = text.partition("\n")[0]
        raise ConfigError(f"there is not enough memory for {what}: {remedy} ({first})") from error


def make_kv(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a KV cache of zeros.

    On a CPU the system allocates its pages when they are first written.
    """
    if device.type == "cuda":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    # torch.zeros would write all of it, as calloc would where it gets memory that was freed
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def _memory_remedy(config: Config, device: torch.device, missing: int) -> str:
    """Returns which setting would give the cache `missing` bytes more."""
    if device.type == "cpu":
        gib = _round_up(config.cache.cpu_memory_gib + missing / GIB)
        return f"cache.cpu_memory_gib to at least {gib}"
    fraction = _round_up(
        config.cache.gpu_memory_utilization + missing / torch.cuda.mem_get_info(device)[1]
    )
    if fraction < 1:
        return f"cache.gpu_memory_utilization to at least {fraction}"
    return "scheduler.max_num_batched_tokens lower, or parallel.tensor_parallel_size higher"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"


def _round_up(value: float) -> float:
    """Returns `value` rounded up to two decimals, or to two digits if it is smaller."""
    decimals = max(2, 1 - math.floor(math.log10(value)))
    return math.ceil(value * 10**decimals) / 10**decimals
