"""How the engines of the tests on GPUs are configured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aioinfer import LLM


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


@contextmanager
def inline_llm(folder: Path, **settings: Any) -> Iterator[LLM]:
    """An engine in this process unless `settings` differ; checks its scheduler at the end."""
    merged = engine_settings(**{"parallel__executor": "inline"} | settings)
    with LLM(str(folder), settings=merged, progress=False) as llm:
        yield llm
        llm.frontend.engines[0].scheduler.check_integrity()
