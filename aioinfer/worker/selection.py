"""Device, dtypes and backend of a rank: selects and sets up its device, and selects the dtypes of
weights and arithmetic, and of the KV cache.
"""

from __future__ import annotations

import ctypes
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from aioinfer.config import Config
from aioinfer.errors import ConfigError
from aioinfer.ipc.expert_placement import ExpertPlacement
from aioinfer.ipc.kv_spec import AttentionSpec, LatentSpec
from aioinfer.layers.backend import Backend
from aioinfer.layers.kv_cache import FLOAT8
from aioinfer.models.causal_lm import CausalLM
from aioinfer.models.config import read_config
from aioinfer.models.kv_scales import has_float8_cache, load_kv_scales
from aioinfer.worker.peers import Peers


def select_device(
    config: Config, rank: int, engine: int = 0, *, owns_devices: bool = False
) -> torch.device:
    """Returns the device of an engine's rank, by its number on its host; `owns_devices` is as in
    `RankSpec`.

    Raises `ConfigError` if it should be a GPU and there are too few.
    """
    wanted = config.parallel.device_type
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
    gpus = parallel.gpus
    if gpus.stop > count:
        above_one = {name: value for name, value in settings.items() if value > 1}
        product = " times ".join(f"{name} = {value}" for name, value in above_one.items())
        behind = f" from the one of parallel.device = {parallel.device!r} on" if gpus.start else ""
        lower = [*above_one, *(["the number of parallel.device"] if behind else [])]
        raise ConfigError(
            f"{product or 'the model'} takes {len(gpus)} GPUs{behind}, and torch finds {count}: "
            f"lower {' or '.join(lower)}"
        )
    return torch.device("cuda", gpus[engine * parallel.world_size + rank])


def begin_context(device: torch.device) -> None:
    """Has the driver make its context of a GPU, a third of a second, in a thread that does not hold
    the interpreter; PyTorch takes the same one. Where that fails, PyTorch says why."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as PyTorch does before the driver starts

    def make() -> None:
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return
        number, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(number), device.index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)

    threading.Thread(target=make, name="context", daemon=True).start()


def set_up_device(config: Config, device: torch.device, engine_size: int) -> str:
    """Sets up the device of this process: the current GPU, or this process's share of the cores.

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


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def select_dtype(wanted: str, stored: torch.dtype, device: torch.device) -> tuple[torch.dtype, str]:
    """Returns the dtype of weights and arithmetic, and its name in the start-up table.

    Few CPUs multiply bfloat16 or float16 faster than float32, and others take a hundred times as
    long: on a CPU it is float32, unless the configuration names another.

    Args:
        wanted: the configured dtype, or "auto".
        stored: the checkpoint's.
    """
    name = str(stored).removeprefix("torch.")
    if wanted != "auto":
        return _DTYPES[wanted], wanted
    if device.type == "cpu" and name != "float32":
        return torch.float32, f"float32 (the weights are {name}, in which few CPUs compute fast)"
    if name not in _DTYPES:
        return torch.bfloat16, f"bfloat16 (the weights are {name})"
    return stored, name


@dataclass(frozen=True, slots=True)
class CacheDtype:
    """The dtype of a KV cache.

    Attributes:
        dtype: of keys and values.
        text: its name in the start-up table.
        is_calibrated: whether it is float8 and its scales are measured at the start.
        is_checked: whether a model that it harms is refused.
    """

    dtype: torch.dtype
    text: str
    is_calibrated: bool = False
    is_checked: bool = False


def select_backend(
    config: Config, device: torch.device, dtype: torch.dtype, peers: Peers
) -> Backend:
    """Returns what the layers of the model compute with."""
    parallel, method = config.parallel, config.speculation.method
    experts = parallel.expert_parallel
    backend = Backend.of(
        device,
        dtype,
        peers.tp,
        expert_parallel=bool(experts),
        expert_group=peers.experts,
        expert_placement=ExpertPlacement.read(Path(experts)) if isinstance(experts, str) else None,
        stage=peers.pp.rank,
        num_stages=peers.pp.size,
    )
    backend.cascade = True
    backend.state_dtype = config.cache.state_dtype
    backend.wants_mtp = method == "mtp"
    backend.wants_embedding = method in ("mtp", "eagle3")
    return backend


def select_cache_dtype(
    config: Config, folder: Path, model: CausalLM, dtype: torch.dtype
) -> CacheDtype:
    """Selects the dtype of the KV cache, and loads its scales if the checkpoint has them.

    Args:
        config: the whole configuration.
        folder: the folder of the model.
        model: with its weights loaded.
        dtype: of the arithmetic.

    Raises:
        ConfigError: a cache in float8 is configured, and the model has none that can be.
    """
    wanted = config.cache.dtype
    if wanted == "auto":
        found = read_config(folder, config.model.hf_overrides)
        wanted = "fp8" if has_float8_cache(found) else "model"
    if not wanted.startswith("fp8"):
        return CacheDtype(dtype, str(dtype).removeprefix("torch."))
    kinds = {type(spec) for specs in model.kv_specs for spec in specs}
    if AttentionSpec not in kinds or LatentSpec in kinds:
        raise ConfigError(
            "a KV cache in float8 is not supported for latent vectors, and for models that keep "
            "states or nothing alone: set cache.dtype to 'model'"
        )
    is_stored = not config.model.has_random_weights
    if is_stored and load_kv_scales(folder, model.kv_scales.values()):
        return CacheDtype(FLOAT8, "float8 (e4m3; scales: the checkpoint's)")
    for number, layer in model.kv_scales.items():
        for spec in model.kv_specs[model.layer_numbers.start + number]:
            if isinstance(spec, AttentionSpec):
                layer.allow_key_shifts(spec.head_size)
    return CacheDtype(
        FLOAT8,
        "float8 (e4m3; scales: calibrated)",
        is_calibrated=True,
        is_checked=is_stored and config.cache.dtype == "fp8",
    )
