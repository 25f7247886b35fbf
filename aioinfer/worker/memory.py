"""How much memory a worker has for its KV cache, and the cache itself.

The worker calls `available_bytes` once its weights are loaded, then `count_blocks`, and when all
ranks agree on a number of blocks, `make_kv`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from aioinfer.config import Config
from aioinfer.errors import ConfigError

GIB = 2**30


def available_bytes(
    config: Config, device: torch.device, largest_step: Callable[[], None], captured: float = 0.0
) -> int:
    """Returns the bytes that the KV cache of this rank may take; 0 or less if nothing is left for
    it.

    On a CPU that is configured. On a GPU it is the share that may be used, less what is in use
    already (weights, and whatever else is on the GPU) and what the largest step adds, which is
    found by running it. Graphs have memory of their own.

    Args:
        largest_step: computes as many tokens as a step may have.
        captured: the share of these tokens that the largest graph computes.
    """
    if device.type == "cpu":
        return int(config.cache.cpu_memory_gib * GIB)
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
    config: Config, device: torch.device, bytes_per_block: int, block_size: int, available: int
) -> int:
    """Returns how many KV blocks this rank can have: `cache.num_blocks`, or what fits into
    `available` bytes.

    Raises:
        ConfigError: there is not one block, or too few for `model.max_model_len`, or on a GPU
            `cache.num_blocks` do not fit. The message says what to change, and to what.
    """
    fitting = max(0, available // bytes_per_block)
    configured, longest = config.cache.num_blocks, config.model.max_model_len
    needed = 1 if longest is None else -(-longest // block_size)
    size = f"{bytes_per_block / 2**20:.2f} MiB"
    if configured is None:
        if fitting >= needed:
            return fitting
        memory = _memory_remedy(config, device, needed * bytes_per_block - available)
        if longest is None:
            raise ConfigError(f"not one KV block of {size} fits into memory: set {memory}")
        shorter = f", or model.max_model_len to at most {fitting * block_size}" if fitting else ""
        raise ConfigError(
            f"model.max_model_len = {longest} needs {needed} KV blocks of {size}, and {fitting} "
            f"fit into memory: set {memory}{shorter}"
        )
    if configured < needed:
        raise ConfigError(
            f"model.max_model_len = {longest} needs {needed} KV blocks: set cache.num_blocks to "
            f"at least {needed}, "
            f"or model.max_model_len to at most {configured * block_size}"
        )
    if configured > fitting and device.type == "cuda":
        memory = _memory_remedy(config, device, configured * bytes_per_block - available)
        fewer = f", or cache.num_blocks to at most {fitting}" if fitting else ""
        raise ConfigError(
            f"cache.num_blocks = {configured} of {size} do not fit into memory: set {memory}{fewer}"
        )
    return configured


def make_kv(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a KV cache of zeros.

    On a CPU the system hands out its pages when they are first written.
    """
    if device.type == "cuda":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    pages = np.zeros(size + 64, np.uint8)  # calloc, where torch.zeros would write all of it
    aligned = -pages.ctypes.data % 64
    return torch.from_numpy(pages[aligned : aligned + size]).view(dtype).view(shape)


def _memory_remedy(config: Config, device: torch.device, missing: int) -> str:
    """Says which setting would give the cache `missing` bytes more."""
    if device.type == "cpu":
        return f"cache.cpu_memory_gib to at least {_round_up(config.cache.cpu_memory_gib + missing / GIB)}"
    share = _round_up(
        config.cache.gpu_memory_utilization + missing / torch.cuda.mem_get_info(device)[1]
    )
    if share < 1:
        return f"cache.gpu_memory_utilization to at least {share}"
    return "scheduler.max_num_batched_tokens lower, or parallel.tensor_parallel_size higher"


def _round_up(value: float) -> float:
    """Returns `value` rounded up to two decimals, or to two digits if it is smaller."""
    decimals = max(2, 1 - math.floor(math.log10(value)))
    return math.ceil(value * 10**decimals) / 10**decimals
