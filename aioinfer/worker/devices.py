"""The device that a rank computes on: which one it is, and how the process makes it its own."""

from __future__ import annotations

import os

import torch

from aioinfer.config import Config
from aioinfer.errors import ConfigError


def select_device(
    config: Config, rank: int, engine: int = 0, *, owns_devices: bool = False
) -> torch.device:
    """Returns the device of an engine's rank, by its number on its host; `owns_devices` is as in
    `RankSpec`.

    Raises `ConfigError` if it should be a GPU and there are too few.
    """
    wanted = config.parallel.device
    count = torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and not count):
        return torch.device("cpu")
    if not count:
        raise ConfigError(
            "parallel.device = 'cuda', and there is no GPU that torch can use: set "
            "it to 'cpu' or 'auto'"
        )
    if owns_devices:
        if rank >= count:
            raise ConfigError(f"{rank + 1} ranks of one host need as many GPUs, and it has {count}")
        return torch.device("cuda", rank)
    parallel = config.parallel
    names = "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"
    settings = {f"parallel.{name}": getattr(parallel, name) for name in names}
    size, engines = parallel.world_size, parallel.data_parallel_size
    if size * engines > count:
        above_one = {name: value for name, value in settings.items() if value > 1}
        product = " times ".join(f"{name} = {value}" for name, value in above_one.items())
        raise ConfigError(
            f"{product} takes {size * engines} GPUs, and torch finds {count}: lower "
            f"{' or '.join(above_one)}"
        )
    return torch.device("cuda", engine * size + rank)


def set_up_device(config: Config, device: torch.device, engine_size: int) -> str:
    """Makes the device this process's own: the current GPU, or this process's share of the cores.

    Args:
        config: the whole configuration.
        device: the rank's.
        engine_size: the number of ranks of an engine.

    Returns:
        Its name for the start-up table.
    """
    if device.type != "cpu":
        torch.cuda.set_device(device)
        return torch.cuda.get_device_name(device)
    parallel = config.parallel
    num_workers = engine_size * parallel.data_parallel_size
    cores = len(os.sched_getaffinity(0))
    threads = parallel.cpu_threads or max(1, cores // num_workers)
    torch.set_num_threads(threads)
    return f"cpu ({threads} thread{'s' if threads > 1 else ''})"
