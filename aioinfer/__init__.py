"""aioinfer: an inference server for large language models on one asyncio event loop.

The public names are few: :class:`LLM` (offline generation), :class:`AsyncLLM` (in asyncio
programs), :class:`LLMEngine` (step by step), :func:`create_app` (the server inside another
application), :class:`SamplingParams`, :class:`BeamSearch` and :class:`BeamSearchParams`, and
:func:`load_config`. They are imported on first use, so
that a worker process, which needs none of them, does not pay for their imports.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# The Triton kernels live in the top-level folder `kernels/`, but are imported as
# `aioinfer.kernels`: a top-level package of that name would shadow the PyPI package `kernels`, for
# which transformers looks. An installed aioinfer contains `aioinfer/kernels`; a checkout does not,
# and finds the folder beside the package through the package's search path.
if not (Path(__file__).parent / "kernels").exists():
    __path__.append(str(Path(__file__).parent.parent))

if TYPE_CHECKING:
    from aioinfer.api.server import create_app as create_app
    from aioinfer.async_llm import AsyncLLM as AsyncLLM
    from aioinfer.config import load_config as load_config
    from aioinfer.llm import LLM as LLM
    from aioinfer.llm_engine import LLMEngine as LLMEngine
    from aioinfer.sampling_params import BeamSearch as BeamSearch
    from aioinfer.sampling_params import BeamSearchParams as BeamSearchParams
    from aioinfer.sampling_params import GrammarSpec as GrammarSpec
    from aioinfer.sampling_params import SamplingParams as SamplingParams

_EXPORTS = {
    "LLM": "aioinfer.llm",
    "AsyncLLM": "aioinfer.async_llm",
    "LLMEngine": "aioinfer.llm_engine",
    "BeamSearch": "aioinfer.sampling_params",
    "BeamSearchParams": "aioinfer.sampling_params",
    "GrammarSpec": "aioinfer.sampling_params",
    "SamplingParams": "aioinfer.sampling_params",
    "create_app": "aioinfer.api.server",
    "load_config": "aioinfer.config",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearch",
    "BeamSearchParams",
    "GrammarSpec",
    "LLMEngine",
    "SamplingParams",
    "__version__",
    "create_app",
    "load_config",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        from importlib import import_module

        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'aioinfer' has no attribute {name!r}")
