"""How the engines of the tests on GPUs are configured."""

from __future__ import annotations

from typing import Any


def engine_settings(**settings: Any) -> dict[str, Any]:
    """Returns a configuration by `section.key`: small, in float32 and without a prefix cache, but
    for `settings` (`section__key`)."""
    defaults = {
        "parallel__device": "cuda",
        "model__dtype": "float32",
        "model__max_model_len": 1024,
        "scheduler__max_num_seqs": 64,
        "cache__num_blocks": 400,
        "cache__gpu_memory_utilization": 0.97,  # tests run side by side
        "cache__enable_prefix_caching": False,
    }
    return {key.replace("__", "."): value for key, value in (defaults | settings).items()}
